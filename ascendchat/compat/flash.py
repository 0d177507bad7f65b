"""The functions of flash-attn 2 (names, arguments, results), on Ascend NPUs and on anything else that torch runs on.

    from ascendchat.compat.flash import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
    flash_attn_func(q, k, v, causal=True, window_size=(255, 0))     # (B, T, H, D); the heads of k and v divide H

    import ascendchat.compat.flash as flash; flash.install()            # then `from flash_attn import …` gives these

What cannot be done is refused by the name of the argument; nothing is ignored. Guide: docs/en/flash.md.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Iterable
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ascendchat.nn.flash_attend import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from ascendchat.version import __version__ as own_version

# The functions of flash_attn.bert_padding: padded rows to sequences end to end and back. See flash.py.


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows of (N, ...) at these indices (M,)."""
    return input.index_select(0, indices.long())


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """(first_axis_dim, ...) of zeros, with these values (M, ...) at these indices (M,)."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices.long(), values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Pick the tokens of rows (B, T, ...) where the mask (B, T) is true, or where `unused_mask` says that they keep
    their place: tokens (N, ...), their indices in B · T, bounds (B + 1,) int32, the longest length, and the lengths
    that the mask alone has."""
    kept = attention_mask.bool() if unused_mask is None else attention_mask.bool() | unused_mask.bool()
    indices = kept.flatten().nonzero().flatten()
    lengths = kept.sum(-1, dtype=torch.int32)
    bounds = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=lengths.device)
    bounds[1:] = lengths.cumsum(0)
    used = attention_mask.bool().sum(-1, dtype=torch.int32)
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, bounds, int(lengths.max()), used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The way back: (N, ...) to (batch, seqlen, ...), with zeros elsewhere."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


__version__ = f"2.8.3+ascendchat.{own_version}"  # the release whose functions these are, and whose work they are
FUNCTIONS = (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
PADDING = (index_first_axis, index_put_first_axis, pad_input, unpad_input)
MODULES = {
    "flash_attn": FUNCTIONS,
    "flash_attn.flash_attn_interface": FUNCTIONS,
    "flash_attn.bert_padding": PADDING,
}
IN_TRANSFORMERS = "transformers.integrations.npu_flash_attention"
_replaced: dict[str, Any] = {}  # its functions


class _Listing(metadata.Distribution, metadata.DistributionFinder):
    """Makes importlib.metadata know a package flash-attn of our version; some libraries ask it, not the module."""

    def find_distributions(self, context: Any = None) -> Iterable[metadata.Distribution]:
        name = getattr(context, "name", None)
        return [self] if name is None or name.lower().replace("_", "-") == "flash-attn" else []

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """transformers has functions of its own for NPUs, which take no window_size and no softcap: when they are
        imported, ours take their place."""
        spec = PathFinder.find_spec(name, path) if name == IN_TRANSFORMERS else None
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                load(module)
                _take_their_place(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def read_text(self, filename: str) -> str | None:
        about = f"Metadata-Version: 2.1\nName: flash-attn\nVersion: {__version__}\nSummary: ascendchat's stand-in\n"
        return {"METADATA": about, "top_level.txt": "flash_attn\n"}.get(filename)

    def locate_file(self, path: Any) -> Path:
        return Path(__file__).parent / path


def _take_their_place(module: Any) -> None:
    for function in FUNCTIONS:
        name = f"npu_{function.__name__}"
        if hasattr(module, name):
            _replaced[name] = getattr(module, name)
            setattr(module, name, function)


def is_installed() -> bool:
    """True if `import flash_attn` gives ours."""
    return getattr(sys.modules.get("flash_attn"), "__version__", "") == __version__


def install(*, replace: bool = False) -> bool:
    """Let `from flash_attn import …`, `flash_attn.flash_attn_interface` and `flash_attn.bert_padding` give the
    functions above, in this process. A real flash-attn stays, unless it is to be replaced. Returns whether ours are in
    place. Call it before whatever imports flash_attn or asks for it, as transformers does when it is imported."""
    if is_installed():
        return True
    installed = "flash_attn" in sys.modules or importlib.util.find_spec("flash_attn") is not None
    if installed and not replace:
        return False
    if "transformers" in sys.modules:
        warnings.warn(
            "transformers has looked for flash_attn already; call install() before importing it", stacklevel=2
        )
    for name in [name for name in sys.modules if name.split(".")[0] == "flash_attn"]:
        del sys.modules[name]
    for name, functions in MODULES.items():
        module: Any = ModuleType(name, "ascendchat's stand-in for flash-attn: docs/en/flash.md")
        module.__spec__ = ModuleSpec(name, None, origin=__file__, is_package=name == "flash_attn")
        module.__version__ = __version__
        module.__path__ = []
        for function in functions:
            setattr(module, function.__name__, function)
        sys.modules[name] = module
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], own, module)
    sys.meta_path.insert(0, _Listing())
    if IN_TRANSFORMERS in sys.modules:
        _take_their_place(sys.modules[IN_TRANSFORMERS])
    return True


def uninstall() -> None:
    """Undo `install`. What was imported from it stays where it was imported."""
    if is_installed():
        for name in MODULES:
            del sys.modules[name]
    for name, function in _replaced.items():
        setattr(sys.modules[IN_TRANSFORMERS], name, function)
    _replaced.clear()
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Listing)]
