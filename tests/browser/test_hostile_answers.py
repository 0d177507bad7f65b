"""A model's answer is text: whatever it holds, no script runs, nothing is loaded, and the page stays usable."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from browser_visit import Visit, visit
from stand_in import WAIT, StandIn

pytestmark = pytest.mark.slow

MARKUP = """\
<script>window.hacked = 1</script> <img src=x onerror="window.hacked = 2"> <svg onload="window.hacked = 3">
</style></script></textarea><style>body { display: none }</style><iframe src="https://evil.example/"></iframe>

# <script>window.hacked = 4</script>

- <b onclick="window.hacked = 5">bold</b>

| <script>window.hacked = 6</script> | b |
|---|---|
| <img src="https://evil.example/x.png"> | `<script>` |

```html
</code></pre><script>window.hacked = 7</script>
```

$\\text{<script>window.hacked = 8</script>}$ <math><mtext><script>window.hacked = 9</script></mtext></math>
"""
LINKS = {
    "[a](javascript:window.hacked=1)": None,
    "[b](JaVaScRiPt:window.hacked=1)": None,
    "[c](java\tscript:window.hacked=1)": None,
    "[d](data:text/html,<script>window.hacked=1</script>)": None,
    "[e](vbscript:x)": None,
    "[f](file:///etc/passwd)": None,
    "[g](/v1/models)": None,
    "[h](//evil.example/)": None,
    "[i](&#106;avascript:window.hacked=1)": None,
    "<javascript:window.hacked=1>": None,
    "[j](https://good.example/a_(b)?q=1&r=<x>)": "https://good.example/a_(b)?q=1&r=",
    "[k](https://good.example/a_(b))": "https://good.example/a_(b)",
    "[l](mailto:a@b.example)": "mailto:a@b.example",
    '[m](https://good.example/"onclick="x)': "https://good.example/%22onclick=%22x",
    "https://good.example/x, and": "https://good.example/x",
    "<https://good.example/y>": "https://good.example/y",
    "![picture](https://evil.example/x.png)": "https://evil.example/x.png",
    "![picture](javascript:window.hacked=1)": None,
    "[[https://inner.example](https://outer.example)": "https://outer.example/",
}


def inert(chat: Visit) -> None:
    page = chat.page
    assert page.evaluate("window.hacked") is None
    made = "script, style, iframe, img, object, embed, form, input, svg:not(.icon), [onclick], [onload], [onerror]"
    assert page.locator(f".content :is({made})").count() == 0
    assert page.locator("script").count() == 2, "only the page's own"


def responsive(chat: Visit, server: StandIn) -> None:
    """The next message works as the first did."""
    server.say("still here")
    chat.send("And now?")
    chat.page.locator(".assistant", has_text="still here").last.wait_for()
    chat.finished()


def test_markup_is_shown_and_not_obeyed(chat: Visit, server: StandIn) -> None:
    server.say(*[MARKUP[i : i + 7] for i in range(0, len(MARKUP), 7)])
    chat.exchange("<script>window.hacked = 0</script>")
    inert(chat)
    shown = chat.answers()[0]
    for number in (1, 4, 6, 7):
        assert f"<script>window.hacked = {number}</script>" in shown
    assert chat.questions() == ["<script>window.hacked = 0</script>"]
    chat.page.reload()
    chat.page.locator(".assistant", has_text="window.hacked = 7").wait_for()
    inert(chat)
    responsive(chat, server)


def test_links_lead_to_web_pages_and_mail_only(chat: Visit, server: StandIn) -> None:
    server.say("\n\n".join(LINKS))
    chat.exchange("Links")
    first = "p => p.querySelector('a')?.getAttribute('href') ?? null"
    found = chat.page.evaluate(f"[...document.querySelectorAll('.assistant .content > p')].map({first})")
    assert dict(zip(LINKS, found, strict=True)) == LINKS
    for link in chat.page.locator(".content a").all():
        assert (link.get_attribute("rel"), link.get_attribute("target")) == ("noopener noreferrer nofollow", "_blank")
    assert chat.page.locator(".content a a").count() == 0
    inert(chat)


HEAVY = {
    "one line of 100 KB": "word " * 20_000,
    "stars": "*a **b " * 15_000,
    "a run of stars": "*" * 50_000 + "a" + "*" * 50_000,
    "open links": "[a](" * 25_000,
    "brackets in brackets": "[" * 10_000 + "x" + "](https://a.example)" * 10_000,
    "backticks": "".join("`" * (i % 300 + 1) + "a" for i in range(700)),
    "dollars": "$a " * 30_000,
    "backslashes": "\\(" * 40_000,
    "quotes in quotes": ">" * 10_000 + " deep",
    "lists in lists": "\n".join("  " * i + "- deep" for i in range(400)),
    "markers in markers": "* - + " * 10_000,
    "braces in a formula": "$$" + "{" * 900 + "}" * 900 + "$$",
    "roots in roots": "$" + "\\sqrt" * 180 + "x$",
    "a table of many rows": "| a | b |\n|---|---|\n" + "| 1 | 2 |\n" * 3_000,
    "a table of many columns": "|a" * 20_000 + "|\n" + "|-" * 20_000 + "|\n",
    "code": "```python\n" + "def f(x): return 'a' # b\n" * 4_000,
    "an open string in code": "```js\n`" + "'\"`" * 15_000,
    "addresses": "https://a.example/" + "(" * 50_000,
    "entities": "&amp;" * 20_000,
    "blank lines": "\n" * 100_000,
}
DEEPEST = """(() => {
    let most = 0;
    for (const leaf of document.querySelectorAll('.content *')) {
        let depth = 0;
        for (let at = leaf; at; at = at.parentElement) depth += 1;
        most = Math.max(most, depth);
    }
    return most;
})()"""


@pytest.fixture(scope="module")
def same(chromium: Any) -> Iterator[tuple[Visit, StandIn]]:
    """One visit for many conversations, and its server."""
    with StandIn() as server, visit(chromium, server.url) as seen:
        yield seen, server


@pytest.mark.parametrize("kind", HEAVY)
def test_heavy_answers_do_not_freeze_the_page(same: tuple[Visit, StandIn], kind: str) -> None:
    chat, server = same
    text = HEAVY[kind]
    step = max(1, len(text) // 20)
    server.say(*[text[i : i + step] for i in range(0, len(text), step)])
    chat.page.get_by_role("button", name="New chat").click()
    chat.exchange("Go")
    assert chat.page.evaluate(DEEPEST) < 120, "an element so deep that a browser may run out of stack"
    inert(chat)


def test_writing_direction_is_contained(chat: Visit, server: StandIn) -> None:
    server.say("start \u202eevil\u202c \u2067x\n\nשלום עולם\n\n```python\nif a: \u202e# b\n```\n", "after")
    chat.exchange("\u202egnp.exe")
    page = chat.page
    assert page.locator(".hl-hidden").inner_text() == "U+202E"
    assert "\u202e" not in page.title()
    assert "\u202e" not in page.locator("#title").inner_text()
    for selector in (".assistant p", ".assistant .content", ".user .content", "#conversations button span"):
        style = page.locator(selector).first.evaluate("e => getComputedStyle(e).unicodeBidi")
        assert style == "isolate", selector
    assert page.locator(".assistant p").nth(1).evaluate("e => getComputedStyle(e).direction") == "rtl"
    page.get_by_role("button", name="Copy code").click()
    page.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == "if a: \u202e# b"


def test_broken_bytes_become_replacement_characters(chat: Visit, server: StandIn) -> None:
    def chunk(inside: bytes) -> bytes:
        return b'data: {"choices": [{"index": 0, "delta": {"content": "' + inside + b'"}}]}\n\n'

    whole = chunk("你".encode())
    cut = whole.index("你".encode()) + 1
    server.say(chunk(b"a\xff\xfeb"), whole[:cut], WAIT, whole[cut:], chunk(b"\xed\xa0\x80 \\ud800 \\u0000end"))
    chat.send("Bytes")
    chat.until("document.querySelector('.assistant .content').textContent.startsWith('a')")
    server.go()
    chat.finished()
    shown = chat.answers()[0]
    assert shown.startswith("a\ufffd\ufffdb你\ufffd")
    assert "end" in shown
    responsive(chat, server)


def test_a_stream_that_is_not_ours_ends_with_a_message(chat: Visit, server: StandIn) -> None:
    junk = [b"data: {not json\n\n", b"data: 7\n\ndata: null\n\ndata: []\n\n", b"\x00\x01\x02"]
    for count, data in enumerate(junk, 1):
        server.say("text ", data)
        chat.send("Go")
        chat.until(f"document.querySelectorAll('.message.assistant').length === {count}")
        chat.finished()
    assert chat.answers() == ["text"] * len(junk)
    responsive(chat, server)


def test_an_answer_without_end_is_stopped(chat: Visit, server: StandIn) -> None:
    server.say(*["0123456789 " * 20_000 + "\n\n"] * 1_000)
    chat.send("For ever")
    chat.page.get_by_text("it is too long to show").wait_for()
    assert server.left.wait(60)
    responsive(chat, server)


DAMAGED = ["", "{", "null", '{"id": "x", "nodes": [null, 7, {"id": "a", "parent": "a", "role": "user", "text": "t"}]}']

STORE = "([key, text]) => localStorage.setItem(key, text)"


@pytest.mark.parametrize("name", ["__proto__", "toString"])
def test_stored_names_that_every_object_knows_are_words_like_others(chat: Visit, server: StandIn, name: str) -> None:
    """In what was edited by hand: how an answer ended, a call, the language, times beyond the calendar."""
    nodes: list[Any] = [{"id": "q", "parent": None, "role": "user", "text": "Hi", "tools": []}]
    tools = [{"call": {"toString": 1}, "result": {"toString": 1}}, {"call": name, "result": name}]
    nodes.append({"id": "a", "parent": "q", "role": "assistant", "text": "fine", "tools": tools, "ended": name})
    nodes.append({"id": name, "parent": "a", "role": "user", "text": "And?", "usage": name, "speed": name})
    talk = {"id": name, "title": name, "created": 1e300, "changed": -1e300, "leaf": name, "nodes": nodes}
    chat.page.evaluate(STORE, [f"ascendchat.conversation.{name}", json.dumps(talk)])
    chat.page.evaluate(STORE, ["ascendchat.language", name])
    chat.page.evaluate(STORE, ["ascendchat.theme", name])
    chat.page.reload()
    chat.page.get_by_role("navigation").get_by_role("button", name=name).click()
    assert (chat.questions(), chat.answers()) == (["Hi", "And?"], ["fine"])
    chat.page.get_by_role("button", name="Conversation menu").click()
    with chat.page.expect_download():
        chat.page.get_by_role("menuitem", name="Save as JSON").click()
    server.say("yes")
    chat.send("Go on")
    chat.page.locator(".assistant", has_text="yes").wait_for()
    chat.finished()


def test_damaged_storage_is_passed_over(chat: Visit, server: StandIn) -> None:
    server.say("kept")
    chat.exchange("A good one")
    for at, stored in enumerate(DAMAGED):
        chat.page.evaluate(STORE, [f"ascendchat.conversation.{at}", stored])
    for settings in DAMAGED[1:3]:
        chat.page.evaluate(STORE, ["ascendchat.settings", settings])
        chat.page.reload()
        chat.page.locator(".assistant", has_text="kept").first.wait_for()
    responsive(chat, server)


FILL = """() => {
    for (let size = 1 << 20; size; size >>= 1) {
        try { for (;;) localStorage.setItem('x' + Math.random(), 'y'.repeat(size)); } catch {}
    }
}"""


def test_a_full_storage_is_said_and_loses_nothing_that_was_kept(chat: Visit, server: StandIn) -> None:
    server.say("kept")
    chat.exchange("A good one")
    chat.page.evaluate(FILL)
    server.say("not kept")
    chat.exchange("One more")
    chat.page.get_by_text("The storage of this browser is full").wait_for()
    assert chat.answers() == ["kept", "not kept"]
    chat.page.reload()
    chat.page.locator(".assistant", has_text="kept").wait_for()


def test_names_from_the_server_are_text_too(chromium: Any, server: StandIn) -> None:
    server.name = "<img src=x onerror=window.hacked=1>"
    server.model = json.loads('{"context": "many", "device": "<b>x</b>", "devices": {}, "defaults": 7}')
    with visit(chromium, server.url) as chat:
        chat.page.get_by_text("<b>x</b>").wait_for()
        assert chat.page.evaluate("window.hacked") is None
        responsive(chat, server)
