"""From model and horizon to total batch, device batch, accumulation, steps, hours and cost. No torch here.

    ascendchat plan --depth 12 --tokens 46000000 --chip H200

Batch rule: B = 2^round(log2(2^19 (D / D_d12)^0.383)) for D tokens of training (D_d12: the horizon of depth 12), then
halved until the run has at least 1,000 steps: a short run is short of steps, not of tokens. Measured on an H200: 98 M
tokens of depth 12 were clearly better in 701 steps than in 373; 9.3 M tokens of a small model gave 1.573 bits per byte
in 567 steps, 1.523 in 1,135 and 1.517 in 2,270.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

from ascendchat.chips import KINDS, Chip
from ascendchat.errors import UserError
from ascendchat.sizes.memory import training, usable
from ascendchat.sizes.schedule import BATCH_EXPONENT, REFERENCE_BATCH, REFERENCE_TOKENS
from ascendchat.sizes.shape import Shape

MIN_STEPS = 1000
MAX_ROWS = 2**20  # no device batch above this is ever searched


def default_token_budget(shape: Shape, ratio: float) -> int:
    """Training tokens: `ratio` per scaling parameter."""
    return max(1, int(ratio * shape.scaling_parameters))


def optimizer_tokens(shape: Shape) -> int:
    """Tokens whose passes take as many operations as a step of the optimizer: Muon's five rounds of three products for
    every matrix. 1.6e12 operations at depth 12, as many as for 2,000 tokens: a sixteenth of a step of 2^15."""
    sizes = ((min(size), max(size), count) for size, count in shape.matrices().items())
    return 5 * sum(count * (4 * n * n * m + 2 * n**3) for n, m, count in sizes) // shape.train_flops_per_token


def batch_for(tokens: int, seq_len: int = 1, min_steps: int = MIN_STEPS) -> int:
    """Tokens per step for a run of `tokens`: the rule at the top of this file; never less than one row."""
    ideal = REFERENCE_BATCH * (max(tokens, 1) / REFERENCE_TOKENS) ** BATCH_EXPONENT
    batch = 2 ** round(math.log2(ideal))
    while tokens // batch < min_steps and batch > seq_len:
        batch //= 2
    return max(batch, seq_len)  # a row is the smallest piece


@dataclass(frozen=True)
class Split:
    """total = devices x rows x accumulation x seq_len, exactly."""

    devices: int
    rows: int  # per device and micro-batch
    accumulation: int  # micro-batches per optimizer step
    seq_len: int

    @property
    def total(self) -> int:
        """Tokens per optimizer step."""
        return self.devices * self.rows * self.accumulation * self.seq_len

    def smaller(self) -> Split | None:
        """The next smaller device batch with the same total; None at one row. For a device that ran out of memory."""
        mine = self.rows * self.accumulation
        rows = next((r for r in range(self.rows - 1, 0, -1) if mine % r == 0), None)
        return None if rows is None else Split(self.devices, rows, mine // rows, self.seq_len)


def split(total: int, devices: int, seq_len: int, max_rows: int) -> Split:
    """Share `total` tokens out with at most `max_rows` rows per device.

    The fewest micro-batches, then the fewest rows that reach the total: powers of two split exactly; otherwise the
    total is raised by less than one row per device and micro-batch. It is never lowered.
    """
    rows_in_all = max(1, -(-total // seq_len))
    accumulation = max(1, -(-rows_in_all // (devices * max_rows)))
    rows = -(-rows_in_all // (devices * accumulation))
    return Split(devices, rows, accumulation, seq_len)


def split_fixed(total: int, devices: int, seq_len: int, rows: int) -> Split:
    """Share `total` tokens out with `rows` rows per device; the total is raised to the next multiple.

    With fewer rows when so many on every device would already be more than the total: the total decides.
    """
    rows = min(rows, max(1, -(-total // (devices * seq_len))))
    return Split(devices, rows, -(-max(total, 1) // (devices * rows * seq_len)), seq_len)


def largest_rows(fits: Callable[[int], bool], most: int = MAX_ROWS) -> int:
    """The largest power of two up to `most` for which `fits(rows)`; 0 when not even one row fits."""
    rows = 0
    while (bigger := rows * 2 or 1) <= most and fits(bigger):
        rows = bigger
    return rows


def fit_split(
    shape: Shape,
    chip: Chip,
    devices: int,
    total: int,
    *,
    rows: int | None = None,
    checkpointing: bool = False,
    beside: int = 0,
    packaged: Collection[str] = (),
) -> Split:
    """Share `total` tokens out for a training command: with the given rows, else with the most that fit beside
    so many bytes of something else. `packaged` as in memory.training."""
    if rows is not None:
        return split_fixed(total, devices, shape.seq_len, rows)
    room = usable(chip) - beside
    max_rows = largest_rows(lambda n: sum(training(shape, chip, devices, n, checkpointing, packaged).values()) <= room)
    if not max_rows:
        command = f"ascendchat plan --depth {shape.depth} --chip '{chip.name}' --devices {devices}"
        raise UserError(f"not even one row of {shape.seq_len} tokens fits {chip.name}; see what would: {command}")
    return split(total, devices, shape.seq_len, max_rows)


@dataclass(frozen=True)
class Fabric:
    """Assumptions about many nodes; `plan` has a flag for each."""

    hop: float = 20e-6  # seconds for a message between two nodes, however short
    jitter: float = 0.01  # standard deviation of a device's computing time, as a share of it


COLLECTIVES = 20  # exchanges per step: two for each of our optimizer's ten buckets, counted on simulated NPUs


def exchange_seconds(exchanged: int, chip: Chip, devices: int, fabric: Fabric) -> float:
    """Reduce-scatter and all-gather of `exchanged` bytes, as HCCL and NCCL do it on several nodes: among the g devices
    of a node, then among n nodes, where every device carries a g-th; each of those takes log2(n) rounds."""
    inner = min(devices, chip.devices_per_node)
    nodes = -(-devices // inner)
    seconds = exchanged * (inner - 1) / inner / chip.link if inner > 1 and chip.link else 0.0
    if nodes > 1:
        seconds += exchanged / inner * (nodes - 1) / nodes / chip.node_link
        seconds += COLLECTIVES * math.ceil(math.log2(nodes)) * fabric.hop
    return seconds


def slowest(devices: int) -> float:
    """Standard deviations by which the slowest of so many devices is behind the mean, for normal times."""
    return math.sqrt(2 * math.log(devices)) if devices > 1 else 0.0


@dataclass(frozen=True)
class _Duration:
    """Time and cost of a run."""

    mfu: float  # share of the peak that was assumed
    tokens_per_second: float
    step_seconds: float
    communication_seconds: float  # per step
    waiting_seconds: float  # per step, for the slowest device, beyond what a node waits
    hours: float
    device_hours: float
    cost: float | None


def duration(
    flops_per_token: float,
    exchanged: int,
    chip: Chip,
    total: Split,
    steps: int,
    mfu: float | None,
    price: float | None,
    recompute: float = 0.0,
    fabric: Fabric | None = None,
    in_one_node: int | None = None,
) -> _Duration:
    """Seconds from FLOPs and the share of the peak. `recompute` is the share of FLOPs done twice by checkpointing.

    `exchanged` is the bytes of the gradients, which are reduce-scattered, and of the weights, which are gathered, once
    per step; `in_one_node`: what one node alone would exchange, if that is less (memory.py). The share of the peak is
    that of one node, its own exchange included; what more nodes add comes on top.
    """
    fabric = fabric or Fabric()
    share = mfu if mfu is not None else KINDS[chip.device_type].mfu
    compute = total.total * flops_per_token * (1 + recompute) / (chip.flops * share * total.devices)
    node = min(total.devices, chip.devices_per_node)
    communication = exchange_seconds(exchanged, chip, total.devices, fabric)
    in_node = exchange_seconds(exchanged if in_one_node is None else in_one_node, chip, node, fabric)
    waiting = compute * fabric.jitter * (slowest(total.devices) - slowest(node))
    step = max(compute, in_node) + communication - in_node + waiting
    hours = steps * step / 3600
    cost = None if price is None else hours * total.devices * price
    return _Duration(share, total.total / step, step, communication, waiting, hours, hours * total.devices, cost)
