"""`ascendchat bench decode --depth 12 --batch-sizes 1,64,256`: how fast the engine generates on this device.

A random model answers random prompts through the real engine: cache, sampling, text and bookkeeping included. The
prompts are read and everything is compiled and recorded before the clock starts; what is timed are decoding steps with
all rows busy. The share of bandwidth counts the bytes a step must read, weights and the keys and values of the mean
length, against the chip's peak. The last line printed is one JSON object.
"""

from __future__ import annotations

import json
import time
from functools import partial
from typing import Any

import torch

from ascendchat.config import as_dict
from ascendchat.config.generate import BenchDecodeConfig
from ascendchat.data.tokenizer.tokenizer import SPECIALS, Tokenizer
from ascendchat.device import Device, pick
from ascendchat.engine.cache import kv_cache_dtype
from ascendchat.engine.engine import Engine, Request, Sampling
from ascendchat.errors import UserError
from ascendchat.nn.attention import choose
from ascendchat.nn.gpt import GPT
from ascendchat.parallel.context import Context, joined
from ascendchat.sizes.shape import Shape

TOLD = "context", "prompt_tokens", "new_tokens", "window_pattern", "kv_cache_dtype"
WARM_STEPS = 2  # passes of the timed round before the clock starts: the prompts, and one step behind them


def two_byte_tokenizer(vocab: int) -> Tokenizer:
    """A tokenizer of the wanted size, made of pairs of bytes."""
    extra = vocab - 256 - len(SPECIALS)
    if not 0 <= extra <= 65536:
        raise UserError(f"--vocab-size {vocab} must lie between {256 + len(SPECIALS)} and {65792 + len(SPECIALS)}")
    return Tokenizer([(pair // 256, pair % 256) for pair in range(extra)])


def requests_of(config: BenchDecodeConfig, batch: int) -> list[Request]:
    """Random prompts, a seed each, that end only at their length."""
    generator = torch.Generator().manual_seed(batch)
    prompts = torch.randint(0, config.vocab_size, (batch, config.prompt_tokens), generator=generator).tolist()
    sampling = partial(Sampling, config.new_tokens, config.temperature, config.top_k, stop_tokens=(), tools=False)
    return [Request(prompt, sampling(seed=seed)) for seed, prompt in enumerate(prompts)]


def measure(engine: Engine, requests: list[Request], device: Device) -> tuple[float, int]:
    """Seconds and steps of decoding with all rows busy."""
    engine.generate(requests)  # compiles, and records every graph that the timed round needs
    jobs = [engine.add(request) for request in requests]
    while min(job.launched for job in jobs) < WARM_STEPS:
        engine.step()
    device.synchronize()
    before, began = jobs[0].launched, time.perf_counter()
    while not all(job.done for job in jobs):
        engine.step()
    device.synchronize()
    return time.perf_counter() - began, jobs[0].launched - before


def read_bytes(shape: Shape, batch: int, length: float, size: int, cache_size: int) -> float:
    """Bytes that one step must read: the weights once, the cache of every row; `size`, `cache_size`: bytes a number."""
    return size * shape.read_parameters(batch) + cache_size * batch * shape.kv_elements(max(1, round(length)))


def run(config: BenchDecodeConfig) -> int:
    """Run `ascendchat bench decode`."""
    if config.prompt_tokens + config.new_tokens > config.context:
        raise UserError("--prompt-tokens and --new-tokens together must not exceed --context")
    with joined(pick(config.device_type, compiled=config.compile)) as here:
        return bench(config, here)


def bench(config: BenchDecodeConfig, here: Context) -> int:
    """Time every batch size, and print the table."""
    device, say = here.device, here.say
    shape = Shape.from_depth(config.depth, vocab=config.vocab_size, window_pattern=config.window_pattern)
    kernel, reason = choose(device.type, device.dtype, shape.head_dim, config.attention, decodes=True)
    say(reason)
    model = GPT(shape, device.operators())
    model.initialise(0)
    model = model.requires_grad_(False).to_compute(device.dtype).to(here.place)
    tokenizer, size = two_byte_tokenizer(config.vocab_size), model.head.element_size()
    cache_dtype = kv_cache_dtype(config.kv_cache_dtype, device)
    length = config.prompt_tokens + config.new_tokens / 2
    rows: list[dict[str, Any]] = []
    say(f"{'batch':>6} {'tok/s':>10} {'ms/step':>9} {'bandwidth':>10} {'memory GiB':>11}")
    for batch in config.batch_sizes:
        device.reset_peak()
        engine = Engine(
            model,
            kernel,
            tokenizer,
            device,
            here.place,
            slots=batch,
            context=config.context,
            compiled=device.compiles,
            cache_dtype=cache_dtype,
            reuse=False,
            prefill_tokens=2 * batch * config.context,  # all prompts before the first step
        )
        seconds, steps = measure(engine, requests_of(config, batch), device)
        read = read_bytes(shape, batch, length, size, cache_dtype.itemsize if cache_dtype else size)
        bandwidth = read * steps / seconds / device.chip.bandwidth
        row = {
            "batch": batch,
            "tokens_per_second": round(batch * steps / seconds),
            "step_ms": round(seconds / steps * 1e3, 4),
            "bandwidth_share": round(bandwidth, 4),
            "memory_peak_gib": round(device.memory().peak / 2**30, 3),
        }
        rows.append(row)
        speed = f"{batch:>6} {row['tokens_per_second']:>10,} {row['step_ms']:>9.3f}"
        say(f"{speed} {bandwidth:>10.1%} {row['memory_peak_gib']:>11.2f}")
        del engine
        device.release()
    facts = {"depth": config.depth, "chip": device.chip.name, "dtype": str(device.dtype).removeprefix("torch.")}
    facts |= {"attention": kernel.name, "compiled": device.compiles, "torch": torch.__version__}
    settings = as_dict(config)
    facts |= {name: settings[name] for name in TOLD}
    say(json.dumps({**facts, "results": rows}))
    return 0
