"""Memory that is no memory of the process: files in memory."""

# ends: ok
import os

total = 0
try:
    for i in range(64):
        file = os.memfd_create(f"held{i}")
        for _ in range(16):
            total += os.write(file, bytes(1 << 20))
except OSError:
    pass
if total > 64 << 20:
    print("ESCAPED", total)
