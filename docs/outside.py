"""MkDocs hook of `make site`: links to files of the repository that are no pages become the name of the file."""

import re

OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./\.\./([^)#]+)[^)]*\)")


def on_page_markdown(markdown: str, **_: object) -> str:
    """`[cannsim](../../cannsim)` -> cannsim (`cannsim`)"""
    return OUTSIDE.sub(r"\1 (`\2`)", markdown)
