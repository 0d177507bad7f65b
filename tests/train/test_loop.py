"""The loop on a stage small enough to see through: order of events, guards, signals, out of memory."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from warm_process import Popen

from ascendchat.checkpoint import Writer
from ascendchat.config.train import BaseConfig
from ascendchat.device import Device, pick
from ascendchat.errors import UserError
from ascendchat.nn.optim import Group, MuonAdamW
from ascendchat.parallel.collectives import World
from ascendchat.runs.run import Run, checkpoints, open_run, read_metrics
from ascendchat.train import loop
from ascendchat.train.loop import GRADIENT, Diverged, LossScale, Options, fit, train_step
from ascendchat.train.signals import Interrupted, StopSignals
from ascendchat.train.stage import Correction, Loss, Stage


class Line(torch.nn.Module):
    """y = weight * 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4))


class ToyStage(Stage):
    """Pulls the weight to 3; every call is written down."""

    def __init__(
        self,
        steps: int = 8,
        losses: dict[int, float] | None = None,
        oom: int = 0,
        scores: list[float] | None = None,
        tail: int = 0,
    ) -> None:
        self.scores = scores or []  # of the evaluations to come
        self.model = Line()
        self.steps, self.tokens_per_step, self.flops_per_token = steps, 100, 10.0
        self.tail = tail
        self.optimizer = MuonAdamW([Group("w", [("weight", self.model.weight)], 0.1)], compute_dtype=torch.float32)
        self.losses, self.oom, self.seen = losses or {}, oom, []
        self.step = 0

    def micro_batches(self, step: int) -> Iterable[int]:
        self.step = step
        return [step, step]

    def probe(self) -> int:
        return -1

    def forward_backward(self, batch: int, scale: float = 1.0) -> Loss:
        return self.loss(batch, scale).backward()

    def loss(self, batch: int, scale: float = 1.0) -> Loss:
        if self.oom:
            raise torch.OutOfMemoryError("NPU out of memory")
        self.seen.append(("loss", batch))
        loss = (self.model.weight - 3.0).square().mean() / 2 * scale
        return Loss(loss * 0.0 + self.losses[batch] if batch in self.losses else loss)

    def rates(self, step: int) -> dict[str, float]:
        return {"lr_scale": 1.0, "momentum": 0.9, "matrix_decay": 0.0}

    def after_step(self, step: int) -> None:
        if step >= self.steps - self.tail:
            self.optimizer.average(step + 1 - (self.steps - self.tail), last=step + 1 == self.steps)

    def evaluate(self, step: int) -> dict[str, float]:
        self.seen.append(("evaluate", step))
        return {"score": self.scores.pop(0) if self.scores else float(self.model.weight.mean())}

    def benchmark(self, step: int) -> dict[str, float]:
        self.seen.append(("core", step))
        return {"core": 0.25}

    def sample(self, step: int) -> list[str]:
        self.seen.append(("sample", step))
        return ["text"]

    def smaller(self) -> bool:
        self.oom -= 1
        return self.oom >= 0

    def identity(self) -> dict[str, Any]:
        return {"stage": "toy"}


@pytest.fixture
def device() -> Device:
    """The CPU."""
    return pick("cpu")


def seen_by(folder: Path, device: Device, **options: int) -> list[tuple[str, int]]:
    stage = ToyStage()
    with open_run(folder, BaseConfig()) as run:
        fit(stage, device, run, Options(**options))
    return [entry for entry in stage.seen if entry[0] in ("evaluate", "core", "sample")]


def test_the_loop_names_no_model_and_no_optimizer() -> None:
    for file in ("loop.py", "stage.py", "run.py"):
        tree = ast.parse((Path(loop.__file__).parent / file).read_text(encoding="utf-8"))
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
        assert not names & {"GPT", "MuonAdamW", "RowStage", "BaseStage", "ChatStage", "Tokenizer"}, file


def test_a_factor_that_is_known_last_changes_loss_and_gradient_alike(device: Device) -> None:
    """A quarter of the loss and a factor of 4 are the loss, in fp16 with its scale as well."""

    class Late(ToyStage):
        def loss(self, batch: int, scale: float = 1.0) -> Loss:
            value = super().loss(batch, scale).value / 4
            return Loss(value, {"error": value.detach() / scale})

        def correction(self, step: int) -> Correction:
            assert [batch for name, batch in self.seen if name == "loss"][-2:] == [step, step], "not before the last"
            return Correction(loss=4.0, metrics=2.0)

    for chip in (device, Half([False] * 6)):
        plain, late = ToyStage(), Late()
        for step in range(3):
            wanted = train_step(plain, step, LossScale(chip))  # type: ignore[arg-type]
            found = train_step(late, step, LossScale(chip))  # type: ignore[arg-type]
            assert torch.equal(plain.model.weight, late.model.weight)
            assert torch.equal(found["loss"], wanted["loss"])
            assert torch.equal(found["error"], wanted["loss"] / 2)
            assert torch.equal(found[GRADIENT], wanted[GRADIENT])


def test_minus_one_means_never_and_zero_only_at_the_end(tmp_path: Path, device: Device) -> None:
    assert seen_by(tmp_path / "a", device, eval_every=-1, save_every=-1, sample_every=-1, benchmark_every=-1) == []
    assert checkpoints(tmp_path / "a") == [8]  # a model is always saved at the end
    assert seen_by(tmp_path / "b", device, eval_every=0, save_every=0) == [("evaluate", 8)]
    found = seen_by(tmp_path / "c", device, eval_every=-1, benchmark_every=3)
    assert found == [("core", 3), ("core", 6), ("core", 8)]
    scores = [(row["step"], row["core"]) for row in read_metrics(tmp_path / "c") if "core" in row]
    assert scores == [(3, 0.25), (6, 0.25), (8, 0.25)]


@pytest.mark.parametrize(("full", "saved"), [({2}, [4, 6, 8]), ({2, 4}, [6, 8]), ({2, 8}, [4, 6, 8])])
def test_training_goes_on_where_a_checkpoint_could_not_be_written(
    full: set[int], saved: list[int], tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, whole = set(full), Writer._write

    def write(self: Writer, draft: Path, step: int, *arguments: Any) -> None:
        if step in left:
            left.remove(step)
            raise OSError(28, "No space left on device")
        whole(self, draft, step, *arguments)

    monkeypatch.setattr(Writer, "_write", write)
    monkeypatch.setattr("ascendchat.checkpoint.pause", lambda _: None, raising=False)
    with start(tmp_path) as run:
        result = fit(ToyStage(), device, run, Options(save_every=2, eval_every=2, keep=9))
    assert (result.step, checkpoints(tmp_path)) == (8, saved)


def start(folder: Path) -> Run:
    return open_run(folder, BaseConfig())


def test_a_checkpoint_is_saved_before_the_evaluation_of_the_same_step(tmp_path: Path, device: Device) -> None:
    stage = ToyStage()
    evaluate = stage.evaluate
    saved: list[list[int]] = []

    def look(step: int) -> dict[str, float]:
        for _ in range(6000):  # it is written in the background, by a disk that others use
            if step in checkpoints(tmp_path):
                break
            time.sleep(0.01)
        saved.append(checkpoints(tmp_path))
        return evaluate(step)

    stage.evaluate = look  # type: ignore[method-assign]
    with start(tmp_path) as run:
        result = fit(stage, device, run, Options(save_every=4, eval_every=4, sample_every=8))
    assert result.step == 8
    assert [entry for entry in stage.seen if entry[0] != "loss"] == [("evaluate", 4), ("evaluate", 8), ("sample", 8)]
    assert saved[0][-1] == 4
    assert saved[1][-1] == 8
    assert stage.model.weight.mean() > 0.5
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 9))
    assert all(row["tokens_per_second"] > 0 for row in rows if "loss" in row)


def test_a_loss_that_is_not_a_number_stops_with_step_and_batch(tmp_path: Path, device: Device) -> None:
    with start(tmp_path) as run, pytest.raises(Diverged, match=r"the loss of step 5 is .*batch 5"):
        fit(ToyStage(losses={5: float("inf")}), device, run, Options(save_every=2))
    assert checkpoints(tmp_path)[-1] <= 5, "a checkpoint was written after the loss went wrong"


def test_a_spike_stops_the_run(tmp_path: Path, device: Device) -> None:
    with start(tmp_path) as run, pytest.raises(Diverged, match="the loss of step 60"):
        fit(ToyStage(steps=80, losses={60: 9.0}), device, run, Options(save_every=0, eval_every=0))


def test_the_dry_run_leaves_neither_gradients_nor_an_update(device: Device) -> None:
    stage = ToyStage()
    before = stage.model.weight.detach().clone()
    loop.dry_run(stage, device, print)
    assert stage.seen == [("loss", -1)], "it takes the path of every other micro-batch"
    assert all(not gradient.any() for gradient in stage.optimizer.gradients())
    assert torch.equal(stage.model.weight, before)
    assert stage.optimizer.steps_done == 0


def test_out_of_memory_in_the_dry_run_takes_the_next_smaller_batch(
    tmp_path: Path, device: Device, capsys: pytest.CaptureFixture[str]
) -> None:
    with start(tmp_path) as run:
        assert fit(ToyStage(oom=2), device, run, Options()).step == 8
    assert capsys.readouterr().out.count("trying the next smaller device batch with the same total") == 2


def test_when_not_even_one_row_fits_the_way_out_is_named(tmp_path: Path, device: Device) -> None:
    stage = ToyStage(oom=1)
    stage.smaller = lambda: False  # type: ignore[method-assign]
    with start(tmp_path) as run, pytest.raises(UserError, match="ascendchat plan"):
        fit(stage, device, run, Options())


def test_who_stops_a_run_is_told_the_command_that_continues_it(
    tmp_path: Path, device: Device, capsys: pytest.CaptureFixture[str]
) -> None:
    for resume, hint in (("auto", "run the same command to"), ("never", "run the same command without --resume never")):
        stage = ToyStage(steps=5)
        signalled(stage, "evaluate", 2)
        options = Options.of(BaseConfig(resume=resume, eval_every=2), None)  # type: ignore[arg-type]
        with start(tmp_path / resume) as run:
            fit(stage, device, run, options)
        assert hint in capsys.readouterr().out


def signalled(stage: ToyStage, name: str, at: int) -> list[int]:
    """SIGTERM comes in the middle of `name` at a step; the list fills with the steps that were looked at to the end."""
    whole: list[int] = []
    look = getattr(stage, name)

    def middle(step: int) -> object:
        if step == at:
            os.kill(os.getpid(), signal.SIGTERM)
            for _ in range(100):  # the handler runs between two lines
                pass
        whole.append(step)
        return look(step)

    setattr(stage, name, middle)
    return whole


@pytest.mark.parametrize(
    ("name", "at", "said"),
    [
        ("after_step", 5, "stopped by a signal after step 6; run the same command to continue"),
        ("evaluate", 4, "stopped by a signal after step 4; run the same command to continue"),
        ("evaluate", 8, "stopped by a signal after step 8; the model is finished"),
        ("sample", 8, "stopped by a signal after step 8; the model is finished"),
    ],
)
def test_a_signal_saves_at_the_next_step_and_breaks_off_a_look_at_the_model(
    tmp_path: Path, device: Device, name: str, at: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = ToyStage()
    whole = signalled(stage, name, at)
    with start(tmp_path) as run:
        result = fit(stage, device, run, Options(save_every=0, eval_every=2, sample_every=4))
    last = at + (name == "after_step")
    assert (result.step, result.stopped_by) == (last, signal.SIGTERM)
    assert name == "after_step" or max(whole) < at, "it was looked at to the end"
    assert checkpoints(tmp_path) == [last]
    assert [row["step"] for row in read_metrics(tmp_path) if "loss" in row] == [*range(1, last + 1)]
    assert said in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_one_of_several_ranks_does_not_leave_the_others_alone_in_a_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start(tmp_path) as run, StopSignals(run) as signals:
        signals.unsaved = True
        monkeypatch.setattr("ascendchat.parallel.collectives.world", lambda: World(size=2))
        try:
            with signals.interruptible():
                signal.raise_signal(signal.SIGTERM)
            with signals.interruptible():
                pass
        except Interrupted:
            pytest.fail("a rank left")
        assert signals.received == signal.SIGTERM
        monkeypatch.setattr("ascendchat.parallel.collectives.world", lambda: World())
        with pytest.raises(Interrupted), signals.interruptible():
            pass


class Half:
    """A device that computes in fp16 and overflows when told."""

    def __init__(self, overflows: list[bool]) -> None:
        from ascendchat.device import Scaling

        self.scaling, self.overflows, self.cleared = Scaling(True, "flag"), overflows, 0

    def clear_overflow(self) -> None:
        self.cleared += 1

    def overflowed(self, gradients: list[torch.Tensor]) -> bool:
        return self.overflows.pop(0)


def test_the_model_is_the_mean_of_its_last_weights(device: Device) -> None:
    plain, averaged = ToyStage(), ToyStage(tail=3)
    scale, after = LossScale(device), []
    for step in range(8):
        train_step(plain, step, scale), train_step(averaged, step, scale)
        after.append(plain.model.weight.detach().clone())
        if step < 7:
            assert torch.equal(averaged.model.weight, after[-1]), "on the way nothing is changed"
    torch.testing.assert_close(averaged.model.weight.detach(), torch.stack(after[-3:]).mean(dim=0))


def test_the_loss_scale_halves_after_an_overflow_and_grows_after_many_good_steps() -> None:
    half = Half([True, True] + [False] * 2000)
    scale = LossScale(half)  # type: ignore[arg-type]
    gradients = [torch.zeros(1)]
    scale.before()
    assert scale.overflowed(0, gradients)
    assert scale.overflowed(0, gradients)
    assert scale.value == 2.0**14
    assert not any(scale.overflowed(0, gradients) for _ in range(2000))
    assert scale.value == 2.0**15
    assert half.cleared == 1


def test_the_best_checkpoint_is_the_best_that_was_saved_and_a_resumed_run_knows_it(
    tmp_path: Path, device: Device
) -> None:
    often = Options(save_every=4, eval_every=2, keep=1)
    with start(tmp_path) as run:  # steps 2, 4, 6, 8: only 4 and 8 are saved
        fit(ToyStage(8, scores=[1.0, 2.0, 1.5, 3.0]), device, run, often)
    assert (tmp_path / "best").read_text() == "step_000004 2.0\n"
    assert checkpoints(tmp_path) == [4, 8]
    with open_run(tmp_path, BaseConfig(), resume_step=8) as run:
        fit(ToyStage(12, scores=[0.5, 2.5]), device, run, Options(save_every=4, eval_every=2, keep=1, start=8))
    assert (tmp_path / "best").read_text() == "step_000004 2.0\n"
    assert checkpoints(tmp_path) == [4, 12]


STUCK = """
import hashlib, sys
sys.path[:0] = {tests!r}
from pathlib import Path
from test_loop import ToyStage, start
from ascendchat.device import pick
from ascendchat.train.loop import Options, fit

class Stuck(ToyStage):
    def loss(self, batch, scale=1.0):
        if {forward!r} == "first" or batch == 3:
            print("in a long operation", flush=True)
            hashlib.pbkdf2_hmac("sha256", b"x", b"y", 2**31 - 1)  # minutes in C: no Python handler runs meanwhile
        return super().loss(batch, scale)

with start(Path({folder!r})) as run:
    fit(Stuck(), pick("cpu"), run, Options(save_every=2))
"""


@pytest.mark.parametrize(("forward", "signals"), [("first", 1), pytest.param("fourth", 2, marks=pytest.mark.slow)])
def test_a_signal_ends_at_once_where_nothing_is_to_be_saved_and_a_second_one_always(
    tmp_path: Path, forward: str, signals: int
) -> None:
    tests = [str(folder) for folder in Path(__file__).parents[:2]]
    code = STUCK.format(tests=tests, forward=forward, folder=str(tmp_path / "run"))
    process = Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if "long operation" in line:
            break
    until = time.monotonic() + 60
    while signals == 2 and checkpoints(tmp_path / "run") != [2]:  # a thread writes it, and would end with the others
        assert time.monotonic() < until
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    time.sleep(1.0)
    assert signals == 1 or process.poll() is None, "it ended too early"
    while signals == 2 and process.poll() is None:  # on a busy machine two of them may be heard as one
        assert time.monotonic() < until, "it does not end"
        process.send_signal(signal.SIGTERM)
        time.sleep(1.0)
    _, shown = process.communicate(timeout=60)  # the operation takes many times as long
    assert process.returncode == 128 + signal.SIGTERM
    assert "nothing to save" in shown if signals == 1 else "second signal" in shown
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "stopped"
    assert checkpoints(tmp_path / "run") == ([] if signals == 1 else [2])
