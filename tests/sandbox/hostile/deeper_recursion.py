"""Calls itself until the stack of the machine ends."""

# ends: signal error memory
import sys

sys.setrecursionlimit(1 << 30)


class Nested:
    def __repr__(self) -> str:
        return repr(self)


repr(Nested())
