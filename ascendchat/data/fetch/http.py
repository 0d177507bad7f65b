"""Names, passwords and tokens in URLs: used to ask a server, but never printed or stored. For `ascendchat data fetch`.

redact("https://bob:pw@host/a.zip?sig=abc&part=2")  ->  "https://***@host/a.zip?sig=***&part=2"
"""

from __future__ import annotations

import hashlib
import re
from urllib.parse import unquote, urlsplit

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
    """The text with the secret parts of every URL in it replaced by ***."""

    def hide(match: re.Match[str]) -> str:
        name, value = unquote(match[1]), unquote(match[2])
        words = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name)  # accessKey -> access-Key
        secret = PERMIT.fullmatch(name) or SECRET_NAME.fullmatch(words) or SECRET_VALUE.fullmatch(value)
        return f"{match[1]}={REDACTED}" if secret else match[0]

    if "://" not in text:
        return text
    return PARAMETER.sub(hide, USER.sub(f"{REDACTED}@", text))


def url_hash(url: str) -> str:
    """8 hex digits that differ for different files: of the URL without user, password, signature and fragment."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2].lower()
    kept = [part for part in parts.query.split("&") if not PERMIT.fullmatch(unquote(part.partition("=")[0]))]
    return hashlib.sha256("\n".join([parts.scheme.lower(), host, parts.path, *kept]).encode()).hexdigest()[:8]
