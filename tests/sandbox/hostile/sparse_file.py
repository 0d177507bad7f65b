"""A file of a terabyte that holds nothing."""

# ends: ok
import os

try:
    with open("file", "wb") as file:
        file.truncate(1 << 40)
    if os.path.getsize("file") == 1 << 40:
        print("ESCAPED")
except OSError:
    pass
