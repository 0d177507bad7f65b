"""The length of a run of `base`: tokens, steps and batch by the flags, or by the clock (--minutes), which chooses depth
and rows too.

    split, steps = plan_run(config, train_model, corpora, saved, say)

With --minutes the speed is measured on the text, and text that would be read too often ends the run sooner.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ascendchat.checkpoint import Checkpoint
from ascendchat.chips import KINDS, Chip
from ascendchat.config.train import USUAL_DEPTH, USUAL_ROW, BaseConfig
from ascendchat.data.corpus import Corpus, TextRows
from ascendchat.data.loader import MicroBatch
from ascendchat.data.mixture import MixtureLoader
from ascendchat.errors import UserError
from ascendchat.parallel import collectives
from ascendchat.sizes.batch import MIN_STEPS, Split, batch_for, default_token_budget, optimizer_tokens
from ascendchat.sizes.memory import training, usable
from ascendchat.sizes.shape import Shape
from ascendchat.train.loop import until_it_fits
from ascendchat.train.model import TrainModel
from ascendchat.train.rows import share_out, total_flag

SPEED_SECONDS = 2.0  # an H200 had its lasting speed after one
KEPT_SPEED = 0.94  # of the measured speed is what a run keeps, besides the optimizer: a warm chip, other text
MAX_PASSES = 2.0  # depth 12 on 50 M tokens: 1.078 bits per byte after 2.0 passes, 1.085 after 2.4, 1.23 after 5.4
MIN_DEPTH, MAX_DEPTH = 2, 64  # that --minutes chooses
MAX_PARAMETERS = 14  # of such a model for a token of text
FEW_ROWS, MIN_ROW, MORE_STEPS = 2, 256, 1.2  # where --minutes chooses the rows: of a step; tokens; to be worth it
FP8_GAIN = 1.15  # what 8-bit products add to the speed
TIME_LEFT = 1.04  # times the time of a run, besides the optimizer, is what twice its steps take

Corpora = Sequence[tuple[Corpus, float]]  # with their weights in the mixture


def shape_of(config: BaseConfig, vocab: int, depth: int | None = None) -> Shape:
    """Shape of the model that the flags describe; `depth` if they name none."""
    return Shape.from_depth(
        config.depth or depth or USUAL_DEPTH,
        vocab=vocab,
        seq_len=config.max_seq_len or USUAL_ROW,
        window_pattern=config.window_pattern,
        dim=config.dim,
        head_dim=config.head_dim,
        kv_heads=config.kv_heads,
    )


def token_budget(config: BaseConfig, shape: Shape) -> int:
    """Token budget of the flags, but for --steps and --minutes, which win over it."""
    if config.target_flops is not None:
        return config.tokens or max(1, int(config.target_flops / shape.train_flops_per_token))
    return config.tokens or default_token_budget(shape, config.target_param_data_ratio)


def steps_of(config: BaseConfig, shape: Shape, train_model: TrainModel, tokens: int, total: int) -> tuple[Split, int]:
    """Split `total` tokens a step, or the batch of the flags, over the devices; also the steps over `tokens`."""
    flag = total_flag(config.total_batch_size)
    total = config.total_batch_size or total
    split = share_out(config, shape, train_model.device, total, flag=flag, packaged=train_model.packaged)
    return split, config.num_iterations or max(1, round(tokens / split.total))


def timed(fits: int, corpora: Corpora, seq_len: int, extra: int = 0, total_batch: int | None = None) -> tuple[int, int]:
    """Tokens and batch of a run with time for `fits` tokens. A step takes that of `extra` of them for the optimizer, a
    third of its time at most, unless its batch is `given`. No more than MAX_PASSES over the text; time left over goes
    into smaller steps."""
    least, room = seq_len, fits
    while least < 2 * extra:
        least *= 2
    for _ in range(2):  # the batch follows the tokens
        fits = max(1, int(room / (1 + extra / (total_batch or batch_for(fits, least)))))
    tokens = max(1, int(fits * min(1.0, MAX_PASSES / passes(corpora, fits))))
    batch, usual = batch_for(tokens, least, 2 * MIN_STEPS), batch_for(tokens, least)
    while batch < tokens and room < (TIME_LEFT if batch < usual else 1.0) * tokens * (1 + extra / batch):
        batch *= 2
    return tokens, total_batch or batch


def passes(corpora: Corpora, tokens: int) -> float:
    """Number of times that a run of `tokens` reads the corpus that it reads most often."""
    whole = sum(weight for _, weight in corpora)
    return max(tokens * weight / whole / corpus.tokens for corpus, weight in corpora)


def expected_token_budget(config: BaseConfig, shape: Shape, chip: Chip) -> int:
    """Tokens that fit in --minutes by the chip's data sheet."""
    speed, world = (
        chip.flops * KINDS[chip.device_type].mfu * (FP8_GAIN if config.fp8 and chip.fp8 else 1.0),
        collectives.world(),
    )
    chips = world.nodes if chip.device_type == "cpu" else world.size  # ranks of a machine share its cores
    return max(1, int(chips * speed * (config.minutes or 0.0) * 60 / shape.train_flops_per_token))


def depth_for(config: BaseConfig, corpora: Corpora, chip: Chip) -> int:
    """The deepest model for which --minutes are enough to read the text MAX_PASSES times, or as many tokens as it is
    worth, if that is less. Small models on 4.8 M tokens, two passes each: the larger, the fewer bits per byte, up to
    14 parameters for a token of text (docs/log.md); beyond that nothing was tried."""
    vocab, whole = corpora[0][0].vocab_size, int(MAX_PASSES / passes(corpora, 1))
    best = 0
    for depth in range(MIN_DEPTH, MAX_DEPTH + 1):
        try:
            shape = shape_of(config, vocab, depth)
        except UserError:  # --head-dim or --kv-heads are for other widths
            continue
        needed = min(token_budget(config, shape), whole)
        large = shape.total_parameters > MAX_PARAMETERS * whole / MAX_PASSES
        held = training(shape, chip, collectives.world().size, 1, config.activation_checkpointing)
        fits = sum(held.values()) <= usable(chip)
        if best and (large or not fits or needed > expected_token_budget(config, shape, chip)):
            break
        best = depth
    return best or MIN_DEPTH


def sizes_for(config: BaseConfig, corpora: Corpora, chip: Chip) -> tuple[int, int]:
    """Depth and tokens per row for --minutes, where they are not given: the longest rows of which there is time for
    MIN_STEPS steps of FEW_ROWS, unless shorter ones hardly give more steps. Two cores of a Neoverse N1, 2.0 M tokens,
    --minutes 4, depth 2: rows of 2048 gave 2.203 bits per byte after 239 s, of 512 1.998 after 267 s."""
    depth, row = config.depth or depth_for(config, corpora, chip), config.max_seq_len or USUAL_ROW
    free = not (config.max_seq_len or config.total_batch_size or config.gradient_accumulation_steps)

    def seen(row: int) -> tuple[int, float]:
        """Tokens that there is time for, and steps."""
        shape = shape_of(replace(config, max_seq_len=row), corpora[0][0].vocab_size, depth)
        fits = expected_token_budget(config, shape, chip)
        tokens, total = timed(fits, corpora, row, optimizer_tokens(shape))
        return fits, tokens / total

    while free and row > MIN_ROW:
        (fits, steps), (_, more) = seen(row), seen(row // 2)
        if fits >= MIN_STEPS * max(FEW_ROWS, collectives.world().size) * row or more < MORE_STEPS * steps:
            break
        row //= 2
    agreed = torch.tensor([float(depth), float(row)], device=collectives.place())
    collectives.all_reduce(agreed, "min")  # chips of several kinds
    return int(agreed[0].item()), int(agreed[1].item())


def first_batch(train_model: TrainModel, split: Split, corpora: Corpora, seed: int) -> MicroBatch:
    """This rank's first micro-batch of the text."""
    rows, rank, world = split.rows, collectives.world().rank, collectives.world().size
    sources = [(TextRows(corpus, split.seq_len, seed), weight) for corpus, weight in corpora]
    batch = MixtureLoader(sources, rows * world).batch(0, rank * rows, (rank + 1) * rows)
    inputs, targets = (torch.from_numpy(array).to(train_model.place) for array in (batch.inputs, batch.targets))
    return MicroBatch(inputs, targets, batch.lengths, split.total)


def measured_speed(train_model: TrainModel, batch: MicroBatch) -> float:
    """Tokens a second of this rank, over one micro-batch again and again."""
    tokens = batch.inputs.numel()
    weight = torch.tensor(1.0 / tokens, device=train_model.place)
    train_model.mean_over(tokens)
    started, done = 0.0, 0
    with train_model.forgetting_gradients():
        while not started or time.perf_counter() - started < SPEED_SECONDS:
            train_model.forward_backward(batch, weight, weight)
            train_model.device.synchronize()
            done = done + tokens if started else 0  # the first one compiles
            started = started or time.perf_counter()
        return done / (time.perf_counter() - started)


def measured_token_budget(
    config: BaseConfig, train_model: TrainModel, corpora: Corpora, split: Split, say: Callable[[str], None]
) -> int:
    """Tokens that fit in --minutes, alike on all ranks: from the speed with the rows of `split`, or as many as fit."""
    splits, speeds = [split], [0.0]

    def trial() -> None:
        speeds.append(measured_speed(train_model, first_batch(train_model, splits[-1], corpora, config.seed)))

    def smaller() -> bool:
        less = splits[-1].smaller()
        splits.append(less or split)
        return less is not None

    until_it_fits(trial, smaller, train_model.model.zero_grad, train_model.model, train_model.device, say)
    pace = torch.tensor(speeds[-1], device=collectives.place())
    collectives.all_reduce(pace, "min")  # a step waits for the slowest
    return max(1, int(pace.item() * collectives.world().size * (config.minutes or 0.0) * 60 * KEPT_SPEED))


def plan_run(
    config: BaseConfig, train_model: TrainModel, corpora: Corpora, saved: Checkpoint | None, say: Callable[[str], None]
) -> tuple[Split, int]:
    """Batch and steps: from the flags, or from the speed that was measured for --minutes."""
    shape, device = train_model.model.shape, train_model.device
    tokens = token_budget(config, shape)
    split, steps = steps_of(config, shape, train_model, tokens, batch_for(tokens, shape.seq_len))
    if config.minutes is None:
        return split, steps
    total_batch = split.total if config.total_batch_size or config.gradient_accumulation_steps else None
    if saved and "steps" in saved.state:  # not a model that was imported: train_stage refuses it
        total = saved.state["total_batch"]
        tokens = saved.state["steps"] * total
    else:
        arguments = corpora, shape.seq_len, optimizer_tokens(shape), total_batch
        if total_batch is None:
            tokens, total = timed(expected_token_budget(config, shape, device.chip), *arguments)
            split, _ = steps_of(config, shape, train_model, tokens, total)  # likely that of the run: compiled only once
        tokens, total = timed(measured_token_budget(config, train_model, corpora, split, say), *arguments)
    if total_batch is None:
        return steps_of(config, shape, train_model, tokens, total)
    return split, config.num_iterations or max(1, round(tokens / total_batch))
