"""Replaces what its caller will use."""

# ends: exit error
import builtins
import os
import sys

os.write = None
builtins.exec = builtins.compile = builtins.print = None
sys.stdout = sys.stderr = None
sys.exit = None
raise SystemExit(0)
