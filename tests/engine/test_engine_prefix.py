"""Tokens that are still in the cache are not read again, long prompts are read in pieces, and no answer changes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import engine_models as make
import pytest
import torch

from ascendchat.device import Device, pick
from ascendchat.engine.engine import Completion, Engine, Request, RequestState, Sampling
from ascendchat.engine.prefix import MIN_REUSE, MIN_REUSE_ASYNC, Copy
from ascendchat.nn.attention import Attention, Eager, Reference, Sdpa
from ascendchat.nn.gpt import GPT

pytestmark = pytest.mark.usefixtures("one_thread")

CONTEXT = 300
MODELS = {
    "full": {"seq_len": 512, "window_pattern": "L", "kv_heads": 2},
    "ring": {"seq_len": 512, "window_pattern": "SL"},  # windows 128, 300, 300
    "small-ring": {"seq_len": 40, "window_pattern": "SSL", "kv_heads": 1},  # windows 40, 40, 300
}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"))]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Device:
    """A CPU, and a GPU where there is one, with exact products."""
    return make.exact(request.param)


def engine_of(model: GPT, device: Device, kernel: Attention | None = None, **more: Any) -> Engine:
    return make.engine(model, device, kernel or Sdpa(), **{"context": CONTEXT, "min_reuse": MIN_REUSE, **more})


def plain(model: GPT, device: Device) -> Engine:
    """Prompts are read whole, and nothing is kept."""
    return engine_of(model, device, slots=16, reuse=False, prefill_tokens=100_000)


def words(draw: random.Random, model: GPT, count: int) -> list[int]:
    return [draw.randrange(model.shape.vocab) for _ in range(count)]


def greedy(count: int = 8) -> Sampling:
    return Sampling(max_tokens=count, temperature=0.0, stop_tokens=(), tools=False, logprobs=True)


def assert_alike(found: Completion, expected: Completion) -> None:
    """The same tokens, and the same probabilities: one wrong key of a hundred hardly changes a token."""
    count = len(found.ids) if found.finish_reason == "cancelled" else len(expected.ids)
    assert (found.ids, found.forced) == (expected.ids[:count], expected.forced[:count])
    assert found.logprobs == pytest.approx(expected.logprobs[:count], abs=1e-4)


class Counted:
    """What a decoder really reads and copies."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passes: list[int] = []  # tokens of each pass over prompts
        self.copies = 0
        decoder = engine.decoder
        prefill, copy = decoder.prefill, decoder.copy

        def counted(requests: Any, slots: Any, mode: Any, starts: Sequence[int], ends: Sequence[int]) -> Any:
            self.passes.append(sum(ends) - sum(starts))
            return prefill(requests, slots, mode, starts, ends)

        def copied(copies: Sequence[Copy]) -> None:
            self.copies += sum(one.source != one.target for one in copies)
            copy(copies)

        monkeypatch.setattr(decoder, "prefill", counted)
        monkeypatch.setattr(decoder, "copy", copied)

    def take(self) -> int:
        read, self.passes = sum(self.passes), []
        return read


@pytest.mark.parametrize(("name", "late"), [("full", 0), ("ring", 1), ("small-ring", 0)])
def test_the_next_turn_of_a_conversation_reads_only_what_is_new(
    device: Device, monkeypatch: pytest.MonkeyPatch, name: str, late: int
) -> None:
    """Three conversations in turn in an engine with three slots: the rings of their slots have turned."""
    model, draw = make.model(21, **MODELS[name]), random.Random(1)
    engine = engine_of(model, device, slots=3, late=late)
    counted, asked, answers = Counted(engine, monkeypatch), [], []
    rows = [words(draw, model, 100) for _ in range(3)]
    for turn in range(3):
        for number, row in enumerate(rows):
            asked.append(Request(row, greedy(6)))
            (found,) = engine.generate(asked[-1:])
            answers.append(found)
            known = 100 + (turn - 1) * 17 + 6 if turn else 0  # prompt and answer before; its last token was not read
            assert found.cached_tokens == (known - 1 if turn else 0)
            assert counted.take() == len(row) - found.cached_tokens
            rows[number] = [*row, *found.ids, *words(draw, model, 11)]
    for found, expected in zip(answers, plain(model, device).generate(asked)):
        assert_alike(found, expected)


@pytest.mark.parametrize(("name", "pieces"), [("full", None), ("small-ring", 48)])
def test_samples_of_one_prompt_read_it_once(
    device: Device, monkeypatch: pytest.MonkeyPatch, name: str, pieces: int | None
) -> None:
    """Also behind a piece that is longer than a ring: the last token of the prompt sees all that the ring has."""
    model, draw = make.model(22, **MODELS[name]), random.Random(2)
    engine = engine_of(model, device, slots=8, prefill_tokens=pieces)
    counted = Counted(engine, monkeypatch)
    prompts = [words(draw, model, count) for count in (144, 192)]
    requests = [
        Request(prompt, Sampling(max_tokens=6, temperature=1.0, seed=seed, stop_tokens=(), logprobs=True))
        for prompt in prompts
        for seed in range(4)
    ]
    found = engine.generate(requests)
    assert counted.take() == 144 + 192 + 3 + 3
    assert counted.copies == 6
    assert [answer.cached_tokens for answer in found] == [0, 143, 143, 143, 0, 191, 191, 191]
    for answer, expected in zip(found, plain(model, device).generate(requests)):
        assert_alike(answer, expected)
    assert len({tuple(answer.ids) for answer in found}) == 8


@pytest.mark.parametrize("pieces", [None, 48])
def test_other_ends_behind_a_common_beginning_read_from_the_last_whole_block(
    device: Device, pieces: int | None
) -> None:
    """From slots that were read whole, in pieces, and behind a part of another slot."""
    model, draw = make.model(30, **MODELS["full"]), random.Random(7)
    engine = engine_of(model, device, slots=6, prefill_tokens=pieces)
    system, asked, answers = words(draw, model, 270), [], []
    for common, reused in ((270, 0), (100, 64), (140, 128), (262, 256), (63, 0), (130, 128)):
        asked.append(Request([*system[:common], *words(draw, model, 10)], greedy(4)))
        answers += engine.generate(asked[-1:])
        assert answers[-1].cached_tokens == reused
    for found, expected in zip(answers, plain(model, device).generate(asked)):
        assert_alike(found, expected)


def test_new_weights_wait_for_prompts_that_are_half_read_and_forget_what_the_old_computed(device: Device) -> None:
    model, later = make.model(24, **MODELS["full"]), make.model(25, **MODELS["full"])
    engine, draw = engine_of(model, device, slots=1, prefill_tokens=32), random.Random(4)
    known, half = (Request(words(draw, model, count), greedy()) for count in (120, 90))
    (old,), (new,) = plain(model, device).generate([half]), plain(later, device).generate([known])
    engine.generate([known])
    under_way, waiting = engine.add(half), engine.add(known)
    engine.step()
    assert 0 < under_way.cached < 90
    engine.load(later.state_dict(), 1)
    assert (under_way.completion.ids, under_way.completion.version) == (old.ids, 0)
    make.finish(engine, waiting)
    found = waiting.completion
    assert (found.ids, found.version, found.cached_tokens) == (new.ids, 1, 0)
    assert engine.generate([known])[0].cached_tokens == 119


def test_rows_go_on_while_a_long_prompt_is_read_and_prompts_keep_their_order(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, draw = make.model(26, **MODELS["ring"]), random.Random(5)
    engine, alone = engine_of(model, device, slots=3, prefill_tokens=64), plain(model, device)
    counted = Counted(engine, monkeypatch)
    running = engine.add(Request(words(draw, model, 10), greedy(60)))
    engine.step()
    long = [engine.add(Request(words(draw, model, 270), greedy(5))) for _ in range(2)]
    steps = 0
    while not all(job.launched for job in long):
        before, read = running.launched, len(counted.passes)
        engine.step()
        steps += 1
        assert running.launched == before + 1, "a token for the row that runs, after every pass"
        assert sum(counted.passes[read:]) <= 64
        assert long[0].launched or not long[1].launched
    assert steps >= 2 * 270 // 64
    jobs = [running, *long]
    make.finish(engine, *jobs)
    for job, expected in zip(jobs, alone.generate([job.request for job in jobs])):
        assert_alike(job.completion, expected)


def test_many_short_prompts_wait_for_a_step_as_well(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    model, draw = make.model(26, **MODELS["ring"]), random.Random(5)
    engine = engine_of(model, device, slots=6, prefill_tokens=64)
    counted = Counted(engine, monkeypatch)
    engine.add(Request(words(draw, model, 10), greedy(60)))
    engine.step()
    short = [engine.add(Request(words(draw, model, 40), greedy(5))) for _ in range(4)]
    while not all(job.launched for job in short):
        counted.take()
        engine.step()
        assert counted.take() <= 64, "more than the row that runs should wait for"


# ---- whatever happens, the answers stay the same --------------------------------------------------


def random_sampling(draw: random.Random) -> Sampling:
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.2, "top_k": 20, "seed": draw.randrange(99)},
        {"temperature": 0.8, "repetition_penalty": 1.3, "seed": draw.randrange(99)},
        {"temperature": 0.0, "allowed_tokens": tuple(range(draw.randrange(3, 200)))},
    ]
    usual = {"max_tokens": draw.randint(1, 20), "stop_tokens": (5, 6), "logprobs": draw.random() < 0.8}
    return Sampling(**{**draw.choice(ways), **usual})


def random_prompt(draw: random.Random, model: GPT, before: Sequence[RequestState]) -> list[int]:
    """New, the next turn of something, the same again, or another end behind the same beginning."""
    kind = draw.randrange(4) if before else 0
    if kind == 0:
        return words(draw, model, draw.randint(1, 160))
    job = draw.choice(before)
    row = [*job.request.prompt, *job.completion.ids]
    if kind == 1:
        row += words(draw, model, draw.randint(1, 40))
    elif kind == 2:
        row = job.request.prompt
    else:
        row = [*row[: draw.randint(1, len(row))], *words(draw, model, draw.randint(1, 30))]
    return row if len(row) < CONTEXT else words(draw, model, 20)


def play(engine: Engine, draw: random.Random, model: GPT, count: int) -> list[RequestState]:
    """Requests come while others run; some are cancelled."""
    jobs: list[RequestState] = []
    while len(jobs) < count or not all(job.done for job in jobs):
        if len(jobs) < count and draw.random() < 0.6:
            prompt = random_prompt(draw, model, jobs)
            for _ in range(draw.choice((1, 1, 1, 3))):
                jobs.append(engine.add(Request(prompt, random_sampling(draw))))
        if draw.random() < 0.05:
            engine.cancel(draw.choice(jobs or [engine.add(Request([1]))]))
        engine.step()
        assert engine.decoder.host_length.tolist() == engine.decoder.length.tolist(), "kernels that ask the host"
    return jobs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kernel"), [("full", Eager()), ("ring", Sdpa()), ("small-ring", Sdpa()), ("small-ring", Reference())]
)
def test_random_requests_with_common_beginnings_are_answered_as_if_alone(
    device: Device, name: str, kernel: Attention
) -> None:
    model, draw = make.model(28, **MODELS[name]), random.Random(f"{name} {kernel.name}")
    alone, count, reused = plain(model, device), 20, 0
    for late, tokens in ((0, None), (1, 48)):
        engine = engine_of(model, device, kernel, slots=draw.choice((2, 3, 6)), prefill_tokens=tokens, late=late)
        jobs = play(engine, draw, model, count)
        reused += sum(job.completion.cached_tokens for job in jobs)
        for job, expected in zip(jobs, alone.generate([job.request for job in jobs])):
            assert_alike(job.completion, expected)
    assert reused > 10 * count, "or this compares nothing"


def test_forced_tokens_are_kept_like_others(device: Device) -> None:
    """A calculator's result lies in the cache behind the call; the next turn goes on behind both."""
    follows, answer = make.calculator_script()
    start, end = (make.tokenizer().specials[name] for name in ("<|assistant_start|>", "<|assistant_end|>"))
    for late in (0, 1):
        engine = engine_of(make.scripted(follows), device, Reference(), slots=2, late=late)
        prompt, found = [*range(40), start], []
        for _ in range(2):
            found += engine.generate([Request(prompt, Sampling(temperature=0.0))])
            prompt = [*prompt, *answer, end, 1, start]
        assert [one.ids for one in found] == [answer] * 2
        assert engine.decoder.host_length.tolist() == engine.decoder.length.tolist()
        assert found[1].cached_tokens - 41 - len(answer) in (-1, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",  # all that a compiler sees of a step, without two minutes of C++
        pytest.param("inductor", marks=pytest.mark.long(short="test_compiled_steps_leave_what_is_kept_as_it_is")),
    ],
)
def test_compiled_steps_leave_what_is_kept_as_it_is(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """Two rows, of which one ends earlier, and then the next turns of both: one step to compile. The answers are those
    of what is not compiled, which test_engine.py compares with the reference."""
    device = pick("cpu", compiled=True)
    monkeypatch.setattr(device, "compile", lambda fn, **how: torch.compile(fn, backend=backend, **how))
    model, draw = make.model(29, seq_len=40, window_pattern="SL", dim=16, depth=2), random.Random(9)
    engine = engine_of(model, device, slots=2, context=100, compiled=True)
    requests = [Request(words(draw, model, 50), greedy(count)) for count in (4, 20)]
    answers = engine.generate(requests)
    for request, answer in zip(requests[:2], answers[:2]):
        requests.append(Request([*request.prompt, *answer.ids, *words(draw, model, 5)], greedy(10)))
    answers += engine.generate(requests[2:])
    assert [answer.cached_tokens for answer in answers[2:]] == [53, 69]
    assert {key.rows for key in engine.decoder.steps} == {2}
    for answer, expected in zip(answers, plain(model, device).generate(requests)):
        assert_alike(answer, expected)


def test_a_device_that_works_on_its_own_reads_short_prompts_anew(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All samples of a short prompt in one pass, without a copy; of a long one the second goes on behind the first."""
    model, draw = make.model(30), random.Random(10)
    engine = engine_of(model, device, slots=8, min_reuse=MIN_REUSE_ASYNC, prefill_tokens=16384)
    alone, counted = plain(model, device), Counted(engine, monkeypatch)
    short, long = (words(draw, model, count) for count in (MIN_REUSE_ASYNC, MIN_REUSE_ASYNC + 2))
    for prompt, passes, copies in ((short, [8 * len(short)], 0), (long, [len(long), 7], 7)):
        answers = engine.generate([Request(prompt, greedy(3))] * 8)
        assert (counted.passes, counted.copies) == (passes, copies)
        counted.passes.clear()
        (expected,) = alone.generate([Request(prompt, greedy(3))])
        for answer in answers:
            assert_alike(answer, expected)


def test_what_one_has_asked_is_not_in_the_cache_for_another(device: Device) -> None:
    """Neither when all are written together, nor afterwards; a guess finds only what was guessed before."""
    model, draw = make.model(26, **MODELS["full"]), random.Random(6)
    engine, prompt = engine_of(model, device, slots=8), words(draw, model, 120)
    asked = [Request(prompt, greedy(), salt) for salt in ("a", "b", "a", "")]
    together = engine.generate(asked)
    assert [answer.cached_tokens for answer in together] == [0, 0, 119, 0]
    assert [engine.generate([one])[0].cached_tokens for one in asked] == [119] * 4
    guess = [*prompt[:70], (prompt[70] + 1) % model.shape.vocab, *prompt[71:]]
    assert [engine.generate([Request(row, greedy(), "c")])[0].cached_tokens for row in (guess, prompt)] == [0, 64]
    for answer in together:
        assert_alike(answer, together[0])
