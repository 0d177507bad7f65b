"""What one rule of `ascendchat explain LOG` is. The rules themselves stand in explain_rules_*.py, one file per family.

To add one, append a block to the list RULES of the family it belongs to, and a log excerpt of the same name to
tests/unit/explain_samples/ (a test fails until it is there):

    Rule(
        id="disk-full",
        level=CAUSE,
        patterns=[r"No space left on device"],
        en=Text(title="The disk is full", cause="A file could not be written.", check=["Which folder is it?"]),
        zh=Text(title="磁盘已满", cause="有文件没能写入。", check=["是哪个目录？"]),
        commands=["df -h . /tmp ~"],
    )

A pattern is a regular expression searched in one line of the log. It must hold a run of plain text outside brackets
(the scan looks for that text first) and no `|` outside brackets. `{name}` in a text is replaced by the group
(?P<name>...) of the pattern; every pattern of the rule must then have that group.

`ascendchat explain "训练卡住"` looks for what a user sees instead: the phrases in `symptoms` of both languages, and
the titles. A few words per phrase are enough; their order and endings do not matter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

# What comes first in the answer. A fault on one rank makes the others time out: the fault must be named before them.
CAUSE = 0  # a fault by itself
SYMPTOM = 1  # a fault whose reason usually stands elsewhere in the log
CONSEQUENCE = 2  # what other ranks and launchers say after a fault
NOTE = 3  # slow or odd, but not a failure
GENERIC = 4  # a code we can only decode


@dataclass(frozen=True)
class Text:
    """A rule in one language."""

    title: str
    cause: str
    check: list[str] = field(default_factory=list)
    symptoms: list[str] = field(default_factory=list)  # what a user would say: "training hangs"; see explain_symptoms


@dataclass(frozen=True)
class Rule:
    """Patterns, and what to say when one of them is seen."""

    id: str
    level: int
    patterns: list[str]
    en: Text
    zh: Text
    commands: list[str]

    def text(self, lang: str) -> Text:
        """The words of this rule in `lang`."""
        return self.zh if lang == "zh" else self.en


def code(number: int) -> str:
    """A pattern for a status code where an error text gives one; a bare number may be a count of tokens."""
    before = r"[Ee]rror ?[Cc]ode|[Ee]rr[Cc]ode|[Ee]rr[Nn]o|\b[Rr]et(?:[Cc]ode|[Vv]al)?|runtime result|\[?[Ee]rror\]?:"
    return rf"(?:{before})(?: is)?[ :=\[(]*{number}\b"


SET_OR_REPEAT = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]|\{\d*,?\d*\}")  # [...] or {1,40}


def literal(pattern: str) -> str:
    """The longest plain text that every match of `pattern` contains; "" when there is none."""
    runs, run, depth, i = [""], "", 0, 0
    while i < len(pattern):
        char, step = pattern[i], 1
        plain = char not in r"\.^$*+?{}[]()|"
        if char == "\\":
            char, step = pattern[i + 1], 2
            plain = not char.isalnum()
        elif char == "|" and depth == 0:
            return ""
        elif inside := SET_OR_REPEAT.match(pattern, i):
            step = len(inside[0])
        elif char in "()":
            depth += 1 if char == "(" else -1
        following = pattern[i + step : i + step + 1]
        if plain and depth == 0 and following not in ("?", "*", "{"):
            run += char
        else:
            runs.append(run)
            run = ""
        i += step
    return max(runs + [run], key=len)
