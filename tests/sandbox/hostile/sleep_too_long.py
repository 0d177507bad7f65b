"""Sleeps past its time."""

# ends: time
import time

time.sleep(3600)
print("ESCAPED")
