"""ascendchat: from raw text to a chat model, on Ascend NPUs and on anything else. Start with `ascendchat --help`."""

from __future__ import annotations

from ascendchat.compat import old_paths
from ascendchat.version import __version__

__all__ = ["__version__", "preload"]

old_paths.keep()


def preload(argv: list[str]) -> None:
    """Import what `ascendchat ARGV` will import, in the environment of its device; touch no device.
    launch/forkserver.py"""
    from ascendchat.cli import preload as of_command

    of_command(argv)
