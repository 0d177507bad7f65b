"""What is dropped while a model learns: only then, and the same again after a restart."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from small_training import prepared_home

from ascendchat.cli import main
from ascendchat.nn.attention import Reference
from ascendchat.nn.gpt import GPT, dense
from ascendchat.sizes.shape import Shape
from ascendchat.train.rows import mixed

SHAPE = Shape.from_depth(2, vocab=64, dim=32, head_dim=16, seq_len=16)


def made(dropout: float, checkpointing: bool = False) -> GPT:
    model = GPT(SHAPE, dropout=dropout, checkpoint_activations=checkpointing)
    model.initialise(0)
    with torch.no_grad():
        for block in model.blocks:
            for weight in (block.out, block.down):
                weight.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(1))
    return model


def hidden(model: GPT, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return model(torch.arange(16).view(1, 16), dense(model, Reference()))


def test_only_a_model_that_learns_drops() -> None:
    plain, dropping = made(0.0), made(0.5)
    assert not torch.equal(hidden(plain), hidden(dropping))
    assert not torch.equal(hidden(dropping, 1), hidden(dropping, 2))
    assert torch.equal(hidden(dropping, 1), hidden(dropping, 1))
    with torch.no_grad():
        assert torch.equal(hidden(plain), hidden(dropping))


def test_what_is_computed_again_drops_the_same() -> None:
    gradients = []
    for checkpointing in (False, True):
        model = made(0.3, checkpointing)
        hidden(model).square().sum().backward()
        gradients.append(model.blocks[0].up.grad)
    assert torch.equal(*gradients)


def test_every_seed_rank_and_step_drops_something_else() -> None:
    """On a CPU too, whose generator takes 32 bits of a seed."""
    places = [(seed, rank, step) for seed in (0, 7, 10**18) for rank in (0, 1, 4, 8) for step in (0, 1, 2**30 - 1)]
    found = set()
    for place in places:
        torch.manual_seed(mixed(*place))
        found.add(tuple(torch.rand(4).tolist()))
    assert len(found) == len(places)
    assert mixed(3, 2, 1) == mixed(3, 2, 1)


@pytest.mark.slow
def test_a_run_that_goes_on_drops_what_it_would_have_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCENDCHAT_HOME", str(tmp_path))
    sizes = "--depth 1 --dim 16 --head-dim 16 --max-seq-len 32 --total-batch-size 128 --device-batch-size 4 --steps 4"
    told = [
        *sizes.split(),
        prepared_home(tmp_path),
        "--device-type",
        "cpu",
        "--eval-every",
        "-1",
        "--sample-every",
        "0",
    ]

    def losses(run: str) -> dict[int, float]:
        rows = map(json.loads, (tmp_path / "runs" / run / "base" / "metrics.jsonl").read_text().splitlines())
        return {row["step"]: row["loss"] for row in rows if "loss" in row}

    dropping = ["--run", "r", "--dropout", "0.2", "--save-every", "2"]
    assert main(["base", *told, "--run", "plain"]) == 0
    assert main(["base", *told, *dropping]) == 0
    whole = losses("r")
    shutil.rmtree(tmp_path / "runs" / "r" / "base" / "step_000004")
    assert main(["base", *told, *dropping]) == 0
    assert losses("r") == whole
    assert losses("plain") != whole
