"""The one training loop: pretraining, mid-training, SFT, fine-tuning, preferences and RL are Stages of it. One device
or many is the same path.

    result = fit(stage, device, run, Options(save_every=500, eval_every=250))     # train/run.py does it in a run folder

A step: micro-batches forward and backward, then the optimizer. Losses are read one step late, so the device never
waits for the console. A signal and a loss that went wrong are agreed on by all ranks, since they travel with the loss.
"""

from __future__ import annotations

import gc
import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ascendchat.checkpoint import Checkpoint, Writer
from ascendchat.chips import KINDS
from ascendchat.config.train import TrainConfig
from ascendchat.device import Device, Mark, smi
from ascendchat.errors import OutOfMemory, UserError
from ascendchat.parallel import collectives
from ascendchat.processes import SMALLER
from ascendchat.runs.console import Console, Smooth, Telemetry, eta, speed
from ascendchat.runs.run import Run, old_models_notice
from ascendchat.train.profile import Profiler
from ascendchat.train.signals import Interrupted, StopSignals
from ascendchat.train.stage import Correction, Stage

FIRST_SCALE = 2.0**16  # of the loss, in fp16
GRADIENT = "gradient_square"  # of the norm, in reports
MAX_SKIPPED = 30  # steps in a row that overflow; after 16 of them the loss is no longer scaled


class _Due(NamedTuple):
    """Work that is due after a step."""

    save: bool
    evaluate: bool
    benchmark: bool
    sample: bool


@dataclass(frozen=True)
class Options:
    """Intervals, in steps, of saving, validating and sampling; each also happens after the last step. 0 or less: only
    after the last step (save_every), else never; eval_every 0: only after the last step."""

    save_every: int = 500
    eval_every: int = 250
    sample_every: int = 0
    log_every: int = 10
    keep: int = 2
    start: int = 0  # steps done by the checkpoint that was loaded
    unseen: bool = False  # the run was killed between saving and evaluating that checkpoint
    loss_scale: tuple[float, int] | None = None
    benchmark_every: int = 0
    profile: int = 0  # steps under the profiler
    again: str = "run the same command to continue"  # advice for a user who stopped the run

    @classmethod
    def of(cls, config: TrainConfig, saved: Checkpoint | None, benchmark_every: int = 0) -> Options:
        """Options from the command's flags and, when a run resumes, its checkpoint."""
        scale = saved.state.get("loss_scale") if saved else None
        without = " without --resume never" if config.resume == "never" else ""
        return cls(
            save_every=config.save_every,
            eval_every=config.eval_every,
            sample_every=config.sample_every,
            log_every=config.log_every,
            keep=config.keep,
            start=saved.step if saved else 0,
            loss_scale=(float(scale[0]), int(scale[1])) if scale else None,
            benchmark_every=benchmark_every,
            profile=config.profile,
            again=f"run the same command{without} to continue",
        )

    def profiler(self, last: int, device: Device, run: Run, console: Console) -> Profiler:
        """The profiler of --profile."""
        folder = run.folder / "profile"
        return Profiler(self.profile, device, folder, first=self.start, last=last, say=console.print)

    def due(self, step: int, last: int) -> _Due:
        """Work that is due after `step`; `last` is the last step of the run."""
        every = self.save_every, self.eval_every, self.benchmark_every, self.sample_every
        save, check, benchmark, sample = (step == last or (n > 0 and step % n == 0) for n in every)
        return _Due(
            save,
            check and self.eval_every >= 0,
            benchmark and self.benchmark_every > 0,
            sample and self.sample_every > 0,
        )


@dataclass
class Result:
    """State at the end of `fit`."""

    step: int
    metrics: dict[str, float] = field(default_factory=dict)
    stopped_by: int = 0  # the signal, if one


class Diverged(UserError):
    """The loss is not a number, or far above its running mean."""


class LossScale:
    """Loss scaling for chips that compute in fp16; on the others it is 1 and costs nothing."""

    def __init__(
        self, device: Device, saved: tuple[float, int] | None = None, say: Callable[[str], None] = print
    ) -> None:
        self.device, self.say, self.skipped, self.in_a_row = device, say, 0, 0
        self.needed = device.scaling.needed
        self.value, self.good = (saved or (FIRST_SCALE, 0)) if self.needed else (1.0, 0)

    def before(self) -> None:
        if self.needed:
            self.device.clear_overflow()

    def overflowed(self, step: int, gradients: list[Tensor]) -> bool:
        """True if any rank overflowed: the step is skipped and the scale halved. MAX_SKIPPED in a row end the run."""
        if not self.needed:
            return False
        flag = torch.tensor([float(self.device.overflowed(gradients))], device=collectives.place())
        collectives.all_reduce(flag, "max")
        if flag.item():
            used, self.value, self.good = self.value, max(1.0, self.value / 2), 0
            self.skipped, self.in_a_row = self.skipped + 1, self.in_a_row + 1
            self.say(f"step {step + 1}: float16 overflowed, no update; loss scale {used:g} -> {self.value:g}")
            if self.in_a_row == MAX_SKIPPED:
                raise Diverged(
                    f"float16 overflowed in {MAX_SKIPPED} steps in a row, up to step {step + 1}, whatever the loss "
                    "scale: nothing is learned; try a smaller --lr-multiplier, or ASCENDCHAT_DTYPE=fp32"
                )
            return True
        self.good, self.in_a_row = self.good + 1, 0
        if self.good % 2000 == 0:
            self.value *= 2
        return False

    def metrics(self) -> dict[str, float]:
        return {"loss_scale": self.value, "skipped_steps": self.skipped} if self.needed else {}


def train_step(stage: Stage, step: int, scale: LossScale, profiler: Profiler | None = None) -> dict[str, Tensor]:
    """Forward and backward of all micro-batches, then one optimizer step. Returns this rank's loss and metrics, still
    on the device."""
    sums: dict[str, Tensor] = {}
    used = scale.value
    scale.before()  # clear the overflow flag of an NPU
    for batch in profiler.feed(stage.micro_batches, step) if profiler else stage.micro_batches(step):
        loss, metrics = stage.forward_backward(batch, used)
        for name, value in {"loss": loss, **metrics}.items():
            sums[name] = sums[name] + value.detach() if name in sums else value.detach()
    assert sums, "a step without micro-batches"
    correction = stage.correction(step)  # not 1 in RL only, which knows now how many tokens it had
    if correction != Correction():
        sums = {
            name: value * (correction.loss if name == "loss" else correction.metrics) for name, value in sums.items()
        }
    if scale.overflowed(step, stage.optimizer.gradients()):
        stage.optimizer.zero_grad()
    else:
        # The gradients lack the correction: dividing by a smaller scale multiplies them by it.
        norm = stage.optimizer.step(**stage.rates(step), loss_scale=used / correction.loss)
        sums[GRADIENT] = norm.square() * collectives.world().size  # reports are averaged over the ranks, squares add up
    stage.after_step(step)
    if scale.needed:
        sums["loss"] = sums["loss"] / used
    return sums


def telemetry(device: Device) -> Callable[[], list[Telemetry]] | None:
    """Reader of the vendor's tool (npu-smi, nvidia-smi) for the console; None without one."""
    tool = KINDS[device.type].tool
    if not tool or smi.locate(tool) is None:
        return None

    def read() -> list[Telemetry]:
        reading = smi.read(tool)
        if isinstance(reading, smi.Problem):
            raise RuntimeError(reading.text)
        return [
            Telemetry(d.index, d.utilisation, d.temperature, d.memory_used, d.memory_total) for d in reading.devices
        ]

    return read


class _Report(NamedTuple):
    """Loss and metrics of a step by name, on their way to the host."""

    step: int
    names: tuple[str, ...]
    values: Callable[[], Tensor]  # waits for the copy; the last value is the wish to stop
    end: Mark
    more: dict[str, float]  # known on the host


@dataclass
class _Progress:
    """Turns reports that arrive one step late into metrics, and stops a run that diverged."""

    stage: Stage
    device: Device
    run: Run
    console: Console
    since: Mark  # the end of the step before, or when training went on after something else
    pending: deque[_Report] = field(default_factory=deque)
    smooth: Smooth = field(default_factory=lambda: Smooth(0.95))
    mean: float = math.nan
    started: float = field(default_factory=time.perf_counter)
    first: int = 0

    def add(self, step: int, values: Mapping[str, Tensor], stop: int, more: dict[str, float]) -> None:
        """Queue the values of a step. The same all-reduce carries the wish of a rank to stop."""
        wish = torch.full_like(values["loss"], float(stop > 0), dtype=torch.float32)
        report = torch.stack((*(value.float() for value in values.values()), wish))
        collectives.all_reduce(report, "mean", async_op=True).wait()
        self.pending.append(_Report(step, tuple(values), self.device.fetch(report), self.device.event(), more))

    def read(self, keep: int) -> bool:
        """Read all queued reports but the newest `keep`; True if some rank wants to stop."""
        ready = [self.pending.popleft() for _ in range(max(0, len(self.pending) - keep))]
        stop = False
        for report, numbers in [(report, report.values().tolist()) for report in ready]:  # waits for the last one
            values = dict(zip(report.names, numbers))
            stop = stop or numbers[-1] > 0
            if GRADIENT in values:
                values["gradient_norm"] = math.sqrt(values.pop(GRADIENT))
            loss = values.pop("loss")
            self.check(report.step, loss, values.get("gradient_norm", 0.0))
            self.show(report.step + 1, loss, report.end.since(self.since) / 1e3, {**values, **report.more})
            self.since = report.end
        return stop

    def check(self, step: int, loss: float, norm: float) -> None:
        late = step > self.first + 50  # before, a loss moves fast
        if not math.isfinite(loss) or (late and self.stage.is_spike(loss, self.mean)):
            seen = f"the loss of step {step} is {loss:.4g} (running mean {self.mean:.4g})"
            raise Diverged(f"{seen}; batch {step} of this data and seed; the last checkpoint is before it")
        if not math.isfinite(norm):
            seen = f"the gradient of step {step} has the norm {norm:.4g} (loss {loss:.4g})"
            raise Diverged(f"{seen}; batch {step} of this data and seed; the last checkpoint is before it")
        self.mean = self.smooth.add(loss)

    def show(self, step: int, loss: float, seconds: float, more: dict[str, float]) -> None:
        pace = speed(
            self.stage.tokens_per_step,
            seconds,
            self.stage.flops_per_token,
            self.device.chip.peak,
            collectives.world().size,
        )
        memory = self.device.memory()
        left = eta(step - self.first, self.stage.steps - self.first, time.perf_counter() - self.started)
        metrics = {"tokens_per_second": pace.tokens_per_second, "mfu": pace.mfu, "seconds": seconds, **more}
        rates = self.stage.rates(step - 1)
        self.run.log(step, loss=loss, memory_peak=memory.peak, **metrics, **rates)
        shown = {"tokens_per_second": pace.tokens_per_second, "mfu": pace.mfu, "memory": (memory.peak, memory.total)}
        self.console.update(step, loss=self.mean, seconds_left=left, **shown)


def fit(stage: Stage, device: Device, run: Run, options: Options, title: str = "") -> Result:
    """Train until stage.steps, a signal, or a loss that diverged."""
    main = collectives.world().rank == 0
    result = Result(options.start)
    with (
        StopSignals(run) as signals,
        Console(
            stage.steps, title=title, log_every=options.log_every, main=main, telemetry=telemetry(device)
        ) as console,
    ):
        scale = LossScale(device, options.loss_scale, console.print)
        dry_run(stage, device, console.print)
        writer = Writer(run.folder, keep=options.keep, say=console.print)
        progress = _Progress(stage, device, run, console, device.event(), first=options.start)
        profiler = options.profiler(stage.steps, device, run, console) if options.profile and main else None
        if options.unseen:
            try:
                eval_and_sample(stage, run, console, signals, result, options.due(options.start, stage.steps), writer)
            except Interrupted:
                result.stopped_by = signals.received  # the next step ends the run, if there is one
        for step in range(options.start, stage.steps):
            if profiler:
                profiler.before(step)
            values = train_step(stage, step, scale, profiler)
            progress.add(step, values, signals.received, {**scale.metrics(), **stage.extra_metrics(step)})
            result.step, signals.unsaved = step + 1, True
            due = options.due(result.step, stage.steps)
            stop = progress.read(keep=0 if any(due) else 1)
            if profiler:
                profiler.after(step, ends=stop or any(due))
            if step == options.start:
                gc.collect()
                gc.freeze()  # the collector would stop one rank for half a second now and then, and all wait for it
            saves, signals.last_save = due.save or stop, stop
            if saves:
                progress.read(keep=0)
                save(writer, stage, result.step, scale, last=stop or result.step == stage.steps)
            try:
                if not stop and eval_and_sample(stage, run, console, signals, result, due, writer if saves else None):
                    progress.since = device.event()
            except Interrupted:  # only the evaluation is broken off
                stop = True
                if not saves or writer.failed():
                    save(writer, stage, result.step, scale, last=True)
            if stop:
                result.stopped_by = signals.received or signal.SIGTERM
                how = "the model is finished" if result.step == stage.steps else options.again
                console.print(f"stopped by a signal after step {result.step}; {how}")
                break
        signals.last_save = True
        writer.wait()
        if result.step == stage.steps:
            writer.forget_earlier()
        elif sentence := old_models_notice(run.folder):
            console.print(sentence)
    gc.unfreeze()
    return result


def save(writer: Writer, stage: Stage, step: int, scale: LossScale, *, last: bool) -> None:
    """Hand a checkpoint to the writer, which goes on in the background."""
    updates = stage.optimizer.steps_done  # not `step` after a warm start, or where fp16 overflowed
    state = {**stage.identity(), "updates": updates, "loss_scale": [scale.value, scale.good]}
    parts = {"model": stage.weights(), "shards": stage.optimizer.shards(), "extra": stage.extra()}
    writer.save(step, state=state, last=last, **parts)


def eval_and_sample(
    stage: Stage,
    run: Run,
    console: Console,
    signals: StopSignals,
    result: Result,
    due: _Due,
    writer: Writer | None,
) -> bool:
    """Validate, benchmark and sample the model of this step, whichever is due; False if nothing was. `writer` has saved
    this step, if it is given."""
    if due.evaluate:
        result.metrics = evaluate(stage, stage.evaluate, run, console, result.step, signals)
        if writer and result.metrics:
            score = next(iter(result.metrics.values()))
            writer.mark_best(result.step, score, higher_is_better=stage.higher_is_better)
    if due.benchmark:
        evaluate(stage, stage.benchmark, run, console, result.step, signals)
    if due.sample:
        try:
            with signals.interruptible():
                texts = stage.sample(result.step)
        except Exception as error:  # noqa: BLE001 - whatever it is, the model is trained and will be written
            line = next(iter(str(error).splitlines()), "")
            console.print(f"no samples of step {result.step}: {type(error).__name__}: {line}")
            texts = []
        for text in texts:
            console.print(f"  > {text}")
        run.log(result.step, samples=texts)
    return due.evaluate or due.benchmark or due.sample


def evaluate(
    stage: Stage, score: Callable[[int], dict[str, float]], run: Run, console: Console, step: int, signals: StopSignals
) -> dict[str, float]:
    """Run `score` on the model without gradients; log and print its metrics."""
    stage.model.eval()
    with torch.no_grad(), signals.interruptible():
        metrics = score(step)
    stage.model.train()
    run.log(step, **metrics)
    if metrics:
        console.print(f"step {step}: " + ", ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
    return metrics


# The dry run: one micro-batch, forward and backward, before the first step, so that running out of memory shows now and
# not after an hour. budget.py, which measures the speed before there is a stage, uses `until_it_fits` too.
#
# On NPUs with TASK_QUEUE_ENABLE=2, which training uses, an operator whose workspace does not fit raises once; from then
# on torch_npu drops every operation without an error, and reads return what the memory held before. Only a new process
# helps: this one ends with OutOfMemory.status, and `ascendchat launch` starts again with the next smaller batch.
#
# The same where ranks share the weights out (nn/sharded.py): they gather layer by layer, and a rank that ran out of
# memory in the middle takes no further part, while the others wait for its shard.


def dry_run(stage: Stage, device: Device, say: Callable[[str], None]) -> None:
    """Take smaller device batches until one fits on all ranks."""

    def trial() -> None:
        stage.forward_backward(stage.probe())
        device.synchronize()

    until_it_fits(trial, stage.smaller, stage.optimizer.zero_grad, stage.model, device, say)


def until_it_fits(
    trial: Callable[[], None],
    smaller: Callable[[], bool],
    clear: Callable[[], None],
    model: torch.nn.Module,
    device: Device,
    say: Callable[[str], None],
) -> None:
    """Repeat `trial` with `smaller` batches until it fits on all ranks. It may call no collective, since a rank that
    ran out of memory would not take part. `clear` zeroes the gradients."""
    place = next(model.parameters()).device
    for _ in range(_agreed(int(os.environ.get(SMALLER, "0")), place)):  # what processes before this one have found
        _shrink(smaller, say)
    while True:
        short = False
        try:
            trial()
        except torch.OutOfMemoryError:
            short = True
        dead = not device.responds()
        if dead or (short and _shared_out(model)):
            why = "the device does nothing any more" if dead else "the other devices wait for its share of the weights"
            collectives.abandon()
            raise OutOfMemory(
                f"out of memory in the dry run, and {why}, so this process has to end; `ascendchat launch` starts "
                "again with a smaller batch by itself, without it give a smaller --device-batch-size"
            )
        short = bool(_agreed(int(short), place))
        clear()
        if not short:
            return
        device.release()
        _shrink(smaller, say)


def _shared_out(model: torch.nn.Module) -> bool:
    """True if other ranks hold shards of the weights. Such parameters are DTensors, recognised by an attribute, since
    importing that class takes a second."""
    return any(hasattr(parameter, "device_mesh") for parameter in model.parameters())


def _agreed(number: int, place: torch.device) -> int:
    """The largest number of all ranks."""
    flag = torch.tensor([float(number)], device=place)
    collectives.all_reduce(flag, "max")
    return int(flag.item())


def _shrink(smaller: Callable[[], bool], say: Callable[[str], None]) -> None:
    if not smaller():
        raise UserError("one row per device does not fit in memory; `ascendchat plan` shows what would")
    say("out of memory in the dry run: trying the next smaller device batch with the same total")
