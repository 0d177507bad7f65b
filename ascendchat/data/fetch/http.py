"""HTTP for `ascendchat data fetch`: one client, and URLs whose names, passwords and tokens are never printed or stored.

redact("https://bob:pw@host/a.zip?sig=abc&part=2")  ->  "https://***@host/a.zip?sig=***&part=2"
"""

from __future__ import annotations

import contextlib
import email.utils
import functools
import hashlib
import logging
import os
import random
import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

from ascendchat.errors import UserError
from ascendchat.version import __version__

if TYPE_CHECKING:
    import httpx


REDACTED = "***"
USER = re.compile(r"(?<=://)[^\s/?#]*@")
PARAMETER = re.compile(r"(?<=[?&;#])([^\s=&;#?]+)=([^\s&;#'\"]+)")

# Parameters that only sign or permit a request, whatever file it is for. A new signature is not another file, so these
# do not count when two URLs are compared. `token` and `key` do count: some servers choose the file by them.
PERMIT = re.compile(
    r"x-(amz|goog|obs)-.*|x-oss-(?!process).*|q-(sign|ak|key|header|url).*|sig|signature|expires|policy|key-pair-id"
    r"|(aws|oss|google)?access-?_?(key-?_?)?id|(security|access|auth|session)[-_]?token|passw(or)?d|pwd",
    re.IGNORECASE,
)
SECRET_WORDS = (
    r"token|key|apikey|secret|sig|signature|hmac|pass|password|passwd|pwd|auth|authorization|bearer|credentials?|jwt"
    r"|session|sid|code|ticket|hash"
)
SECRET_NAME = re.compile(rf"(?:.*[^a-z])?(?:{SECRET_WORDS})(?:[^a-z].*)?|.*(?:token|secret|apikey)", re.IGNORECASE)
SECRET_VALUE = re.compile(r"(?:hf|gh[a-z]|sk|ms|xox[a-z])[_-][\w-]{8,}|eyJ[\w-]{8,}\..*|[\w+=-]{32,}")


def redact(text: str) -> str:
    """Replace the secret parts of every URL in a text by ***."""

    def hide(match: re.Match[str]) -> str:
        name, value = unquote(match[1]), unquote(match[2])
        words = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name)  # accessKey -> access-Key
        secret = PERMIT.fullmatch(name) or SECRET_NAME.fullmatch(words) or SECRET_VALUE.fullmatch(value)
        return f"{match[1]}={REDACTED}" if secret else match[0]

    if "://" not in text:
        return text
    return PARAMETER.sub(hide, USER.sub(f"{REDACTED}@", text))


def url_hash(url: str) -> str:
    """8 hex digits that tell files apart: a hash of the URL without user, password, signature and fragment."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2].lower()
    parameters = [part for part in parts.query.split("&") if not PERMIT.fullmatch(unquote(part.partition("=")[0]))]
    return hashlib.sha256("\n".join([parts.scheme.lower(), host, parts.path, *parameters]).encode()).hexdigest()[:8]


# HTTP for `ascendchat data fetch`: one client, TLS always verified, proxies respected, errors with a remedy.
#
#     with Web(Policy()) as web:
#         listing, next_page = web.json("https://huggingface.co/api/datasets/openai/gsm8k/tree/main")
#
# The only module of data/ that imports httpx.

T = TypeVar("T")
logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every URL, signatures and passwords included
RETRY_STATUS = {408, 425, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524}
MAX_WAIT = 300.0  # seconds: a server may ask for more with Retry-After; nobody waits an hour


@dataclass(frozen=True)
class Policy:
    """Timeouts, retries and sizes of a download. Times in seconds, sizes in bytes."""

    chunk: int = 8 << 20  # of a range; a killed process loses at most one per connection
    attempts: int = 6  # in a row without one new byte
    connect_attempts: int = 3  # few, so that the next source is tried soon
    restarts: int = 3  # of one file whose content changed, or whose checksum was wrong
    backoff: float = 0.5  # doubled each time, up to `max_backoff`, with jitter
    max_backoff: float = 30.0
    timeout: float = 30.0  # without a byte; HF_HUB_DOWNLOAD_TIMEOUT wins
    min_rate: int = 512  # bytes per second over `timeout`: a slower connection is dropped

    def delay(self, failures: int) -> float:
        return min(self.max_backoff, self.backoff * 2 ** (failures - 1)) * random.uniform(0.5, 1.0)


class SourceFailed(Exception):
    """This source cannot give the file; another one may. The text is printed: no secret of a URL may be in it."""

    def __init__(self, text: str) -> None:
        super().__init__(redact(text))


class TransientFailure(Exception):
    """A failure worth another try, `after` so many seconds if the server asked for it."""

    def __init__(self, text: str, after: float = 0.0, unreachable: bool = False) -> None:
        super().__init__(redact(text))
        self.after = after
        self.unreachable = unreachable


def read_timeout(policy: Policy) -> float:
    """Seconds without a byte after which a connection is dropped."""
    text = os.environ.get("HF_HUB_DOWNLOAD_TIMEOUT", "")
    try:
        return float(text) if text else policy.timeout
    except ValueError:
        raise UserError(f"HF_HUB_DOWNLOAD_TIMEOUT={text!r} is not a number of seconds; try: 300") from None


@functools.lru_cache(maxsize=4)
def _tls(*_: str) -> ssl.SSLContext:
    """Load trusted certificates, once for each value of the variables that choose them: reading them takes 0.1 s."""
    import httpx

    return httpx.create_ssl_context()


def host_of(url: str) -> str:
    import httpx

    return httpx.URL(url).host


class Web:
    """An HTTP client that knows which errors are worth a retry."""

    def __init__(self, policy: Policy, connections: int = 8) -> None:
        try:
            import httpx
        except ImportError as error:
            raise UserError(f"fetching needs httpx ({error}): pip install httpx") from None
        self.policy = policy
        self.timeout = read_timeout(policy)
        self.stopped = threading.Event()
        self._not_before = 0.0  # time.monotonic: after a 429 every connection waits, not only the one that got it
        try:
            self._client = httpx.Client(
                follow_redirects=True,
                verify=_tls(os.environ.get("SSL_CERT_FILE", ""), os.environ.get("SSL_CERT_DIR", "")),
                timeout=httpx.Timeout(self.timeout, connect=min(10.0, self.timeout)),
                limits=httpx.Limits(max_connections=connections + 2, max_keepalive_connections=connections),
                # identity: a compressed transfer has neither the length nor the ranges of the file
                headers={"User-Agent": f"ascendchat/{__version__}", "Accept-Encoding": "identity"},
                event_hooks={"response": [_no_downgrade]},
            )
        except (ImportError, ValueError) as error:  # a socks proxy without its package, or a malformed proxy URL
            raise UserError(
                f"the proxy in HTTP_PROXY, HTTPS_PROXY or ALL_PROXY cannot be used ({redact(str(error))}); "
                "use an http:// proxy, or `pip install socksio` for a socks5:// one"
            ) from None

    def __enter__(self) -> Web:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def wait(self, seconds: float) -> None:
        """Sleep, but not past the end of the download."""
        self.stopped.wait(min(seconds, MAX_WAIT))

    @contextlib.contextmanager
    def get(self, url: str, headers: dict[str, str]) -> Iterator[httpx.Response]:
        """Open a response with status 200, 206 or 416; everything else becomes TransientFailure or SourceFailed."""
        import httpx

        if (pause := self._not_before - time.monotonic()) > 0:
            self.wait(pause)
        try:
            with self._client.stream("GET", url, headers=headers) as response:
                if response.status_code not in (200, 206, 416):
                    self._refuse(response, url)
                yield response
        except httpx.TransportError as error:
            text = f"{type(error).__name__}: {error}".rstrip(": ")
            if "CERTIFICATE_VERIFY_FAILED" in text:
                raise SourceFailed(
                    f"the TLS certificate of {host_of(url)} cannot be verified ({error}); behind a company proxy set "
                    "SSL_CERT_FILE to the file with its root certificate, and check the clock of this machine"
                ) from None
            if isinstance(error, (httpx.UnsupportedProtocol, httpx.ProxyError)):
                raise SourceFailed(f"{url}: {text}; check the URL and HTTPS_PROXY") from None
            unreachable = isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout))
            raise TransientFailure(f"{host_of(url)}: {text}", unreachable=unreachable) from None
        except (httpx.TooManyRedirects, httpx.InvalidURL) as error:
            raise SourceFailed(f"{url}: {type(error).__name__}: {error}") from None

    def _refuse(self, response: httpx.Response, url: str) -> None:
        status, where = response.status_code, f"{host_of(url)} answered {response.status_code} for {url}"
        if status in RETRY_STATUS:
            after = retry_after(response.headers.get("retry-after", ""))
            if after:
                self._not_before = max(self._not_before, time.monotonic() + min(after, MAX_WAIT))
            raise TransientFailure(where, after=after)
        if status in (401, 403):
            raise SourceFailed(
                f"{where}: access is refused; accept the terms on the page of the data set, then "
                "`export HF_TOKEN=hf_...` with a token that may read it"
            )
        if status in (404, 410):
            raise SourceFailed(f"{where}: there is no such file or repository (or it is private: set HF_TOKEN)")
        raise SourceFailed(where)

    def json(self, url: str, headers: dict[str, str] | None = None) -> tuple[Any, str]:
        """Get a JSON document and the URL of its next page ("" when it is the last)."""

        def read(response: httpx.Response) -> tuple[Any, str]:
            response.read()
            following = response.links.get("next", {}).get("url", "")
            return response.json(), str(response.url.join(following)) if following else ""

        try:
            return self._with_retries(url, headers or {}, read)
        except (ValueError, RecursionError):
            raise SourceFailed(f"{url} is not JSON: a login page or a proxy answered instead of the hub") from None

    def validator(self, url: str, headers: dict[str, str]) -> str:
        """Get the validator of a URL without its content: the ETag, else the time of change."""
        return self._with_retries(url, {**headers, "Range": "bytes=0-0"}, version)

    def _with_retries(self, url: str, headers: dict[str, str], read: Callable[[httpx.Response], T]) -> T:
        failures = 0
        while True:
            try:
                with self.get(url, headers) as response:
                    return read(response)
            except TransientFailure as error:
                failures += 1
                if failures >= (self.policy.connect_attempts if error.unreachable else self.policy.attempts):
                    raise SourceFailed(f"{error} ({failures} attempts)") from None
                self.wait(error.after or self.policy.delay(failures))


def version(response: Any) -> str:
    """Validator of a response; "" when the server gives none."""
    return str(response.headers.get("etag") or response.headers.get("last-modified") or "")


def retry_after(text: str) -> float:
    """Seconds in a Retry-After header, which holds seconds or a date; 0 when there is none."""
    text = text.strip()
    if text.isdigit():
        return float(text)
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    return 0.0


def _no_downgrade(response: httpx.Response) -> None:
    if response.has_redirect_location and response.url.scheme == "https":
        target = response.url.join(response.headers["location"])
        if target.scheme != "https":
            raise SourceFailed(f"{response.url.host} redirects from https to {target.scheme}; refused")
