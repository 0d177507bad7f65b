"""Kills all it may."""

# ends: ok signal
import contextlib
import os
import signal

for target in (-1, 0):
    with contextlib.suppress(OSError):
        os.kill(target, signal.SIGKILL)
