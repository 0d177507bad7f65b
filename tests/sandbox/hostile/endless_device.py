"""Reads a device that has no end."""

# ends: memory
with open("/dev/zero", "rb") as file:
    file.read()
