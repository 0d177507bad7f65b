"""torch.compile whose result later processes find, for every device that compiles."""

from __future__ import annotations

import os
from typing import Any, TypeVar

import torch._functorch.config

from ascendchat.config import home

F = TypeVar("F")


def compiled(fn: F, **options: Any) -> F:
    """torch.compile, kept in $ASCENDCHAT_HOME/compiled, where a restart of the machine leaves it alone.

    torch does not keep the gradients of functions that write theirs out themselves, unless told to: what they compute
    is part of the key. Depth 4 on a CPU, found again: 9 s instead of 24.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(home() / "compiled"))
    torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
    return torch.compile(fn, **options)  # type: ignore[call-overload, no-any-return]
