"""Leaves a process behind that belongs to no group of its."""

# ends: ok exit
import json
import os
import time

given = json.loads(input())

try:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(given["seconds"] + 1.0)
            with open(given["outside"] + "/written", "w") as file:
                file.write("still here")
        os._exit(0)
except OSError:
    pass
