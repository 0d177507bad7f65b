"""Writes where the system keeps its files."""

# ends: ok
import os

for place in ("/", "/etc", "/usr", "/usr/bin", "/root", "/home", "/var/tmp", os.path.dirname(os.__file__)):
    try:
        with open(os.path.join(place, "ascendchat-hostile"), "w") as file:
            file.write("here")
        os.unlink(os.path.join(place, "ascendchat-hostile"))
        print("ESCAPED", place)
    except OSError:
        pass
