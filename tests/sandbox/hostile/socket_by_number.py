"""Makes a socket without Python's module."""

# ends: ok
import ctypes
import platform

number = {"x86_64": 41, "aarch64": 198}.get(platform.machine(), 41)
libc = ctypes.CDLL(None, use_errno=True)
if libc.syscall(number, 1, 1, 0) >= 0:
    print("ESCAPED")
