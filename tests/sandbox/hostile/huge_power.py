"""A number that no machine can hold."""

# ends: time memory
x = 9 ** (9**9)
print("ESCAPED")
