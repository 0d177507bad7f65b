"""Deletes what is not its own."""

# ends: ok
import json
import os
import shutil

given = json.loads(input())

shutil.rmtree(given["outside"], ignore_errors=True)
for name in ("secret",):
    try:
        os.unlink(os.path.join(given["outside"], name))
        print("ESCAPED")
    except OSError:
        pass
