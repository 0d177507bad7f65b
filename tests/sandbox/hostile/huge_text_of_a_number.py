"""The digits of a large number."""

# ends: time error
import sys

sys.set_int_max_str_digits(0)
print(len(str(7 ** (10**8))))
print("ESCAPED")
