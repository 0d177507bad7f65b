"""Waits to be called."""

# ends: ok error
import socket

try:
    server = socket.create_server(("0.0.0.0", 0))
    print("ESCAPED" if server.getsockname()[1] else "")
except OSError:
    pass
