"""Lone surrogates: halves of a character outside the BMP (an emoji, say) where a text was cut by UTF-16 units, as
JavaScript and many scrapers cut. Python strings can hold them, UTF-8 cannot.

    has_lone_surrogate("ok \\ud83d")             # True
    replace_lone_surrogates("ok \\ud83d")        # "ok \\ufffd"

One rule everywhere: a row of data with one is counted as a row that cannot be read, and left out (`data prepare`,
`tokenizer train`, `mid`, `sft`, `finetune`, `rl`); a text that is typed or sent (`chat`, `serve`) is read with
U+FFFD.
"""

from __future__ import annotations

import re
from typing import Any

SURROGATE = re.compile("[\ud800-\udfff]")
LONE_SURROGATE = "half a character (a lone surrogate)"  # in error messages


def has_lone_surrogate(value: Any) -> bool:
    """True if a text, or any text in a list or an object, has one."""
    if isinstance(value, str):
        return not value.isascii() and SURROGATE.search(value) is not None
    if isinstance(value, dict):
        return any(has_lone_surrogate(part) for pair in value.items() for part in pair)
    return isinstance(value, (list, tuple)) and any(map(has_lone_surrogate, value))


def replace_lone_surrogates(value: Any) -> Any:
    """Put U+FFFD in place of each, in a text or in all texts of a value; two that belong together become their
    character."""
    if not has_lone_surrogate(value):
        return value
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {replace_lone_surrogates(name): replace_lone_surrogates(part) for name, part in value.items()}
    return [replace_lone_surrogates(part) for part in value]
