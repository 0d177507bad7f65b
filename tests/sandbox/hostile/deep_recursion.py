"""Calls itself."""


# ends: error
def down(n: int) -> int:
    return down(n + 1) + 1


down(0)
