"""The web page in a real browser: talking, stopping, editing, keeping, languages, phones, keyboards."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import pytest
from browser_visit import Visit, visit, visiting
from stand_in import WAIT, StandIn, tool

pytestmark = pytest.mark.slow


def test_an_answer_streams_and_the_status_line_fills(chat: Visit, server: StandIn) -> None:
    server.say("The **first** ", WAIT, "part, and the end.")
    chat.send("Hello")
    chat.page.locator(".assistant strong", has_text="first").wait_for()
    assert chat.answers() == ["The first"], "text is on the page before the answer has ended"
    assert chat.page.get_by_role("button", name="Stop").is_visible()
    server.go()
    chat.finished()
    assert chat.answers() == ["The first part, and the end."]
    status = chat.page.locator(".status").inner_text()
    assert "d12/sft" in status
    assert "Ascend 910B" in status
    assert "1,898 of 2,048 tokens left" in status
    assert "tok/s" in status
    asked = server.asked[0]
    assert asked["messages"] == [{"role": "user", "content": "Hello"}]
    assert asked["stream"] is True
    assert asked["stream_options"] == {"include_usage": True}


def test_stop_keeps_what_was_said_and_hangs_up(chat: Visit, server: StandIn) -> None:
    server.say("one ", WAIT, *["two "] * 200_000)
    chat.send("Count")
    chat.page.locator(".assistant", has_text="one").wait_for()
    chat.page.get_by_role("button", name="Stop").click()
    chat.finished()
    server.go()
    assert server.left.wait(60), "the server was not told"
    assert chat.answers() == ["one"]
    assert chat.page.get_by_text("Stopped.").first.is_visible()
    server.say("again")
    chat.send("Go on")
    chat.page.locator(".assistant", has_text="again").wait_for()
    assert [m["content"] for m in server.asked[-1]["messages"]] == ["Count", "one ", "Go on"]


def test_another_answer_and_an_edited_question_are_branches(chat: Visit, server: StandIn) -> None:
    for text in ("red", "green", "blue"):
        server.say(text)
    chat.exchange("A colour")
    chat.page.get_by_role("button", name="Answer again").click()
    chat.page.locator(".assistant", has_text="green").wait_for()
    chat.finished()
    assert chat.answers() == ["green"]
    chat.page.get_by_role("button", name="Earlier version").click()
    assert chat.answers() == ["red"]
    chat.page.locator(".user").hover()
    chat.page.get_by_role("button", name="Edit").click()
    chat.page.get_by_label("Change your message").fill("Another colour")
    chat.page.keyboard.press("Enter")
    chat.page.locator(".assistant", has_text="blue").wait_for()
    chat.finished()
    assert server.asked[-1]["messages"] == [{"role": "user", "content": "Another colour"}]
    chat.page.get_by_role("button", name="Earlier version").click()
    assert (chat.questions(), chat.answers()) == (["A colour"], ["green"])


def test_conversations_survive_a_reload_and_can_be_renamed_and_deleted(chat: Visit, server: StandIn) -> None:
    page = chat.page
    server.say("first answer")
    chat.exchange("First question")
    page.get_by_role("button", name="New chat").click()
    server.say("second answer")
    chat.exchange("Second question")
    page.reload()
    page.locator(".assistant", has_text="second answer").wait_for()
    page.get_by_role("navigation").get_by_role("button", name="First question").click()
    assert chat.answers() == ["first answer"]
    page.get_by_role("button", name="Conversation menu").click()
    page.get_by_role("menuitem", name="Rename").click()
    page.get_by_label("Name", exact=True).fill("Renamed")
    page.keyboard.press("Enter")
    page.get_by_role("navigation").get_by_role("button", name="Renamed").wait_for()
    page.get_by_role("button", name="Conversation menu").click()
    page.get_by_role("menuitem", name="Delete").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    page.locator(".greeting").wait_for()
    page.reload()
    titles = page.locator("#conversations button").all_inner_texts()
    assert titles == ["Second question"]


def test_export_and_delete_all(chat: Visit, server: StandIn) -> None:
    page = chat.page
    server.say("It is ", tool("tool", "17+"), tool("tool", "25"), tool("output", "42"), "**42**.")
    chat.exchange("What is 17 + 25?")
    assert page.locator(".chip").text_content() == "Calculator 17+25 = 42"
    files = {}
    for choice in ("Save as JSON", "Save as Markdown"):
        page.get_by_role("button", name="Conversation menu").click()
        with page.expect_download() as download:
            page.get_by_role("menuitem", name=choice).click()
        files[download.value.suggested_filename] = download.value.path().read_text(encoding="utf-8")
    said = json.loads(files["What-is-17-25.json"])
    assert said["model"] == "d12/sft"
    assert said["messages"][1] == {"role": "assistant", "content": "It is [17+25 = 42]**42**."}
    assert "## You\n\nWhat is 17 + 25?\n\n## Model\n\nIt is [17+25 = 42]**42**.\n" in files["What-is-17-25.md"]
    page.get_by_role("button", name="Settings").click()
    page.get_by_role("button", name="Delete all conversations").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete", exact=True).click()
    page.locator(".greeting").wait_for()
    page.reload()
    page.get_by_text("Nothing here yet.").wait_for()
    kept = page.evaluate("Object.keys(localStorage).filter(k => k.startsWith('ascendchat.conversation'))")
    assert kept == []


def test_settings_are_sent_kept_and_reset(chat: Visit, server: StandIn) -> None:
    page = chat.page
    page.get_by_role("button", name="Settings").click()
    assert page.get_by_label("Top-k").get_attribute("placeholder") == "Default: 50"
    assert not page.get_by_label("API key").is_visible(), "asked for only where the server wants one"
    page.get_by_label("Temperature").fill("0.25")
    page.get_by_label("Top-k").fill("7")
    page.get_by_label("Longest answer").fill("33")
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_role("button", name="Save", exact=True).click()
    page.reload()
    server.say("ok")
    chat.exchange("Hi")
    asked = server.asked[0]
    assert (asked["temperature"], asked["top_k"], asked["max_tokens"]) == (0.25, 7, 33)
    assert asked["messages"][0] == {"role": "system", "content": "Be brief."}
    page.get_by_role("button", name="Settings").click()
    page.get_by_role("button", name="Use defaults").click()
    page.get_by_role("button", name="Save", exact=True).click()
    server.say("ok")
    chat.exchange("Hi")
    assert not {"temperature", "top_k", "max_tokens"} & set(server.asked[1])
    assert server.asked[1]["messages"][0]["role"] == "user"


def test_a_server_with_keys_is_asked_again_with_one(chromium: Any, server: StandIn) -> None:
    server.key = "secret"
    with visit(chromium, server.url) as chat:
        chat.expected = ("401",)
        chat.page.get_by_label("API key").fill("secret")
        chat.page.keyboard.press("Enter")
        chat.page.get_by_text("d12/sft").wait_for()
        server.say("welcome")
        chat.send("Hi")
        chat.page.locator(".assistant", has_text="welcome").wait_for()
        assert "secret" not in chat.page.evaluate("JSON.stringify(localStorage)")


def test_a_busy_server_is_tried_again_and_a_broken_stream_keeps_its_text(chat: Visit, server: StandIn) -> None:
    chat.expected = ("503", "ERR_INCOMPLETE_CHUNKED_ENCODING")
    server.refuse(503, {"Retry-After": "7"})
    chat.send("Hi")
    chat.page.get_by_text("try again in 7 s").wait_for()
    server.say("half an ans", b'data: {"error": {"message": "the worker died"}}\n\n')
    chat.page.get_by_role("button", name="Try again").click()
    chat.page.get_by_text("The server refused: the worker died").wait_for()
    assert chat.answers() == ["half an ans"]
    server.say("a whole answer")
    chat.page.get_by_role("button", name="Try again").click()
    chat.page.locator(".assistant", has_text="a whole answer").wait_for()
    chat.finished()
    assert [len(asked["messages"]) for asked in server.asked] == [1, 1, 1]


def test_a_message_that_is_faster_than_the_name_of_the_model_waits_for_it(chromium: Any, server: StandIn) -> None:
    """As on a busy machine. The real server refuses a message to the model ''."""
    server.named.clear()
    with visit(chromium, server.url) as chat:
        server.say("welcome")
        chat.send("Hi")
        chat.until("document.querySelector('.message.assistant')")
        server.named.set()
        chat.page.locator(".assistant", has_text="welcome").wait_for()
        assert server.asked[0].get("model") in (None, server.name)


def test_a_conversation_that_is_too_long_leads_to_a_new_one(chat: Visit, server: StandIn) -> None:
    chat.expected = ("400",)
    server.refuse(400, code="context_length_exceeded")
    chat.send("A long story")
    error = chat.page.get_by_role("alert").filter(has_text="longer than the model can read")
    error.get_by_role("button", name="New chat").click()
    assert chat.page.get_by_role("button", name="Try again").count() == 0
    server.say("fine")
    chat.send("Hi")
    chat.page.locator(".assistant", has_text="fine").wait_for()
    chat.finished()
    assert server.asked[-1]["messages"] == [{"role": "user", "content": "Hi"}]


def test_an_answer_that_a_reload_cut_off_can_be_asked_again(chat: Visit, server: StandIn) -> None:
    server.say(WAIT, "never seen")
    chat.send("Hi")
    chat.until("document.querySelector('.running')")
    chat.page.reload()
    server.say("seen")
    chat.page.get_by_role("button", name="Try again").click()
    chat.page.locator(".assistant", has_text="seen").wait_for()
    chat.finished()
    assert (chat.questions(), chat.answers()) == (["Hi"], ["seen"])
    assert server.asked[-1]["messages"] == [{"role": "user", "content": "Hi"}]


def test_language_and_theme_follow_the_browser_and_the_reader(chromium: Any, server: StandIn) -> None:
    with visit(chromium, server.url, locale="zh-CN", color_scheme="dark") as chat:
        page = chat.page
        assert page.evaluate("document.documentElement.lang") == "zh-CN"
        assert page.get_by_role("button", name="新对话").is_visible()
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
        server.say("你好，**世界**", tool("tool", "1+1"), tool("output", "2"))
        page.get_by_label("消息", exact=True).fill("你好")
        page.keyboard.press("Enter")
        chat.finished()
        page.get_by_role("button", name="English").click()
        page.get_by_role("button", name="浅色或深色").wait_for(state="detached")
        page.get_by_role("button", name="Light or dark").click()
        light = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert light != dark
        assert page.locator(".assistant .content").text_content() == "你好，世界Calculator 1+1 = 2"
        page.reload()
        page.get_by_role("button", name="New chat").wait_for()
        assert page.evaluate("document.documentElement.dataset.theme") == "light"
        assert page.evaluate("document.documentElement.lang") == "en"


def test_a_phone_has_no_sideways_scroll_and_a_drawer(chromium: Any, server: StandIn) -> None:
    phone = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
    table = "| " + " | ".join(f"column {i}" for i in range(12)) + " |\n" + "|---" * 12 + "|\n" + "| 1 " * 12 + "|\n"
    with visit(chromium, server.url, **phone) as chat:
        page = chat.page
        server.say(table, "\n```python\n", "x = " + "1 + " * 100 + "1\n```\n", "w" * 600, " $$" + "x+" * 90 + "x$$")
        page.get_by_label("Message", exact=True).fill("Wide things")
        page.get_by_role("button", name="Send").tap()
        chat.finished()
        for part in ("document.documentElement", "document.getElementById('scroll')"):
            assert page.evaluate(f"{part}.scrollWidth <= innerWidth"), part
        drawer = page.get_by_role("navigation", name="Conversations")
        assert not drawer.is_visible()
        page.get_by_role("button", name="Show conversations").tap()
        drawer.wait_for()
        drawer.get_by_role("button", name="New chat").tap()
        page.locator(".greeting").wait_for()
        chat.until("getComputedStyle(document.getElementById('sidebar')).visibility === 'hidden'")
        page.get_by_role("button", name="Show conversations").tap()
        page.keyboard.press("Escape")
        assert page.evaluate("document.activeElement.id") == "drawer-button"


def test_a_conversation_by_keyboard_only(chat: Visit, server: StandIn) -> None:
    page = chat.page

    def tab_to(name: str) -> None:
        for _ in range(60):
            page.keyboard.press("Tab")
            if (
                page.evaluate("document.activeElement.getAttribute('aria-label') ?? document.activeElement.innerText")
                == name
            ):
                return
        pytest.fail(f"{name} is not reached with Tab")

    page.keyboard.press("Tab")
    for text in ("an answer", "a second one", "endless"):
        server.say(text) if text != "endless" else server.say("so ", WAIT, "far")
    tab_to("Skip to the message field")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "composer"
    page.keyboard.type("line one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("line two")
    page.keyboard.press("Enter")
    chat.finished()
    assert server.asked[0]["messages"][0]["content"] == "line one\nline two"
    tab_to("Answer again")
    page.keyboard.press("Enter")
    page.locator(".assistant", has_text="a second one").wait_for()
    chat.finished()
    tab_to("Edit")
    page.keyboard.press("Enter")
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.dataset.label") == "edit", "the focus returns"
    tab_to("Message")
    page.keyboard.type("more")
    page.keyboard.press("Enter")
    page.locator(".assistant", has_text="so").wait_for()
    page.keyboard.press("Escape")
    chat.finished()
    assert chat.answers()[-1] == "so"
    server.go()
    tab_to("Conversation menu")
    page.keyboard.press("Enter")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    page.get_by_role("dialog").wait_for()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.locator(".greeting").wait_for()


def test_enter_while_an_input_method_composes_does_not_send(chat: Visit, server: StandIn) -> None:
    page = chat.page
    page.get_by_label("Message", exact=True).focus()
    devtools = page.context.new_cdp_session(page)
    devtools.send("Input.imeSetComposition", {"text": "nihao", "selectionStart": 5, "selectionEnd": 5})
    fire = "document.getElementById('composer').dispatchEvent(new KeyboardEvent('keydown', %s))"
    page.evaluate(fire % "{key: 'Enter', isComposing: true, bubbles: true, cancelable: true}")
    assert page.locator(".message").count() == 0
    devtools.send("Input.insertText", {"text": "你好"})
    server.say("好")
    page.keyboard.press("Enter")
    chat.finished()
    assert server.asked[0]["messages"][0]["content"] == "你好"


def test_reading_further_up_is_not_disturbed_by_the_stream(chat: Visit, server: StandIn) -> None:
    page = chat.page
    server.say("line\n\n" * 100, WAIT, "more\n\n" * 50, WAIT, "last\n\n" * 20)
    chat.send("Write a lot")
    chat.until("document.querySelectorAll('.assistant p').length === 100")
    assert page.evaluate(
        "scroll => scroll.scrollTop + scroll.clientHeight > scroll.scrollHeight - 60", page.query_selector("#scroll")
    )
    page.locator("#scroll").evaluate("scroll => { scroll.scrollTop = 200; }")
    page.get_by_role("button", name="To the latest message").wait_for()
    server.go()
    chat.until("document.querySelectorAll('.assistant p').length === 150")
    assert page.locator("#scroll").evaluate("scroll => scroll.scrollTop") == 200
    page.get_by_role("button", name="To the latest message").click()
    server.go()
    chat.finished()
    chat.until("(s => s.scrollTop + s.clientHeight > s.scrollHeight - 60)(document.getElementById('scroll'))")


@contextlib.contextmanager
def second_tab(chat: Visit) -> Iterator[Visit]:
    """The same conversation in another tab of the same browser."""
    page = chat.page.context.new_page()
    with visiting(page, chat.page.url) as seen:
        yield seen
    page.close()


def kept(page: Any) -> list[str]:
    """The texts of all messages of all stored conversations."""
    entries = page.evaluate("Object.entries(localStorage).filter(([k]) => k.startsWith('ascendchat.conversation.'))")
    return sorted(node["text"] for _, entry in entries for node in json.loads(entry)["nodes"])


@pytest.mark.parametrize("first", ["here", "there"])
def test_two_tabs_that_ask_in_one_conversation_at_once_lose_nothing(chat: Visit, server: StandIn, first: str) -> None:
    """Whichever asks first, and is answered first."""
    server.say("begun")
    chat.exchange("Begin")
    with second_tab(chat) as other:
        order = (chat, other) if first == "here" else (other, chat)
        for tab in order:
            server.say("well ", WAIT, "then")
            tab.send("What?")
            tab.until("document.querySelector('.running .content')?.textContent.includes('well')")
        for tab in order:
            server.go()
            tab.finished()
        texts = sorted(["Begin", "begun", *["What?", "well then"] * 2])
        assert kept(chat.page) == texts
        for tab in order:
            tab.page.reload()
            tab.page.locator(".assistant", has_text="then").last.wait_for()
        assert kept(chat.page) == texts


def test_a_conversation_that_is_deleted_in_another_tab_stays_deleted(chat: Visit, server: StandIn) -> None:
    server.say("one ", WAIT, *["two "] * 200_000)
    chat.send("Count")
    chat.page.locator(".assistant", has_text="one").wait_for()
    with second_tab(chat) as other:
        other.page.get_by_role("button", name="Conversation menu").click()
        other.page.get_by_role("menuitem", name="Delete").click()
        other.page.get_by_role("dialog").get_by_role("button", name="Delete").click()
        other.page.locator(".greeting").wait_for()
    chat.page.locator(".greeting").wait_for()
    server.go()
    assert server.left.wait(60), "the answer is still being written"
    assert kept(chat.page) == []


def test_a_name_that_is_given_in_another_tab_stays(chat: Visit, server: StandIn) -> None:
    server.say("one ", WAIT, "two")
    chat.send("Count")
    chat.page.locator(".assistant", has_text="one").wait_for()
    with second_tab(chat) as other:
        other.page.get_by_role("button", name="Conversation menu").click()
        other.page.get_by_role("menuitem", name="Rename").click()
        other.page.get_by_label("Name", exact=True).fill("Renamed")
        other.page.keyboard.press("Enter")
        other.page.get_by_role("navigation").get_by_role("button", name="Renamed").wait_for()
    server.go()
    chat.finished()
    assert chat.page.locator("#title").text_content() == "Renamed"
    chat.page.reload()
    chat.page.locator(".assistant", has_text="one two").wait_for()
    assert chat.page.locator("#title").text_content() == "Renamed"
