"""What becomes of the tokens: tool calls, endings, text that never splits a character, contexts that overflow."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import engine_models as make
import pytest
import torch

from ascendchat.data.chat.render import parse_content, render_prompt
from ascendchat.device import Device, pick
from ascendchat.engine.detokenize import TextStream
from ascendchat.engine.engine import Engine, Piece, Request, Sampling
from ascendchat.engine.request import prompt_room

TEXT = make.tokenizer()
SPECIAL = TEXT.specials
START, END = SPECIAL["<|assistant_start|>"], SPECIAL["<|assistant_end|>"]


@pytest.fixture
def device(one_thread: None) -> Device:
    """A CPU."""
    return pick("cpu", compiled=False)


def asked(prompt: list[int] | None = None, **settings: Any) -> Request:
    return Request(prompt or [START], Sampling(temperature=0.0, **settings))


def calculating(device: Device, slots: int = 1, late: int = 0) -> tuple[Engine, list[int]]:
    """An engine that calls the calculator, and its answer. `late`: passes whose results are not read at once."""
    follows, answer = make.calculator_script()
    return make.engine(make.scripted(follows), device, slots=slots, late=late), answer


def saying(device: Device, text: str, slots: int = 2, context: int = 64) -> Engine:
    """An engine that answers with this text."""
    run = [START, *TEXT.encode(text), END]
    return make.engine(make.scripted(make.script(run)), device, slots=slots, context=context)


@pytest.mark.parametrize("late", [0, 1])
def test_a_calculator_call_gets_its_result_forced_in(device: Device, late: int) -> None:
    engine, answer = calculating(device, 3, late)
    found = engine.generate([asked([0] * n + [START], logprobs=True) for n in (0, 5, 9, 2)])
    for completion in found:
        assert completion.ids == answer
        assert (completion.text, completion.finish_reason) == ("你好!", "stop")
        forced = [index for index, flag in enumerate(completion.forced) if flag]
        assert TEXT.decode(answer[i] for i in forced) == "<|output_start|>42<|output_end|>"
        assert [i for i, p in enumerate(completion.logprobs) if p is None] == forced
    content = parse_content(TEXT, found[0].ids)
    assert [part["text"] for part in content] == ["17+25", "42", "你好!"]  # type: ignore[index]


@pytest.mark.parametrize("late", [0, 1])
def test_an_answer_may_end_anywhere_in_a_tool_call(device: Device, late: int) -> None:
    engine, answer = calculating(device, late=late)
    for limit in range(1, 18):
        (found,) = engine.generate([asked(max_tokens=limit)])
        assert found.ids == answer[:limit]
        assert found.finish_reason == ("length" if limit <= len(answer) else "stop"), limit


@pytest.mark.parametrize("late", [0, 1])
def test_a_row_that_ends_in_a_tools_result_writes_nothing_more(
    device: Device, monkeypatch: pytest.MonkeyPatch, late: int
) -> None:
    """It is over before the next step, which its neighbour still needs: a ring that turns once more would lose a key
    that is promised to other prompts."""
    engine, answer = calculating(device, 2, late)
    step, written = engine.decoder.step, set[int]()

    def watched(*arguments: Any) -> torch.Tensor:
        idle = [slot for slot, job in enumerate(engine.running) if job is None]
        written.update(engine.decoder.target[idle].tolist())
        return step(*arguments)

    monkeypatch.setattr(engine.decoder, "step", watched)
    for limit in range(answer.index(SPECIAL["<|output_start|>"]) + 1, answer.index(SPECIAL["<|output_end|>"]) + 2):
        ends = engine.add(asked(max_tokens=limit))
        goes_on = engine.add(asked(max_tokens=limit + 4, stop_tokens=(), tools=False))
        make.finish(engine, goes_on)
        assert ends.completion.ids == answer[:limit]
    assert written == {engine.decoder.cache.dump}


def test_tools_can_be_turned_off(device: Device) -> None:
    engine, _ = calculating(device)
    (found,) = engine.generate([asked(tools=False, max_tokens=9)])
    assert SPECIAL["<|output_start|>"] not in found.ids[:8]
    assert not any(found.forced)


def test_the_stream_shows_calls_and_results_apart_from_the_text(device: Device) -> None:
    engine, _ = calculating(device)
    pieces = list(engine.stream(asked()))
    for kind, text in (("tool", "17+25"), ("output", "42"), ("text", "你好!")):
        assert "".join(piece.text for piece in pieces if piece.kind == kind) == text
    visible = [piece.text for piece in engine.stream(asked()) if piece.kind == "text"]
    assert visible == ["你", "好", "!"], "each character when it is whole"


@pytest.mark.parametrize(
    ("stop", "expected"), [("cde", "ab"), ("e", "abcd"), ("hello", "abcdefg"), ("xyz", "abcdefghello"), ("a", "")]
)
def test_stop_texts_are_found_across_tokens_and_not_shown(device: Device, stop: str, expected: str) -> None:
    assert len(TEXT.encode("hello")) == 2, "hell and o: the stop text ends inside the answer's tokens"
    engine, request = saying(device, "abcdefghello"), asked(stop=("never", stop))
    (found,) = engine.generate([request])
    assert (found.text, found.finish_reason) == (expected, "stop")
    assert "".join(piece.text for piece in engine.stream(request)) == expected


def test_what_might_become_a_stop_text_is_held_back_until_it_is_not() -> None:
    stream = TextStream(TEXT, stop=("abcd",))
    shown = ["".join(piece.text for piece in stream.feed(ord(letter))) for letter in "xababce"]
    assert shown == ["x", "", "", "ab", "", "", "abce"]
    assert stream.close() == []
    assert stream.text == "xababce"


def test_a_text_is_never_cut_inside_a_character_and_an_unfinished_one_is_marked_once() -> None:
    answer = "é 你好，世界 🙂 ok"
    stream = TextStream(TEXT)
    pieces = [piece for token in TEXT.encode(answer) for piece in stream.feed(token)]
    assert "".join(piece.text for piece in pieces) == answer
    assert all("\ufffd" not in piece.text for piece in pieces)
    assert [stream.feed(byte) for byte in "好".encode()[:2]] == [[], []]
    assert stream.close() == [Piece("text", "\ufffd")]


@pytest.mark.parametrize("stop", [(), ("你",), ("o好",), ("42",)])
def test_many_tokens_at_once_give_the_same_text(stop: tuple[str, ...]) -> None:
    _, answer = make.calculator_script()
    tokens = [*TEXT.encode("hello好"), *answer, *TEXT.encode("世界 ok")]
    one, all_at_once = TextStream(TEXT, stop), TextStream(TEXT, stop)
    pieces = [piece for token in tokens for piece in one.feed(token)] + one.close()
    together = [*all_at_once.feed_all(tokens[:5]), *all_at_once.feed_all(tokens[5:]), *all_at_once.close()]
    for kind in ("text", "tool", "output"):
        assert "".join(p.text for p in pieces if p.kind == kind) == "".join(p.text for p in together if p.kind == kind)
    assert (one.text, one.stopped) == (all_at_once.text, all_at_once.stopped)


def test_the_context_ends_an_answer(device: Device) -> None:
    a, b = b"ab"
    engine = make.engine(make.scripted(make.script([a, b, a])), device, context=20)
    found = engine.generate([asked([a] * n, max_tokens=100) for n in (1, 10, 19)])
    assert [(len(answer.ids), answer.finish_reason) for answer in found] == [(n, "length") for n in (19, 10, 1)]


def test_a_long_conversation_loses_its_oldest_turns_and_is_answered(device: Device) -> None:
    engine = saying(device, "ok")
    turns = [{"role": role, "content": f"{i} " + "x" * 12} for i in range(9) for role in ("user", "assistant")]
    messages = [{"role": "system", "content": "S"}, *turns, {"role": "user", "content": "last"}]
    prompt = render_prompt(TEXT, messages, prompt_room(engine.context, 16))
    assert len(prompt) <= 64 - 16
    assert TEXT.decode(prompt).startswith("<|bos|><|system_start|>S<|system_end|><|user_start|>")
    assert TEXT.decode(prompt).endswith("last<|user_end|><|assistant_start|>")
    assert engine.generate([asked(prompt, max_tokens=16)])[0].text == "ok"


def test_own_stop_tokens_replace_the_usual_ones(device: Device) -> None:
    (found,) = saying(device, "abc").generate([asked(stop_tokens=(ord("c"),))])
    assert (found.text, found.ids, found.finish_reason) == ("ab", [97, 98], "stop")


def failing(after: int, real: Any) -> Any:
    """A function that does what the real one does, and then runs out of memory the last time."""
    calls = iter(range(after + 1))

    def fails(*known: Any) -> Any:
        made = real(*known)
        if next(calls) == after:
            raise RuntimeError("out of memory")
        return made

    return fails


def test_an_error_leaves_no_request_of_the_caller_behind(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, requests = saying(device, "abcdef"), [asked() for _ in range(4)]
    with monkeypatch.context() as patch:
        patch.setattr(engine, "decode", failing(2, engine.decode))
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.generate(requests)
    assert not engine.waiting
    assert not any(engine.running)
    assert [found.text for found in engine.generate(requests)] == ["abcdef"] * 4


def test_what_a_failed_pass_has_overwritten_is_not_gone_on_behind(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had written further into the rings of the windows than anybody knows."""
    model = make.model(seq_len=40, window_pattern="SSL", kv_heads=1)
    engine, fresh = (make.engine(model, device, slots=1, context=300) for _ in range(2))
    draw = random.Random(0)
    prompt, more = ([draw.randrange(model.shape.vocab) for _ in range(count)] for count in (60, 100))
    sampling = Sampling(max_tokens=8, temperature=0.0, stop_tokens=(), tools=False, logprobs=True)
    engine.generate([Request(prompt, replace(sampling, max_tokens=1))])
    with monkeypatch.context() as patch:
        patch.setattr(engine.decoder, "prefill", failing(0, engine.decoder.prefill))
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.generate([Request([*prompt, *more], sampling)])
    found, expected = (one.generate([Request([*prompt, *more[:5]], sampling)])[0] for one in (engine, fresh))
    assert found.ids == expected.ids
    assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
