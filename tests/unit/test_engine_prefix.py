"""Tokens that are still in the cache are not read again, long prompts are read in pieces, and no answer changes."""

from __future__ import annotations

import random
from collections.abc import Sequence

import engine_models as make
import pytest
import torch

from ascendchat.device import Device, pick
from ascendchat.infer.engine import Completion, Engine, Job, Request, Sampling
from ascendchat.infer.prefix import LEAST_REUSE, LEAST_REUSE_ALONE
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
    found = pick(request.param, dtype="fp32", compiled=False)
    torch.set_float32_matmul_precision("highest")
    return found


def engine_of(
    model: GPT, device: Device, kernel: Attention | None = None, slots: int = 4, context: int = CONTEXT, **more: object
) -> Engine:
    place = device.bind(0)
    kernel = kernel or Sdpa()
    sizes = {"slots": slots, "context": context, "least_reuse": LEAST_REUSE, **more}
    return Engine(model.to(place), kernel, make.tokenizer(), device, place, **sizes)  # type: ignore[arg-type]


def plain(model: GPT, device: Device) -> Engine:
    """Prompts are read whole, and nothing is kept."""
    return engine_of(model, device, slots=16, reuse=False, prefill_tokens=100_000)


def words(draw: random.Random, model: GPT, count: int) -> list[int]:
    return [draw.randrange(model.shape.vocab) for _ in range(count)]


def greedy(count: int = 8) -> Sampling:
    return Sampling(max_tokens=count, temperature=0.0, stop_tokens=(), tools=False, logprobs=True)


def assert_alike(found: Completion, expected: Completion) -> None:
    """The same tokens, and the same probabilities: one wrong key of a hundred hardly changes a token."""
    ids, forced, logprobs = expected.ids, expected.forced, expected.logprobs
    if found.finish_reason == "cancelled":
        ids, forced, logprobs = (column[: len(found.ids)] for column in (ids, forced, logprobs))
    assert (found.ids, found.forced) == (ids, forced)
    assert found.logprobs == pytest.approx(logprobs, abs=1e-4)


class Counted:
    """What a decoder really reads and copies."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.passes: list[int] = []  # tokens of each pass over prompts
        self.copies = 0
        decoder = engine.decoder
        prefill, copy = decoder.prefill, decoder.copy

        def counted(requests, slots, mode, starts=(), ends=()):  # type: ignore[no-untyped-def]
            self.passes.append(sum(ends) - sum(starts))
            return prefill(requests, slots, mode, starts, ends)

        def copied(copies):  # type: ignore[no-untyped-def]
            self.copies += sum(one.source != one.target for one in copies)
            copy(copies)

        monkeypatch.setattr(decoder, "prefill", counted)
        monkeypatch.setattr(decoder, "copy", copied)

    def take(self) -> int:
        read, self.passes = sum(self.passes), []
        return read


@pytest.mark.slow
@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("name", MODELS)
def test_the_next_turn_of_a_conversation_reads_only_what_is_new(
    device: Device, monkeypatch: pytest.MonkeyPatch, name: str, late: int
) -> None:
    """Three conversations in turn in an engine with three slots: the rings of their slots have turned."""
    model, draw = make.model(21, **MODELS[name]), random.Random(1)
    engine, alone = engine_of(model, device, slots=3), plain(model, device)
    engine.ahead = late
    counted = Counted(engine, monkeypatch)
    rows = [words(draw, model, 100) for _ in range(3)]
    for turn in range(4):
        for number in (0, 1, 2):
            request = Request(rows[number], greedy(9))
            (found,), (expected,) = engine.generate([request]), alone.generate([request])
            assert_alike(found, expected)
            known = 100 + (turn - 1) * 20 + 9 if turn else 0  # prompt and answer before; its last token was not read
            assert found.cached_tokens == (known - 1 if turn else 0)
            assert counted.take() == len(rows[number]) - found.cached_tokens
            rows[number] = [*rows[number], *found.ids, *words(draw, model, 11)]


@pytest.mark.parametrize("name", MODELS)
def test_samples_of_one_prompt_read_it_once(device: Device, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model, draw = make.model(22, **MODELS[name]), random.Random(2)
    engine, alone = engine_of(model, device, slots=8), plain(model, device)
    counted = Counted(engine, monkeypatch)
    prompts = [words(draw, model, count) for count in (150, 200)]
    requests = [
        Request(prompt, Sampling(max_tokens=10, temperature=1.0, seed=seed, stop_tokens=(), logprobs=True))
        for prompt in prompts
        for seed in range(4)
    ]
    found = engine.generate(requests)
    assert counted.take() == 150 + 200 + 3 + 3
    assert counted.copies == 6
    assert [answer.cached_tokens for answer in found] == [0, 149, 149, 149, 0, 199, 199, 199]
    for request, answer in zip(requests, found):
        assert_alike(answer, alone.generate([request])[0])
    assert len({tuple(answer.ids) for answer in found}) == 8


@pytest.mark.parametrize("pieces", [None, 48])
def test_other_ends_behind_a_common_beginning_read_from_the_last_whole_block(
    device: Device, pieces: int | None
) -> None:
    """From slots that were read whole, in pieces, and behind a part of another slot."""
    model, draw = make.model(30, **MODELS["full"]), random.Random(7)
    engine, alone = engine_of(model, device, slots=6, prefill_tokens=pieces), plain(model, device)
    system = words(draw, model, 270)
    for common, reused in ((270, 0), (100, 64), (140, 128), (200, 192), (262, 256), (63, 0), (130, 128)):
        request = Request([*system[:common], *words(draw, model, 10)], greedy(6))
        (found,) = engine.generate([request])
        assert found.cached_tokens == reused
        assert_alike(found, alone.generate([request])[0])


def test_a_prompt_that_comes_again_while_it_is_answered_costs_one_token(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, draw = make.model(23, **MODELS["full"]), random.Random(3)
    engine = engine_of(model, device)
    counted = Counted(engine, monkeypatch)
    prompt = words(draw, model, 120)
    first = engine.add(Request(prompt, greedy(30)))
    for _ in range(10):
        engine.step()
    assert not first.done
    counted.take()
    (again,) = engine.generate([Request(prompt, greedy(30))])
    assert counted.take() == 1
    while not first.done:
        engine.step()
    assert_alike(again, first.completion)
    assert_alike(again, plain(model, device).generate([first.request])[0])


def test_without_reuse_everything_is_read_again(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    model, draw = make.model(23, **MODELS["full"]), random.Random(3)
    engine = engine_of(model, device, reuse=False)
    counted = Counted(engine, monkeypatch)
    request = Request(words(draw, model, 120), greedy(3))
    found = engine.generate([request, request, request])
    assert counted.take() == 360
    assert [answer.cached_tokens for answer in found] == [0, 0, 0]


def test_new_weights_forget_what_the_old_ones_computed(device: Device) -> None:
    model, later = make.model(24, **MODELS["full"]), make.model(25, **MODELS["full"])
    engine, draw = engine_of(model, device), random.Random(4)
    request = Request(words(draw, model, 120), greedy())
    engine.generate([request])
    waiting = engine.add(Request(words(draw, model, 90), greedy(20)))
    engine.step()
    engine.load(later.state_dict(), 1)
    assert waiting.done
    (found,) = engine.generate([request])
    assert found.cached_tokens == 0
    assert found.ids == plain(later, device).generate([request])[0].ids
    assert engine.generate([request])[0].cached_tokens == 119


def test_load_waits_for_prompts_that_are_half_read(device: Device) -> None:
    model, later = make.model(24, **MODELS["full"]), make.model(25, **MODELS["full"])
    engine, draw = engine_of(model, device, prefill_tokens=32), random.Random(4)
    request = Request(words(draw, model, 120), greedy())
    expected = plain(model, device).generate([request])[0].ids
    job = engine.add(request)
    engine.step()
    assert 0 < job.cached < 120
    engine.load(later.state_dict(), 1)
    assert (job.completion.ids, job.completion.version) == (expected, 0)


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
    while not all(job.done for job in jobs):
        engine.step()
    for job in jobs:
        assert_alike(job.completion, alone.generate([job.request])[0])


@pytest.mark.slow
def test_idle_rows_and_rows_that_run_on_leave_what_is_kept_as_it_is(device: Device) -> None:
    """Slot 0 is left while slot 1 goes on for many steps, then its conversation comes back."""
    for name in MODELS:
        model, draw = make.model(27, **MODELS[name]), random.Random(6)
        for late in (0, 1):
            engine, alone = engine_of(model, device, slots=2), plain(model, device)
            engine.ahead = late
            short, long = Request(words(draw, model, 100), greedy(3)), Request(words(draw, model, 30), greedy(40))
            first, other = engine.add(short), engine.add(long)
            while len(other.completion.ids) < 25:
                engine.step()
            assert first.done
            row = [*short.prompt, *first.completion.ids, *words(draw, model, 3)]
            again = engine.add(Request(row, greedy(20)))
            while not (again.done and other.done):
                engine.step()
            assert again.completion.cached_tokens == 102
            assert_alike(again.completion, alone.generate([again.request])[0])
            assert_alike(other.completion, alone.generate([long])[0])


# ---- whatever happens, the answers stay the same --------------------------------------------------


def random_sampling(draw: random.Random) -> Sampling:
    ways: list[dict[str, object]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": draw.randrange(99)},
        {"temperature": 1.2, "top_k": 20, "seed": draw.randrange(99)},
        {"temperature": 0.8, "repetition_penalty": 1.3, "seed": draw.randrange(99)},
        {"temperature": 0.0, "allowed_tokens": tuple(range(draw.randrange(3, 200)))},
    ]
    return Sampling(
        **{
            **draw.choice(ways),
            "max_tokens": draw.randint(1, 20),
            "stop_tokens": (5, 6),
            "logprobs": draw.random() < 0.8,
        }
    )  # type: ignore[arg-type]


def random_prompt(draw: random.Random, model: GPT, before: Sequence[Job]) -> list[int]:
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


def play(engine: Engine, draw: random.Random, model: GPT, count: int) -> list[Job]:
    """Requests come while others run; some are cancelled."""
    jobs: list[Job] = []
    while len(jobs) < count or not all(job.done for job in jobs):
        if len(jobs) < count and draw.random() < 0.6:
            prompt = random_prompt(draw, model, jobs)
            for _ in range(draw.choice((1, 1, 1, 3))):
                jobs.append(engine.add(Request(prompt, random_sampling(draw))))
        if draw.random() < 0.05:
            engine.cancel(draw.choice(jobs or [engine.add(Request([1]))]))
        engine.step()
        assert engine.decoder.held.tolist() == engine.decoder.length.tolist(), "kernels that ask the host"
    return jobs


def played() -> list[object]:
    """Every model with the usual kernel and every kernel with one model; when all tests run the other pairs, and the
    usual kernel for longer."""
    usual, *others = Sdpa(), Reference(), Eager()
    first = [*((name, usual) for name in MODELS), *(("full", kernel) for kernel in others)]
    later = [(name, kernel, 60) for name in MODELS for kernel in others if name != "full"]
    later += [(name, usual, 150) for name in MODELS]
    return [pytest.param(name, kernel, 60, id=f"{name}-{kernel.name}") for name, kernel in first] + [
        pytest.param(name, kernel, count, id=f"{name}-{kernel.name}-{count}", marks=pytest.mark.slow)
        for name, kernel, count in later
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kernel", "count"), played())
def test_random_requests_with_common_beginnings_are_answered_as_if_alone(
    device: Device, name: str, kernel: Attention, count: int
) -> None:
    model, draw = make.model(28, **MODELS[name]), random.Random(f"{name} {kernel.name}")
    alone = plain(model, device)
    reused = 0
    for late, tokens in ((0, None), (1, 48)):
        engine = engine_of(model, device, kernel, slots=draw.choice((2, 3, 6)), prefill_tokens=tokens)
        engine.ahead = late
        jobs = play(engine, draw, model, count // 2)
        reused += sum(job.completion.cached_tokens for job in jobs)
        for job, expected in zip(jobs, alone.generate([job.request for job in jobs])):
            assert_alike(job.completion, expected)
    assert reused > 5 * count, "or this compares nothing"


def test_forced_tokens_are_kept_like_others(device: Device) -> None:
    """A calculator's result lies in the cache behind the call; the next turn goes on behind both."""
    follows, answer = make.calculator_script()
    model = make.scripted(follows)
    start = make.tokenizer().specials["<|assistant_start|>"]
    for late in (0, 1):
        engine = engine_of(model, device, Reference(), slots=2)
        engine.ahead = late
        prompt = [*range(40), start]
        (first,) = engine.generate([Request(prompt, Sampling(temperature=0.0))])
        row = [*prompt, *answer, make.tokenizer().specials["<|assistant_end|>"], 1, start]
        (second,) = engine.generate([Request(row, Sampling(temperature=0.0))])
        assert first.ids == second.ids == answer
        assert engine.decoder.held.tolist() == engine.decoder.length.tolist()
        assert second.cached_tokens in (len(prompt) + len(answer) - 1, len(prompt) + len(answer))


@pytest.mark.slow
def test_compiled_steps_leave_what_is_kept_as_it_is() -> None:
    """Two rows, of which one ends earlier, and then the next turns of both: one step to compile. What is compiled gives
    the tokens and probabilities of what is not, which test_engine.py compares with the reference."""
    device = pick("cpu", compiled=True)
    model, draw = make.model(29, seq_len=40, window_pattern="SL", dim=16, depth=2), random.Random(9)
    engine = engine_of(model, device, slots=2, context=100, compiled=True)
    alone = engine_of(model, device, slots=2, context=100, reuse=False)
    requests = [Request(words(draw, model, 50), greedy(count)) for count in (4, 20)]
    answers = engine.generate(requests)
    for number in range(2):
        said = [*requests[number].prompt, *answers[number].ids]
        requests.append(Request([*said, *words(draw, model, 5)], greedy(10)))
    answers += engine.generate(requests[2:])
    assert [answer.cached_tokens for answer in answers[2:]] == [53, 69]
    assert [count for count, _ in engine.decoder._models] == [2]
    for request, answer in zip(requests, answers):
        assert_alike(answer, alone.generate([request])[0])


def test_a_device_that_works_on_its_own_reads_short_prompts_anew(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All samples of a short prompt in one pass, without a copy; of a long one the second goes on behind the first."""
    model, draw = make.model(30), random.Random(10)
    engine = engine_of(model, device, slots=8, least_reuse=LEAST_REUSE_ALONE, prefill_tokens=16384)
    alone, counted = plain(model, device), Counted(engine, monkeypatch)
    short, long = (words(draw, model, count) for count in (LEAST_REUSE_ALONE, LEAST_REUSE_ALONE + 2))
    for prompt, passes, copies in ((short, [8 * len(short)], 0), (long, [len(long), 7], 7)):
        answers = engine.generate([Request(prompt, greedy(3))] * 8)
        assert (counted.passes, counted.copies) == (passes, copies)
        counted.passes.clear()
        (expected,) = alone.generate([Request(prompt, greedy(3))])
        for answer in answers:
            assert_alike(answer, expected)
