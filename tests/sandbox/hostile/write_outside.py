"""Writes next to the evaluator."""

# ends: ok
import json

given = json.loads(input())

try:
    with open(given["outside"] + "/written", "w") as file:
        file.write("here")
    print("ESCAPED")
except OSError:
    pass
