"""The documentation as a site: all pages are in the navigation, links lead to headings, generated pages are current.

python -m pytest tests/test_site.py      `make site` builds it with MkDocs and checks the same and more
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


class Loader(yaml.SafeLoader):
    """mkdocs.yml names a Python function, which is not called here."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def settings() -> dict:
    return yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)


def listed(nav: object) -> list[str]:
    """The pages of a navigation, in order."""
    if isinstance(nav, str):
        return [nav]
    return [page for entry in (nav.values() if isinstance(nav, dict) else nav) for page in listed(entry)]  # type: ignore[attr-defined]


def test_every_page_is_in_the_navigation_once_and_in_both_languages() -> None:
    pages = listed(settings()["nav"])
    assert sorted(pages) == sorted(str(page.relative_to(DOCS)) for page in PAGES)
    english, chinese = ([p[3:] for p in pages if p.startswith(lang)] for lang in ("en/", "zh/"))
    assert english == chinese


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^\s*```.*?^\s*```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    titles = re.findall(r"^#+ (.+)$", text, flags=re.M)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in titles]
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in plain}


def test_links_to_headings_lead_to_one() -> None:
    for page in [*PAGES, ROOT / "README.md", ROOT / "README.zh.md"]:
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", page.read_text(encoding="utf-8")):
            found = anchors(page.parent / target if target else page)
            assert anchor in found, f"{page.name} links to {target}#{anchor}; the headings are {sorted(found)}"


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_the_page_of_known_errors_is_current(lang: str) -> None:
    spec = importlib.util.spec_from_file_location("made", ROOT / "tests" / "golden" / "troubleshooting.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    page = made.page(lang)
    assert page == made.target(lang).read_text(encoding="utf-8"), "run: python tests/golden/troubleshooting.py"
    assert page.count("\n### ") > 50
