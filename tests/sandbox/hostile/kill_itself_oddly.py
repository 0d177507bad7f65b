"""Ends by a signal that has no name."""

# ends: signal
import os

os.kill(os.getpid(), 40)
