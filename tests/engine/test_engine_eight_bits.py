"""Keys and values kept in 8 bits: the answers are those of a cache that rounds, and nothing else changes."""

from __future__ import annotations

import random
from typing import Any

import engine_models as make
import pytest
import torch

from ascendchat.chips import find
from ascendchat.device import Device, DeviceOptions, pick
from ascendchat.device.cuda import CUDA
from ascendchat.device.npu import NPU
from ascendchat.engine import cache
from ascendchat.engine.cache import EIGHT_BITS, MAX_EIGHT_BITS, KVCache, Narrowed, kv_cache_dtype, narrowed
from ascendchat.engine.engine import Completion, Request, Sampling
from ascendchat.errors import UserError
from ascendchat.nn.attention import Reference, Sdpa
from ascendchat.sizes.shape import Shape

CONTEXT = 200


@pytest.fixture(scope="module")
def device() -> Device:
    """A CPU."""
    return pick("cpu")


def answers(device: Device, cache_dtype: torch.dtype | None, sizes: dict[str, Any]) -> list[list[Completion]]:
    """Of three rounds: prompts of many lengths, then prompts behind what the cache has, in other slots, too."""
    made = make.model(5, **sizes)
    engine = make.engine(made, device, Sdpa(), context=CONTEXT, cache_dtype=cache_dtype, min_reuse=16)
    draw, rounds = random.Random(3), []
    start = [draw.randrange(made.shape.vocab) for _ in range(90)]
    first, second, third = [(0, 5), (0, 70), (0, 20), (0, 150)], [(64, 10), (90, 3), (64, 40), (0, 30)], [(90, 30)] * 2
    for number, plan in enumerate((first, second, third)):
        requests = []
        for seed, (shared, more) in enumerate(plan):
            prompt = start[:shared] + [draw.randrange(made.shape.vocab) for _ in range(more)]
            heat = 0.0 if seed % 2 else 0.9
            sampling = Sampling(20, heat, seed=seed, stop_tokens=(), tools=False, logprobs=True)
            requests.append(Request(start if number == 0 and seed == 1 else prompt, sampling))
        rounds.append(engine.generate(requests))
    return rounds


SIZES = {"ring": {"seq_len": 16}, "grouped": {"kv_heads": 2, "window_pattern": "L"}}


@pytest.mark.parametrize("name", SIZES)
def test_answers_are_those_of_a_cache_that_rounds(device: Device, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, found = (answers(device, kept, SIZES[name]) for kept in (None, EIGHT_BITS))
    monkeypatch.setattr(cache, "narrowed", lambda x, dtype: narrowed(x, EIGHT_BITS).to(dtype))
    assert found == answers(device, None, SIZES[name])
    assert [[a.cached_tokens for a in each] for each in found] == [[a.cached_tokens for a in each] for each in plain]
    assert name == "ring" or any(a.cached_tokens for each in found for a in each), "some went on behind what was there"
    assert found != plain, "else nothing was rounded"


def test_such_a_cache_has_half_the_keys_and_values(device: Device) -> None:
    shape = Shape.from_depth(4, vocab=64)
    sizes = {"slots": 3, "context": 4096, "dtype": torch.bfloat16, "device": device.bind(0)}
    whole, half = KVCache(shape, **sizes), KVCache(shape, **sizes, cache_dtype=EIGHT_BITS)  # type: ignore[arg-type]
    pairs = list(zip(whole.keys + whole.values, half.keys + half.values))
    assert all(a.shape == b.shape and a.nbytes == 2 * b.nbytes for a, b in pairs)
    assert half.raw[0].dtype == torch.bfloat16, "what is mixed with the next token stays whole"


def test_numbers_that_are_too_large_are_the_largest(device: Device) -> None:
    x = torch.tensor([1e6, -1e6, 449.0, 3.3, 0.0])
    assert narrowed(x, EIGHT_BITS).float().tolist() == [MAX_EIGHT_BITS, -MAX_EIGHT_BITS, MAX_EIGHT_BITS, 3.25, 0.0]
    assert narrowed(x, torch.float32) is x


def test_a_kernel_sees_what_the_cache_would_give_back() -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 5, 2, 8, generator=draw) for _ in range(3))
    kernel: Any = Narrowed(Reference(), EIGHT_BITS)
    keys, values = (narrowed(x, EIGHT_BITS).float() for x in (k, v))
    assert torch.equal(kernel.dense(q, k, v, 5, 0.3), Reference().dense(q, keys, values, 5, 0.3))
    lengths = torch.tensor([5, 5])
    assert torch.equal(kernel.cached(q, k, v, lengths, 5, 0.3), Reference().cached(q, keys, values, lengths, 5, 0.3))
    assert kernel.name == "reference, keys and values as float8_e4m3fn", "results say what was measured"
    assert kernel.slices


def test_chips_without_such_numbers_refuse(device: Device) -> None:
    assert kv_cache_dtype("auto", device) is None
    assert kv_cache_dtype("fp8", device) is EIGHT_BITS
    for name, kind in (("H200", CUDA), ("A100-80GB", CUDA), ("Ascend910B3", NPU), ("Ascend950PR_9589", NPU)):
        other = kind(None, find(name), DeviceOptions())
        if name == "H200":
            assert kv_cache_dtype("fp8", other) is EIGHT_BITS
            continue
        with pytest.raises(UserError, match="is for CUDA chips from Ada and Hopper on"):
            kv_cache_dtype("fp8", other)
