"""Many files, together larger than the disk the program was given."""

# ends: ok
total = 0
try:
    for i in range(10):
        with open(f"file{i}", "wb") as file:
            for _ in range(10):
                total += file.write(bytes(1 << 20))
                file.flush()
except OSError:
    pass
if total > 20 << 20:
    print("ESCAPED", total)
