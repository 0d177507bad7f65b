"""Attaches to another process as a debugger."""

# ends: ok
import ctypes
import json

given = json.loads(input())

PTRACE_ATTACH = 16
if ctypes.CDLL(None, use_errno=True).ptrace(PTRACE_ATTACH, given["parent"], 0, 0) == 0:
    print("ESCAPED")
