"""A pattern that needs longer than the age of the world."""

# ends: time
import re

re.match(r"(a+)+$", "a" * 64 + "b")
print("ESCAPED")
