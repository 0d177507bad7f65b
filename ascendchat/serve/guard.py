"""The middleware around the application (app.py): keys, hosts, rates, limits, the access log.

    Guard(app, config, keys, AccessLog(config.access_log))    # an ASGI application around another

In this order: request id; Host (421) and Origin (403); preflight of CORS; key (401); rate (429); body, read whole
(413). On the way back: security headers, no words about our own faults (503; the trace goes to stderr), one line in
the access log. Time and number of connections are limited in connection.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import json
import logging
import math
import os
import re
import secrets
import socket
import sys
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, MutableMapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TextIO

from ascendchat.config.serve import ServeConfig
from ascendchat.errors import UserError
from ascendchat.serve import counters
from ascendchat.serve.connection import SECURITY_HEADERS, error_body

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

OPEN = re.compile(r"/|/web/[^/]+|/health(/live|/ready)?")  # the page and health need no key; all else does
READING = {"GET", "HEAD", "OPTIONS"}  # change nothing: a page elsewhere may send them, and cannot read the answer
UPLOAD = "/update_weights"
# In the scope of a request:
OWNER = "ascendchat.owner"  # the short name of its API key
BODY = "ascendchat/body"  # its body, unless weights are uploaded
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
HEADER_NAMES = re.compile(r"[A-Za-z0-9_, -]{0,1000}")
CLIENTS = 10_000  # whose rate is remembered
GONE = 499  # written into the log when the client went before it was answered


class _Refusal(Exception):
    """Answered at once, in OpenAI's form."""

    def __init__(self, status: int, message: str, code: str | None = None, **headers: str) -> None:
        super().__init__(message)
        self.status, self.code, self.headers = status, code, headers


class _Gone(Exception):
    """The client closed the connection before its request was whole."""


class Rates:
    """A bucket of tokens for each client: full at first, refilled at the given rate, one token per request."""

    def __init__(self, per_minute: float) -> None:
        self.per_second, self.size = per_minute / 60, max(1.0, per_minute)
        self.buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # tokens, and when; used last comes last

    def take(self, client: str, now: float) -> float:
        """0, or seconds until there is a token again."""
        tokens, then = self.buckets.pop(client, (self.size, now))
        tokens = min(self.size, tokens + (now - then) * self.per_second)
        self.buckets[client] = (tokens - 1 if tokens >= 1 else tokens, now)
        if len(self.buckets) > CLIENTS:
            self.buckets.popitem(last=False)
        return 0.0 if tokens >= 1 else (1 - tokens) / self.per_second


class AccessLog:
    """One JSON object per line, on stderr or in a file."""

    def __init__(self, path: str) -> None:
        try:
            self.file: TextIO = open(path, "a", encoding="utf-8", buffering=1) if path else sys.stderr  # noqa: SIM115
        except OSError as error:
            raise UserError(f"cannot write --access-log {path}: {error.strerror}") from None

    def write(self, line: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # a full disk does not stop the answers
            self.file.write(json.dumps({name: value for name, value in line.items() if value not in (None, "")}) + "\n")
            self.file.flush()


class _Exchange:
    """One request and what was answered."""

    def __init__(self, scope: MutableMapping[str, Any], send: Send) -> None:
        self.scope, self._send = scope, send
        self.method, self.path = str(scope["method"]), str(scope["path"])
        self.headers: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            self.headers.setdefault(name.decode("latin-1"), []).append(value.decode("latin-1"))
        given = self.headers.get("x-request-id", [""])[0]
        self.id = given if REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"
        cache = "no-cache" if OPEN.fullmatch(self.path) else "no-store"
        self.answer_headers = {**SECURITY_HEADERS, "Cache-Control": cache, "X-Request-Id": self.id}
        self.status, self.fault, self.key = 0, False, ""
        self.body = b""
        self.began = time.monotonic()

    def header(self, name: str) -> str:
        """ "" when it is missing. One that is there twice means different things to different servers: 400."""
        values = self.headers.get(name, [""])
        if len(values) > 1:
            raise _Refusal(400, f"the header {name} stands there more than once")
        return values[0].strip()

    async def send(self, message: Message) -> None:
        """Pass on what the application answers. Words of the framework about a fault of ours are held back."""
        if message["type"] == "http.response.start":
            self.fault = message["status"] >= 500 and message["status"] != 503
            if not self.fault:
                self.status = message["status"]
                message = {**message, "headers": self.complete(message.get("headers", []))}
        if not self.fault:
            await self._send(message)

    def complete(self, headers: Any) -> list[tuple[bytes, bytes]]:
        """Ours are added where the application has not said otherwise."""
        headers = list(headers)
        there = {name.lower() for name, _ in headers}
        ours = [(name.lower().encode(), value.encode("latin-1")) for name, value in self.answer_headers.items()]
        return headers + [(name, value) for name, value in ours if name not in there]

    async def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        if self.status:
            return  # it has begun already: the connection is cut, and the client knows that it is incomplete
        all_headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}
        encoded = [(name.replace("_", "-").lower().encode(), value.encode()) for name, value in all_headers.items()]
        self.fault = False
        await self.send({"type": "http.response.start", "status": status, "headers": encoded})
        await self.send({"type": "http.response.body", "body": b"" if self.method == "HEAD" else body})

    async def refuse(self, refusal: _Refusal) -> None:
        body = error_body(refusal.status, str(refusal), refusal.code)
        await self.answer(refusal.status, body, **refusal.headers)


class Guard:
    """The middleware."""

    def __init__(self, app: Application, config: ServeConfig, keys: Keys, log: AccessLog) -> None:
        self.app, self.config, self.keys, self.log = app, config, keys, log
        self.hosts, self.origins = _Hosts(config), set(config.cors_origin)
        self.rates = Rates(config.rate_limit) if config.rate_limit else None

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        exchange = _Exchange(scope, send)
        tally = counters.RequestTally(text=[] if self.config.log_messages else None)
        counters.TALLY.set(tally)
        try:
            await self.pass_on(exchange, receive)
        finally:
            self.note(exchange, tally)

    async def pass_on(self, exchange: _Exchange, receive: Receive) -> None:
        """Checks, then the application; whatever goes wrong has an answer."""
        try:
            if not await self.admit(exchange):
                return
            binary = exchange.header("content-type").startswith("application/octet-stream")
            if self.config.weight_updates and exchange.path == UPLOAD and binary:
                await self.app(exchange.scope, receive, exchange.send)  # it may be gigabytes: weights.py counts them
            else:
                exchange.body = exchange.scope[BODY] = await self.read(exchange, receive)
                await self.app(exchange.scope, receive, exchange.send)  # whose next message is the disconnect
            if exchange.fault:
                raise RuntimeError("the application answered with a fault of its own")
        except _Refusal as refusal:
            await exchange.refuse(refusal)
        except _Gone:
            exchange.status = GONE
        except RecursionError:
            await exchange.refuse(_Refusal(400, "the request is nested too deeply"))
        except Exception:
            logging.getLogger(__name__).exception("request %s: %s %r", exchange.id, exchange.method, exchange.path)
            await exchange.refuse(_Refusal(503, f"the server failed to answer; its log has more under {exchange.id}"))

    async def admit(self, exchange: _Exchange) -> bool:
        """True if the application shall answer; a preflight is answered here."""
        host, origin = exchange.header("host"), exchange.header("origin")
        if not host:
            raise _Refusal(400, "the header Host is missing")
        if not self.hosts.allows(host):
            raise _Refusal(
                421,
                f"this server is not known as {host[:80]}; it can be started with --allowed-host",
                "host_not_allowed",
            )
        if origin in self.origins:
            exchange.answer_headers |= {"Access-Control-Allow-Origin": origin, "Vary": "Origin"}
            exchange.answer_headers["Access-Control-Expose-Headers"] = "X-Request-Id, Retry-After"
            if exchange.method == "OPTIONS":
                await self.preflight(exchange)
                return False
        elif origin and exchange.method not in READING and origin.lower().partition("://")[2] != host.lower():
            raise _Refusal(403, "pages of other origins may not use this server (--cors-origin)", "origin_not_allowed")
        if not OPEN.fullmatch(exchange.path):
            self.check_key(exchange)
        exchange.scope[OWNER] = exchange.key
        return True

    async def preflight(self, exchange: _Exchange) -> None:
        """Keys are in a header, not in cookies, so any header may be asked for."""
        wanted = exchange.header("access-control-request-headers")
        await exchange.answer(
            200,
            access_control_allow_methods="GET, POST",
            access_control_allow_headers=wanted if HEADER_NAMES.fullmatch(wanted) else "authorization, content-type",
            access_control_max_age="600",
        )

    def check_key(self, exchange: _Exchange) -> None:
        if self.keys:
            exchange.key = self.keys.owner(exchange.header("authorization").encode("latin-1"))
        if self.rates:
            wait = self.rates.take(exchange.key or network(exchange.scope), time.monotonic())
            if wait:
                seconds = str(math.ceil(wait))
                raise _Refusal(
                    429, f"too many requests; try again in {seconds} s", "rate_limit_exceeded", retry_after=seconds
                )
        if self.keys and not exchange.key:
            message = "this server needs an API key: send the header Authorization: Bearer KEY"
            if exchange.header("authorization"):
                message = "this API key is not valid"
            raise _Refusal(401, message, "invalid_api_key", www_authenticate="Bearer")

    async def read(self, exchange: _Exchange, receive: Receive) -> bytes:
        """The body, up to the limit."""
        most = self.config.max_body
        announced = exchange.header("content-length")
        if announced.isdecimal() and (len(announced) > 15 or int(announced) > most):
            raise _Refusal(413, f"the request is larger than {most} bytes", "request_too_large")
        parts, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _Gone
            size += len(message.get("body", b""))
            if size > most:
                raise _Refusal(413, f"the request is larger than {most} bytes", "request_too_large")
            parts.append(message.get("body", b""))
            if not message.get("more_body"):
                return b"".join(parts)

    def note(self, exchange: _Exchange, tally: counters.RequestTally) -> None:
        """Count it and write it down."""
        status, seconds = exchange.status or GONE, time.monotonic() - exchange.began
        counters.request(str(getattr(exchange.scope.get("route"), "path", "other")), status, seconds)
        self.log.write(
            {
                "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
                "id": exchange.id,
                "client": (exchange.scope.get("client") or ("",))[0],
                "key": exchange.key,
                "method": exchange.method,
                "path": exchange.path[:200],
                "status": status,
                "ms": round(seconds * 1000, 1),
                "prompt_tokens": tally.prompt or None,
                "cached_tokens": tally.cached or None,
                "completion_tokens": tally.completion or None,
                "request": exchange.body.decode("utf-8", "replace") if self.config.log_messages else None,
                "answer": None if tally.text is None else "".join(tally.text),
            }
        )


def network(scope: MutableMapping[str, Any]) -> str:
    """The client's address; of IPv6 the network, since every client has a whole one to itself."""
    client = str((scope.get("client") or ("",))[0])
    try:
        address = ipaddress.ip_address(client)
    except ValueError:
        return client
    return str(ipaddress.ip_network((address, 64), strict=False)) if address.version == 6 else client


# Who may ask: API keys, and the addresses and names of this server; checked before the model is opened.
#
# Keys come from a file or the environment, never from the command line, which every user of the machine can read.

VARIABLE = "ASCENDCHAT_API_KEYS"
MIN_KEY = 16  # characters of a key: shorter ones can be guessed, also from their digest in the access log
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
    if any(len(key) < MIN_KEY or not key.isascii() or not key.isprintable() or " " in key for key in keys):
        raise UserError(
            f"a key in {source} is unfit: keys have at least {MIN_KEY} characters, ASCII and without spaces, "
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


class _Hosts:
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
