"""Opens files until there are no more numbers."""

# ends: ok
held = []
try:
    for _ in range(5000):
        held.append(open("/dev/null"))  # noqa: SIM115
    print("ESCAPED")
except OSError:
    pass
