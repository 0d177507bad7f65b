"""Replaces the machinery of imports, then leaves as if all were well."""

# ends: exit
import builtins
import sys


class Everything:
    def find_spec(self, name: str, *rest: object) -> None:
        raise SystemExit(0)


sys.meta_path.insert(0, Everything())
builtins.__import__ = lambda *a, **k: sys.exit(0)
sys.modules.clear()
import json  # noqa: E402, F401
