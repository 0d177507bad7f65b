"""Imports what is installed beside the evaluator."""

# ends: ok
import sys

for name in ("ascendchat", "torch", "numpy", "pip"):
    try:
        __import__(name)
        print("ESCAPED", name, sys.path)
    except ImportError:
        pass
