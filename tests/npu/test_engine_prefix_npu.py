"""Reused tokens and prompts in pieces on the simulated NPU: the tokens are those of the CPU, steps launch no more."""

from __future__ import annotations

import random

import engine_models as make
import pytest
import torch

import cannsim
from ascendchat.device import Device
from ascendchat.engine.engine import Engine, Request, RequestState, Sampling
from ascendchat.engine.prefix import MIN_REUSE
from ascendchat.nn.attention import Attention, Eager, Sdpa, choose
from ascendchat.nn.gpt import GPT

CONTEXT = 200
SIZES: dict[str, dict[str, object]] = {
    "full": {"seq_len": 256, "window_pattern": "L", "kv_heads": 2, "dim": 64, "head_dim": 16},
    "ring": {"seq_len": 40, "window_pattern": "SSL", "kv_heads": 2, "dim": 64, "head_dim": 16},
}
STEP_LAUNCHES = 163  # of a step of three layers, as before anything was kept between requests


def engine_of(model: GPT, device: Device, kernel: Attention, **more: object) -> Engine:
    place = device.bind(0)
    sizes = {"slots": 4, "context": CONTEXT, "min_reuse": MIN_REUSE, **more}
    return Engine(model.to(place), kernel, make.tokenizer(), device, place, **sizes)  # type: ignore[arg-type]


def greedy(count: int) -> Sampling:
    return Sampling(max_tokens=count, temperature=0.0, stop_tokens=(), tools=False)


def conversation(engine: Engine, vocab: int) -> list[RequestState]:
    """Three samples of a prompt, another end behind its beginning, and then the next turn of two of the answers."""
    draw = random.Random(3)
    prompt = [draw.randrange(vocab) for _ in range(100)]
    rows = [prompt, prompt, prompt, [*prompt[:80], *(draw.randrange(vocab) for _ in range(9))]]
    jobs = [engine.add(Request(row, greedy(6))) for row in rows]
    while not all(job.done for job in jobs):
        engine.step()
    for job in (jobs[0], jobs[3]):
        row = [*job.request.prompt, *job.completion.ids, *(draw.randrange(vocab) for _ in range(20))]
        jobs.append(engine.add(Request(row, greedy(6))))
    while not all(job.done for job in jobs):
        engine.step()
    return jobs


@pytest.mark.parametrize(
    ("name", "kernel", "graphs"),
    [("full", Sdpa(), True), ("ring", Sdpa(), False), ("full", Eager(), False), ("ring", Eager(), True)],
    ids=["sdpa-full-graphs", "sdpa-ring", "eager-full", "eager-ring-graphs"],
)
def test_float32_tokens_are_those_of_the_cpu(device: Device, name: str, kernel: Attention, graphs: bool) -> None:
    host, model = make.model(1, **SIZES[name]), make.model(1, device.operators(), **SIZES[name])
    engine = engine_of(model, device, kernel, graphs=graphs, prefill_tokens=64 if graphs else None)
    jobs = conversation(engine, host.shape.vocab)
    again = 64 if name == "full" else 0  # the rings have turned
    assert [job.completion.cached_tokens for job in jobs] == [0, 99, 99, again, 105, 94]
    for job in jobs:
        assert job.completion.ids == make.greedy(host, job.request.prompt, 6, CONTEXT)


@pytest.mark.parametrize(("name", "dtype"), [("full", torch.float16), ("ring", torch.bfloat16)], ids=str)
def test_the_fused_kernel_goes_on_behind_cached_tokens(device: Device, name: str, dtype: torch.dtype) -> None:
    host = make.model(1, **SIZES[name]).to_compute(dtype).to_compute(torch.float32)
    model = make.model(1, device.operators(), **SIZES[name]).to_compute(dtype)
    kernel, reason = choose("npu", dtype, 16)
    assert reason == "attention: npu_fusion"
    jobs = conversation(engine_of(model, device, kernel), host.shape.vocab)
    assert sum(job.completion.cached_tokens for job in jobs) > 300
    exact = total = 0
    for job in jobs:
        row = list(job.request.prompt)
        for token in job.completion.ids:
            logits = make.logits_of(host, row, CONTEXT)
            assert logits[token] >= logits.max() - (0.05 if dtype == torch.float16 else 0.4)
            exact, total = exact + (int(logits.argmax()) == token), total + 1
            row.append(token)
    assert exact > 0.85 * total


def test_a_step_launches_as_much_as_before(device: Device) -> None:
    sizes: dict[str, object] = {"seq_len": 16, "kv_heads": 2, "dim": 64, "head_dim": 16}
    model = make.model(1, device.operators(), **sizes).to_compute(torch.float16)
    engine = engine_of(model, device, choose("npu", torch.float16, 16)[0], context=48, graphs=False)
    for length in (5, 9):
        engine.add(Request([*range(length)], greedy(30)))
    for _ in range(2):
        engine.step()
    device.synchronize()
    cannsim.reset()
    engine.step()
    device.synchronize()
    assert sum(cannsim.launches().values()) <= STEP_LAUNCHES, cannsim.launches()
