"""MkDocs hook of `make site`: nothing on a page leads to or loads from outside of it.

Links to files of the repository that are no pages become the name of the file, and the script that searches without a
server is ours (docs/offline-search.js), not one from elsewhere.
"""

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./\.\./([^)#]+)[^)]*\)")
SHIM = "https://unpkg.com/iframe-worker/shim"


def on_page_markdown(markdown: str, **_: object) -> str:
    """`[cannsim](../../cannsim)` -> cannsim (`cannsim`)"""
    return OUTSIDE.sub(r"\1 (`\2`)", markdown)


def on_post_page(output: str, page: Any, **_: object) -> str:
    output = output.replace('role="dialog"', 'role="dialog" aria-label="Search"')  # the theme gives it no name
    return output.replace(SHIM, "../" * page.url.count("/") + "offline-search.js")


def on_post_template(output_content: str, template_name: str, **_: object) -> str:
    """The page for addresses that are not there is served from anywhere."""
    return output_content.replace(SHIM, "/offline-search.js")
