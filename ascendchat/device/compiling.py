"""torch.compile whose result later processes find, for every device that compiles."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch._functorch.config
import torch.compiler

from ascendchat import __version__
from ascendchat.config import home

F = TypeVar("F")
SETTING = "autograd_cache_allow_custom_autograd_functions"  # older versions of torch do not have it,
TAG = "cache_key_tag"  # nor this
OPERATORS = "nn", "device"  # our packages whose code torch's keys may not see
ROOM = 2**30  # bytes that are free where something is kept; a model of depth 12 takes a tenth of it


def keep(variable: str, part: str) -> None:
    """Let `variable`, unless it is set, name a folder where a restart of the machine leaves alone what was compiled:
    $ASCENDCHAT_HOME/compiled. Not on several nodes: they share that folder, and would wait for each other's locks. Nor
    where compiling would fail because of it: then the folder is the usual one, under /tmp."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    one_node = ranks == os.environ.get("LOCAL_WORLD_SIZE", ranks)
    folder = home() / "compiled" / part
    if variable not in os.environ and one_node and serves(folder):
        os.environ[variable] = str(folder)


def serves(folder: Path) -> bool:
    """Whether a compiler can work in this folder, which is made: it is ours alone, since what lies there is run; there
    is room; and torch can name it to the C++ compiler, whose command it splits as a shell does."""
    try:
        if shlex.split(str(folder)) != [str(folder)]:
            return False
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(2**16))
        return folder.stat().st_uid == os.getuid() and shutil.disk_usage(folder).free >= ROOM
    except (OSError, ValueError):  # read-only, full, a file of that name; a quotation that does not end
        return False


@cache
def version() -> str:
    """Of the code of our operators: the release, and what was changed in it since."""
    package, found = Path(__file__).parent.parent, hashlib.sha256()
    for path in sorted(path for name in OPERATORS for path in (package / name).glob("*.py")):
        found.update(path.read_bytes())
    return f"ascendchat {__version__} {found.hexdigest()[:16]}"


def compiled(fn: F, **options: Any) -> F:
    """torch.compile, found again by later processes.

    torch does not keep the gradients of functions that write theirs out themselves, unless told to: what they compute
    is part of the key. Depth 4 on a CPU, found again: 9 s instead of 24. Of an operator of ours only the name is part
    of the key: what another version made of it would be found, with the gradient that it had then.
    """
    keep("TORCHINDUCTOR_CACHE_DIR", "torch")
    if hasattr(torch._functorch.config, SETTING):
        setattr(torch._functorch.config, SETTING, True)
    told: Any = getattr(torch.compiler, "config", None)
    if not hasattr(told, TAG):
        torch._functorch.config.enable_autograd_cache = False
    elif version() not in (tag := getattr(told, TAG)):
        setattr(told, TAG, f"{tag} {version()}".strip())
    return torch.compile(fn, **options)  # type: ignore[call-overload, no-any-return]
