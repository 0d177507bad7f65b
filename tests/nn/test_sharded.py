"""Weights shared out over ranks (FSDP2), in one copy or two: the same training as on one rank, and any ranks go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from ranks import Host, run_ranks

from ascendchat.checkpoint import Writer, newest
from ascendchat.errors import UserError
from ascendchat.nn.attention import Sdpa
from ascendchat.nn.gpt import GPT, dense
from ascendchat.nn.loss import head_loss
from ascendchat.nn.optim import MuonAdamW, adamw_groups
from ascendchat.nn.sharded import ShardedAdamW, mesh_over, share_out_weights, whole_weights
from ascendchat.parallel import collectives
from ascendchat.sizes.shape import Shape

SHAPE = Shape.from_depth(2, vocab=61, seq_len=24, dim=32, head_dim=16)  # 61 rows: no number of ranks divides them
Trained = tuple[list[float], list[float], NDArray[np.float32]]  # losses, gradient norms, some weights
ROWS, STEPS = 12, 6


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, 61, (ROWS, 25), generator=torch.Generator().manual_seed(step % 4))


def train(last: int, together: int, load: str | None = None, save: str | None = None, **how: Any) -> Trained:
    """`together` ranks share a copy of the weights; 0: every rank has all."""
    world = collectives.world()
    model = GPT(SHAPE)
    model.initialise(0)
    optimizer: Any
    if together:
        mesh = mesh_over(torch.device("cpu"), together)
        share_out_weights(model, model.blocks, mesh, torch.float32, **how)
        optimizer = ShardedAdamW(model, adamw_groups(model, 3e-3, decay=0.1), mesh)
    else:
        optimizer = MuonAdamW(adamw_groups(model, 3e-3, decay=0.1), compute_dtype=torch.float32)
    first = 0
    if load:
        found = newest(Path(load))
        assert found is not None
        optimizer.load(found.reader(), found.step)
        first = found.step
    mine = ROWS // world.size
    attend, losses, norms = dense(model, Sdpa()), [], []
    for step in range(first, last):
        rows = batch(step)[world.rank * mine : (world.rank + 1) * mine]
        total = torch.zeros(())
        for part in rows.split(mine // 3 or 1):
            weight = torch.tensor(4.0 / (mine * SHAPE.seq_len))
            loss = head_loss(model(part[:, :-1], attend), model.head, part[:, 1:], SHAPE.vocab, weight=weight)
            loss.backward()
            total += loss.detach() / 4.0
        collectives.all_reduce(total, "mean")
        square = optimizer.step(lr_scale=0.5 if step else 1.0, clip=0.2, loss_scale=4.0).square()
        collectives.all_reduce(square, "sum")
        losses.append(total.item())
        norms.append(square.sqrt().item())
    weights = whole_weights(model.state_dict(), torch.float32)
    if save:
        writer = Writer(Path(save))
        writer.save(last, model=weights, shards=optimizer.shards(), state={})
        writer.wait()
        collectives.barrier()
    return losses, norms, weights["blocks.1.up"].numpy() if weights else np.empty(0, np.float32)


def rank_main(rank: int, *arguments: Any) -> Trained:
    collectives.init(Host())
    try:
        return train(*arguments)
    finally:
        collectives.teardown()


@pytest.fixture(scope="module")
def alone() -> Trained:
    """What one process makes of all steps."""
    return train(STEPS, 0)


def same(found: Trained, expected: Trained) -> None:
    assert found[0] == pytest.approx(expected[0][-len(found[0]) :], abs=1e-5)
    assert found[1] == pytest.approx(expected[1][-len(found[1]) :], rel=1e-4)
    np.testing.assert_allclose(found[2], expected[2], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "together"), [(2, 2), (4, 2)])
def test_weights_that_are_shared_out_train_like_whole_ones(ranks: int, together: int, alone: Trained) -> None:
    assert alone[0][-1] < alone[0][0]
    found = run_ranks(rank_main, ranks, STEPS, together, seconds=300)
    same(found[0], alone)
    assert all(each[:2] == found[0][:2] for each in found)  # all ranks say the same


@pytest.mark.slow
def test_a_run_goes_on_with_other_shares(alone: Trained, tmp_path: Path) -> None:
    place = str(tmp_path)
    run_ranks(rank_main, 4, 2, 2, None, place, seconds=300)  # two copies over two ranks each
    run_ranks(rank_main, 2, 4, 2, place, place, seconds=300)  # one copy over two
    same(train(STEPS, 0, place), alone)  # and one that is whole


@pytest.mark.parametrize("together", [1, 3])
def test_what_cannot_be_shared_out_is_refused(together: int) -> None:
    with pytest.raises(UserError, match=f"{together} devices cannot share"):
        mesh_over(torch.device("cpu"), together)


def losses_around_a_load(rank: int) -> tuple[float, float]:
    """Of the weights that were loaded: after a look at those of before, and by a model that never had others."""
    collectives.init(Host())
    try:
        rows, found = batch(0), []
        for looks in (True, False):
            model, other = GPT(SHAPE), GPT(SHAPE)
            model.initialise(0)
            other.initialise(1)
            mesh = mesh_over(torch.device("cpu"), 2)
            share_out_weights(model, model.blocks, mesh, torch.float32)
            optimizer, attend = ShardedAdamW(model, adamw_groups(model, 3e-3), mesh), dense(model, Sdpa())
            weights = {name: parameter.detach().flatten() for name, parameter in other.named_parameters()}
            with torch.no_grad():
                if looks:
                    model(rows[:, :-1], attend)
                optimizer.load(lambda shard, known=weights: known[shard.parameter][shard.start : shard.stop], 0)
                found.append(head_loss(model(rows[:, :-1], attend), model.head, rows[:, 1:], SHAPE.vocab).item())
        return found[0], found[1]
    finally:
        collectives.teardown()


@pytest.mark.slow
def test_weights_that_are_loaded_after_a_look_at_the_model_are_those_that_run() -> None:
    for looked, fresh in run_ranks(losses_around_a_load, 2, seconds=300):
        assert looked == fresh
