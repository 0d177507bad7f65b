"""Asks for the address of a name."""

# ends: ok error
import contextlib
import socket

with contextlib.suppress(OSError):
    print("ESCAPED", socket.gethostbyname("example.com"))
