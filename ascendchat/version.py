"""The version of ascendchat, and how it is installed."""

from __future__ import annotations

import shlex
from pathlib import Path

__version__ = "0.1.0"


def in_clone() -> bool:
    """True when the package runs from a clone of the repository, False when it was installed from a wheel."""
    return (Path(__file__).resolve().parents[1] / "pyproject.toml").is_file()


def install_command(extra: str = "") -> str:
    """The command that installs all dependencies of the package, or those of one extra."""
    brackets = f"[{extra}]" if extra else ""
    if in_clone():
        return f"pip install -e {shlex.quote('.' + brackets)} in your clone of ascendchat"
    return f"pip install {shlex.quote('ascendchat' + brackets)}"
