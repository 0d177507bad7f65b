"""One file beyond the limit."""

# ends: ok
total = 0
try:
    with open("file", "wb", buffering=0) as file:
        while total < 64 << 20:
            total += file.write(bytes(1 << 20))
except OSError:
    pass
if total > 17 << 20:
    print("ESCAPED", total)
