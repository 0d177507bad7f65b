"""Leaves a segment of shared memory behind."""

# ends: ok error
import ctypes

libc = ctypes.CDLL(None, use_errno=True)
if libc.shmget(0x5A5A5A, 4096, 0o1666) != -1:
    print("ESCAPED")
