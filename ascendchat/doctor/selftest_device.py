"""One process of `ascendchat selftest`: runs items on the device, and writes a line before and after each.

    python -m ascendchat.doctor.selftest_device ANSWERS TYPE|"" quick|whole DEVICES ITEM ...

It ends when the device stops responding; selftest.py starts another one for the items that are left.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from ascendchat.device import Device, pick
from ascendchat.device.attention import LENGTHS, QUERIES, REFERENCE, cache_mask, decode_fault
from ascendchat.device.cann import cann_for, fits
from ascendchat.doctor import selftest_operators as operators
from ascendchat.doctor.checks_npu import base
from ascendchat.doctor.selftest_case import ItemResult, more_than_visible
from ascendchat.doctor.selftest_operators import SelftestBench, Skip, Wrong
from ascendchat.engine import sampling
from ascendchat.errors import UserError
from ascendchat.sizes.shape import Shape

DEAD = "the device does nothing any more, without an error (dead queue)"
SMALL = Shape.from_depth(2, vocab=512, seq_len=64, dim=128, head_dim=64, window_pattern="SL")
COUNTER = "LAUNCH_COUNTER"  # names a module with reset(), launches() and aicpu(): a simulator's, a profiler's


def versions(bench: SelftestBench) -> dict[str, Any]:
    """Check that torch, torch_npu and CANN belong together."""
    software = bench.device.software()
    wheel, cann = software.get("torch_npu", ""), software.get("CANN", "")
    if wheel and base(wheel) != base(torch.__version__):
        raise Wrong(f"torch_npu {wheel} beside torch {torch.__version__}: their versions must be equal")
    if wheel and cann and not fits(wheel, cann):
        raise Wrong(f"torch_npu {wheel} belongs to CANN {cann_for(wheel)}, this is {cann}; see `ascendchat doctor`")
    return {}


# ---- memory -------------------------------------------------------------------------------------


def memory(bench: SelftestBench) -> dict[str, Any]:
    """Check that half of the memory can be allocated, that more than all of it cannot, and that the device survives."""
    total = _memory_of(bench)
    mem_get_info = getattr(torch.get_device_module(bench.torch_device), "mem_get_info", None)
    if mem_get_info and (free := mem_get_info()[0]) < total // 2:
        raise Skip(f"only {free / 2**30:.1f} of {total / 2**30:.1f} GiB are free: other processes use this device")
    parts, size = [], total // 32
    try:
        for _ in range(16):
            parts.append(torch.empty(size, dtype=torch.uint8, device=bench.torch_device))
            parts[-1][-1] = len(parts)
        if [int(part[-1]) for part in parts] != list(range(1, len(parts) + 1)):
            raise Wrong("what was written to memory did not stay there")
    except torch.OutOfMemoryError:
        raise Wrong(f"out of memory at {len(parts) * size / 2**30:.1f} of {total / 2**30:.1f} GiB") from None
    try:
        torch.empty(2 * total, dtype=torch.uint8, device=bench.torch_device)
        raise Wrong("twice the memory that there is was given without an error")
    except torch.OutOfMemoryError:
        pass
    parts.clear()
    bench.device.release()
    _alive(bench)
    return {"memory_gib": round(total / 2**30, 2)}


def queue(bench: SelftestBench) -> dict[str, Any]:
    """Check that with no memory left an operator without workspace works, and nothing is silently dropped after it. If
    an operator with a workspace ends the queue, this is a fact, not a fault: training then starts again with a
    smaller batch."""
    total, x = _memory_of(bench), torch.zeros(2**20, device=bench.torch_device)
    q, k, v = heads = [part.to(bench.torch_device).requires_grad_() for part in operators.rows_of_heads(bench, rows=16)]
    kernel, _ = bench.kernel()
    kernel.prepare(bench.length, [bench.length], bench.torch_device)
    out = kernel.dense(q, k, v, bench.length, 0.1)
    grad_out = torch.ones_like(out)
    bench.device.synchronize()
    with _full(bench, total), contextlib.suppress(RuntimeError):
        x.tanh_()
        bench.device.synchronize()
    _alive(bench)
    raised, gradients = False, [torch.empty_like(part) for part in heads]  # for the gradients, not for their workspace
    with _full(bench, total):
        try:
            gradients.clear()
            out.backward(grad_out)
            bench.device.synchronize()
        except RuntimeError:
            raised = True
    return {"gradient_out_of_memory": raised, "queue_dies_of_workspace": not bench.device.responds()}


def _memory_of(bench: SelftestBench) -> int:
    if bench.device.type == "cpu":
        raise Skip("the memory of the host is not the device's own")
    return bench.device.memory().total


@contextlib.contextmanager
def _full(bench: SelftestBench, total: int) -> Iterator[None]:
    """Take all memory, down to blocks of 2 MiB, inside this context."""
    blocks, size = [], total // 16
    while size >= 2**21:
        try:
            blocks.append(torch.empty(size, dtype=torch.uint8, device=bench.torch_device))
        except torch.OutOfMemoryError:
            size //= 2
    try:
        yield
    finally:
        blocks.clear()
        bench.device.release()


def _alive(bench: SelftestBench) -> None:
    if not bench.device.responds():
        raise Wrong(DEAD)


# ---- decoding -----------------------------------------------------------------------------------


def _cache(bench: SelftestBench) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One query for each of LENGTHS, and a KV cache whose entries past that length would be noticed in the result."""
    shape, rows, longest = bench.shape, len(LENGTHS), max(LENGTHS)
    q = bench.random_tensor(rows, 1, shape.heads, shape.head_dim)
    k, v = (bench.random_tensor(rows, longest, shape.kv_heads, shape.head_dim) for _ in range(2))
    for row, length in enumerate(LENGTHS):
        v[row, length:] = 8.0
    return q, k, v


def decode(bench: SelftestBench) -> dict[str, Any]:
    """Check the decode kernel at the lengths where kernels were found wrong, and with a few queries behind a cache."""
    shape, scale = bench.shape, bench.shape.head_dim**-0.5
    kernel, why = bench.kernel(decodes=True)
    if "is wrong on this device" in why:
        raise Wrong(why)
    setup: Any = kernel, REFERENCE, bench.device.type, bench.device.dtype, shape.head_dim
    if fault := decode_fault(*setup):
        raise Wrong(f"{kernel.name}: {fault}")
    mask = cache_mask(1, max(LENGTHS), torch.tensor(LENGTHS), max(LENGTHS))
    errors = operators.against_float64(
        bench,
        f"{kernel.name}, one query",
        lambda q, k, v: kernel.one_query(q, k, v, LENGTHS, scale),
        lambda q, k, v: operators.exact_attention(q, k, v, mask, scale),
        _cache(bench),
        gradients=False,
    )
    lengths = torch.tensor([4 * QUERIES, QUERIES + 3])
    inputs = [bench.random_tensor(2, QUERIES, shape.heads, shape.head_dim)]
    inputs += [bench.random_tensor(2, 4 * QUERIES, shape.kv_heads, shape.head_dim) for _ in range(2)]
    cache = cache_mask(QUERIES, 4 * QUERIES, lengths, QUERIES)
    return errors | operators.against_float64(
        bench,
        f"{kernel.name}, {QUERIES} queries",
        lambda q, k, v: kernel.cached(q, k, v, lengths.to(bench.torch_device), QUERIES, scale),
        lambda q, k, v: operators.exact_attention(q, k, v, cache, scale),
        inputs,
        gradients=False,
    )


def mask(bench: SelftestBench) -> dict[str, Any]:
    """Check for a known fault of hardware (vllm-ascend issue 15503): masks of one query are ignored from the 513th key
    on. Our decoding passes lengths instead, others pass masks."""
    kernel, _ = bench.kernel()
    lengths, longest, scale = torch.tensor(LENGTHS), max(LENGTHS), bench.shape.head_dim**-0.5
    visible_keys = cache_mask(1, longest, lengths, longest)
    return operators.against_float64(
        bench,
        f"{kernel.name}, mask of one query",
        lambda q, k, v: kernel.cached(q, k, v, lengths.to(bench.torch_device), longest, scale),
        lambda q, k, v: operators.exact_attention(q, k, v, visible_keys, scale),
        _cache(bench),
        gradients=False,
    )


def sampling_noise(bench: SelftestBench) -> dict[str, Any]:
    """Check that the sampling noise has the same bits as on the CPU, where float64 proves every step exact."""
    keys = torch.tensor([sampling.seed_keys(seed) for seed in (0, 1, -7, 2**70)])
    position, blocks = torch.tensor([0, 1, 2047, 100000]), sampling.columns(4096)
    expected = sampling.uniform(keys.double(), position, blocks.double())
    noise = sampling.uniform(*(part.to(bench.torch_device) for part in (keys.float(), position, blocks))).cpu().double()
    if not torch.equal(noise, expected):
        raise Wrong(f"{int((noise != expected).sum())} of {expected.numel()} numbers differ from the CPU's")
    return {}


def graph(bench: SelftestBench) -> dict[str, Any]:
    """Check that a captured graph gives what its operators give, with new inputs and new lengths given by the host."""
    if not bench.device.chip.graphs:
        raise Skip("this chip has no captured graphs")
    dim, ops = bench.shape.dim, bench.ops
    weight, static = (
        bench.random_tensor(dim, dim, scale=0.05).to(bench.torch_device),
        bench.random_tensor(4, dim).to(bench.torch_device),
    )

    def step(x: torch.Tensor) -> torch.Tensor:
        return ops.mlp(ops.rms_norm(x), weight, weight)

    replay = bench.device.graph(step, static)
    if replay is step:
        raise Wrong("no graph was captured")
    for number in range(3):
        new = bench.random_tensor(4, dim).to(bench.torch_device)
        if not torch.equal(replay(new).clone(), step(new)):
            raise Wrong(f"replay {number + 1} is not what the operators give")
    kernel, _ = bench.kernel(decodes=True)
    if not kernel.lengths_on_host:
        return {}
    lengths, scale = list(LENGTHS), bench.shape.head_dim**-0.5
    q, k, v = (part.to(bench.torch_device) for part in _cache(bench))
    attend = bench.device.graph(
        lambda: kernel.one_query(q, k, v, lengths, scale), updates=lambda: [{"actual_seq_lengths_kv": list(lengths)}]
    )
    for number in range(4):
        lengths[:] = [1 + (length + 37 * number) % max(LENGTHS) for length in LENGTHS]
        if not torch.equal(attend().clone(), kernel.one_query(q, k, v, lengths, scale)):
            raise Wrong(f"replay {number + 1} has not taken the new lengths")
    return {}


def hot_path(bench: SelftestBench) -> dict[str, Any]:
    """Check that no operator of a training step or of a sampled token runs on the slow scalar processor of the chip."""
    name = os.environ.get(COUNTER)
    if not name:
        raise Skip("nothing here counts the launches of the device")
    counter = importlib.import_module(name)
    facts: dict[str, Any] = {}
    for what, step in (("training", _training_step), ("decoding", _sampled_token)):
        if what == "training" and not bench.device.chip.trains:
            continue
        run = step(bench)
        run()  # compiles, allocates
        counter.reset()
        run()
        slow = counter.aicpu()
        facts[what] = sum(counter.launches().values())
        if slow:
            raise Wrong(f"{what}: {', '.join(f'{count} {name}' for name, count in slow.items())} on the AICPU")
    return {"launches": facts}


def _training_step(bench: SelftestBench) -> Callable[[], object]:
    from ascendchat.bench import train as timing
    from ascendchat.config.train import BenchTrainConfig
    from ascendchat.parallel.context import Context
    from ascendchat.parallel.world import World
    from ascendchat.sizes.batch import fit_split
    from ascendchat.train.model import build

    context = Context(bench.device, World(), bench.torch_device, lambda text: None)
    split = fit_split(SMALL, bench.device.chip, 1, 4 * SMALL.seq_len, rows=4)
    return timing.Bench(build(BenchTrainConfig(), SMALL, context), split, 0).step


def _sampled_token(bench: SelftestBench) -> Callable[[], object]:
    from ascendchat.bench.decode import two_byte_tokenizer
    from ascendchat.engine.engine import Engine, Request, Sampling
    from ascendchat.nn.attention import choose
    from ascendchat.nn.gpt import GPT

    device, torch_device = bench.device, bench.torch_device
    model = GPT(SMALL, device.operators())
    model.initialise(0)
    model = model.requires_grad_(False).to_compute(device.dtype).to(torch_device)
    kernel, _ = choose(device.type, device.dtype, SMALL.head_dim, decodes=True)
    engine = Engine(
        model, kernel, two_byte_tokenizer(SMALL.vocab), device, torch_device, slots=2, context=64, graphs=False
    )
    settings: Any = {"max_tokens": 40, "temperature": 0.9, "top_k": 20, "top_p": 0.9, "stop_tokens": (), "tools": False}
    for seed in range(2):
        engine.add(Request([7, 8, 9 + seed], Sampling(seed=seed, **settings)))
    return engine.step


ITEMS: dict[str, Callable[[SelftestBench], dict[str, Any]]] = {
    "versions": versions,
    "norm": operators.norm,
    "rotary": operators.rotary,
    "block": operators.block,
    "attention": operators.attention,
    "documents": operators.packed,
    "log-sum-exp": operators.logsumexps,
    "head-loss": operators.losses,
    "optimizer": operators.optimizer,
    "memory": memory,
    "queue": queue,
    "decode": decode,
    "mask": mask,
    "noise": sampling_noise,
    "graph": graph,
    "hot-path": hot_path,
}


def about(device: Device) -> dict[str, Any]:
    """Describe the device, and count the visible ones, for the result file."""
    return {
        "device": device.type,
        "chip": device.chip.name,
        "dtype": str(device.dtype).removeprefix("torch."),
        "simulated": device.type != "cpu" and "CANNSIM_HOME" in os.environ,
        "trains": device.chip.trains,
        "torch": torch.__version__,
        "software": device.software(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "visible": device.count(),
    }


def perform(bench: SelftestBench, name: str) -> ItemResult:
    """Run one item; whatever it raises becomes its result."""
    began = time.monotonic()
    try:
        facts = ITEMS[name](bench)
        bench.device.synchronize()
        result = ItemResult(name, "held", facts=facts)
    except Skip as why:
        return ItemResult(name, "skipped", str(why))
    except Wrong as what:
        result = ItemResult(name, "failed", str(what))
    except Exception as error:  # noqa: BLE001 (the log has it whole)
        traceback.print_exc()
        first = next(iter(str(error).splitlines()), "")
        result = ItemResult(name, "failed", f"{type(error).__name__}: {first}")
    if result.verdict == "failed" and DEAD not in result.said and not bench.device.responds():
        result.said += f"; {DEAD}"
    result.seconds = time.monotonic() - began
    return result


def main(argv: Sequence[str]) -> int:
    """Run the items named in `argv`."""
    answers, device_type, size, devices, *names = argv
    with open(answers, "a", encoding="utf-8") as file:

        def write(row: dict[str, Any]) -> None:
            print(json.dumps(row), file=file, flush=True)

        device = pick(device_type or None)
        bench = SelftestBench(device, device.bind(0), size == "quick")
        write({"about": (facts := about(device))})
        if more_than_visible(int(devices), facts):
            return 0  # selftest.py refuses that
        for name in names:
            write({"begun": name})
            write({"verdict": asdict(perform(bench, name))})
            device.release()
            if not device.responds():
                return 0  # a new process for the items that are left
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(f"ascendchat selftest: {error}")
