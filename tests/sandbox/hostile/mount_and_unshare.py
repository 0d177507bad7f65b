"""Makes namespaces and mounts of its own."""

# ends: ok
import ctypes

libc = ctypes.CDLL(None, use_errno=True)
for flags in (0x10000000, 0x00020000, 0x40000000, 0x10000000 | 0x20000000):
    if libc.unshare(flags) == 0:
        print("ESCAPED", hex(flags))
if libc.mount(b"proc", b"/tmp", b"proc", 0, None) == 0:
    print("ESCAPED")
