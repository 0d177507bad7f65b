"""Asks to be somebody else."""

# ends: ok
import os

if os.getuid() == 0:
    print("ESCAPED already root")
for change in (os.setuid, os.setgid, os.seteuid):
    try:
        change(0)
        print("ESCAPED", change.__name__)
    except OSError:
        pass
