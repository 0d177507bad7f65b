"""Reads the environment and the memory of other processes."""

# ends: ok
import json

given = json.loads(input())

for name in ("environ", "mem", "maps", "root/etc/passwd", "cwd"):
    for number in (given["parent"], 1):
        try:
            with open(f"/proc/{number}/{name}", "rb") as file:
                if file.read(16):
                    print("ESCAPED", number, name)
        except OSError:
            pass
