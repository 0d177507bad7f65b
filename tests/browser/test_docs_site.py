"""The documentation's site, opened from a disk: axe finds nothing serious, nothing is asked of anybody, search works.

make site && python -m pytest tests/browser/test_docs_site.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

SITE = Path(__file__).resolve().parent.parent.parent / "site"
NAMES = ("index", "en/quickstart", "zh/quickstart", "en/scale", "zh/cannsim", "en/evaluation")

pytestmark = pytest.mark.skipif(not SITE.is_dir(), reason="the documentation's site is not built: make site")


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_pages_can_be_read_by_everybody_and_searched_without_a_server(chromium: Any, colours: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.base", reason="axe is not installed: pip install -e '.[dev]'")
    page = chromium.new_page(viewport={"width": 1280, "height": 900}, color_scheme=colours)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for name in NAMES:
        page.goto((SITE / f"{name}.html").as_uri())
        page.evaluate(axe.AXE_SCRIPT)
        found = page.evaluate("async () => (await axe.run()).violations.map((v) => [v.impact, v.id, v.nodes[0].html])")
        assert [entry for entry in found if entry[0] in ("serious", "critical")] == [], name
    page.keyboard.press("/")
    page.keyboard.type("checkpoint")
    page.wait_for_selector(".md-search-result__item")
    page.close()
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
