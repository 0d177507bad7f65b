"""Makes a socket by the other table of system calls that the processor has."""

# ends: ok signal
import ctypes

if ctypes.CDLL(None, use_errno=True).syscall(0x40000000 + 41, 2, 1, 0) >= 0:
    print("ESCAPED")
