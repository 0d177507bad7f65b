"""Environment variables that cost something and help nothing: `harmful_settings(os.environ)` lists those that are set.

`ascendchat doctor` and every start on an NPU report them with their cost, in English and Chinese. They are never
changed: the user may have a reason. The list is harmful_env.json, read once. A rule applies to one of its `values`, to
numbers that are `at_least` so large, to what the named `check` below says, or else to any value. The kinds: "slow",
"memory", "hides faults", "breaks", "no effect", "does not exist".
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from typing import Any

Environ = Mapping[str, str]


@dataclass(frozen=True)
class HarmfulSetting:
    """One variable that should be unset or changed, and why."""

    name: str
    value: str
    kind: str
    cost: str
    advice: str
    cost_zh: str
    advice_zh: str

    def sentence(self, lang: str = "en") -> str:
        """One line for the console, in `en` or `zh`."""
        if lang == "zh":
            return f"{self.name}={self.value}：{self.cost_zh}；{self.advice_zh}"
        return f"{self.name}={self.value}: {self.cost}; {self.advice}"


@functools.cache
def known_harmful() -> dict[str, Any]:
    """harmful_env.json: `rules`, and `nonexistent` names (patterns) that scripts copy but no part of CANN reads."""
    table: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return table


def visible_problem(value: str) -> tuple[str, str] | None:
    """What is wrong with a list of visible NPUs, in English and Chinese, or None. The driver wants "0,1,2": digits and
    commas, strictly ascending. It stops reading at any other character, and finds no device when the order is wrong."""
    if not re.fullmatch(r"\d+(,\d+)*", value):
        return "only digits and commas are read, and reading stops at a space", "只认数字和逗号，遇到空格即停止解析"
    ids = [int(part) for part in value.split(",")]
    if any(a >= b for a, b in pairwise(ids)):
        return (
            "the ids must be strictly ascending, otherwise no device is found",
            "编号必须严格递增，否则找不到任何设备",
        )
    return None


def _number(text: str | None, default: float) -> float:
    try:
        return float(text) if text else default
    except ValueError:
        return default


# Timeouts are in seconds; where one is not set, CANN's default counts. 0 waits for ever.
CHECKS: dict[str, Callable[[str, Environ], bool]] = {
    "outside_connect_range": lambda value, environ: not (value.strip().isdigit() and 120 <= int(value) <= 7200),
    "exec_not_above_connect": lambda value, environ: (
        0 < _number(value, 1836) <= _number(environ.get("HCCL_CONNECT_TIMEOUT"), 120)
    ),
    "event_not_above_exec": lambda value, environ: (
        0 < _number(value, 1868) <= _number(environ.get("HCCL_EXEC_TIMEOUT"), 1836)
    ),
    "two_allocator_settings": lambda value, environ: "PYTORCH_ALLOC_CONF" in environ,
    "visible_devices": lambda value, environ: visible_problem(value) is not None,
}


def _applies(rule: dict[str, Any], value: str, environ: Environ) -> bool:
    if "values" in rule:
        return value.strip() in rule["values"]
    if "at_least" in rule:
        return _number(value, 0) >= rule["at_least"]
    return CHECKS[rule["check"]](value, environ) if "check" in rule else True


def harmful_settings(environ: Environ) -> list[HarmfulSetting]:
    """Every harmful, useless or misspelt setting in `environ`; changes nothing."""
    settings = []
    for rule in known_harmful()["rules"]:
        value = environ.get(rule["name"])
        if value is not None and _applies(rule, value, environ):
            texts = {key: rule[key] for key in ("kind", "cost", "advice", "cost_zh", "advice_zh")}
            settings.append(HarmfulSetting(rule["name"], value, **texts))
    unread = ("does not exist", "no such setting exists, nothing reads it", "unset it")
    unread_zh = ("并不存在这个设置，没有任何组件读取", "请取消该变量")
    for name in sorted(environ):
        if any(fnmatchcase(name, pattern) for pattern in known_harmful()["nonexistent"]):
            settings.append(HarmfulSetting(name, environ[name], *unread, *unread_zh))
    return settings
