"""Packages that a user may have installed for a chip, and whether they can be called.

installed("flash-attn-4")                 # by its name in the index
fault(load, {"function": {"argument"}})   # None, or why not
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any


@cache
def installed(name: str) -> bool:
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


def fault(load: Callable[[], Any], called: Mapping[str, set[str]]) -> str | None:
    """Why these functions of a package cannot be called with arguments of these names, or None."""
    try:
        package = load()
        known = {name: set(inspect.signature(getattr(package, name)).parameters) for name in called}
    except Exception as error:  # noqa: BLE001 - its own, or of a compiler that it imports: of any kind
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    lacking = [f"{name} takes no {word}" for name in called for word in sorted(called[name] - known[name])]
    return "; ".join(lacking) or None
