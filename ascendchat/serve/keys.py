"""Who may ask: API keys, and the addresses and names of this server; checked before the model is opened.

Keys come from a file or the environment, never from the command line, which every user of the machine can read.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import re
import secrets
import socket
import sys
from pathlib import Path

from ascendchat.config import UserError
from ascendchat.config.serve import ServeConfig

VARIABLE = "ASCENDCHAT_API_KEYS"
SHORTEST = 16  # characters of a key: shorter ones can be guessed, also from their digest in the access log
ORIGIN = re.compile(r"https?://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:\d{1,5})?")


class Keys:
    """The keys' digests; none: everybody may ask."""

    def __init__(self, keys: list[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def owner(self, authorization: bytes) -> str:
        """Short name of the key in an Authorization header, "" when it is none of ours.

        Digests of equal length are compared, all of them and in constant time: how long it takes tells nothing.
        """
        scheme, _, token = authorization.partition(b" ")
        digest = hashlib.sha256(token.strip()).digest()
        known = False
        for ours in self._digests:
            known |= hmac.compare_digest(ours, digest)
        return digest.hex()[:8] if known and scheme.lower() == b"bearer" else ""


def load_keys(config: ServeConfig) -> Keys:
    """From the file, else from the environment. The variable is removed: the workers need not know it."""
    from_environment = os.environ.pop(VARIABLE, "")
    if not config.api_key_file:
        return checked(from_environment.split(","), f"${VARIABLE}")
    path = Path(config.api_key_file).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
        mode = path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"cannot read --api-key-file {path}: {reason}") from None
    if mode & 0o007:  # said and not refused: secrets are mounted into containers like this
        print(f"every user of this machine can read the keys in {path}; mend it: chmod 600 {path}", file=sys.stderr)
    keys = checked([line for line in text.splitlines() if not line.startswith("#")], str(path))
    if not keys:
        raise UserError(f"there is no key in {path}; write one into it, such as {secrets.token_urlsafe(32)}")
    return keys


def checked(keys: list[str], source: str) -> Keys:
    keys = [key.strip() for key in keys if key.strip()]
    if any(len(key) < SHORTEST or not key.isascii() or not key.isprintable() or " " in key for key in keys):
        raise UserError(
            f"a key in {source} is unfit: keys have at least {SHORTEST} characters, ASCII and without spaces, "
            f"such as {secrets.token_urlsafe(32)}"
        )
    return Keys(keys)


def admission(config: ServeConfig) -> Keys:
    """The keys of this server; a combination that would leave it open by accident is a UserError."""
    keys = load_keys(config)
    if keys and config.no_auth:
        raise UserError("--no-auth and API keys exclude each other; leave one of them out")
    if config.weight_updates and not keys:
        raise UserError("--weight-updates needs an API key: write one into a file and name it with --api-key-file")
    if not keys and not is_loopback(config.host):
        if not config.no_auth:
            raise UserError(
                f"--host {config.host} can be reached from other machines, so clients need a key: write one into a "
                f"file and name it with --api-key-file, or let everyone in with --no-auth"
            )
        print(f"no keys (--no-auth): everyone who reaches {config.host} can use this model", file=sys.stderr)
    for origin in config.cors_origin:
        if not ORIGIN.fullmatch(origin):
            raise UserError(f"--cors-origin {origin!r} is not an origin; write it like https://example.org:8443")
    return keys


def address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    address = address_of(host)
    return host == "localhost" if address is None else address.is_loopback


class Hosts:
    """Names and addresses by which this server may be addressed.

    A web page of a stranger can let its own name resolve to 127.0.0.1 (DNS rebinding); its requests then come with
    that name. An address cannot be rebound: all are fine where the server listens on all.
    """

    def __init__(self, config: ServeConfig) -> None:
        bound = address_of(config.host)
        self.any_address = bound is not None and bound.is_unspecified
        self.names = {"localhost", config.host.lower(), *(name.lower() for name in config.allowed_host)}
        if not is_loopback(config.host):
            self.names.add(socket.gethostname().lower())

    def allows(self, header: str) -> bool:
        """`header`: NAME, NAME:PORT, or [ADDRESS]:PORT; --allowed-host may name it with or without the port."""
        name = header.lower()
        host = re.sub(r":\d*$", "", name)
        address = address_of(host[1:-1] if host.startswith("[") and host.endswith("]") else host)
        if address is not None:
            return self.any_address or address.is_loopback or str(address) in self.names
        return host.rstrip(".") in self.names or name in self.names
