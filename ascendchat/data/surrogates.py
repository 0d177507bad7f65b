"""Half characters: what is left of a character outside the BMP (an emoji, say) where a text was cut by UTF-16 units, as
JavaScript and many scrapers cut. Python holds it as a lone surrogate, and UTF-8 cannot write it.

    has_half("ok \\ud83d")             # True
    without_halves("ok \\ud83d")       # "ok \\ufffd"

One rule everywhere: a row of data with one is counted as a row that cannot be read, and left out (`data prepare`,
`tokenizer train`, `mid`, `sft`, `finetune`, `rl`); what somebody types or sends (`chat`, `serve`) is read with U+FFFD.
"""

from __future__ import annotations

import re
from typing import Any

SURROGATE = re.compile("[\ud800-\udfff]")
HALF = "half a character (a lone surrogate)"


def has_half(value: Any) -> bool:
    """Whether there is one in a text, or in any text in a list or an object."""
    if isinstance(value, str):
        return not value.isascii() and SURROGATE.search(value) is not None
    if isinstance(value, dict):
        return any(has_half(part) for pair in value.items() for part in pair)
    return isinstance(value, (list, tuple)) and any(map(has_half, value))


def without_halves(value: Any) -> Any:
    """A text, or what holds texts, with U+FFFD in place of each; two that belong together become their character."""
    if not has_half(value):
        return value
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {without_halves(name): without_halves(part) for name, part in value.items()}
    return [without_halves(part) for part in value]
