"""torch.compile whose result later processes find, for every device that compiles."""

from __future__ import annotations

import os
from typing import Any, TypeVar

import torch._functorch.config

from ascendchat.config import home

F = TypeVar("F")
SETTING = "autograd_cache_allow_custom_autograd_functions"  # older versions of torch do not have it


def keep(variable: str, part: str) -> None:
    """Let `variable`, unless it is set, name a folder where a restart of the machine leaves alone what was compiled:
    $ASCENDCHAT_HOME/compiled. Not on several nodes: they share that folder, and would wait for each other's locks."""
    if os.environ.get("WORLD_SIZE", "1") == os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")):
        os.environ.setdefault(variable, str(home() / "compiled" / part))


def compiled(fn: F, **options: Any) -> F:
    """torch.compile, found again by later processes.

    torch does not keep the gradients of functions that write theirs out themselves, unless told to: what they compute
    is part of the key. Depth 4 on a CPU, found again: 9 s instead of 24.
    """
    keep("TORCHINDUCTOR_CACHE_DIR", "torch")
    if hasattr(torch._functorch.config, SETTING):
        setattr(torch._functorch.config, SETTING, True)
    return torch.compile(fn, **options)  # type: ignore[call-overload, no-any-return]
