"""Learning rates, momentum and weight decay as pure functions of the step, and how they follow batch and horizon.

Every value can be computed for any step alone, so a resumed run continues exactly. No torch here.

    from ascendchat.sizes.schedule import lr_scale, momentum, rates, weight_decay
"""

from __future__ import annotations

import math
from dataclasses import dataclass

REFERENCE_BATCH = 2**19  # tokens per step at which the rates below were tuned
REFERENCE_TOKENS = 12 * (12 * 12 * 768**2 + 32768 * 768)  # horizon of depth 12: 12 tokens per scaling parameter
REFERENCE_DIM = 768
BATCH_EXPONENT = 0.383  # optimal batch grows as horizon ** 0.383
MIN_BATCH = 2**16  # batches below this do not lower the rates further

MATRIX_DECAY = 0.28
MAX_SHRINK = 0.02  # of a matrix per step: in a run of a few hundred steps the rule would shrink faster than it learns
WARMUP_STEPS = 40
WARMDOWN_SHARE = 0.65  # share of the run that lowers the learning rate
FINAL_LR = 0.05  # of the full rate
MOMENTUM = (0.85, 0.97, 0.90)  # first step, after the ramp, last step
MOMENTUM_STEPS = 400
AVERAGED_SHARE, SNAPSHOTS = 0.1, 8  # the last part of the run, and about how many weights of it are averaged
MTP_WEIGHT = (0.4, 2 / 3)  # multi-token prediction: weight at step 0, share of the run after which it is 0

MATRIX_RATE = 0.02  # Muon, whose update has the same size at every width; also of the gates (AdamW)
WIDTH_RATES = {"head": 0.008, "embedding": 0.3, "value_embeddings": 0.15}  # AdamW, x (dim / 768) ** -0.5
FIXED_RATES = {"residual_scalars": 0.005, "skip_scalars": 0.5, "smear_backout": 0.2, "shifts": 0.1}  # AdamW


def batch_scale(total_batch: int) -> float:
    """Factor on every learning rate: sqrt(batch / 2^19), and for batches below 2^16 what it is there, 0.35.

    The root alone starves small batches: with 2^13 tokens per step (a small model on an H200, 9.3 M tokens) a factor of
    0.125 gave 1.565 bits per byte, 0.25 gave 1.523, 0.375 gave 1.513.
    """
    return math.sqrt(max(total_batch, MIN_BATCH) / REFERENCE_BATCH)


def rates(
    dim: int,
    total_batch: int,
    *,
    matrix: float | None = None,
    embedding: float | None = None,
    unembedding: float | None = None,
    scalar: float | None = None,
) -> dict[str, float]:
    """Full learning rate of every parameter group: all follow the batch, the three tables also the width. A rate that
    is given is, like the constants above, that of width 768 and 2^19 tokens per step."""
    overrides = {"matrices": matrix, "head": unembedding, "embedding": embedding, "skip_scalars": scalar}
    if embedding is not None:
        overrides["value_embeddings"] = embedding / 2
    if scalar is not None:
        overrides["residual_scalars"] = scalar / 100
    batch = batch_scale(total_batch)
    width = (dim / REFERENCE_DIM) ** -0.5
    full = {"matrices": MATRIX_RATE, **WIDTH_RATES, **FIXED_RATES}
    full |= {name: rate for name, rate in overrides.items() if rate is not None}
    return {name: rate * (width if name in WIDTH_RATES else 1.0) * batch for name, rate in full.items()}


def full_decay(total_batch: int, tokens: int, asked: float | None = None) -> float:
    """Weight decay of the matrices at step 0: the total shrinking over a run is the same at every batch and horizon,
    that of MATRIX_DECAY at depth 12, or of what was asked for. By default no step shrinks by more than MAX_SHRINK."""
    decay = MATRIX_DECAY if asked is None else asked
    even = decay * (total_batch / REFERENCE_BATCH) * (REFERENCE_TOKENS / tokens)
    max_decay = MAX_SHRINK / MATRIX_RATE if asked is None else math.inf
    return min(even, max_decay) / batch_scale(total_batch)


@dataclass(frozen=True)
class Curve:
    """The learning rate over a run."""

    warmup: int = WARMUP_STEPS  # steps up
    warmdown: float = WARMDOWN_SHARE  # share of the run that goes down
    final: float = FINAL_LR  # of the full rate, at the end


def warmdown_start(steps: int, warmdown: float = WARMDOWN_SHARE) -> int:
    """First step at which the learning rate falls."""
    return steps - round(warmdown * steps)


def lr_scale(
    step: int, steps: int, *, warmup: int = WARMUP_STEPS, warmdown: float = WARMDOWN_SHARE, final: float = FINAL_LR
) -> float:
    """Factor on every learning rate at `step` (from 0): linear up, flat, linear down to `final`."""
    up = (step + 1) / warmup if step < warmup else 1.0
    start = warmdown_start(steps, warmdown)
    if step <= start or steps <= start:
        return up
    left = max(0.0, (steps - step) / (steps - start))
    return min(up, left + (1 - left) * final)


def finetuning_scale(step: int, steps: int, form: str, warmup: int, final: float = 0.0) -> float:
    """Factor on the learning rate of a fine-tuning at `step` (from 0): linear up, then down to `final` by a cosine, by
    a line, or not at all (constant). As transformers has it, but that the first step already learns."""
    if step < warmup:
        return (step + 1) / warmup
    if form.startswith("constant") or steps <= warmup:
        return 1.0
    done = (step - warmup) / (steps - warmup)
    left = 0.5 * (1 + math.cos(math.pi * done)) if form == "cosine" else 1 - done
    return left + (1 - left) * final


def momentum(
    step: int,
    steps: int,
    *,
    values: tuple[float, float, float] = MOMENTUM,
    ramp: int = MOMENTUM_STEPS,
    warmdown: float = WARMDOWN_SHARE,
) -> float:
    """Momentum of Muon at `step`: up over the first steps (all of the flat part in a short run), down with the rate."""
    first, peak, last = values
    start = warmdown_start(steps, warmdown)
    ramp = max(1, min(ramp, start))
    if step < ramp:
        return first + (peak - first) * step / ramp
    if step <= start or steps <= start:
        return peak
    return peak + (last - peak) * min(1.0, (step - start) / (steps - start))


def weight_decay(step: int, steps: int, full: float) -> float:
    """Weight decay of the matrices at `step`: a cosine from `full` to 0 at the end of the run."""
    return full * 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))


def averaged_snapshots(step: int, steps: int) -> int:
    """Count the snapshots in the weight average after `step`. They are taken at even distances, the last step's among
    them; the mean of the last weights is rid of the noise of small batches."""
    tail = round(AVERAGED_SHARE * steps)
    every = max(1, tail // SNAPSHOTS)
    return max(0, tail // every - -(-(steps - 1 - step) // every))


def mtp_weight(step: int, steps: int, values: tuple[float, float] = MTP_WEIGHT) -> float:
    """Weight at `step` of multi-token prediction, the loss of the token after next: what is two tokens away shapes the
    early training, and the end of the run is spent on the next token alone."""
    full, until = values
    return full * max(0.0, 1.0 - step / steps / until)
