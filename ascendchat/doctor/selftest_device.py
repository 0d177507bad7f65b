"""One process of `ascendchat selftest`: goes through items on the device, and writes a line before and behind each.

    python -m ascendchat.doctor.selftest_device ANSWERS TYPE|"" quick|whole DEVICES ITEM ...

It ends when the device does nothing any more; selftest.py starts another one for the items that are left.
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
from ascendchat.doctor.selftest_case import Verdict, too_many
from ascendchat.doctor.selftest_operators import Bench, Skip, Wrong
from ascendchat.engine import sampling
from ascendchat.errors import UserError
from ascendchat.sizes.shape import Shape

DEAD = "the device does nothing any more, without an error (dead queue)"
SMALL = Shape.from_depth(2, vocab=512, seq_len=64, dim=128, head_dim=64, window_pattern="SL")
COUNTER = "LAUNCH_COUNTER"  # names a module with reset(), launches() and aicpu(): a simulator's, a profiler's


def versions(bench: Bench) -> dict[str, Any]:
    """torch, torch_npu and CANN belong together."""
    software = bench.device.software()
    wheel, cann = software.get("torch_npu", ""), software.get("CANN", "")
    if wheel and base(wheel) != base(torch.__version__):
        raise Wrong(f"torch_npu {wheel} beside torch {torch.__version__}: their versions must be equal")
    if wheel and cann and not fits(wheel, cann):
        raise Wrong(f"torch_npu {wheel} belongs to CANN {cann_for(wheel)}, this is {cann}; see `ascendchat doctor`")
    return {}


# ---- memory -------------------------------------------------------------------------------------


def memory(bench: Bench) -> dict[str, Any]:
    """Half of the memory can be had; more than there is cannot, and the device lives on."""
    total = _memory_of(bench)
    look = getattr(torch.get_device_module(bench.place), "mem_get_info", None)
    if look and (free := look()[0]) < total // 2:
        raise Skip(f"only {free / 2**30:.1f} of {total / 2**30:.1f} GiB are free: other processes use this device")
    parts, size = [], total // 32
    try:
        for _ in range(16):
            parts.append(torch.empty(size, dtype=torch.uint8, device=bench.place))
            parts[-1][-1] = len(parts)
        if [int(part[-1]) for part in parts] != list(range(1, len(parts) + 1)):
            raise Wrong("what was written to memory did not stay there")
    except torch.OutOfMemoryError:
        raise Wrong(f"out of memory at {len(parts) * size / 2**30:.1f} of {total / 2**30:.1f} GiB") from None
    try:
        torch.empty(2 * total, dtype=torch.uint8, device=bench.place)
        raise Wrong("twice the memory that there is was given without an error")
    except torch.OutOfMemoryError:
        pass
    parts.clear()
    bench.device.release()
    _alive(bench)
    return {"memory_gib": round(total / 2**30, 2)}


def queue(bench: Bench) -> dict[str, Any]:
    """With no memory left, an operator without workspace works, and nothing is silently dropped behind it. Whether an
    operator that has one ends the queue is a fact, not a fault: training then starts again with a smaller batch."""
    total, x = _memory_of(bench), torch.zeros(2**20, device=bench.place)
    q, k, v = heads = [part.to(bench.place).requires_grad_() for part in operators.rows_of_heads(bench, rows=16)]
    kernel, _ = bench.kernel()
    kernel.prepare(bench.length, [bench.length], bench.place)
    out = kernel.dense(q, k, v, bench.length, 0.1)
    towards = torch.ones_like(out)
    bench.device.synchronize()
    with _full(bench, total), contextlib.suppress(RuntimeError):
        x.tanh_()
        bench.device.synchronize()
    _alive(bench)
    raised, room = False, [torch.empty_like(part) for part in heads]  # for the gradients, not for their workspace
    with _full(bench, total):
        try:
            room.clear()
            out.backward(towards)
            bench.device.synchronize()
        except RuntimeError:
            raised = True
    return {"gradient_out_of_memory": raised, "queue_dies_of_workspace": not bench.device.responds()}


def _memory_of(bench: Bench) -> int:
    if bench.device.type == "cpu":
        raise Skip("the memory of the host is not the device's own")
    return bench.device.memory().total


@contextlib.contextmanager
def _full(bench: Bench, total: int) -> Iterator[None]:
    """All memory taken, but for what is left over."""
    held, size = [], total // 16
    while size >= 2**21:
        try:
            held.append(torch.empty(size, dtype=torch.uint8, device=bench.place))
        except torch.OutOfMemoryError:
            size //= 2
    try:
        yield
    finally:
        held.clear()
        bench.device.release()


def _alive(bench: Bench) -> None:
    if not bench.device.responds():
        raise Wrong(DEAD)


# ---- decoding -----------------------------------------------------------------------------------


def _cache(bench: Bench) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One query for each of LENGTHS, and caches whose places behind that length show when they are seen."""
    shape, rows, longest = bench.shape, len(LENGTHS), max(LENGTHS)
    q = bench.drawn(rows, 1, shape.heads, shape.head_dim)
    k, v = (bench.drawn(rows, longest, shape.kv_heads, shape.head_dim) for _ in range(2))
    for row, length in enumerate(LENGTHS):
        v[row, length:] = 8.0
    return q, k, v


def decode(bench: Bench) -> dict[str, Any]:
    """The kernel that decodes, at the lengths where kernels were found wrong, and a few queries behind a cache."""
    shape, scale = bench.shape, bench.shape.head_dim**-0.5
    kernel, why = bench.kernel(decodes=True)
    if "is wrong on this device" in why:
        raise Wrong(why)
    known: Any = kernel, REFERENCE, bench.device.type, bench.device.dtype, shape.head_dim
    if fault := decode_fault(*known):
        raise Wrong(f"{kernel.name}: {fault}")
    mask = cache_mask(1, max(LENGTHS), torch.tensor(LENGTHS), max(LENGTHS))
    found = operators.against_float64(
        bench,
        f"{kernel.name}, one query",
        lambda q, k, v: kernel.one_query(q, k, v, LENGTHS, scale),
        lambda q, k, v: operators.exact_attention(q, k, v, mask, scale),
        _cache(bench),
        gradients=False,
    )
    lengths = torch.tensor([4 * QUERIES, QUERIES + 3])
    inputs = [bench.drawn(2, QUERIES, shape.heads, shape.head_dim)]
    inputs += [bench.drawn(2, 4 * QUERIES, shape.kv_heads, shape.head_dim) for _ in range(2)]
    several = cache_mask(QUERIES, 4 * QUERIES, lengths, QUERIES)
    return found | operators.against_float64(
        bench,
        f"{kernel.name}, {QUERIES} queries",
        lambda q, k, v: kernel.cached(q, k, v, lengths.to(bench.place), QUERIES, scale),
        lambda q, k, v: operators.exact_attention(q, k, v, several, scale),
        inputs,
        gradients=False,
    )


def mask(bench: Bench) -> dict[str, Any]:
    """A known fault of hardware (vllm-ascend issue 15503): masks of one query are ignored from the 513th key on. Our
    decoding passes lengths instead, others pass masks."""
    kernel, _ = bench.kernel()
    lengths, longest, scale = torch.tensor(LENGTHS), max(LENGTHS), bench.shape.head_dim**-0.5
    hidden = cache_mask(1, longest, lengths, longest)
    return operators.against_float64(
        bench,
        f"{kernel.name}, mask of one query",
        lambda q, k, v: kernel.cached(q, k, v, lengths.to(bench.place), longest, scale),
        lambda q, k, v: operators.exact_attention(q, k, v, hidden, scale),
        _cache(bench),
        gradients=False,
    )


def sampling_noise(bench: Bench) -> dict[str, Any]:
    """The same bits as on the CPU, where float64 says that every step is exact."""
    keys = torch.tensor([sampling.seed_keys(seed) for seed in (0, 1, -7, 2**70)])
    position, blocks = torch.tensor([0, 1, 2047, 100000]), sampling.columns(4096)
    right = sampling.uniform(keys.double(), position, blocks.double())
    found = sampling.uniform(*(part.to(bench.place) for part in (keys.float(), position, blocks))).cpu().double()
    if not torch.equal(found, right):
        raise Wrong(f"{int((found != right).sum())} of {right.numel()} numbers differ from the CPU's")
    return {}


def graph(bench: Bench) -> dict[str, Any]:
    """A captured graph gives what its operators give, with new inputs and, where the host tells them, new lengths."""
    if not bench.device.chip.graphs:
        raise Skip("this chip has no captured graphs")
    dim, ops = bench.shape.dim, bench.ops
    weight, static = bench.drawn(dim, dim, scale=0.05).to(bench.place), bench.drawn(4, dim).to(bench.place)

    def step(x: torch.Tensor) -> torch.Tensor:
        return ops.mlp(ops.rms_norm(x), weight, weight)

    replay = bench.device.graph(step, static)
    if replay is step:
        raise Wrong("no graph was captured")
    for number in range(3):
        new = bench.drawn(4, dim).to(bench.place)
        if not torch.equal(replay(new).clone(), step(new)):
            raise Wrong(f"replay {number + 1} is not what the operators give")
    kernel, _ = bench.kernel(decodes=True)
    if not kernel.host_lengths:
        return {}
    held, scale = list(LENGTHS), bench.shape.head_dim**-0.5
    q, k, v = (part.to(bench.place) for part in _cache(bench))
    attend = bench.device.graph(
        lambda: kernel.one_query(q, k, v, held, scale), updates=lambda: [{"actual_seq_lengths_kv": list(held)}]
    )
    for number in range(4):
        held[:] = [1 + (length + 37 * number) % max(LENGTHS) for length in LENGTHS]
        if not torch.equal(attend().clone(), kernel.one_query(q, k, v, held, scale)):
            raise Wrong(f"replay {number + 1} has not taken the new lengths")
    return {}


def hot_path(bench: Bench) -> dict[str, Any]:
    """No operator of a training step or of a sampled token runs on the slow scalar processor of the chip."""
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


def _training_step(bench: Bench) -> Callable[[], object]:
    from ascendchat.bench import train as timing
    from ascendchat.config.train import BenchTrainConfig
    from ascendchat.parallel.context import Context
    from ascendchat.parallel.world import World
    from ascendchat.sizes.batch import fit_split
    from ascendchat.train.model import build

    here = Context(bench.device, World(), bench.place, lambda text: None)
    split = fit_split(SMALL, bench.device.chip, 1, 4 * SMALL.seq_len, rows=4)
    return timing.Bench(build(BenchTrainConfig(), SMALL, here), split, 0).step


def _sampled_token(bench: Bench) -> Callable[[], object]:
    from ascendchat.bench.decode import two_byte_tokenizer
    from ascendchat.engine.engine import Engine, Request, Sampling
    from ascendchat.nn.attention import choose
    from ascendchat.nn.gpt import GPT

    device, place = bench.device, bench.place
    model = GPT(SMALL, device.operators())
    model.initialise(0)
    model = model.requires_grad_(False).to_compute(device.dtype).to(place)
    kernel, _ = choose(device.type, device.dtype, SMALL.head_dim, decodes=True)
    engine = Engine(model, kernel, two_byte_tokenizer(SMALL.vocab), device, place, slots=2, context=64, graphs=False)
    ways: Any = {"max_tokens": 40, "temperature": 0.9, "top_k": 20, "top_p": 0.9, "stop_tokens": (), "tools": False}
    for seed in range(2):
        engine.add(Request([7, 8, 9 + seed], Sampling(seed=seed, **ways)))
    return engine.step


ITEMS: dict[str, Callable[[Bench], dict[str, Any]]] = {
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
    """What the file says about the device, and how many of them there are."""
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


def perform(bench: Bench, name: str) -> Verdict:
    """One item; whatever it raises is its verdict."""
    began = time.monotonic()
    try:
        facts = ITEMS[name](bench)
        bench.device.synchronize()
        found = Verdict(name, "held", facts=facts)
    except Skip as why:
        return Verdict(name, "skipped", str(why))
    except Wrong as what:
        found = Verdict(name, "failed", str(what))
    except Exception as error:  # noqa: BLE001 (the log has it whole)
        traceback.print_exc()
        first = next(iter(str(error).splitlines()), "")
        found = Verdict(name, "failed", f"{type(error).__name__}: {first}")
    if found.verdict == "failed" and DEAD not in found.said and not bench.device.responds():
        found.said += f"; {DEAD}"
    found.seconds = time.monotonic() - began
    return found


def main(argv: Sequence[str]) -> int:
    """The process."""
    answers, device_type, size, devices, *names = argv
    with open(answers, "a", encoding="utf-8") as file:

        def write(row: dict[str, Any]) -> None:
            print(json.dumps(row), file=file, flush=True)

        device = pick(device_type or None)
        bench = Bench(device, device.bind(0), size == "quick")
        write({"about": (found := about(device))})
        if too_many(int(devices), found):
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
