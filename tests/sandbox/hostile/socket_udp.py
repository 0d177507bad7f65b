"""Sends a datagram."""

# ends: ok
import json
import socket

given = json.loads(input())

try:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(b"hello", ("127.0.0.1", given["port"]))
        sender.sendto(b"hello", ("192.0.2.1", 53))
    print("ESCAPED")
except OSError:
    pass
