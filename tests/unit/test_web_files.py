"""The files of the web page: small, self-contained, and without any way from a string to HTML or code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ascendchat

WEB = Path(ascendchat.__file__).parent / "serve" / "web"
FILES = sorted(WEB.iterdir())
FORBIDDEN = (
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\(|new Function|createContextualFragment"
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_is_small_and_says_what_it_is_for(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 400
    assert path.suffix not in (".js", ".css") or lines[0].startswith(("// ", "/* "))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_nothing_comes_from_elsewhere_and_no_string_becomes_html(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.search(FORBIDDEN, text)
    assert not re.search(r"<script(?![^>]*\bsrc=)|\sstyle=|\son[a-z]+=\"", text), "inline script or style"
    addresses = set(re.findall(r"https?://[a-z][\w.]+[^\s\"']*", text))
    names = {"http://www.w3.org/2000/svg", "http://www.w3.org/1998/Math/MathML"}  # of XML, never asked
    assert addresses <= names


def test_every_file_that_is_named_exists() -> None:
    known = {path.name for path in FILES}
    named = set(re.findall(r"(?:href|src)=\"web/([^\"]+)", (WEB / "index.html").read_text(encoding="utf-8")))
    for path in WEB.glob("*.js"):
        named |= set(re.findall(r"from \"\./([^\"]+)\"", path.read_text(encoding="utf-8")))
    assert named
    assert named | {"index.html"} == known, "missing, or never used"
