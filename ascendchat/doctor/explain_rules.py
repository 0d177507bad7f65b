"""The rules of `ascendchat explain`: their fields, and how rules/*.yaml is read and checked.

rules/NN_TOPIC.yaml hold the rules (of two that match one line, the one read first comes first), codes.yaml the
status codes that are only decoded, answer.yaml the words around the findings. docs/en/architecture.md tells how to
add a rule.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from ascendchat.errors import UserError

FOLDER = Path(__file__).with_name("rules")
# The order of the answer. A fault on one rank makes the others time out: the fault must be named before them.
# cause: a fault by itself; symptom: its reason usually stands elsewhere in the log; consequence: printed by other ranks
# and launchers after a fault; note: slow or odd, but no failure; generic: a code that we can only decode.
LEVELS = ("cause", "symptom", "consequence", "note", "generic")
CAUSE, SYMPTOM, CONSEQUENCE, NOTE, GENERIC = range(5)
HOLE = re.compile(r"\{(\w+)\}")
SET_OR_REPEAT = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]|\{\d*,?\d*\}")  # [...] or {1,40}
FORMS = {  # field of a rule -> the value it must have
    "id": "a name such as disk-full, in lower case",
    "code": "the name of the code, such as ERR99999",
    "level": "cause, symptom, consequence, note or generic",
    "patterns": "a list of regular expressions, or of `code: NUMBER`",
    "title": "a text in `en` and one in `zh`",
    "cause": "a text in `en` and one in `zh`",
    "check": "a list of texts, each in `en` and in `zh`",
    "symptoms": "a list of phrases in `en` and one in `zh`",
    "commands": "a list of commands",
    "alone": "true or false",
    "tables": "for each table: rows with a text in `en` and one in `zh`",
    "base": "10 or 16",
}
Words = dict[str, str]  # a text in each language: {"en": ..., "zh": ...}
Values = dict[str, str | Words]  # hole of a text -> its value


@dataclass(frozen=True, eq=False)
class ErrorRule:
    """Patterns, and the texts to show when one of them matches. `{name}` in a text is the group (?P<name>...)."""

    id: str
    level: int
    patterns: list[str]
    title: Words
    cause: Words
    check: list[Words]
    commands: list[str]
    where: str  # its file and name, for an error about it
    symptoms: dict[str, list[str]] = field(default_factory=lambda: {"en": [], "zh": []})
    alone: bool = False  # other rules that match the same line are not shown
    code: str = ""  # set: a status code, decoded only where no rule explains the line
    tables: dict[str, dict[str, Words]] = field(default_factory=dict)  # group -> its text -> what that means
    base: int = 0  # set: the groups are numbers in this base

    def values(self, match: re.Match[str]) -> Values | None:
        """Values for the holes of the texts; None for a code that is not in the tables."""
        values: Values = {}
        for name, text in match.groupdict().items():
            text = str(int(text, self.base)) if self.base else text or ""
            if name in self.tables and text not in self.tables[name]:
                return None
            values[name] = self.tables[name][text] if name in self.tables else text
        return {**values, "code": fill(self.code, values)} if self.code else values


def fill(text: str, values: Values, lang: str = "en") -> str:
    """The text with its holes filled; a hole without a value stays."""
    texts = {name: value if isinstance(value, str) else value[lang] for name, value in values.items()}
    return HOLE.sub(lambda hole: texts.get(hole[1], hole[0]), text)


def code(number: int) -> str:
    """Build a pattern for a status code where an error text gives one; a bare number may be a count of tokens."""
    before = r"[Ee]rror ?[Cc]ode|[Ee]rr[Cc]ode|[Ee]rr[Nn]o|\b[Rr]et(?:[Cc]ode|[Vv]al)?|runtime result|\[?[Ee]rror\]?:"
    return rf"(?:{before})(?: is)?[ :=\[(]*{number}\b"


def literal(pattern: str) -> str:
    """Find the longest plain text that every match of `pattern` contains; "" when there is none."""
    runs, run, depth, i = [""], "", 0, 0
    while i < len(pattern):
        char, step = pattern[i], 1
        plain = char not in r"\.^$*+?{}[]()|"
        if char == "\\":
            char, step = pattern[i + 1 : i + 2], 2
            plain = not char.isalnum()
        elif char == "|" and depth == 0:
            return ""
        elif inside := SET_OR_REPEAT.match(pattern, i):
            step = len(inside[0])
        elif char in "()":
            depth += 1 if char == "(" else -1
        if plain and depth == 0 and pattern[i + step : i + step + 1] not in ("?", "*", "{"):
            run += char
        else:
            runs.append(run)
            run = ""
        i += step
    return max(runs + [run], key=len)


@functools.cache
def compiled(pattern: str, where: str) -> re.Pattern[str]:
    """Compile a pattern when its plain text is first seen: all patterns together take longer than a short log."""
    try:
        return re.compile(pattern)
    except re.error as error:
        _refuse(where, f"the pattern {pattern} is no regular expression: {error}")


def _refuse(where: str, problem: str) -> NoReturn:
    raise UserError(f"{where}: {problem}; mend it as docs/en/architecture.md says under Adding an error explanation")


def _read(path: Path) -> Any:
    """Read a YAML file. A key that occurs twice is refused: YAML would silently drop the first."""
    try:
        import yaml
    except ModuleNotFoundError:
        raise UserError("the rules of explain are YAML files; install what reads them: pip install pyyaml") from None
    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # in C: ten times faster

    class Loader(base):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [key.value for key, _ in node.value]
            for key in {key for key in keys if keys.count(key) > 1}:
                raise yaml.MarkedYAMLError(problem=f"`{key}` stands twice", problem_mark=node.start_mark)
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        _refuse(str(path), " ".join(str(error).split()))
    except RecursionError:
        _refuse(str(path), "it is nested too deep")


def _is(value: Any, form: str) -> bool:
    """True if a field has its form."""
    if form in ("patterns", "check", "commands"):
        inner = {"patterns": "pattern", "check": "title", "commands": "text"}[form]
        return isinstance(value, list) and bool(value or form == "commands") and all(_is(v, inner) for v in value)
    if form in ("title", "cause", "symptoms"):
        inner = "commands" if form == "symptoms" else "text"
        return isinstance(value, dict) and set(value) == {"en", "zh"} and all(_is(v, inner) for v in value.values())
    if form == "tables":
        rows = [*value.values()] if isinstance(value, dict) else [None]
        return all(isinstance(r, dict) and all(_is(k, "text") and _is(v, "title") for k, v in r.items()) for r in rows)
    if form == "pattern" and isinstance(value, dict):
        return set(value) == {"code"} and isinstance(value["code"], int)
    if form == "id":
        return isinstance(value, str) and bool(re.fullmatch(r"[a-z0-9-]+", value))
    allowed = {"level": LEVELS, "base": (10, 16), "alone": (True, False)}
    return value in allowed[form] if form in allowed else isinstance(value, str) and bool(value.strip())


def _rule(entry: Any, path: Path, number: int) -> ErrorRule:
    """Make a rule of one entry of a file; anything wrong with it is refused by its name."""
    kind = "code" if path.name == "codes.yaml" else "id"
    name = entry.get(kind, number) if isinstance(entry, dict) else number
    where = f"{path}, rule {name}"
    if not isinstance(entry, dict):
        _refuse(where, "an entry has fields such as `id:` and `title:`")
    needed = {kind, "level", "patterns", "title", "cause", "check", "commands"}
    allowed = needed | ({"tables", "base"} if kind == "code" else {"symptoms", "alone"})
    for key in sorted(needed - set(entry)):
        _refuse(where, f"the field `{key}` is missing")
    for key, value in entry.items():
        if key not in allowed:
            _refuse(where, f"there is no field `{key}`")
        if not _is(value, key):
            _refuse(where, f"`{key}` must be {FORMS.get(key)}")
    patterns = [code(p["code"]) if isinstance(p, dict) else p for p in entry["patterns"]]
    texts = [*entry["title"].values(), *entry["cause"].values(), *(t for c in entry["check"] for t in c.values())]
    holes = set(HOLE.findall(" ".join([*texts, *entry["commands"], entry.get("code", "")]))) - {"code"}
    for pattern in patterns:
        if len(literal(pattern).encode()) < 2:
            _refuse(where, f"the pattern {pattern} needs two plain characters outside brackets, and no | there")
        for hole in sorted(holes | set(entry.get("tables", ()))):
            if f"(?P<{hole}>" not in pattern:
                _refuse(where, f"the pattern {pattern} has no group (?P<{hole}>...) for {{{hole}}}")
    level = LEVELS.index(entry["level"])
    identity = f"code-{entry['code']}" if kind == "code" else entry["id"]
    return ErrorRule(**{**entry, "id": identity, "level": level, "patterns": patterns, "where": where})


def read_rules(folder: Path) -> Iterator[ErrorRule]:
    """Yield the rules of a folder in their order, the codes last."""
    names: set[str] = set()
    for path in sorted(folder.glob("*.yaml")):
        if path.name == "answer.yaml":
            continue
        if path.name != "codes.yaml" and not re.fullmatch(r"\d\d_\w+\.yaml", path.name):
            _refuse(str(path), "a file of rules is called NN_TOPIC.yaml, its number says when it is asked")
        entries = _read(path)
        if not isinstance(entries, list):
            _refuse(str(path), "the file must be a list of rules, each beginning with `- id:`")
        for number, entry in enumerate(entries, 1):
            rule = _rule(entry, path, number)
            if rule.id in names and not rule.code:
                _refuse(rule.where, "another rule has this name")
            names.add(rule.id)
            yield rule


@functools.cache
def all_rules() -> tuple[list[ErrorRule], list[ErrorRule]]:
    """(rules, codes that are only decoded), read once per process."""
    rules = list(read_rules(FOLDER))
    return [rule for rule in rules if not rule.code], [rule for rule in rules if rule.code]


@functools.cache
def matchers() -> list[tuple[bytes, bytes, str, ErrorRule]]:
    """(plain text to search for, that text without digits, pattern, rule), the codes last."""
    patterns = [(literal(p).encode(), p, rule) for rules in all_rules() for rule in rules for p in rule.patterns]
    return [(needle, needle.translate(None, b"0123456789"), pattern, rule) for needle, pattern, rule in patterns]


@functools.cache
def answer() -> dict[str, Any]:
    """The words around the findings: {key: {"en": ..., "zh": ...}, or a list of such}."""
    return dict(_read(FOLDER / "answer.yaml"))
