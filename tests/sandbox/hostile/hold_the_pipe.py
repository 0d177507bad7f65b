"""Ends, but leaves a child that holds its output open."""

# ends: ok exit
import os
import time

try:
    if os.fork() == 0:
        time.sleep(3600)
except OSError:
    pass
