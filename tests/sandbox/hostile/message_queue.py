"""Leaves a message queue behind."""

# ends: ok
import ctypes

if ctypes.CDLL(None, use_errno=True).msgget(0x5A5A5B, 0o1666) != -1:
    print("ESCAPED")
