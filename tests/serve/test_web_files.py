"""The files of the web page: self-contained, and without any way from a string to HTML or code."""

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


@pytest.mark.parametrize("path", WEB.glob("*.css"), ids=lambda path: path.name)
def test_a_style_sheet_is_whole(path: Path) -> None:
    """A browser passes over what it cannot read and says nothing."""
    text = path.read_text(encoding="utf-8")
    assert text.count("{") == text.count("}")
    for number, line in enumerate(text.splitlines(), 1):
        assert line.count('"') % 2 == 0, f"line {number} ends inside a string"
