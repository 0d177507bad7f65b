"""A list that grows for ever."""

# ends: memory
held = []
while True:
    held.append(bytearray(1 << 20))
    if len(held) > 300:
        print("ESCAPED", flush=True)
