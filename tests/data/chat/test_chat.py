"""The one renderer: masks, round trips, no injection, and what happens to conversations that are too long."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascendchat.data.chat import render as chat_render
from ascendchat.data.chat.render import (
    Counts,
    Rendered,
    canonical,
    has_reply,
    parse_content,
    parse_messages,
    render,
    render_choice,
    render_pieces,
    render_prompt,
    text_of,
)
from ascendchat.data.tokenizer.tokenizer import SPECIALS, train_tokenizer


class Bytes:
    """A tokenizer with one token per byte: every count below can be checked by hand."""

    specials = {name: 256 + i for i, name in enumerate(SPECIALS)}  # noqa: RUF012

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")


TOKENIZER = Bytes()
S = TOKENIZER.specials


def message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def supervised(rendered: Rendered) -> str:
    """The supervised tokens, special ones by name."""
    names = {number: name for name, number in S.items()}
    chosen = [token for token, on in zip(rendered.ids, rendered.mask) if on]
    return "".join(names.get(token) or chr(token) for token in chosen)


CALL = [
    {"type": "text", "text": "Let me see. "},
    {"type": "tool", "text": "17+25"},
    {"type": "output", "text": "42"},
    {"type": "text", "text": "It is 42."},
]


def test_the_mask_covers_what_the_assistant_produces_and_nothing_else() -> None:
    rendered = render(TOKENIZER, [message("system", "s"), message("user", "17+25?"), message("assistant", CALL)])
    assert supervised(rendered) == "Let me see. <|tool_start|>17+25<|tool_end|>It is 42.<|assistant_end|>"
    twice = [message("user", "a"), message("assistant", "b"), message("user", "c"), message("assistant", "d")]
    assert supervised(render(TOKENIZER, twice)) == "b<|assistant_end|>d<|assistant_end|>"
    assert len(rendered.ids) == len(rendered.mask)
    assert rendered.ids[0] == S["<|bos|>"]
    assert rendered.ids[-1] == S["<|assistant_end|>"]


def test_the_prompt_is_the_beginning_of_the_rendered_conversation() -> None:
    messages = [message("system", "s"), message("user", "u"), message("assistant", "a"), message("user", "v")]
    prompt = render_prompt(TOKENIZER, messages)
    whole = render(TOKENIZER, [*messages, message("assistant", "reply")]).ids
    assert prompt == whole[: len(prompt)]
    assert prompt[-1] == S["<|assistant_start|>"]
    assert parse_content(TOKENIZER, whole[len(prompt) :]) == "reply"


def test_the_real_tokenizer_round_trips_and_is_not_fooled_either() -> None:
    texts = ["What is 17 + 25? The answer is 42.", "十七加二十五等于多少？答案是四十二。"]
    tokenizer = train_tokenizer(texts * 50, 320)
    sly = "".join(SPECIALS) + "你好\n 17+25"
    messages = [
        message("system", sly),
        message("user", sly),
        message("assistant", [*CALL, {"type": "tool", "text": sly}]),
    ]
    rendered = render(tokenizer, messages)
    assert parse_messages(tokenizer, rendered.ids) == messages
    assert sum(token in tokenizer.specials.values() for token in rendered.ids) == 1 + 2 + 2 + 2 + 3 * 2


def test_tool_messages_and_split_assistant_messages_are_one_turn() -> None:
    separate = [
        message("user", "q"),
        message("assistant", CALL[:2]),
        message("tool", "42"),
        message("assistant", "It is 42."),
    ]
    together = [message("user", "q"), message("assistant", CALL)]
    assert canonical(separate) == together
    assert render(TOKENIZER, separate) == render(TOKENIZER, together)
    assert text_of(CALL) == "Let me see. It is 42."
    said = [{"type": "text", "text": text} for text in ("a", "", "b")]
    assert canonical([message("assistant", said), message("assistant", "c")]) == [message("assistant", "ab\nc")]
    empty = [message("assistant", [{"type": "tool", "text": ""}, {"type": "output", "text": ""}])]
    assert parse_messages(TOKENIZER, render(TOKENIZER, empty).ids) == empty


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
parts = st.lists(
    st.fixed_dictionaries({"type": st.sampled_from(["text", "tool", "output"]), "text": texts}), max_size=4
)
messages_ = st.lists(
    st.one_of(
        st.builds(message, st.sampled_from(["system", "user", "tool"]), texts),
        st.builds(message, st.just("assistant"), st.one_of(texts, parts)),
    ),
    max_size=6,
)


@given(messages_)
def test_parsing_gives_back_what_was_rendered(messages: list[dict[str, Any]]) -> None:
    assert parse_messages(TOKENIZER, render(TOKENIZER, messages).ids) == canonical(messages)


def test_an_unfinished_or_broken_reply_is_parsed_as_far_as_it_goes() -> None:
    prompt = render_prompt(TOKENIZER, [message("user", "q")])
    cut = [*prompt, *b"x", S["<|tool_start|>"], *b"1+"]
    assert parse_messages(TOKENIZER, cut)[-1]["content"] == [
        {"type": "text", "text": "x"},
        {"type": "tool", "text": "1+"},
    ]
    assert parse_content(TOKENIZER, [*b"yes", S["<|bos|>"], *b"never read"]) == "yes"


@pytest.mark.parametrize(
    "bad",
    [
        message("martian", "x"),
        message("user", [{"type": "tool", "text": "1"}]),
        message("assistant", [{"type": "image", "text": "x"}]),
        message("assistant", [{"type": "text", "text": None}]),
    ],
)
def test_a_message_without_a_known_role_or_part_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"role|part"):
        render(TOKENIZER, [bad])


def test_choices_carry_their_letter_without_a_space() -> None:
    assert render_choice("Which?", ["red", "blue"]) == "Which?\n- red=A\n- blue=B\nAnswer with one letter: A, B."
    assert render_choice("哪个？", ["红", "蓝"], "XY", "") == "哪个？\n- 红=X\n- 蓝=Y"
    with pytest.raises(ValueError, match="2 choices"):
        render_choice("Which?", ["red", "blue"], "ABC")


def exchange(n: int, user: int = 10, reply: int = 10) -> list[dict[str, Any]]:
    return [message("user", str(n) * user), message("assistant", str(n) * reply)]


def test_a_long_conversation_is_split_between_exchanges_and_every_reply_is_kept() -> None:
    messages = [message("system", "sys"), *exchange(1), *exchange(2), *exchange(3)]  # 1 + 5 + 3 * 24 tokens
    counts = Counts()
    pieces = render_pieces(TOKENIZER, messages, 60, counts)
    assert [len(piece.ids) for piece in pieces] == [54, 30]
    replies = [
        text_of(m["content"])
        for piece in pieces
        for m in parse_messages(TOKENIZER, piece.ids)
        if m["role"] == "assistant"
    ]
    assert replies == ["1" * 10, "2" * 10, "3" * 10]
    assert all(parse_messages(TOKENIZER, piece.ids)[0]["content"] == "sys" for piece in pieces)
    assert (counts.whole, counts.split, counts.pieces, counts.tokens, counts.lost_tokens) == (0, 1, 2, 84, 0)


def test_a_single_exchange_that_is_too_long_loses_the_start_of_its_prompt_then_the_end_of_its_reply() -> None:
    counts = Counts()
    (piece,) = render_pieces(TOKENIZER, exchange(7, user=100, reply=100), 65, counts)
    assert len(piece.ids) == 65
    assert parse_messages(TOKENIZER, piece.ids) == [message("user", "7" * 29), message("assistant", "7" * 32)]
    assert piece.ids[-1] != S["<|assistant_end|>"]  # a cut reply must not teach to stop
    assert (counts.cut_prompts, counts.cut_replies) == (1, 1)
    assert counts.lost_tokens == len(render(TOKENIZER, exchange(7, 100, 100)).ids) - 65


def test_a_short_reply_to_a_long_prompt_is_kept_whole() -> None:
    counts = Counts()
    (piece,) = render_pieces(TOKENIZER, [message("system", "s" * 50), *exchange(7, user=200, reply=5)], 64, counts)
    assert parse_messages(TOKENIZER, piece.ids)[-1] == message("assistant", "7" * 5)
    assert piece.ids[-1] == S["<|assistant_end|>"]
    assert (counts.cut_prompts, counts.cut_replies) == (1, 0)


def test_a_system_message_that_goes_is_counted_with_what_is_cut() -> None:
    counts, talk = Counts(), [message("system", "s" * 50), *exchange(7, 9, 8)]
    (piece,) = render_pieces(TOKENIZER, talk, 23, counts)  # the exchange of 21 tokens fits behind <|bos|>
    assert parse_messages(TOKENIZER, piece.ids) == exchange(7, 9, 8)
    assert counts.lost_tokens == len(render(TOKENIZER, talk).ids) - len(piece.ids) > 50
    assert (counts.cut_prompts, counts.cut_replies) == (0, 0)


def test_a_conversation_without_a_reply_is_counted_and_not_handed_on() -> None:
    counts = Counts()
    assert render_pieces(TOKENIZER, [message("user", "x" * 100)], 50, counts) == []
    assert (counts.unsupervised, counts.pieces) == (1, 0)
    with pytest.raises(ValueError, match="rows of 7 tokens are too short"):
        render_pieces(TOKENIZER, exchange(1), 7, counts)


@given(messages_, st.integers(8, 40))
def test_no_piece_is_too_long_or_without_a_target_and_all_conversations_are_counted(
    messages: list[dict[str, Any]], limit: int
) -> None:
    counts = Counts()
    pieces = render_pieces(TOKENIZER, messages, limit, counts)
    assert all(len(piece.ids) == len(piece.mask) <= limit and any(piece.mask[1:]) for piece in pieces)
    assert counts.whole + counts.split + counts.unsupervised + counts.empty == 1
    assert str(counts.lost_tokens) in counts.line()
    assert bool(pieces) == (any(render(TOKENIZER, messages).mask) and not counts.empty)
    assert len(pieces) == counts.pieces


def test_a_prompt_over_the_limit_drops_the_oldest_exchanges_then_the_system_then_its_own_beginning() -> None:
    messages = [message("system", "sys"), *exchange(1), *exchange(2), message("user", "now")]
    whole = render_prompt(TOKENIZER, messages)
    counts = Counts()
    assert render_prompt(TOKENIZER, messages, len(whole), counts) == whole
    assert counts == Counts(whole=1, pieces=1, tokens=len(whole))

    def left(limit: int) -> list[str]:
        counts = Counts()
        prompt = render_prompt(TOKENIZER, messages, limit, counts)
        lost = len(whole) - len(prompt)
        assert counts == Counts(split=1, pieces=1, cut_prompts=1, tokens=len(prompt), lost_tokens=lost)
        assert len(prompt) <= limit
        assert prompt[0] == S["<|bos|>"]
        return [text_of(m["content"]) for m in parse_messages(TOKENIZER, prompt[:-1])]

    assert left(len(whole) - 1) == ["sys", "2" * 10, "2" * 10, "now"]
    assert left(35) == ["sys", "now"]
    assert left(11) == ["now"]
    assert left(6) == ["ow"]
    assert left(3) == []  # the end of the user's turn
    with pytest.raises(ValueError, match="a prompt needs more than 2 tokens"):
        left(2)


@pytest.mark.parametrize(
    "made",
    [
        lambda talk: render(TOKENIZER, talk),
        lambda talk: render_pieces(TOKENIZER, talk, 1 << 20, Counts()),
        lambda talk: render_pieces(TOKENIZER, talk, 8_000, Counts()),
        lambda talk: render_prompt(TOKENIZER, talk, 1000),
    ],
    ids=["whole", "one piece", "pieces", "prompt"],
)
def test_the_time_of_a_conversation_grows_with_its_length_and_not_with_its_square(made: Callable[[Any], Any]) -> None:
    def seconds(messages: int) -> float:
        talk = [message(("user", "assistant")[at % 2], "x") for at in range(messages)]
        began = time.process_time()
        made(talk)
        return time.process_time() - began

    assert seconds(24_000) / seconds(3_000) < 24  # 8 where it is linear, 64 where a message copies those before it


@pytest.mark.parametrize("empty", ["", " \n", []])
def test_a_conversation_with_an_empty_reply_is_counted_and_left_out(empty: Any) -> None:
    ask, told = message("user", "a"), message("assistant", "b")
    for talk in ([ask, message("assistant", empty)], [ask, message("assistant", empty), ask, told]):
        counts = Counts()
        assert render_pieces(TOKENIZER, talk, 64, counts) == []
        assert not has_reply(talk)
        assert "1 with an empty reply (left out)" in counts.line()
    called = [message("assistant", [{"type": "tool", "text": "1+1"}]), message("tool", "2"), message("assistant", "")]
    assert render_pieces(TOKENIZER, [ask, *called], 64, Counts())
    assert has_reply([ask, *called])
    assert "empty" not in Counts(whole=1).line()


def test_a_turn_of_twice_as_many_steps_is_twice_as_much_work(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at, parts_of = 0, chat_render.content_parts

    def counting(content: Any) -> Any:
        nonlocal looked_at
        looked_at += len(content)
        return parts_of(content)

    monkeypatch.setattr(chat_render, "content_parts", counting)
    work = []
    step = [message("assistant", [{"type": "tool", "text": "1+1"}]), message("tool", [{"type": "text", "text": "2"}])]
    for steps in (50, 100):
        looked_at = 0
        (turn,) = canonical(step * steps)
        work.append(looked_at)
        assert len(turn["content"]) == 2 * steps
    assert work[1] <= 2.1 * work[0]


def test_what_the_assistant_thinks_is_not_written_by_our_models_and_counted() -> None:
    ask, bare, counts = message("user", "a"), message("assistant", "b"), Counts()
    thinks = message("assistant", [{"type": "thought", "text": "c"}, {"type": "text", "text": "b"}])
    assert render_pieces(TOKENIZER, [ask, thinks, thinks], 64, counts) == [render(TOKENIZER, [ask, bare, bare])]
    assert render_prompt(TOKENIZER, [ask, thinks, ask]) == render_prompt(TOKENIZER, [ask, bare, ask])
    assert "in 1 the reasoning_content is left out" in counts.line()
