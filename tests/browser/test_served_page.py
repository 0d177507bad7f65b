"""The page against the real `ascendchat serve`: tiny models whose weights make them say a known text."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser_visit import visit

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "unit"))
import engine_models as make

from ascendchat.checkpoint import Writer

pytestmark = pytest.mark.slow
START = make.tokenizer().specials["<|assistant_start|>"]
ENDLESS = make.script([START, ord("a"), ord("b"), ord("a")])


def save(home: Path, run: str, follows: dict[int, int], seq_len: int) -> None:
    """A run whose model follows a script."""
    model = make.scripted(follows, seq_len)
    state = {"stage": "sft", "shape": model.shape.to_dict(), "tokenizer": make.tokenizer().fingerprint}
    writer = Writer(home / "runs" / run / "sft")
    writer.save(1, model=dict(model.state_dict()), shards={}, state=state)
    writer.wait()
    make.tokenizer().save(home / "tokenizer")


def serve(home: Path, run: str) -> Iterator[str]:
    """The command in its own process, on a free port; its address."""
    flags = ["--run", run, "--port", "0", "--device-type", "cpu", "--drain", "0", "--max-tokens", "100000"]
    environment = {**os.environ, "ASCENDCHAT_HOME": str(home)}
    command = [sys.executable, "-m", "ascendchat", "serve", *flags]
    running = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    assert running.stderr
    said = []
    for line in running.stderr:
        said.append(line)
        if found := re.search(r"http://\S+", line):
            yield f"{found[0]}/"
            break
    running.send_signal(signal.SIGTERM)
    said.append(running.communicate(timeout=60)[1])
    assert running.returncode == 0, "".join(said)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def calculating(home: Path) -> Iterator[str]:
    save(home, "calculating", make.calculator_script()[0], 256)
    yield from serve(home, "calculating")


@pytest.fixture(scope="module")
def endless(home: Path) -> Iterator[str]:
    save(home, "endless", ENDLESS, 8192)
    yield from serve(home, "endless")


def test_a_conversation_with_a_tool_call_is_answered_and_kept(chromium: Any, calculating: str) -> None:
    with visit(chromium, calculating) as chat:
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
        length = "document.querySelector('.assistant .content')?.textContent.length"
        chat.send("Go on for ever")
        chat.until(f"{length} > 10")
        first = chat.page.evaluate(length)
        chat.until(f"{length} > {first}")
        chat.page.get_by_role("button", name="Stop").click()
        chat.finished()
        chat.page.get_by_text("Stopped.").first.wait_for()
        assert set(chat.answers()[0]) == {"a", "b"}
        last = chat.page.evaluate(length)
        chat.page.wait_for_timeout(200)
        assert chat.page.evaluate(length) == last


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
