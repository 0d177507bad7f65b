"""Looks for the old root folder behind its own."""

# ends: ok
import contextlib
import json
import os

given = json.loads(input())

for way in ("/..", "/../..", "/tmp/../..", "/dev/../../."):
    with contextlib.suppress(OSError):
        with open(way + given["outside"] + "/secret") as file:
            print("ESCAPED", file.read())
    with contextlib.suppress(OSError):
        os.chdir(way)
        if os.path.exists("." + given["outside"]):
            print("ESCAPED", way)
