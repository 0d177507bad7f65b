"""The engine on the simulated NPU: the fused decode kernel runs, and the tokens are those of the CPU."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import engine_models as make
import pytest
import torch

import cannsim
from ascendchat.device import Device, pick
from ascendchat.engine.engine import Request, Sampling
from ascendchat.engine.request import Grammar
from ascendchat.nn.attention import Sdpa, choose
from ascendchat.nn.gpt import GPT

CONTEXT = 48


def requests(vocab: int, count: int, seed: int = 0) -> list[Request]:
    draw = random.Random(seed)
    greedy = partial(Sampling, temperature=0.0, stop_tokens=(), tools=False)
    return [
        Request([draw.randrange(vocab) for _ in range(draw.randint(1, 40))], greedy(max_tokens=draw.randint(1, 8)))
        for _ in range(count)
    ]


@torch.no_grad()
def almost_greedy(model: GPT, request: Request, ids: list[int], tolerance: float) -> float:
    """Every token is the CPU's likeliest one in float32, or within rounding of it; the share that is exactly it."""
    row, exact = list(request.prompt), 0
    for token in ids:
        logits = make.logits_of(model, row, CONTEXT)
        assert logits[token] >= logits.max() - tolerance
        exact += int(logits.argmax()) == token
        row.append(token)
    return exact / len(ids)


def test_float32_tokens_are_those_of_the_cpu(device: Device) -> None:
    sizes: dict[str, object] = {"dim": 64, "head_dim": 16, "seq_len": 12, "kv_heads": 2}
    host, model = make.model(1, **sizes), make.model(1, device.operators(), **sizes)
    engine = make.engine(model, device, Sdpa(), slots=3, context=CONTEXT)
    for batch in range(2):
        batch_requests = requests(host.shape.vocab, 5, batch)
        for request, answer in zip(batch_requests, engine.generate(batch_requests)):
            assert answer.ids == make.greedy(host, request.prompt, request.sampling.max_tokens, CONTEXT)


def test_the_fused_decode_kernel_runs_and_agrees(device: Device) -> None:
    dtype = torch.bfloat16
    sizes: dict[str, object] = {"seq_len": 16, "kv_heads": 2, "dim": 64, "head_dim": 16}
    host = make.model(1, **sizes).to_compute(dtype).to_compute(torch.float32)  # the same rounded weights
    model = make.model(1, device.operators(), **sizes).to_compute(dtype)
    kernel, reason = choose("npu", dtype, 16)
    assert reason == "attention: npu_fusion"
    engine = make.engine(model, device, kernel, slots=3, context=CONTEXT)
    cannsim.reset()
    asked = requests(host.shape.vocab, 8)
    answers = engine.generate(asked)
    launched = cannsim.launches()
    steps = len(engine.decoder.steps)
    assert steps >= 1
    assert launched["aclnnFusedInferAttentionScoreV3"] >= 3 * steps, "one per layer of every step that was recorded"
    assert launched["aclnnFlashAttentionScore"] % 3 == 0, "prompts go through the training kernel"
    shares = [almost_greedy(host, r, a.ids, 0.4) for r, a in zip(asked, answers)]
    assert sum(shares) / len(shares) > 0.9


def test_a_tool_result_is_forced_in_while_results_arrive_late(device: Device) -> None:
    follows, answer = make.calculator_script()
    engine = make.engine(make.scripted(follows), device, Sdpa(), slots=2)
    assert engine.lag == 1
    start = make.tokenizer().specials["<|assistant_start|>"]
    for found in engine.generate([Request([0] * n + [start], Sampling(temperature=0.0)) for n in (0, 3, 1)]):
        assert (found.ids, found.text) == (answer, "你好!")


def test_seeds_draw_the_same_tokens_as_on_the_cpu(device: Device) -> None:
    host, model = make.model(2, seq_len=16), make.model(2, device.operators(), seq_len=16)
    drawn = partial(Sampling, max_tokens=6, temperature=0.9, stop_tokens=())
    settings = [drawn(), drawn(top_k=9, seed=1), drawn(top_p=0.7, repetition_penalty=1.2, seed=2)]
    settings += [drawn(allowed_tokens=(5, 70, 33), seed=3), drawn(seed=4)]
    asked = [Request([7, 8, 9 + s], sampling) for s, sampling in enumerate(settings)]
    here = make.engine(host, pick("cpu"), Sdpa(), context=CONTEXT).generate(asked)
    there = make.engine(model, device, Sdpa(), context=CONTEXT).generate(asked)
    assert [answer.ids for answer in there] == [answer.ids for answer in here]


@pytest.mark.slow
def test_bias_penalties_tops_and_grammars_in_captured_graphs_equal_the_cpu(device: Device) -> None:
    host, model = make.model(2, seq_len=16), make.model(2, device.operators(), seq_len=16)
    ways: list[dict[str, Any]] = [
        {"logit_bias": ((5, 9.0), (70, -100.0)), "top_logprobs": 3},
        {"frequency_penalty": 2.0, "presence_penalty": 1.0},
        {"grammar": Grammar("regex", "[a-f]{3}[0-9]{2}"), "temperature": 0.9, "seed": 3},
        {"grammar": Grammar("json_schema", '{"enum": [1, true, "x"]}'), "frequency_penalty": 1.0, "top_logprobs": 20},
        {"temperature": 0.8, "top_k": 9, "seed": 4},
    ]
    usual = {"max_tokens": 7, "temperature": 0.0, "stop_tokens": (), "logprobs": True}
    asked = [Request([7, 8, 9 + i], Sampling(**{**usual, **ways[i % 5]})) for i in range(10)]
    here = make.engine(host, pick("cpu"), Sdpa(), slots=3, context=CONTEXT).generate(asked)
    engine = make.engine(model, device, Sdpa(), slots=3, context=CONTEXT)
    assert engine.lag == 1
    there = engine.generate(asked)
    assert engine.decoder.graphs
    assert [answer.text for answer in there[3::5]] == [answer.text for answer in here[3::5]]
    for one, other in zip(there, here):
        assert (one.ids, one.finish_reason) == (other.ids, other.finish_reason)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)
        assert [[token for token, _ in tops] for tops in one.tops] == [[t for t, _ in tops] for tops in other.tops]


def test_kept_rows_go_on_with_new_weights_in_the_same_graphs(device: Device) -> None:
    sizes: dict[str, object] = {"seq_len": 16, "dim": 64, "head_dim": 16}
    engines = [
        make.engine(make.model(1, device.operators(), **sizes), device, Sdpa(), slots=3, context=CONTEXT),
        make.engine(make.model(1, **sizes), pick("cpu"), Sdpa(), slots=3, context=CONTEXT),
    ]
    found = []
    for engine in engines:
        engine.generate(requests(engine.vocab, 4))  # captures
        captured = dict(engine.decoder.steps)
        jobs = [engine.add(Request([3, n, 5], Sampling(max_tokens=9, temperature=0.0, stop_tokens=()))) for n in (1, 2)]
        for _ in range(3):
            engine.step()
        engine.pause("keep")
        engine.load(make.model(2, **sizes).state_dict(), 7)
        engine.resume()
        while not all(job.done for job in jobs):
            engine.step()
        assert engine.decoder.steps == captured, "nothing was captured again"
        found.append([(job.completion.ids, job.completion.versions) for job in jobs])
    assert found[0] == found[1]
    assert [versions for _, versions in found[0]] == [[0] * 4 + [7] * 5] * 2


OLD_CHIP = """
import torch
import engine_models as make
from test_engine_npu import CONTEXT, almost_greedy, requests
from ascendchat.device import pick
from ascendchat.nn.attention import choose

device = pick("npu")
device.bind(0)
assert device.dtype == torch.float16 and not device.chip.graphs
kernel, reason = choose("npu", device.dtype, 16)
assert reason.startswith("attention: eager"), reason
sizes = dict(seq_len=16, kv_heads=2, dim=64, head_dim=16)
host = make.model(1, **sizes).to_compute(torch.float16).to_compute(torch.float32)
model = make.model(1, device.operators(), **sizes).to_compute(torch.float16)
asked = requests(host.shape.vocab, 4)
answers = make.engine(model, device, kernel, slots=2, context=CONTEXT).generate(asked)
shares = [almost_greedy(host, request, answer.ids, 0.05) for request, answer in zip(asked, answers)]
assert sum(shares) / len(shares) > 0.9, shares
"""


def test_chips_without_bf16_generate_in_fp16(on_npu: Callable[..., list[Any]]) -> None:
    on_npu(OLD_CHIP, chip="Ascend310P3", timeout=120)
