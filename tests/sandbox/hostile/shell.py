"""Turns into a shell that writes outside."""

# ends: exit signal
import json
import os

given = json.loads(input())

os.execv("/bin/sh", ["sh", "-c", f"echo here > {given['outside']}/written && echo ESCAPED"])
