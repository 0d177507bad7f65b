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
        elsewhere = [
            url for url in self.requests if urlsplit(url).netloc != self.origin and not url.startswith("blob:")
        ]
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

    def finished(self) -> None:
        """Wait until no answer is under way."""
        self.until("!document.querySelector('.running')")

    def answers(self) -> list[str]:
        return list(self.page.locator(".message.assistant .content").all_inner_texts())

    def questions(self) -> list[str]:
        return list(self.page.locator(".message.user .content").all_inner_texts())


@contextlib.contextmanager
def visit(chromium: Any, url: str, **options: Any) -> Iterator[Visit]:
    """Open the page in a fresh profile, and judge at the end what it did."""
    options = {"locale": "en-GB", "viewport": {"width": 1100, "height": 760}, **options}
    context = chromium.new_context(**options)
    context.set_default_timeout(PATIENCE)
    context.grant_permissions(["clipboard-read", "clipboard-write"], origin=url.rstrip("/"))
    page = context.new_page()
    seen = Visit(page, urlsplit(url).netloc)
    context.on("request", lambda request: seen.requests.append(request.url))
    context.on("dialog", lambda dialog: (seen.dialogs.append(dialog.message), dialog.dismiss()))
    page.on("pageerror", lambda error: seen.errors.append(str(error)))
    page.on("console", lambda said: seen.errors.append(said.text) if said.type in ("error", "warning") else None)
    page.goto(url)
    seen.until("document.getElementById('composer').placeholder")
    yield seen
    context.close()
    seen.check()
