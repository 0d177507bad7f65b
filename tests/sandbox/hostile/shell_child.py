"""Starts a shell that writes outside."""

# ends: ok
import contextlib
import json
import os
import subprocess

given = json.loads(input())

with contextlib.suppress(OSError, subprocess.SubprocessError):
    subprocess.run(f"echo here > {given['outside']}/written && echo ESCAPED", shell=True, timeout=1)
os.system(f"echo here > {given['outside']}/written && echo ESCAPED")
