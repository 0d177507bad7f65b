"""Fills the pipe below Python's own buffers."""

# ends: output
import os

while True:
    os.write(1, b"x" * 65536)
