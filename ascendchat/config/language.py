"""Chinese for the users of a Chinese shell: help, `plan` and errors. English stands in the code, zh.json translates it.

    print(translate(str(error)))         # where a text is shown, not where it is made

zh.json maps English templates to Chinese ones, in the groups errors, help and plan. `{}` stands for a value, in the
order of the English text; where Chinese needs another order its placeholders are numbered, from {0}. A text is found as
it stands, or by the template it was made from. Its values are translated too, because they may be errors of ours.
A text without an entry stays English. `python tests/golden/catalogue.py` lists what is missing.
"""

from __future__ import annotations

import functools
import json
import os
import re
import string
import textwrap
import unicodedata
from collections.abc import Mapping
from pathlib import Path

CATALOGUE = Path(__file__).with_name("zh.json")
# Where a line may be broken: at spaces, and beside every wide character, but not before closing punctuation.
PIECES = re.compile(r"\s+|[（《]*(?:[^\s\u2e80-\uffef]+|\S)[，。；：、！？）》]*")


def language(lang: str | None = None, environ: Mapping[str, str] | None = None) -> str:
    """ "zh" or "en": the language of `lang`, else of the shell (LC_ALL, else LC_MESSAGES, else LANG)."""
    environ = os.environ if environ is None else environ
    locale = lang or environ.get("LC_ALL") or environ.get("LC_MESSAGES") or environ.get("LANG") or ""
    return "zh" if locale.lower().startswith("zh") else "en"


def literals(template: str) -> list[str]:
    """The parts of a template around its values: "rank {} of {}" -> ["rank ", " of ", ""]."""
    parts = [""]
    for literal, value, _, _ in string.Formatter().parse(template):
        parts[-1] += literal
        if value is not None:
            parts.append("")
    return parts


@functools.lru_cache(maxsize=2)
def catalogue(groups: tuple[str, ...]) -> tuple[dict[str, str], list[tuple[list[str], str]]]:
    """(text -> Chinese, [(literals of a template, Chinese template)]), the longest first: the most specific."""
    stored = json.loads(CATALOGUE.read_text(encoding="utf-8"))
    entries = [(literals(en), zh) for group in groups for en, zh in stored[group].items()]
    texts = {parts[0]: zh.format() for parts, zh in entries if len(parts) == 1}
    templates = [(parts, zh) for parts, zh in entries if len(parts) > 1]
    return texts, sorted(templates, key=lambda entry: -len("".join(entry[0])))


def values_in(text: str, around: list[str]) -> list[str] | None:
    """The values that a template with these literals needs to give `text`; None if it cannot."""
    first, *middle, last = around
    at, end = len(first), len(text) - len(last)
    if at > end or not text.startswith(first) or not text.endswith(last):
        return None
    values = []
    for literal in middle:
        here = text.find(literal, at, end)
        if here < 0:
            return None
        values.append(text[at:here])
        at = here + len(literal)
    return [*values, text[at:end]]


def translate(text: str, lang: str | None = None) -> str:
    """The text in `lang`, by default in the language of the shell; English where the catalogue does not have it."""
    return text if language(lang) != "zh" else _chinese(text, ("errors", "help", "plan"))


def _chinese(text: str, groups: tuple[str, ...]) -> str:
    texts, templates = catalogue(groups)
    if text in texts:
        return texts[text]
    for around, chinese in templates:
        values = values_in(text, around)
        if values is not None:  # a single word is a name or a number; several may be a message inside a message
            return chinese.format(*(_chinese(v, ("errors",)) if " " in v.strip() else v for v in values))
    return text


def bracketed(notes: list[str]) -> str:
    """Notes in brackets behind a text, as the language of the shell writes them; empty without notes."""
    if not notes:
        return ""
    return f"（{'；'.join(notes)}）" if language() == "zh" else f" ({'; '.join(notes)})"


def cells(text: str) -> int:
    """The width of a text in columns of a terminal: a Chinese character takes two."""
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text)


def pad(text: str, width: int) -> str:
    """The text with spaces up to `width` columns."""
    return text + " " * (width - cells(text))


def wrap(text: str, width: int, first: str = "", following: str = "") -> list[str]:
    """Lines of at most `width` columns, the first one after `first`, the others after `following`."""
    if cells(first + text) == len(first + text):
        return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=following)
    lines, line = [], first
    for piece in PIECES.findall(text):
        if cells(line + piece.rstrip()) > width and line not in (first, following):
            lines.append(line.rstrip())
            line, piece = following, piece.lstrip()
        line += piece
    return [*lines, line.rstrip()] if line.strip() else lines
