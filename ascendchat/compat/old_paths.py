"""Old import paths of ours, which keep working for one release: `from ascendchat.nn.flash import flash_attn_func` is
what compat/flash has, and a warning says so once."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "ascendchat.nn.flash": "ascendchat.compat.flash",
    "ascendchat.infer.areal": "ascendchat.compat.areal",
    "ascendchat.infer.request": "ascendchat.engine.request",
    "ascendchat.infer.remote": "ascendchat.remote.client",
    "ascendchat.infer.fleet": "ascendchat.remote.fleet",
    "ascendchat.infer.vllm_worker": "ascendchat.remote.vllm_worker",
}
PACKAGE = "ascendchat.infer"  # gone otherwise


class _Old(Loader):
    """Gives the module of the new name under the old one."""

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        if spec.name == PACKAGE:
            return None
        new = MOVED[spec.name]
        warnings.warn(f"{spec.name} is {new} now; the old name goes with the next release", FutureWarning, stacklevel=2)
        module = importlib.import_module(new)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """The module has run; it keeps the spec of its new name."""
        spec = module.__spec__
        if spec is not None and spec.loader_state is not None:
            module.__spec__ = spec.loader_state


class _Finder(MetaPathFinder):
    """Finds the old names, after everything else has been asked."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in MOVED or fullname == PACKAGE:
            return ModuleSpec(fullname, _Old(), is_package=fullname == PACKAGE)
        return None


def keep() -> None:
    """Let old names be imported in this process."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


keep()  # ascendchat/__init__.py imports this module, and with it every program that imports anything of ours
