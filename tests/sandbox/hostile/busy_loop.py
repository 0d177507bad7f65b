"""Computes nothing, for ever."""

# ends: time
while True:
    pass
