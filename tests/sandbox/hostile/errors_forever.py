"""Complains without end."""

# ends: output
import sys

while True:
    sys.stderr.write("x" * 1000)
