"""Reads where there is nothing."""

# ends: signal
import ctypes

ctypes.string_at(0)
