"""Waits for more than it is told."""

# ends: error
while True:
    input()
