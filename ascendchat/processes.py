"""Free ports for the rendezvous of `ascendchat launch`: chosen and checked right before use, never a fixed 29500."""

from __future__ import annotations

import socket

from ascendchat.config import UserError

# Collectives listen here by default; a rendezvous on one of these would make their start fail.
RESERVED = range(60000, 60032)


def is_free(port: int, host: str = "") -> bool:
    """True when a server could listen on this port now: on this IPv4 address, or on all addresses, IPv4 and IPv6."""
    for family, address in ((socket.AF_INET, host or "0.0.0.0"), *([] if host else [(socket.AF_INET6, "::")])):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as server:
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # TIME_WAIT does not count as taken
                if family == socket.AF_INET6:
                    server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                server.bind((address, port))
                server.listen(1)
        except OSError as error:
            if family == socket.AF_INET or "in use" in str(error):
                return False
    return True


def free_port() -> int:
    """A port that is free at this moment, from the range that the operating system hands out."""
    for _ in range(100):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
            server.bind(("0.0.0.0", 0))
            port = int(server.getsockname()[1])
        if port not in RESERVED and is_free(port):
            return port
    raise UserError("no free port was found in 100 tries; see what listens with `ss -ltn`")


def split_address(text: str) -> tuple[str, int]:
    """`host:1234`, `host`, `[::1]:1234` -> (host, port); port 0 when none was given."""
    host, colon, port = text.rpartition(":")
    if not colon or (":" in host and not host.endswith("]")):  # no port, or a bare IPv6 address
        return text.strip("[]"), 0
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(f"--master {text!r} is not HOST or HOST:PORT, e.g. --master node0:20123")
    return host.strip("[]"), int(port)
