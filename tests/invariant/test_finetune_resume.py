"""A fine-tuning that is killed, or that goes on with another number of ranks, ends where it would have ended."""

from __future__ import annotations

import importlib.util
import shutil
import signal
from pathlib import Path

import hf_models
import pytest
import torch
from commands import finish, run_apart, signalled
from safetensors.torch import load_file
from warm_process import TheirsPopen

from ascendchat.runs.run import read_metrics

STEPS = 6
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2, and sums to learn."""
    return hf_models.save_with_sums(tmp_path_factory.mktemp("finetune-resume"), num_hidden_layers=2)


def words(run: str, *more: str) -> list[str]:
    sizes = f"--max-seq-len 96 --total-batch-size 384 --device-batch-size 2 --steps {STEPS} --learning-rate 0.01"
    pace = "--save-every 2 --keep 9 --eval-every 3 --sample-every 0 --log-every 1 --device-type cpu"
    named = ["finetune", "--model", "tiny", "--data", "sums.jsonl", "--run", run, "--lora", "--lora-rank", "4"]
    return [*named, *sizes.split(), *pace.split(), *more]


def final(home: Path, run: str, file: str = "model.safetensors") -> dict[str, torch.Tensor]:
    return load_file(home / "runs" / run / "hf" / f"step_{STEPS:06d}" / file)


@pytest.fixture(scope="module")
def undisturbed(home: Path) -> dict[str, torch.Tensor]:
    """The adapters of this process, which has nothing in common with those that are killed."""
    finish(home, words("whole"))
    return final(home, "whole")


def cut(home: Path, run: str, last: int) -> None:
    """As if the run had been killed behind its checkpoint of step `last`."""
    folder = home / "runs" / run / "hf"
    for path in folder.glob("step_*"):
        if int(path.name[5:]) > last:
            shutil.rmtree(path)
    (folder / "latest").write_text(f"step_{last:06d}\n", encoding="utf-8")


def killed(home: Path, run: str, *more: str) -> str:
    """Killed in its fifth step, while the fourth is saved; what it says when it then comes to its end."""
    status, said = signalled(home, words(run, *more), 5, signal.SIGKILL, TheirsPopen)
    assert status == -signal.SIGKILL, said
    return finish(home, words(run, *more))


def assert_same_end(home: Path, one: str, other: str) -> None:
    for file in ("model.safetensors", "optim-0-of-1.safetensors"):
        ours, theirs = final(home, one, file), final(home, other, file)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours), file


def test_a_kill_changes_nothing(home: Path, undisturbed: dict[str, torch.Tensor]) -> None:
    assert "continuing after step" in killed(home, "killed")
    assert_same_end(home, "killed", "whole")


@pytest.mark.long(short="test_a_run_goes_on_to_the_same_bytes_and_other_bits_are_another_run")
@pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None,
    reason="bitsandbytes is not installed: pip install -e '.[qlora]' to run this test",
)
def test_a_kill_changes_nothing_where_the_base_is_held_in_4_bits(home: Path) -> None:
    finish(home, words("four-bits", "--bits", "4"))
    assert "continuing after step" in killed(home, "four-bits-killed", "--bits", "4")
    assert_same_end(home, "four-bits-killed", "four-bits")


def test_a_run_moves_from_one_rank_to_two_and_back(home: Path, undisturbed: dict[str, torch.Tensor]) -> None:
    shutil.copytree(home / "runs" / "whole", home / "runs" / "moved")
    cut(home, "moved", 2)
    launch = ["-m", "ascendchat", "launch", "--devices", "2", "--device-type", "cpu"]
    status, said = run_apart(home, [*launch, *words("moved")], TheirsPopen)
    assert status == 0, said
    assert (home / "runs" / "moved" / "hf" / "step_000004" / "optim-1-of-2.safetensors").is_file()
    cut(home, "moved", 4)
    assert "continuing after step 4" in finish(home, words("moved"))
    found = final(home, "moved")
    for name, tensor in undisturbed.items():
        torch.testing.assert_close(found[name], tensor, atol=2e-4, rtol=1e-2, msg=name)
    losses = [
        [row["loss"] for row in read_metrics(home / "runs" / run / "hf") if "loss" in row] for run in ("whole", "moved")
    ]
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)
