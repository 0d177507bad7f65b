"""One visit to the page in a real browser, and what it must never do: fail, open dialogs, ask other servers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest

PATIENCE = 60_000  # ms: a guard, for machines that are busy with other tests


@dataclass
class Visit:
    """A page and everything it did: afterwards nothing may have gone wrong, unasked, or to another place."""

    page: Any
    origin: str
    errors: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    expected: tuple[str, ...] = ()  # parts of console errors that the test causes on purpose

    def check(self) -> None:
        unexpected = [error for error in self.errors if not any(part in error for part in self.expected)]
        assert not unexpected, unexpected
        assert not self.dialogs, self.dialogs
        here = f"http://{self.origin}/", "blob:", "about:"
        elsewhere = [url for url in self.requests if not url.startswith(here)]
        assert not elsewhere, f"the page asked {elsewhere}"

    # ---- what tests do again and again

    def send(self, text: str) -> None:
        self.page.get_by_label("Message", exact=True).fill(text)
        self.page.keyboard.press("Enter")

    def until(self, condition: str) -> None:
        """Wait for a JavaScript expression; Playwright's own wait needs `eval`, which the page's policy forbids."""
        deadline = time.monotonic() + PATIENCE / 1000
        while not self.page.evaluate(condition):
            if time.monotonic() > deadline:
                said = self.page.get_by_role("alert").all_inner_texts()
                pytest.fail(f"never came true: {condition}; the page says {said}, its console {self.errors}")
            self.page.wait_for_timeout(20)

    def exchange(self, text: str) -> None:
        """A message and its whole answer."""
        self.send(text)
        self.finished()

    def finished(self) -> None:
        """Wait until no answer is under way."""
        self.until("!document.querySelector('.running')")

    def answers(self) -> list[str]:
        return list(self.page.locator(".message.assistant .content").all_inner_texts())

    def questions(self) -> list[str]:
        return list(self.page.locator(".message.user .content").all_inner_texts())


@contextlib.contextmanager
def tab(chromium: Any, **options: Any) -> Iterator[Any]:
    """A page in a fresh profile."""
    context = chromium.new_context(**{"locale": "en-GB", "viewport": {"width": 1100, "height": 760}, **options})
    context.set_default_timeout(PATIENCE)
    yield context.new_page()
    context.close()


@contextlib.contextmanager
def visiting(page: Any, url: str) -> Iterator[Visit]:
    """Open the address there, and judge at the end what was done."""
    seen = Visit(page, urlsplit(url).netloc)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=url.rstrip("/"))
    listeners = {
        "request": lambda request: seen.requests.append(request.url),
        "dialog": lambda dialog: (seen.dialogs.append(dialog.message), dialog.dismiss()),
        "pageerror": lambda error: seen.errors.append(str(error)),
        "console": lambda said: seen.errors.append(said.text) if said.type in ("error", "warning") else None,
    }
    for event, listener in listeners.items():
        page.on(event, listener)
    try:
        page.goto(url)
        seen.until("document.getElementById('composer').placeholder")
        yield seen
        page.goto("about:blank")
    finally:
        for event, listener in listeners.items():
            page.remove_listener(event, listener)
    seen.check()


@contextlib.contextmanager
def visit(chromium: Any, url: str, **options: Any) -> Iterator[Visit]:
    """Both: a profile of its own for this visit."""
    with tab(chromium, **options) as page, visiting(page, url) as seen:
        yield seen
