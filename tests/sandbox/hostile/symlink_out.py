"""Writes and reads through a link that points out."""

# ends: ok
import contextlib
import json
import os

given = json.loads(input())

with contextlib.suppress(OSError):
    os.symlink(given["outside"], "link")
for mode in ("r", "w"):
    try:
        with open("link/secret", mode):
            print("ESCAPED", mode)
    except OSError:
        pass
