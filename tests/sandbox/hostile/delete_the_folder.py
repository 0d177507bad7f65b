"""Deletes the folder it stands in."""

# ends: ok error
import contextlib
import os
import shutil

here = os.getcwd()
shutil.rmtree(here, ignore_errors=True)
with contextlib.suppress(OSError):
    os.rmdir(here)
with contextlib.suppress(OSError):
    print(os.listdir("."))
