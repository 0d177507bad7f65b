"""Links a file from outside into its own folder."""

# ends: ok
import json
import os

given = json.loads(input())

try:
    os.link(given["outside"] + "/secret", "mine")
    print("ESCAPED")
except OSError:
    pass
