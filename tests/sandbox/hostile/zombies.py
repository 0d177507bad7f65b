"""Leaves children that nobody buries."""

# ends: ok
import os

for _ in range(20):
    try:
        if os.fork() == 0:
            os._exit(0)
    except OSError:
        pass
