"""One enormous string."""

# ends: memory
text = "x" * (1 << 31)
print("ESCAPED")
