"""A run that is killed and started again ends with the same weights, bit for bit; one that is asked to stop saves."""

from __future__ import annotations

import json
import math
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import commands
import pytest
from safetensors.torch import load_file

from ascendchat.checkpoint import WRITING
from ascendchat.cli import main
from ascendchat.data.prepare import prepare
from ascendchat.data.tokenizer.tokenizer import train_tokenizer
from ascendchat.runs.run import read_metrics
from ascendchat.train import loop

STEPS = 9
SIZES = "--depth 2 --dim 32 --head-dim 16 --max-seq-len 32 --device-batch-size 4 --total-batch-size 256"
PACE = f"--num-iterations {STEPS} --save-every 2 --eval-every 4 --eval-tokens 500 --sample-every 0 --log-every 1"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with a tokenizer and a small prepared corpus."""
    folder = tmp_path_factory.mktemp("resume")
    commands.prepare_texts(folder, commands.sentences(200))
    return folder


def words(home: Path, run: str, *more: str) -> list[str]:
    where = ["--data", str(home / "words"), "--run", run, "--device-type", "cpu"]
    return ["base", *SIZES.split(), *PACE.split(), *where, *more]


def finish(home: Path, run: str, *more: str, status: int = 0) -> str:
    return commands.finish(home, words(home, run, *more), status)


class Killed(BaseException):
    """The end of a process, as far as a test in this process can have it."""


def killed_after(home: Path, run: str, step: int, *more: str) -> None:
    """The command, which ends behind this step as if it were killed."""
    plain: Callable[..., Any] = loop.train_step

    def train_step(stage: Any, done: int, *more: Any) -> Any:
        if done == step:
            raise Killed
        return plain(stage, done, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train_step", train_step)
        with pytest.raises(Killed):
            finish(home, run, *more)
    for thread in threading.enumerate():
        if thread.name == WRITING:
            thread.join()


def final(home: Path, run: str) -> dict[str, bytes]:
    folder = home / "runs" / run / "base" / f"step_{STEPS:06d}"
    tensors = load_file(folder / "model.safetensors") | load_file(folder / "optim-0-of-1.safetensors")
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def undisturbed(home: Path) -> dict[str, bytes]:
    """What a run leaves in this process, which has nothing in common with those that are killed."""
    finish(home, "whole")
    return final(home, "whole")


@pytest.mark.slow
def test_a_run_that_was_stopped_and_then_killed_ends_with_the_same_weights(
    home: Path, undisturbed: dict[str, bytes]
) -> None:
    status, said = commands.signalled(home, words(home, "cut"), 3, signal.SIGTERM)
    assert status == 128 + signal.SIGTERM
    assert "stopped by a signal after step" in said
    status, said = commands.signalled(home, words(home, "cut"), STEPS - 1, signal.SIGKILL)
    assert status == -signal.SIGKILL
    assert "continuing after step" in said
    assert "continuing after step" in finish(home, "cut")
    assert final(home, "cut") == undisturbed


@pytest.mark.slow
def test_a_run_killed_between_its_last_checkpoint_and_the_validation_is_validated(
    home: Path, undisturbed: dict[str, bytes]
) -> None:
    """Once: the same command says afterwards that the run is finished."""
    shutil.copytree(home / "runs" / "whole", home / "runs" / "unseen")
    metrics = home / "runs" / "unseen" / "base" / "metrics.jsonl"
    *lines, last = metrics.read_text().splitlines(keepends=True)
    assert json.loads(last)["step"] == STEPS
    metrics.write_text("".join(lines))
    assert f"step {STEPS}: bpb " in finish(home, "unseen")
    found = [row["bpb"] for row in read_metrics(metrics) if row["step"] == STEPS and "bpb" in row]
    assert found == [json.loads(last)["bpb"]]
    assert "is finished" in finish(home, "unseen")


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(home: Path, undisturbed: dict[str, bytes]) -> None:
    shutil.copytree(home / "runs" / "whole", home / "runs" / "flip")
    victim = home / "runs" / "flip" / "base" / f"step_{STEPS:06d}" / "model.safetensors"
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 4
    victim.write_bytes(data)
    assert f"DAMAGED CHECKPOINT, NOT USED: {victim}" in finish(home, "flip")
    assert final(home, "flip") == undisturbed


def test_other_settings_are_refused_and_rates_that_may_change_are_said(home: Path) -> None:
    killed_after(home, "other", 4)
    said = finish(home, "other", "--seed", "5", status=2)
    assert "seed 0, this command has 5" in said
    assert "--resume never" in said
    assert "Traceback" not in said
    said = finish(home, "other", "--lr-multiplier", "0.5", "--weight-decay", "0.1")
    assert "continuing with --lr-multiplier 0.5; before, this run had 1.0" in said
    assert "continuing with --weight-decay 0.1; before, this run had None" in said
    assert said.count("continuing with") == 2


@pytest.mark.slow
def test_a_new_run_that_is_killed_leaves_the_finished_model_where_it_is_said(
    home: Path, undisturbed: dict[str, bytes]
) -> None:
    shutil.copytree(home / "runs" / "whole", home / "runs" / "kept")
    status, said = commands.signalled(home, words(home, "kept", "--resume", "never"), 4, signal.SIGKILL)
    assert status == -signal.SIGKILL
    folder, old = home / "runs" / "kept" / "base", home / "runs" / "kept" / "base.old"
    assert f"mv {old} {folder}" in said
    shutil.rmtree(folder)
    old.rename(folder)
    assert final(home, "kept") == undisturbed
    assert "is finished" in finish(home, "kept")


@pytest.mark.slow
def test_a_finished_new_run_takes_the_place_of_the_old_one(home: Path, undisturbed: dict[str, bytes]) -> None:
    shutil.copytree(home / "runs" / "whole", home / "runs" / "renewed")
    killed_after(home, "renewed", 4, "--resume", "never", "--seed", "7")
    assert (home / "runs" / "renewed" / "base.old" / f"step_{STEPS:06d}").is_dir()
    finish(home, "renewed", "--seed", "7")  # goes on with the new one
    assert not (home / "runs" / "renewed" / "base.old").exists()
    assert final(home, "renewed") != undisturbed


@pytest.mark.slow
def test_a_restart_of_the_launcher_means_nothing_from_before_this_launch(
    home: Path, undisturbed: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attempt of a launch may end before it has touched the run: the second must not take the old model."""
    shutil.copytree(home / "runs" / "whole", home / "runs" / "launched")
    anew = "--resume", "never", "--seed", "7"
    monkeypatch.setenv("ASCENDCHAT_LAUNCH", "one")
    monkeypatch.setenv("ASCENDCHAT_RESTART", "1")
    killed_after(home, "launched", 4, *anew)
    monkeypatch.setenv("ASCENDCHAT_RESTART", "2")
    assert "continuing after step" in finish(home, "launched", *anew)  # what this launch has saved itself is used
    monkeypatch.setenv("ASCENDCHAT_LAUNCH", "two")
    assert "continuing" not in finish(home, "launched", *anew)


def test_the_loss_is_a_mean_over_tokens_and_not_over_padding(home: Path, tmp_path: Path) -> None:
    (tmp_path / "short.jsonl").write_text(json.dumps({"text": "red blue tree"}), encoding="utf-8")
    prepare([str(tmp_path / "short.jsonl")], home / "tokenizer", tmp_path / "short", val_fraction=0.0, workers=1)
    finish(home, "padded", "--data", str(tmp_path / "short"), "--num-iterations", "1")
    rows = read_metrics(home / "runs" / "padded" / "base")
    assert rows[0]["loss"] == pytest.approx(math.log(300), rel=0.02)  # an untrained model guesses


@pytest.mark.slow
def test_corpora_in_folders_of_one_name_are_told_apart_and_found_from_any_directory(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        shutil.copytree(home / "words", home / name / "words")
    finish(home, "twins", "--data", "a/words,b/words", "--num-iterations", "2")
    last = [row for row in read_metrics(home / "runs" / "twins" / "base") if "bpb" in row][-1]
    assert {"bpb", "bpb_a/words", "bpb_b/words"} <= set(last)
    monkeypatch.chdir("/")
    monkeypatch.setenv("ASCENDCHAT_HOME", str(home))
    assert main("eval base --run twins --eval bpb --json --device-type cpu --eval-tokens 500".split()) == 0
    found = json.loads(capsys.readouterr().out)["bpb"]
    assert [one["bits_per_byte"] for one in found.values()] == pytest.approx([last["bpb"]] * 2, rel=1e-4)


def test_base_without_a_tokenizer_is_refused_before_anything_is_made(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ASCENDCHAT_HOME", str(tmp_path))
    assert main(words(home, "mute")) == 2
    assert "no tokenizer in" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_tokenizer_that_is_named_and_absent_is_not_made(home: Path, tmp_path: Path) -> None:
    for data in ("toyworld", str(home / "words")):
        said = finish(home, "mute", "--data", data, "--tokenizer", str(tmp_path / "tokk"), status=2)
        assert f"there is no folder {tmp_path / 'tokk'}; name that of the tokenizer" in said
    assert not (tmp_path / "tokk").exists()
    assert not (home / "runs" / "mute").exists()


def test_a_run_goes_on_with_its_own_tokenizer_after_another_was_trained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ASCENDCHAT_HOME", str(tmp_path))
    text = "the red bird sings over the river, under the blue tree; "
    monkeypatch.setattr("ascendchat.data.toyworld.documents", lambda split: [text * 20 + split] * 20)  # not all of it
    sizes = "--depth 1 --dim 32 --head-dim 16 --max-seq-len 32 --device-batch-size 2 --total-batch-size 64 --run own"
    told = ["base", *sizes.split(), *"--data toyworld --device-type cpu --eval-every 0 --sample-every 0".split()]
    train_tokenizer([text * 20], 300).save(tmp_path / "tokenizer")
    assert main([*told, "--steps", "2"]) == 0
    train_tokenizer([text[::-1] * 20], 300).save(tmp_path / "tokenizer")
    capsys.readouterr()
    assert main([*told, "--steps", "2"]) == 2
    own = tmp_path / "runs" / "own" / "base" / "tokenizer"
    said = capsys.readouterr().err
    assert f"was begun with another tokenizer than that of {tmp_path / 'tokenizer'}; go on with its own" in said
    assert f"--tokenizer {own}" in said
    assert main([*told, "--steps", "2", "--tokenizer", str(own)]) == 0
