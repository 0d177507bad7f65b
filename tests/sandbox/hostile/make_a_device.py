"""Makes a device file for the disk."""

# ends: ok
import os
import stat

try:
    os.mknod("disk", 0o666 | stat.S_IFBLK, os.makedev(8, 0))
    print("ESCAPED")
except OSError:
    pass
