"""TLS is always verified, and nothing leads from https to http."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from http_server import DATA, FAST, Server, serve

from ascendchat.data.fetch import fetch
from ascendchat.errors import UserError


@pytest.fixture
def secure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Server, Path]]:
    """An https server whose certificate nobody trusts yet, and that certificate."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificate of this test, is not installed")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    command += " -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    subprocess.run([*command.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    for server in serve(monkeypatch):
        server.encrypt(context)
        yield server, certificate


def test_a_certificate_is_trusted_only_when_the_user_says_so(
    secure: tuple[Server, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, certificate = secure
    url = server.add("/a.bin", DATA)
    with pytest.raises(UserError, match=r"certificate of localhost cannot be verified .*SSL_CERT_FILE"):
        fetch(url, policy=FAST)
    assert server.sent() == 0
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert (fetch(url, policy=FAST) / "a.bin").read_bytes() == DATA


def test_a_redirect_from_https_to_http_is_refused(secure: tuple[Server, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    server, certificate = secure
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with pytest.raises(UserError, match="redirects from https to http; refused"):
        fetch(server.add("/a.bin", DATA, always="redirect:http://example.org/a.bin"), policy=FAST)
