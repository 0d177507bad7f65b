"""The command-line options, written down so that none appears, changes or goes by accident.

python tests/golden/update.py     writes tests/golden/cli.txt; read the diff before you commit it
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
import typing
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden" / "cli.txt"
sys.path.insert(0, str(ROOT))


def options() -> str:
    """One line per option: command, every spelling of the flag (capitals: a bare word), how its value is written."""
    from ascendchat.cli import COMMANDS
    from ascendchat.config import spelling
    from ascendchat.config.help import shape

    lines = []
    for command, (target, _, _) in COMMANDS.items():
        module, name = target.split(":")
        cls = getattr(importlib.import_module(f"ascendchat.config.{module}"), name)
        kinds = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            bare = [field.name.upper()] if field.metadata.get("words") else []
            flags = [spelling(n) for n in (field.name, *field.metadata.get("also", ()))]
            lines.append(" ".join([command, *bare, *flags, shape(kinds[field.name])]).rstrip())
    return "\n".join(sorted(lines)) + "\n"


if __name__ == "__main__":
    GOLDEN.write_text(options(), encoding="utf-8")
    print(f"{GOLDEN.relative_to(ROOT)}: {len(options().splitlines())} options")
