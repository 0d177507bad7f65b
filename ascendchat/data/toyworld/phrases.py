"""Wordings of the toy world (phrases.txt): how each attribute is told, asked for and checked, in each language.

{n} is the name, {v} the value. The first wording of `tell` is the answer to a question. It is a full sentence, so a
reply reads like the texts the model has learnt from, and the value comes after the words that recall it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from ascendchat.data.toyworld.text import split_phrases


class Phrases(NamedTuple):
    """Wordings of one attribute in one language."""

    tell: tuple[str, ...]
    ask: tuple[str, ...]
    check: str  # a statement turned into a yes-or-no question


def parse_phrases(table: str) -> dict[str, dict[str, Phrases]]:
    """attribute -> language -> wordings."""
    phrases: dict[str, dict[str, Phrases]] = {}
    for block in table.split("# ")[1:]:
        title, rest = block.split("\n", 1)
        attribute, language = title.split()
        tell, ask, check = (split_phrases(part) for part in re.split("^(?:tell|ask|check):", rest, flags=re.M)[1:])
        phrases.setdefault(attribute, {})[language] = Phrases(tell, ask, *check)
    return phrases


PHRASES = parse_phrases(Path(__file__).with_name("phrases.txt").read_text(encoding="utf-8"))
