"""Calls home."""

# ends: ok
import json
import socket

given = json.loads(input())

try:
    socket.create_connection(("127.0.0.1", given["port"]), timeout=1)
    print("ESCAPED")
except OSError:
    pass
