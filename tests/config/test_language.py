"""Chinese for a Chinese shell: the rule that chooses, the lookup, the layout, the catalogue that must be whole, and the
commands themselves in processes of their own."""

from __future__ import annotations

import json
import os
import runpy
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ascendchat import cli
from ascendchat.config.language import cells, language, literals, pad, translate, values_in, wrap
from ascendchat.doctor.explain import explain

ROOT = Path(__file__).resolve().parents[2]
TOOL: dict[str, Any] = runpy.run_path(str(ROOT / "tests" / "golden" / "catalogue.py"))
ENTRIES = [(en, zh) for group in TOOL["stored"]().values() for en, zh in group.items()]
ERRORS = [(en, zh) for en, zh in TOOL["stored"]()["errors"].items() if en[0] not in " ,"]  # no ends of sentences


def spoken(*argv: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "100", "ASCENDCHAT_CHIP": "", **variables}
    command = [sys.executable, "-m", "ascendchat", *argv]
    return subprocess.run(command, capture_output=True, encoding="utf-8", env=environment, cwd=ROOT, timeout=120)


def chinese(*argv: str) -> subprocess.CompletedProcess[str]:
    return spoken(*argv, LANG="zh_CN.UTF-8")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, "en"),
        ({"LANG": "zh_CN.UTF-8"}, "zh"),
        ({"LANG": "C.UTF-8"}, "en"),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": "C"}, "en"),
        ({"LANG": "zh_CN.UTF-8", "LC_MESSAGES": "en_US.UTF-8"}, "en"),
        ({"LANG": "en_US.UTF-8", "LC_MESSAGES": "zh_CN.UTF-8"}, "zh"),
        ({"LANG": "zh_CN.UTF-8", "LC_ALL": ""}, "zh"),
    ],
)
def test_the_language_is_that_of_the_shell(environ: dict[str, str], expected: str) -> None:
    assert language(None, environ) == expected
    assert (language("en", environ), language("zh", environ)) == ("en", "zh")


def test_a_message_is_found_by_its_template_and_the_messages_in_it_too() -> None:
    text = "unknown flag --dept; did you mean --depth? (choose from: --depth, --chip)"
    assert translate(text, "zh") == "未知的参数 --dept；是否想用 --depth？（可选：--depth, --chip）"
    assert translate(text, "en") == text
    assert translate(text) == text  # no variable of the shell is set


def test_what_is_not_ours_stays_as_it_is() -> None:
    assert translate("the tensor is upside down", "zh") == "the tensor is upside down"
    # `total` and `time` are labels of a plan: as the name of a file they are a name
    assert translate("cannot read the configuration file total: time", "zh") == "无法读取配置文件 total：time"


def test_values_may_hold_braces_line_breaks_and_nothing() -> None:
    assert translate("--track {0} is not known; choose from: ", "zh") == "--track {0}：没有这个跟踪工具；可选："
    assert translate("x.yaml is not valid YAML: line 1\nline 2 {", "zh") == "x.yaml 不是有效的 YAML：line 1\nline 2 {"
    assert values_in("rank 3 of ", literals("rank {} of {}")) == ["3", ""]
    assert values_in("ab", literals("ab{}b")) is None
    assert literals("slots: {{{}}}") == ["slots: {", "}"]


def test_a_chinese_character_takes_two_columns() -> None:
    assert (cells("显存 GiB"), pad("显存", 6) + "|") == (8, "显存  |")
    assert pad("memory", 3) == "memory"


@pytest.mark.parametrize("width", [20, 99])
def test_lines_fit_and_lose_nothing(width: int) -> None:
    text = "每设备每微批的行数；默认取放得下的最大 2 的幂（--device-batch-size），见 ascendchat plan。" * 3
    lines = wrap(text, width, "  头 ", "     ")
    assert lines[0].startswith("  头 ")
    assert all(cells(line) <= width for line in lines if "--device-batch-size" not in line)
    assert not any(line.strip()[0] in "，。；：、）" for line in lines)
    assert "".join("".join(lines)[len("  头 ") :].split()) == "".join(text.split())
    assert wrap("aaa bbb ccc", 8, "> ", "  ") == ["> aaa", "  bbb", "  ccc"]
    assert wrap("", 80) == []


def test_the_catalogue_is_whole_and_nothing_in_it_is_stale() -> None:
    missing, stale = TOOL["compare"](TOOL["every_text"]())
    hint = "python tests/golden/catalogue.py > new.json, fill it in, python tests/golden/catalogue.py new.json"
    assert not any(missing.values()), f"{hint}\n{json.dumps(missing, ensure_ascii=False, indent=1)}"
    assert not stale, f"python tests/golden/catalogue.py drops these when it is given a file: {stale}"


def test_a_translation_has_the_placeholders_of_its_text() -> None:
    for english, translation in ENTRIES:
        names = [name for _, name, _, _ in string.Formatter().parse(translation) if name is not None]
        numbers = [str(number) for number in range(len(literals(english)) - 1)]
        assert names == [""] * len(numbers) or sorted(names) == numbers, english


def test_every_error_shows_its_values_and_is_explained_in_both_languages() -> None:
    for english, translation in ERRORS:
        values = [f"value{number}" for number in range(len(literals(english)) - 1)]
        text, shown = english.format(*values), translation.format(*values)
        assert translate(text, "zh") == shown
        rules = [{found.rule for found in explain(f"ascendchat base: {line}", "en")} for line in (text, shown)]
        assert rules[0] == rules[1] != set(), english


def test_help_speaks_chinese_and_keeps_flags_and_columns() -> None:
    page, english = chinese("plan", "--help"), spoken("plan", "--help")
    assert page.returncode == english.returncode == 0
    assert page.stdout.startswith("用法：ascendchat plan [--flags]\n\n在运行之前给出参数量")
    assert "  --depth N                      层数；宽度、头数、批量和训练长度由它决定（不小于 1 且不大于" in page.stdout
    assert "规划的目标：训练、RL（训练与采样一起）或推理（默认：train）\n" in page.stdout
    assert all(cells(line) <= 100 for line in page.stdout.splitlines())
    flags = [[line.split()[0] for line in p.stdout.splitlines() if line.startswith("  -")] for p in (page, english)]
    assert flags[0] == flags[1] != []
    assert "检查本机" in chinese("--help").stdout
    assert "把文档变成 token 分片" in chinese("data", "--help").stdout


def test_a_plan_in_chinese_has_the_same_figures_in_the_same_columns() -> None:
    argv = ("plan", "--depth", "20", "--chip", "Ascend910B3", "--devices", "6")
    english, page = spoken(*argv).stdout.splitlines(), chinese(*argv).stdout.splitlines()
    assert len(page) == len(english) > 30
    assert "  合计                       56.90 GiB / 64.00 GiB（89%）" in page
    assert page[-1] == "注意：总批量提高到 1,105,920：1,048,576 个 token 不能按每行 2048 个平分到 6 个设备"
    for line in page:
        if line.startswith("  "):  # the value begins in column 29, as in English
            label = line[2:].split("  ")[0]
            assert cells(line[: line.index(line[2 + len(label) :].lstrip())]) == 29
    assert all(line.isascii() for line in english)
    assert [line.split()[0] for line in page if line.isascii()] == ["MLP", "logits"]


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        ("nope", "ascendchat nope: 没有命令 'nope'；可选：doctor, selftest"),
        ("plan --dept 3", "ascendchat plan: 未知的参数 --dept；是否想用 --depth？"),
        ("plan --depth x", "ascendchat plan: --depth：'x' 不是整数"),
        ("plan --mfu 40", "ascendchat plan: --mfu 必须大于 0 且不大于 1，实际为 40.0"),
        ("plan --chip 910", "ascendchat plan: '910' 不能确定一款芯片（Atlas A2 卡为 Ascend910B1"),
        (
            "plan --depth 30 --chip Ascend910B3 --device-batch-size 64",
            "ascendchat plan: 深度 30 在 Ascend910B3 上放不下（每设备批量 64）：每个设备需要 407.8 GiB，"
            "而 64 GiB 中只能用 60.8 GiB；可改用 --device-batch-size 2，或 --depth 10\n",
        ),
        ("speedrun --recipe nowhere.yaml", "ascendchat speedrun: 没有配方 nowhere.yaml；请给出 YAML 文件的路径"),
    ],
)
def test_errors_speak_chinese_with_their_values(
    argv: str, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LANG", "zh_CN.UTF-8")
    monkeypatch.delenv("ASCENDCHAT_CHIP", raising=False)
    assert cli.main(argv.split()) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(shown)


def test_json_is_the_same_in_every_language() -> None:
    argv = ("plan", "--depth", "64", "--chip", "Ascend910B4", "--json")
    english, other = spoken(*argv), chinese(*argv)
    assert other.stdout == english.stdout
    assert json.loads(other.stdout)["reason"].startswith("depth 64 does not fit Ascend910B4")
    assert "放不下" in other.stderr


def test_every_other_shell_reads_english() -> None:
    unset = spoken("plan", "--depth", "4", "--chip", "cpu")
    assert (unset.stdout + unset.stderr).isascii()
    for variables in ({"LANG": "en_US.UTF-8"}, {"LANG": "zh_CN.UTF-8", "LC_ALL": "C"}):
        assert spoken("plan", "--depth", "4", "--chip", "cpu", **variables).stdout == unset.stdout
    assert spoken("base", "--help", LANG="C").stdout.isascii()


def test_a_terminal_without_chinese_characters_stops_nothing() -> None:
    done = spoken("plan", "--help", LANG="zh_CN.UTF-8", PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert "--device-batch-size" in done.stdout
