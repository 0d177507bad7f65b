"""A map of memory larger than the limit."""

# ends: error
import mmap

mmap.mmap(-1, 1 << 30)
print("ESCAPED")
