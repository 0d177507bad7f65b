"""Waits for the end to change the exit code."""

# ends: exit error
import atexit
import os

atexit.register(os._exit, 3)
