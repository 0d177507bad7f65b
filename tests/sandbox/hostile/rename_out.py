"""Moves a file from outside away."""

# ends: ok
import json
import os

given = json.loads(input())

try:
    os.rename(given["outside"] + "/secret", given["outside"] + "/moved")
    print("ESCAPED")
except OSError:
    pass
