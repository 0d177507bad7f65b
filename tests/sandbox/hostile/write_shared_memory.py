"""Leaves something in the machine's shared memory."""

# ends: ok
try:
    with open("/dev/shm/ascendchat-hostile", "w") as file:
        file.write("here")
    print("ESCAPED")
except OSError:
    pass
