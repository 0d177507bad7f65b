"""Rows that move together answer as if they had stayed, and steps have fewer rows."""

from __future__ import annotations

import random
from dataclasses import replace

import engine_models as make
import pytest
import torch

from ascendchat.device import Device
from ascendchat.engine import engine as gather
from ascendchat.engine.engine import Completion, Engine, Request, RequestState, Sampling
from ascendchat.engine.prefix import MIN_REUSE
from ascendchat.engine.request import Grammar
from ascendchat.nn.attention import Reference, Sdpa
from ascendchat.nn.gpt import GPT

pytestmark = pytest.mark.usefixtures("one_thread")

SLOTS, CONTEXT = 32, 160
MODELS = {
    "full": {"seq_len": 256, "window_pattern": "L", "kv_heads": 2},
    "ring": {"seq_len": 40, "window_pattern": "SSL"},  # windows of 40 turn
}
KINDS = [
    Sampling(temperature=0.0),
    Sampling(temperature=1.0, seed=3),
    Sampling(temperature=0.8, seed=4, top_k=20, top_p=0.9, repetition_penalty=1.3),
    Sampling(temperature=1.0, seed=5, presence_penalty=0.5, frequency_penalty=0.7, logit_bias=((7, 3.0), (9, -4.0))),
    Sampling(temperature=1.0, seed=6, allowed_tokens=tuple(range(10, 60))),
    Sampling(temperature=0.0, top_logprobs=3),
    Sampling(temperature=1.0, seed=7, grammar=Grammar("regex", "([a-g]{3} )*")),
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"))]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Device:
    """A CPU, and a GPU where there is one, with exact products."""
    return make.exact(request.param)


class Watched:
    """An engine whose steps and moves are counted."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.rows, self.moved = engine, [], 0  # type: tuple[Engine, list[int], int]
        step, move = engine.decoder.step, engine.batch.move

        def stepped(rows: int, *rest: object) -> torch.Tensor:
            self.rows.append(rows)
            return step(rows, *rest)  # type: ignore[arg-type]

        def moved(sources: object, targets: object) -> None:
            self.moved += len(sources)  # type: ignore[arg-type]
            move(sources, targets)  # type: ignore[arg-type]

        engine.decoder.step, engine.batch.move = stepped, moved  # type: ignore[method-assign]


def requests(count: int, seed: int = 0) -> list[Request]:
    """Most answers are short; the last ones, in the highest slots, go on."""
    draw, vocab, made = random.Random(seed), make.tokenizer().vocab_size, []
    for number in range(count):
        prompt = [draw.randrange(vocab) for _ in range(draw.randint(1, 70))]
        length = draw.randint(40, 70) if number % 4 == 3 or number == count - 1 else draw.randint(1, 12)
        stops = tuple(range(60 + number, 70 + number)) if number % 3 == 1 else ()
        kind = replace(KINDS[number % len(KINDS)], max_tokens=length, stop_tokens=stops, tools=False, logprobs=True)
        made.append(Request(prompt, kind))
    return made


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows move after two steps in which half as many rows would do."""
    monkeypatch.setattr(gather, "SPARSE_STEPS", 2)
    monkeypatch.setattr(gather, "CAPTURE_AFTER", 0)  # where steps are recorded, new sizes at once


def same(found: list[Completion], expected: list[Completion]) -> None:
    for one, other in zip(found, expected, strict=True):
        for part in ("ids", "text", "finish_reason", "versions"):
            assert getattr(one, part) == getattr(other, part), part
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)
        assert [[token for token, _ in top] for top in one.tops] == [[token for token, _ in top] for top in other.tops]


@pytest.mark.parametrize(("name", "late"), [("full", 0), ("ring", 1)])
@pytest.mark.usefixtures("patient")
def test_answers_are_those_of_rows_that_stay(
    device: Device, name: str, late: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, asked = make.model(3, **MODELS[name]), requests(SLOTS)
    moving = Watched(make.engine(model, device, Sdpa(), slots=SLOTS, context=CONTEXT, late=late))
    found = moving.engine.generate(asked)
    assert moving.moved > 3
    assert {"stop", "length"} == {answer.finish_reason for answer in found}
    sheet = moving.engine.batch
    assert not sheet._watchers
    assert not sheet.watched.any(), "nobody's tokens are watched any more"
    monkeypatch.setattr(gather, "SPARSE_STEPS", 10**9)
    staying = Watched(make.engine(model, device, Sdpa(), slots=SLOTS, context=CONTEXT, late=late))
    same(found, staying.engine.generate(asked))
    assert staying.moved == 0
    assert sum(moving.rows) < 0.7 * sum(staying.rows)
    assert abs(len(moving.rows) - len(staying.rows)) <= 2


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.usefixtures("patient")
def test_a_tools_result_is_put_in_wherever_the_row_is(device: Device, late: int) -> None:
    """Moved in the middle of a call, of its result, and behind it."""
    follows, answer = make.calculator_script()
    start = [make.tokenizer().specials["<|assistant_start|>"]]
    watched = Watched(make.engine(make.scripted(follows), device, slots=16, context=64, late=late))
    for short in range(1, 14, 2):
        watched.moved = 0
        brief = Request([65], Sampling(temperature=0.0, max_tokens=short, stop_tokens=(), tools=False))
        *_, found = watched.engine.generate([*[brief] * 15, Request(start, Sampling(temperature=0.0))])
        assert found.ids == answer
        assert found.forced == [False] * 7 + [True] * 4 + [False] * (len(answer) - 11)
        assert watched.moved == 1
        assert not watched.engine.batch.forced.any()


@pytest.mark.usefixtures("patient")
def test_a_row_may_move_again_and_its_old_slots_are_idle(device: Device) -> None:
    model, draw = make.model(8, **MODELS["ring"]), random.Random(2)
    watched = Watched(make.engine(model, device, Sdpa(), slots=64, context=CONTEXT, late=1))
    engine, greedy = watched.engine, Sampling(temperature=0.0, stop_tokens=(), tools=False)
    asked = []
    for length in [3] * 34 + [18] * 20 + [60] * 10:  # the first move leaves 30 rows, the second 10
        prompt = [draw.randrange(model.shape.vocab) for _ in range(draw.randint(30, 90))]
        asked.append(Request(prompt, replace(greedy, max_tokens=length)))
    jobs, places = [engine.add(request) for request in asked], set()
    while not all(job.done for job in jobs):
        engine.step()
        places.add(jobs[-1].slot)
        idle = [slot for slot, job in enumerate(engine.running) if job is None and slot not in engine._left]
        assert (engine.decoder.target[idle] == engine.decoder.cache.dump).all()
        for slot, job in enumerate(engine.running):
            assert (
                job is None or not job.launched or engine.decoder.host_length[slot] == int(engine.decoder.length[slot])
            )
    assert len(places) == 3
    assert max(watched.rows[-5:]) == 10
    for job, request in list(zip(jobs, asked))[-12:]:
        make.assert_greedy(model, request, job.completion.ids, CONTEXT)


BRIEF = Sampling(temperature=0.0, max_tokens=3, stop_tokens=(), tools=False)


def three_go_on(model: GPT, device: Device, tokens: int) -> tuple[Watched, list[list[int]], list[RequestState]]:
    """All slots are taken; only the answers in the last three have more than a few tokens."""
    engine, draw = (
        make.engine(model, device, Sdpa(), slots=SLOTS, context=CONTEXT, min_reuse=MIN_REUSE),
        random.Random(1),
    )
    prompts = [[draw.randrange(model.shape.vocab) for _ in range(60)] for _ in range(SLOTS)]
    kinds = [BRIEF] * (SLOTS - 3) + [replace(BRIEF, max_tokens=tokens)] * 3
    return Watched(engine), prompts, [engine.add(Request(p, kind)) for p, kind in zip(prompts, kinds)]


@pytest.mark.usefixtures("patient")
def test_what_freed_slots_kept_is_found_behind_their_move(device: Device) -> None:
    watched, prompts, jobs = three_go_on(model := make.model(7, **MODELS["full"]), device, 50)
    engine = watched.engine
    while not watched.moved:
        engine.step()
    again = [engine.add(Request([*p, 5, 6], BRIEF)) for p in prompts[:6]]
    make.finish(engine, *jobs, *again)
    assert watched.moved == 3
    assert all(job.completion.cached_tokens >= 59 for job in again), "what the first slots had is still there"
    for job in [*again, *jobs[-3:]]:
        make.assert_greedy(model, job.request, job.completion.ids, CONTEXT)


def lengths(*tokens: int) -> list[Request]:
    """Requests whose answers have so many tokens."""
    return [Request([3, 4], replace(BRIEF, max_tokens=number)) for number in tokens]


def of_16_slots(model: GPT, device: Device) -> Watched:
    return Watched(make.engine(model, device, Reference(), slots=16, context=64))


@pytest.mark.usefixtures("patient")
def test_nobody_moves_while_others_wait_or_where_it_gives_little(device: Device) -> None:
    model = make.model(3, **MODELS["full"])
    few = Watched(make.engine(model, device, Reference(), slots=gather.MIN_ROWS - 1, context=64))
    few.engine.generate(lengths(*[2] * (gather.MIN_ROWS - 2), 30))
    assert few.moved == 0, "few rows take hardly less time"
    half = of_16_slots(model, device)
    half.engine.generate(lengths(*[2] * 7, *[30] * 9))
    assert half.moved == 0, "more than half of them run"
    half.engine.generate(lengths(*[2] * 8, *[30] * 8))
    assert half.moved == 8
    prepared = of_16_slots(model, device)
    prepared.engine.decoder.prepared = [(1, 64), (16, 64)]
    prepared.engine.generate(lengths(*[2] * 14, 30, 30))
    assert prepared.moved == 0, "there is no smaller step"
    prepared.engine.generate(lengths(*[2] * 15, 30))
    assert prepared.moved == 1
    held = of_16_slots(model, device)
    jobs = [held.engine.add(request) for request in lengths(*[2] * 15, 40)]
    for _ in range(3):
        held.engine.step()
    held.engine.pause("wait")
    jobs += [held.engine.add(request) for request in lengths(5)]
    for _ in range(6):
        held.engine.step()
    assert held.moved == 0, "who waits takes the free slots"
    held.engine.resume()
    make.finish(held.engine, *jobs)
    assert held.moved == 1


def test_a_short_lull_moves_nobody(device: Device) -> None:
    watched = of_16_slots(make.model(3, **MODELS["full"]), device)
    watched.engine.generate(lengths(*[2] * 15, 9))
    assert watched.moved == 0


@pytest.mark.usefixtures("patient")
def test_a_step_of_another_size_is_recorded_when_it_was_wanted_for_long(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make.model(3, **MODELS["full"])
    watched, asked = of_16_slots(model, device), lengths(*[2] * 15, 40)
    decoder = watched.engine.decoder
    monkeypatch.setattr(decoder, "graphs", True)
    monkeypatch.setattr(gather, "CAPTURE_AFTER", 50)
    watched.engine.generate(asked)
    assert watched.moved == 0, "it would have to be recorded"
    watched.engine.generate(asked)
    assert watched.moved == 1
    assert watched.rows[-1] == 1
    decoder.steps.clear()
    watched.engine.wanted.clear()
    watched.engine.generate(lengths(5))
    watched.engine.generate(asked)
    assert watched.moved == 2, "it was recorded already"


@pytest.mark.usefixtures("patient")
def test_copies_for_a_request_that_ended_unread_are_made_before_rows_move(device: Device) -> None:
    """Its stream was let go: the copies named slots that others take now."""
    watched, prompts, jobs = three_go_on(model := make.model(7, **MODELS["full"]), device, 60)
    engine = watched.engine
    while sum(job.done for job in jobs) < SLOTS - 3:
        engine.step()
    dropped = engine.add(Request([*prompts[SLOTS - 2], 5, 6], BRIEF))  # begins as one that runs: a copy is queued
    engine.forgotten.append(dropped)
    while not watched.moved:
        engine.step()
        assert not engine.scheduler.copies
    jobs.append(engine.add(Request([9, 8, 7], BRIEF)))
    make.finish(engine, *jobs)
    for job in jobs[SLOTS - 3 : SLOTS]:
        make.assert_greedy(model, job.request, job.completion.ids, CONTEXT)


@pytest.mark.usefixtures("patient")
def test_a_copy_that_fails_leaves_all_slots_as_they_were(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make.model(3, **MODELS["full"])
    engine, asked = of_16_slots(model, device).engine, lengths(*[2] * 15, 40)

    def fail(copies: object) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(engine.decoder, "copy", fail)
        with pytest.raises(torch.OutOfMemoryError):
            engine.generate(asked)
    assert engine.running == [None] * 16
    assert not engine.batch.owner.any()
    make.assert_greedy(model, asked[-1], engine.generate(asked)[-1].ids, 64)
