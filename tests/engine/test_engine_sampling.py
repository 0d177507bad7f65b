"""Bias, penalties and likeliest tokens in the engine equal a plain decoder that counts for itself; pauses."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import engine_models as make
import pytest

from ascendchat.device import Device
from ascendchat.engine.engine import Engine, Request, RequestState, Sampling
from ascendchat.engine.sampling import Draw, Mode
from ascendchat.nn.attention import Sdpa
from ascendchat.nn.gpt import GPT

pytestmark = pytest.mark.usefixtures("one_thread")

CONTEXT = 48
TEXT = make.tokenizer()
START = TEXT.specials["<|assistant_start|>"]


@pytest.fixture
def device() -> Device:
    """A CPU with exact products."""
    return make.exact("cpu")


def prompts(vocab: int, count: int, seed: int = 3) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(vocab) for _ in range(draw.randint(1, 20))] for _ in range(count)]


WAYS: list[dict[str, Any]] = [
    {},
    {"frequency_penalty": 2.0},
    {"presence_penalty": 2.0, "frequency_penalty": -0.5},
    {"logit_bias": ((5, 12.0), (70, -100.0), (11, 9.0))},
    {"presence_penalty": -2.0, "logit_bias": ((9, 4.0),), "repetition_penalty": 1.3},
    {"logit_bias": tuple((token, -100.0) for token in range(200))},
    {"frequency_penalty": 1.5, "allowed_tokens": (7, 8, 9, 10, 11)},
]


def mixed(vocab: int, count: int, tokens: int) -> list[Request]:
    usual = {"max_tokens": tokens, "temperature": 0.0, "stop_tokens": (), "tools": False}
    ways = [Sampling(**{**usual, **WAYS[i % len(WAYS)]}) for i in range(count)]
    return [Request(prompt, way) for prompt, way in zip(prompts(vocab, count), ways)]


def plain_greedy(model: GPT, request: Request) -> list[int]:
    """No cache, alone, in float64 and Python: the formula of each penalty as it is written in the documentation."""
    said: list[int] = []
    s = request.sampling
    for _ in range(min(s.max_tokens, CONTEXT - len(request.prompt))):
        logits = make.logits_of(model, [*request.prompt, *said], CONTEXT).double().tolist()
        times = Counter(said)
        for token in {*request.prompt, *said}:
            factor = s.repetition_penalty
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        for token, number in s.logit_bias:
            logits[token] += number
        for token, count in times.items():
            logits[token] -= count * s.frequency_penalty + s.presence_penalty
        allowed = s.allowed_tokens or range(len(logits))
        said.append(max(allowed, key=lambda token: logits[token]))
    return said


@pytest.mark.slow
def test_bias_and_penalties_equal_the_plain_decoder_whoever_shares_the_batch(device: Device) -> None:
    """More requests than slots: rows with and without follow each other in a slot."""
    model = make.model(6, seq_len=16)
    asked = mixed(model.shape.vocab, 14, tokens=10)
    expected = [plain_greedy(model, request) for request in asked]
    for slots in (1, 4):
        engine = make.engine(model, device, Sdpa(), slots=slots, context=CONTEXT)
        assert [answer.ids for answer in engine.generate(asked)] == expected
    plain = [make.greedy(model, request.prompt, 10, CONTEXT) for request in asked]
    changed = {i % len(WAYS) for i, (one, other) in enumerate(zip(expected, plain)) if one != other}
    assert changed == {1, 2, 3, 4, 5, 6}, "every way but the first says something else than no way at all"


def test_nothing_is_made_and_nothing_is_done_where_nobody_asks(device: Device) -> None:
    model = make.model(6, seq_len=16)
    engine = make.engine(model, device, Sdpa(), context=CONTEXT)
    engine.generate([Request(prompt, Sampling(max_tokens=4)) for prompt in prompts(model.shape.vocab, 5)])
    decoder = engine.decoder
    assert decoder.tables is None
    assert {key.mode for key in decoder.steps} == {Mode(Draw.RANDOM)}


def test_a_tools_result_is_not_penalised(device: Device) -> None:
    """Only what the model chose itself is counted."""
    special = TEXT.specials
    call = [special["<|tool_start|>"], *TEXT.encode("17+25"), special["<|tool_end|>"]]
    follows = make.script([START, *call], [special["<|output_end|>"], ord("!")])
    for late in (0, 1):
        engine = make.engine(make.scripted(follows), device, slots=1, late=late)
        request = Request([START], Sampling(temperature=0.0, max_tokens=12, frequency_penalty=1.0))
        (found,) = engine.generate([request])
        forced = [token for token, flag in zip(found.ids, found.forced) if flag]
        assert TEXT.decode(forced) == "<|output_start|>42<|output_end|>"
        assert engine.decoder.tables is not None
        read = zip(found.ids[:-1], found.forced)
        counted = {token: int(count) for token, count in enumerate(engine.decoder.tables.counts[0].tolist()) if count}
        assert counted == Counter(token for token, flag in read if not flag)


def test_the_likeliest_tokens_are_reported_beside_each_token(device: Device) -> None:
    model = make.model(6, seq_len=16)
    engine = make.engine(model, device, Sdpa(), slots=3, context=CONTEXT, late=1)
    usual = Sampling(max_tokens=5, temperature=0.8, stop_tokens=(), logprobs=True, frequency_penalty=1.0)
    counts = [0, 3, 20, 1, 0, 5]
    asked = [
        Request(prompt, replace(usual, top_logprobs=count, seed=i))
        for i, (prompt, count) in enumerate(zip(prompts(model.shape.vocab, 6), counts))
    ]
    without = engine.generate([replace(one, sampling=replace(one.sampling, top_logprobs=0)) for one in asked])
    for request, answer, count, same in zip(asked, engine.generate(asked), counts, without):
        assert answer.ids == same.ids, "to report is not to change"
        assert len(answer.tops) == (len(answer.ids) if count else 0)
        along = make.logits_along(model, request.prompt, answer.ids, CONTEXT).log_softmax(-1)
        for token, logprob, tops, expected in zip(answer.ids, answer.logprobs, answer.tops, along):
            best = expected.topk(count)
            assert [top for top, _ in tops] == best.indices.tolist(), "the model's own, before penalties"
            assert [value for _, value in tops] == pytest.approx(best.values.tolist(), abs=1e-4)
            assert logprob == pytest.approx(dict(tops).get(token, logprob), abs=1e-5)


def test_forced_tokens_have_a_version_and_no_likeliest_tokens(device: Device) -> None:
    follows, answer = make.calculator_script()
    engine = make.engine(make.scripted(follows), device, slots=1)
    engine.version = 3
    (found,) = engine.generate([Request([START], Sampling(temperature=0.0, top_logprobs=2))])
    assert (found.ids, found.versions, found.version) == (answer, [3] * len(answer), 3)
    assert [len(tops) for tops in found.tops] == [0 if flag else 2 for flag in found.forced]
    assert all(tops[0][0] == token for token, tops in zip(found.ids, found.tops) if tops)


@pytest.mark.parametrize("name", ["allowed_tokens", "logit_bias"])
def test_tokens_outside_the_vocabulary_are_refused(device: Device, name: str) -> None:
    engine, last = make.engine(make.model(), device), TEXT.vocab_size - 1
    for token in (0, last, -1, last + 1):
        sampling = Sampling(**{name: (5, token) if name == "allowed_tokens" else ((5, 1.0), (token, 1.0))})
        if 0 <= token <= last:
            engine.cancel(engine.add(Request([0], sampling)))
            continue
        with pytest.raises(ValueError, match=f"{name} must lie between 0 and {last}"):
            engine.add(Request([0], sampling))


# ---- versions, and engines that stand still -----------------------------------------------------

NEW = make.model(6, seq_len=16)


def said(model: GPT, request: Request, count: int = 12) -> list[int]:
    """What these weights alone would answer."""
    return make.greedy(model, request.prompt, count, CONTEXT)


def begun(device: Device, late: int, count: int, steps: int, slots: int = 3) -> tuple[Engine, GPT, list[RequestState]]:
    """An engine that has done some steps, the weights it had then, and its requests, which will have 12 tokens."""
    old = make.model(5, seq_len=16)
    engine = make.engine(make.model(5, seq_len=16), device, Sdpa(), slots=slots, context=CONTEXT, late=late)
    usual = Sampling(max_tokens=12, temperature=0.0, stop_tokens=(), tools=False)
    jobs = [engine.add(Request(prompt, usual)) for prompt in prompts(old.shape.vocab, count)]
    for _ in range(steps):
        engine.step()
    return engine, old, jobs


@pytest.mark.parametrize("late", [0, 1])
def test_rows_that_were_kept_go_on_with_the_new_weights(device: Device, late: int) -> None:
    engine, old, jobs = begun(device, late, count=5, steps=4)
    engine.pause("keep")
    held = [list(job.completion.ids) for job in jobs]
    assert [len(ids) for ids in held] == [5, 5, 5, 0, 0]
    for _ in range(3):
        engine.step()
    engine.load(NEW.state_dict(), 9)
    engine.step()
    assert [job.completion.ids for job in jobs] == held, "nothing moves while the engine is paused"
    engine.resume()
    make.finish(engine, *jobs)
    for job, ids in zip(jobs, held):
        answer = job.completion
        assert answer.versions == [0] * len(ids) + [9] * (12 - len(ids)), "exactly at the point of the load"
        assert answer.version == answer.versions[0]
        assert ids == said(old, job.request, len(ids))
    assert all(job.completion.ids == said(NEW, job.request) for job in jobs[3:])
    assert any(job.completion.ids != said(old, job.request) for job in jobs[:3]), "the new weights say something else"


def test_a_load_that_interrupts_is_for_rows_under_way_and_reads_waiting_prompts_from_their_beginning(
    device: Device,
) -> None:
    """Not behind what the old weights made of the same words, nor behind a part that they had read."""
    old, new = (make.model(seed, seq_len=256, window_pattern="L") for seed in (5, 6))
    first, sizes = make.model(5, seq_len=256, window_pattern="L"), {"context": 256, "min_reuse": 16}
    engine = make.engine(first, device, Sdpa(), slots=3, late=1, prefill_tokens=32, **sizes)
    known, long = ([(7 * i + n) % old.shape.vocab for i in range(length)] for n, length in ((1, 64), (2, 150)))
    usual = Sampling(max_tokens=8, temperature=0.0, stop_tokens=(), tools=False)
    engine.generate([Request(known, usual)])
    running = engine.add(Request([9, 8], usual))
    engine.step()
    engine.step()
    waiting = [engine.add(Request(prompt, usual)) for prompt in (long, [*known, 5, 6, 7])]
    engine.step()
    assert [job.cached for job in waiting] == [32, 64]
    engine.load(new.state_dict(), 9, interrupt=True)
    assert not running.done
    make.finish(engine, running, *waiting)
    for job in waiting:
        answer = job.completion
        assert answer.ids == make.greedy(new, job.request.prompt, 8, 256)
        assert (answer.versions, answer.cached_tokens) == ([9] * 8, 0)
    answer = running.completion
    written = answer.versions.count(0)
    assert 0 < written < 8
    assert answer.versions == [0] * written + [9] * (8 - written)
    assert answer.ids[:written] == make.greedy(old, [9, 8], written, 256)
    assert answer.ids != make.greedy(old, [9, 8], 8, 256)


def test_rows_that_are_waited_for_end_with_the_old_weights(device: Device) -> None:
    engine, old, jobs = begun(device, late=1, count=4, steps=1, slots=2)
    engine.pause("wait")
    make.finish(engine, *jobs[:2])
    for _ in range(3):
        engine.step()
    assert [job.slot for job in jobs[2:]] == [-1, -1], "nothing new enters"
    engine.load(NEW.state_dict(), 4)
    engine.resume()
    make.finish(engine, *jobs)
    for job, model, version in zip(jobs, (old, old, NEW, NEW), (0, 0, 4, 4)):
        assert job.completion.ids == said(model, job.request)
        assert job.completion.versions == [version] * 12


@pytest.mark.parametrize("late", [0, 1])
def test_rows_that_are_aborted_end_cancelled_and_waiting_ones_come_later(device: Device, late: int) -> None:
    engine, old, jobs = begun(device, late, count=3, steps=3, slots=2)
    engine.pause("abort")
    assert [(job.done, job.completion.finish_reason) for job in jobs[:2]] == [(True, "cancelled")] * 2
    assert [job.completion.ids for job in jobs[:2]] == [said(old, job.request, 4) for job in jobs[:2]]
    assert engine.running == [None, None]
    engine.step()
    assert not jobs[2].completion.ids
    engine.load(NEW.state_dict(), 2)
    engine.resume()
    make.finish(engine, *jobs)
    assert jobs[2].completion.ids == said(NEW, jobs[2].request)


def test_requests_can_be_cancelled_while_the_engine_is_paused(device: Device) -> None:
    engine, old, jobs = begun(device, late=0, count=4, steps=1, slots=2)
    engine.pause("keep")
    engine.cancel(jobs[0])
    engine.cancel(jobs[2])
    engine.step()
    assert engine.running == [None, jobs[1]], "a freed slot stays free"
    engine.resume()
    make.finish(engine, *jobs)
    assert [job.completion.finish_reason for job in jobs] == ["cancelled", "length", "cancelled", "length"]
    assert jobs[1].completion.ids == said(old, jobs[1].request)


def test_a_paused_engine_does_not_wait_for_itself(device: Device) -> None:
    engine, _, _ = begun(device, late=0, count=0, steps=0)
    engine.pause("wait")
    with pytest.raises(RuntimeError, match="resume"):
        engine.generate([Request([0])])
    with pytest.raises(ValueError, match="wait, abort, keep"):
        engine.pause("sleep")  # type: ignore[arg-type]
    engine.resume()
    assert engine.generate([Request([0], Sampling(max_tokens=3, stop_tokens=()))])[0].versions == [0, 0, 0]
