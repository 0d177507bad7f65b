"""A run that is killed and started again ends with the same weights, bit for bit; one that is asked to stop saves."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file
from warm_process import Popen
from warm_process import run as run_warm

from ascendchat.cli import main
from ascendchat.data.prepare import prepare
from ascendchat.data.tokenizer import train_tokenizer
from ascendchat.record import read_metrics

STEPS = 24
WORDS = ["red", "blue", "tree", "river", "stone", "bird", "walks", "sings", "under", "over", "the", "a"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with a tokenizer and a small prepared corpus."""
    folder = tmp_path_factory.mktemp("resume")
    rng = random.Random(0)
    texts = [" ".join(rng.choice(WORDS) for _ in range(rng.randint(5, 60))) + "." for _ in range(400)]
    source = folder / "text.jsonl"
    source.write_text("\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8")
    train_tokenizer(texts, 300).save(folder / "tokenizer")
    prepare([str(source)], folder / "tokenizer", folder / "data" / "words", val_fraction=0.1, workers=1)
    return folder


def command(home: Path, run: str, *more: str) -> list[str]:
    sizes = "--depth 2 --dim 32 --head-dim 16 --max-seq-len 32 --device-batch-size 4 --total-batch-size 256"
    pace = f"--num-iterations {STEPS} --save-every 3 --eval-every 8 --eval-tokens 500 --sample-every 0 --log-every 1"
    where = ["--data", str(home / "data" / "words"), "--run", run, "--device-type", "cpu"]
    return [sys.executable, "-m", "ascendchat", "base", *sizes.split(), *pace.split(), *where, *more]


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "ASCENDCHAT_HOME": str(home), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def finish(home: Path, run: str, *more: str) -> str:
    result = run_warm(command(home, run, *more), env=environment(home), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def final(home: Path, run: str) -> dict[str, bytes]:
    folder = home / "runs" / run / "base" / f"step_{STEPS:06d}"
    tensors = load_file(folder / "model.safetensors") | load_file(folder / "optim-0-of-1.safetensors")
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def undisturbed(home: Path) -> dict[str, bytes]:
    """Of a process that has nothing in common with those that are killed."""
    subprocess.run(command(home, "whole"), env=environment(home), stdout=subprocess.DEVNULL, check=True)
    return final(home, "whole")


def kill_at(home: Path, run: str, moment: float) -> bool:
    """Start the run and kill -9 it `moment` seconds after its first step; True if it was still running."""
    process = Popen(command(home, run), env=environment(home), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if " step " in line:
            break
    time.sleep(moment)
    running = process.poll() is None
    process.kill()
    process.wait()
    return running


@pytest.mark.slow
def test_thirty_kills_at_random_moments_change_nothing(home: Path, undisturbed: dict[str, bytes]) -> None:
    rng, kills, run = random.Random(1), 0, 0
    while kills < 30:
        run += 1
        name = f"killed{run}"
        for _ in range(5):
            if not kill_at(home, name, rng.random() * 0.25):
                break
            kills += 1
        finish(home, name)
        assert final(home, name) == undisturbed, f"run {name} ended elsewhere"
    assert run >= 3


@pytest.mark.slow
def test_a_run_that_was_killed_once_ends_with_the_same_weights(home: Path, undisturbed: dict[str, bytes]) -> None:
    name = next(name for name in map("once{}".format, range(9)) if kill_at(home, name, 0.02))  # else it was over
    finish(home, name)
    assert final(home, name) == undisturbed


@pytest.mark.slow
def test_a_run_killed_between_its_last_checkpoint_and_the_validation_is_validated(home: Path) -> None:
    """Once: the same command says afterwards that the run is finished."""
    finish(home, "unseen")
    metrics = home / "runs" / "unseen" / "base" / "metrics.jsonl"
    *lines, last = metrics.read_text().splitlines(keepends=True)
    assert json.loads(last)["step"] == STEPS
    assert "bpb" in json.loads(last)
    metrics.write_text("".join(lines))
    assert f"step {STEPS}: bpb " in finish(home, "unseen")
    assert [row["bpb"] for row in read_metrics(metrics) if row["step"] == STEPS and "bpb" in row] == [
        json.loads(last)["bpb"]
    ]
    assert "is finished" in finish(home, "unseen")


@pytest.mark.slow
def test_sigterm_saves_and_the_same_command_goes_on(home: Path, undisturbed: dict[str, bytes]) -> None:
    process = Popen(command(home, "term"), env=environment(home), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if " step 4/" in line:
            process.send_signal(signal.SIGTERM)
            break
    rest = process.stdout.read()
    assert process.wait() == 128 + signal.SIGTERM
    assert "stopped by a signal after step" in rest
    assert "continuing after step" in finish(home, "term")
    assert final(home, "term") == undisturbed


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(home: Path, undisturbed: dict[str, bytes]) -> None:
    finish(home, "flip")
    folder = home / "runs" / "flip" / "base"
    victim = folder / f"step_{STEPS:06d}" / "model.safetensors"
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 4
    victim.write_bytes(data)
    output = finish(home, "flip")
    assert "DAMAGED CHECKPOINT" in output
    assert str(victim) in output
    assert final(home, "flip") == undisturbed


def test_other_settings_are_refused_with_the_way_out(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ASCENDCHAT_HOME", str(home))
    words = [*command(home, "other")[3:], "--num-iterations", "2", "--eval-every", "-1"]
    assert main(words) == 0
    assert main([*words, "--seed", "5"]) == 2
    said = capsys.readouterr().err
    assert "seed 0, this command has 5" in said
    assert "--resume never" in said
    assert "Traceback" not in said


def interrupt(home: Path, run: str, line: str, number: signal.Signals, *more: str) -> tuple[int, str]:
    """Start the run with --resume never and send a signal at the first line that holds `line`."""
    words = command(home, run, "--resume", "never", *more)
    both = subprocess.STDOUT
    process = Popen(words, env=environment(home), stdout=subprocess.PIPE, stderr=both, text=True)
    assert process.stdout is not None
    shown = ""
    for text in process.stdout:
        shown += text
        if line in text:
            process.send_signal(number)
            break
    rest, _ = process.communicate()
    return process.returncode, shown + rest


MOMENTS = [("parameters;", "SIGINT"), ("kept in", "SIGTERM"), (" step 1/", "SIGINT"), (" step 4/", "SIGKILL")]


@pytest.mark.slow
@pytest.mark.parametrize(("line", "number"), MOMENTS)
def test_resume_never_and_a_signal_leave_the_finished_model_where_it_is_said(
    home: Path, undisturbed: dict[str, bytes], line: str, number: str
) -> None:
    run = f"kept{line.strip('; /').replace(' ', '')}"
    shutil.copytree(home / "runs" / "whole", home / "runs" / run)
    _, shown = interrupt(home, run, line, signal.Signals[number])
    folder, old = home / "runs" / run / "base", home / "runs" / run / "base.old"
    if old.exists():
        if line == "parameters;":  # the signal may come before the notice; the next start gives it again
            shown += interrupt(home, run, " step 1/", signal.SIGKILL)[1]
        assert f"mv {old} {folder}" in shown
        shutil.rmtree(folder)
        old.rename(folder)
    assert final(home, run) == undisturbed
    assert "is finished" in finish(home, run)


@pytest.mark.slow
def test_a_finished_new_run_takes_the_place_of_the_old_one(home: Path, undisturbed: dict[str, bytes]) -> None:
    shutil.copytree(home / "runs" / "whole", home / "runs" / "renewed")
    interrupt(home, "renewed", " step 4/", signal.SIGTERM, "--seed", "7")
    assert (home / "runs" / "renewed" / "base.old" / f"step_{STEPS:06d}").is_dir()
    finish(home, "renewed", "--seed", "7")  # goes on with the new one
    assert not (home / "runs" / "renewed" / "base.old").exists()
    assert final(home, "renewed") != undisturbed


@pytest.mark.slow
def test_a_restart_of_the_launcher_means_nothing_from_before_this_launch(
    home: Path, undisturbed: dict[str, bytes]
) -> None:
    """The first attempt of a launch may end before it has touched the run: the second must not take the old model."""
    shutil.copytree(home / "runs" / "whole", home / "runs" / "launched")
    launched = {**environment(home), "ASCENDCHAT_LAUNCH": "one", "ASCENDCHAT_RESTART": "1"}
    words = command(home, "launched", "--resume", "never", "--seed", "7")
    process = Popen(words, env=launched, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    shown = ""
    for line in process.stdout:
        shown += line
        if " step 8/" in line:
            process.kill()
            break
    process.wait()
    assert "continuing after" not in shown
    again = run_warm(words, env={**launched, "ASCENDCHAT_RESTART": "2"}, capture_output=True, text=True, check=True)
    assert "continuing after step" in again.stdout  # what this launch has saved itself is used
    other = {**launched, "ASCENDCHAT_LAUNCH": "two"}
    assert "continuing" not in run_warm(words, env=other, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
def test_settings_that_may_change_are_said_when_a_run_goes_on(home: Path) -> None:
    interrupt(home, "rates", " step 4/", signal.SIGTERM)
    shown = finish(home, "rates", "--lr-multiplier", "0.5", "--weight-decay", "0.1")
    assert "continuing with --lr-multiplier 0.5; before, this run had 1.0" in shown
    assert "continuing with --weight-decay 0.1; before, this run had None" in shown
    assert shown.count("continuing with") == 2


@pytest.mark.slow
def test_the_loss_is_a_mean_over_tokens_and_not_over_padding(home: Path, tmp_path: Path) -> None:
    (tmp_path / "short.jsonl").write_text(json.dumps({"text": "red blue tree"}), encoding="utf-8")
    prepare([str(tmp_path / "short.jsonl")], home / "tokenizer", tmp_path / "short", val_fraction=0.0, workers=1)
    where = ["--data", str(tmp_path / "short"), "--num-iterations", "1"]
    finish(home, "padded", *where)
    rows = read_metrics(home / "runs" / "padded" / "base")
    assert rows[0]["loss"] == pytest.approx(math.log(300), rel=0.02)  # an untrained model guesses


@pytest.mark.slow
def test_corpora_in_folders_of_one_name_are_told_apart_and_found_from_any_directory(home: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        shutil.copytree(home / "data" / "words", tmp_path / name / "words")
    words = [*command(home, "twins"), "--data", "a/words,b/words"]
    run_warm(words, env=environment(home), cwd=tmp_path, capture_output=True, check=True)
    last = [row for row in read_metrics(home / "runs" / "twins" / "base") if "bpb" in row][-1]
    assert {"bpb", "bpb_a/words", "bpb_b/words"} <= set(last)
    examine = [
        "eval",
        "base",
        "--run",
        "twins",
        "--eval",
        "bpb",
        "--json",
        "--device-type",
        "cpu",
        "--eval-tokens",
        "500",
    ]
    shown = run_warm(
        [sys.executable, "-m", "ascendchat", *examine], env=environment(home), cwd="/", capture_output=True, text=True
    )
    assert shown.returncode == 0, shown.stderr
    found = json.loads(shown.stdout)["bpb"]
    assert [one["bits_per_byte"] for one in found.values()] == pytest.approx([last["bpb"]] * 2, rel=1e-4)


def test_base_without_a_tokenizer_is_refused_before_anything_is_made(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ASCENDCHAT_HOME", str(tmp_path))
    assert main(command(home, "mute")[3:]) == 2
    assert "no tokenizer in" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_tokenizer_that_is_named_and_absent_is_not_made(
    home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ASCENDCHAT_HOME", str(home))
    told = command(home, "mute")[3:]
    for data in ("toyworld", str(home / "data" / "words")):
        told[told.index("--data") + 1] = data
        assert main([*told, "--tokenizer", str(tmp_path / "tokk")]) == 2
        assert f"there is no folder {tmp_path / 'tokk'}; name that of the tokenizer" in capsys.readouterr().err
    assert not (tmp_path / "tokk").exists()
    assert not (home / "runs" / "mute").exists()


def test_a_run_goes_on_with_its_own_tokenizer_after_another_was_trained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ASCENDCHAT_HOME", str(tmp_path))
    text = "the red bird sings over the river, under the blue tree; "
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
