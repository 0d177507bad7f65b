"""Closes every file it can find."""

# ends: ok error exit
import os

os.closerange(0, 64)
