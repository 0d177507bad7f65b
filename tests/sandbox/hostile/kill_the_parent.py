"""Kills the evaluator."""

# ends: ok
import json
import os
import signal

given = json.loads(input())

for number in (given["parent"], os.getppid(), 1):
    for kind in (signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP):
        try:
            os.kill(number, kind)
            if number == given["parent"]:
                print("ESCAPED")
        except OSError:
            pass
