"""Asks not to die with its parent, and stays."""

# ends: ok exit
import ctypes
import json
import os
import time

given = json.loads(input())

ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
try:
    if os.fork() == 0:
        time.sleep(given["seconds"] + 1.0)
        with open(given["outside"] + "/written", "w") as file:
            file.write("still here")
except OSError:
    pass
