"""A real Chromium for the web page: the distribution's, driven by Playwright; tests skip where there is none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from browser_visit import PATIENCE, Visit, tab, visiting
from stand_in import StandIn

FLAGS = """--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
    --disable-component-update --disable-sync --disable-dev-shm-usage""".split()
# The first one that is there. The shell draws no toolbar for every visit: 32 tests took 42 s of processor time, not 95.
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """The browser. Not for the whole session: while it runs, so does Playwright's event loop in this thread, and tests
    elsewhere that call asyncio.run would fail."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install -e '.[dev]'")
    found = [path for name in BROWSERS if (path := shutil.which(name))]
    if not found:
        pytest.skip("no Chromium found: install the package chromium to run the tests of the web page")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found[0], args=FLAGS, timeout=PATIENCE)
        yield browser
        browser.close()


@pytest.fixture
def server() -> Iterator[StandIn]:
    """On a port of its own, and so with a storage of its own in the browser."""
    with StandIn() as running:
        yield running


@pytest.fixture(scope="module")
def shared_tab(chromium: Any) -> Iterator[Any]:
    """A new profile for each test took half of the processor time."""
    with tab(chromium) as page:
        yield page


@pytest.fixture
def chat(shared_tab: Any, server: StandIn) -> Iterator[Visit]:
    """A visit to that server."""
    with visiting(shared_tab, server.url) as seen:
        yield seen
