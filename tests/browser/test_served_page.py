"""The page against the real `ascendchat serve`: tiny models whose weights make them say a known text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser_visit import visit
from running_server import endless as endless_model
from running_server import make, save, serving

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of this file's servers."""
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def calculating(home: Path) -> Iterator[str]:
    """The page of a server whose model always calls the calculator."""
    save(home, make.scripted(make.calculator_script()[0]), "calculating")
    with serving(home, "--run=calculating") as server:
        yield f"{server.url}/"


@pytest.fixture(scope="module")
def endless(home: Path) -> Iterator[str]:
    """The page of a server whose model never ends its answer."""
    save(home, endless_model(), "endless")
    with serving(home, "--run=endless", "--max-tokens=100000") as server:
        yield f"{server.url}/"


def test_a_conversation_with_a_tool_call_is_answered_and_kept(chromium: Any, calculating: str) -> None:
    with visit(chromium, calculating) as chat:
        chat.page.get_by_text("calculating/sft").wait_for()
        chat.send("What is 17 + 25?")
        chat.page.locator(".assistant", has_text="你好!").wait_for()
        chat.finished()
        assert chat.page.locator(".chip").text_content() == "Calculator 17+25 = 42"
        chat.send("And again?")
        chat.until("document.querySelectorAll('.assistant .chip').length === 2")
        chat.finished()
        status = chat.page.locator(".status").inner_text()
        assert "calculating/sft" in status
        left = re.search(r"(\d+) of 256 tokens left", status)
        assert left, status
        assert 0 < int(left[1]) < 250
        chat.page.get_by_role("button", name="Answer again").last.click()
        chat.page.get_by_role("button", name="Earlier version").wait_for()
        chat.finished()
        chat.page.reload()
        chat.until("document.querySelectorAll('.message').length === 4")
        assert chat.questions() == ["What is 17 + 25?", "And again?"]


def test_an_answer_streams_and_can_be_stopped(chromium: Any, endless: str) -> None:
    with visit(chromium, endless) as chat:
        chat.page.get_by_text("endless/sft").wait_for()
        length = "document.querySelector('.assistant .content')?.textContent.length"
        chat.send("Go on for ever")
        chat.until(f"{length} > 10")
        first = chat.page.evaluate(length)
        chat.until(f"{length} > {first}")
        chat.page.get_by_role("button", name="Stop").click()
        chat.finished()
        chat.page.get_by_text("Stopped.").first.wait_for()
        assert set(chat.answers()[0]) == {"a", "b"}


def test_a_full_context_drops_the_oldest_turns_and_says_so(chromium: Any, calculating: str) -> None:
    """The context is 256 tokens, a token is a byte here: three or four turns."""
    with visit(chromium, calculating) as chat:
        page, asked = chat.page, []
        page.on("request", lambda sent: asked.append(sent.post_data_json) if sent.url.endswith("completions") else None)
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("System prompt").fill("Be brief.")
        page.get_by_role("button", name="Save", exact=True).click()
        note = page.get_by_text("The model no longer reads what stands above: the context was full.")
        for turn in range(6):
            assert note.is_visible() == any(len(one["messages"]) < 2 * n + 2 for n, one in enumerate(asked))
            chat.send(f"Question number {turn}, in so many words")
            chat.until(f"document.querySelectorAll('.assistant .chip').length === {turn + 1}")
            chat.finished()
        assert page.get_by_role("alert").count() == 0
        said = [[message["content"] for message in one["messages"]] for one in asked]
        assert {texts[0] for texts in said} == {"Be brief."}, "the system prompt stays"
        assert [texts[-1].split(",")[0] for texts in said] == [f"Question number {turn}" for turn in range(6)]
        assert all([message["role"] for message in one["messages"]][1] == "user" for one in asked)
        begins = [int(texts[1].split(",")[0].split()[-1]) for texts in said]  # the oldest question that was sent
        assert begins == sorted(begins)
        assert 0 < begins[-1] < 5
        assert len(set(begins)) < len(begins) - 1, "what is read stays the same for a while, and so in the cache"
        assert len(chat.questions()) == 6, "they are still on the page"
        below = page.locator(".dropped + .message .content")
        assert below.inner_text().startswith(f"Question number {begins[-1]},")
        page.reload()
        note.wait_for()
        page.get_by_role("button", name="Language").click()
        assert page.locator(".dropped").inner_text() == "以上内容模型不再读取：上下文已满。"
        page.locator(".user").first.hover()
        page.get_by_role("button", name="编辑").first.click()
        page.get_by_label("修改你的消息").fill("From the beginning")
        page.keyboard.press("Enter")
        chat.until("document.querySelectorAll('.message').length === 2")
        chat.finished()
        assert [message["content"] for message in asked[-1]["messages"]] == ["Be brief.", "From the beginning"]
        assert page.locator(".dropped").count() == 0


INLINE = """() => {
    const script = document.createElement('script');
    try { script.textContent = 'window.ran = 1'; } catch { return 'refused'; }
    document.body.append(script);
    return window.ran === 1 ? 'ran' : 'blocked';
}"""


def test_the_page_forbids_inline_script_and_html_from_strings(chromium: Any, calculating: str) -> None:
    with visit(chromium, calculating) as chat:
        chat.expected = ("TrustedScript", "TrustedHTML", "Content Security Policy")
        assert chat.page.evaluate(INLINE) in ("refused", "blocked")
        html = "() => { try { document.body.innerHTML = '<b>x</b>'; return 'taken'; } catch { return 'refused'; } }"
        assert chat.page.evaluate(html) == "refused"
