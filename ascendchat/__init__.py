"""ascendchat: from raw text to a chat model, on Ascend NPUs and on anything else. Start with `ascendchat --help`."""

from __future__ import annotations


def preload(argv: list[str]) -> None:
    """Import what `ascendchat ARGV` will import, in the environment of its device; touch no device.
    launch/forkserver.py"""
    from ascendchat.cli import preload as of_command

    of_command(argv)
