"""One rank, two, three, or micro-batches: the same training; and state saved by some ranks is read by any others."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from ranks import Host, run_ranks

from ascendchat.checkpoint import Writer, newest
from ascendchat.chips import Chip, find, this_cpu
from ascendchat.config.train import USUAL_ROW, BaseConfig
from ascendchat.errors import OutOfMemory, RankFailed, UserError, rank_error
from ascendchat.nn import optim
from ascendchat.nn.attention import Sdpa
from ascendchat.nn.gpt import GPT, dense
from ascendchat.nn.loss import head_loss
from ascendchat.nn.optim import MuonAdamW, groups
from ascendchat.parallel import collectives
from ascendchat.rl.source import SyncRolloutSource
from ascendchat.rl.stage import RlStage
from ascendchat.sizes.batch import Split
from ascendchat.sizes.schedule import lr_scale, rates
from ascendchat.sizes.shape import Shape
from ascendchat.train import budget
from ascendchat.train.budget import sizes_for
from ascendchat.train.stage import Loss

SHAPE = Shape.from_depth(2, vocab=60, seq_len=24, dim=32, head_dim=16)
Trained = tuple[list[float], NDArray[np.float32]]  # losses, some weights
HOST: Any = SimpleNamespace(responds=lambda: True, release=lambda: None)
ROWS = 12  # of the global batch: divides among 1, 2, 3, 4 and 6


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, 60, (ROWS, 25), generator=torch.Generator().manual_seed(step % 4))


def train(first: int, last: int, micro: int, load: str | None, save: str | None) -> Trained:
    world = collectives.world()
    model = GPT(SHAPE)
    model.initialise(0)
    optimizer = MuonAdamW(groups(model, rates(SHAPE.dim, 4096)), compute_dtype=torch.float32)
    if load:
        found = newest(Path(load))
        assert found is not None
        optimizer.load(found.reader(), found.step, averaging=found.step > 8)
    mine = ROWS // world.size
    attend, losses = dense(model, Sdpa()), []
    for step in range(first, last):
        rows = batch(step)[world.rank * mine : (world.rank + 1) * mine]
        total = torch.zeros(())
        for part in rows.split(micro):
            weight = torch.tensor(1.0 / (mine * SHAPE.seq_len))
            loss = head_loss(model(part[:, :-1], attend), model.head, part[:, 1:], SHAPE.vocab, weight=weight)
            loss.backward()
            total += loss.detach()
        collectives.all_reduce(total, "mean")
        optimizer.step(lr_scale=0.25 * lr_scale(step, 20, warmup=5), momentum=0.9, matrix_decay=0.1)
        if step >= 8:
            optimizer.average(step - 7, last=step == 9)
        losses.append(total.item())
    if save:
        writer = Writer(Path(save))
        writer.save(last, model=model.state_dict(), shards=optimizer.shards(), state={})
        writer.wait()
        collectives.barrier()
    return losses, model.blocks[1].up.detach().numpy().copy()


def rank_main(rank: int, *arguments: object) -> Trained:
    collectives.init(Host())
    try:
        return train(*arguments)  # type: ignore[arg-type]
    finally:
        collectives.teardown()


def sizes_of(chip: Chip, minutes: float) -> tuple[int, int]:
    """With --minutes, where text does not end."""
    corpora: Any = [(SimpleNamespace(vocab_size=16384, tokens=10**10), 1.0)]
    return sizes_for(BaseConfig(minutes=minutes), corpora, chip)


def chosen_sizes(rank: int, cpu: bool, minutes: float) -> tuple[int, int]:
    """On two CPU ranks, or where the second rank has a chip with less memory and speed."""
    collectives.init(Host())
    h200 = find("H200")
    try:
        other = replace(h200, memory=h200.memory // (1 + 7 * rank), flops=h200.flops / (1 + 999 * rank))
        return sizes_of(this_cpu() if cpu else other, minutes)
    finally:
        collectives.teardown()


def test_ranks_with_different_chips_choose_one_depth_and_one_length_of_rows() -> None:
    first, second = run_ranks(chosen_sizes, 2, False, 0.05)
    assert first == second
    assert first[1] < USUAL_ROW


def test_ranks_on_one_cpu_are_not_twice_as_fast_as_it() -> None:
    assert run_ranks(chosen_sizes, 2, True, 1000) == [sizes_of(this_cpu(), 1000)] * 2


def paced(rank: int) -> int:
    """The horizon of a minute where the second rank is four times slower."""
    collectives.init(Host())
    try:
        budget.measured_speed = lambda train_model, batch: 1000.0 / (1 + 3 * rank)
        budget.first_batch = lambda *_: None  # type: ignore[assignment,return-value]
        train_model: Any = SimpleNamespace(place=torch.device("cpu"), model=torch.nn.Linear(1, 1), device=HOST)
        return budget.measured_token_budget(BaseConfig(minutes=1), train_model, [], Split(2, 1, 1, 32), print)
    finally:
        collectives.teardown()


def test_minutes_are_those_of_the_slowest_rank() -> None:
    assert run_ranks(paced, 2) == [int(2 * 250 * 60 * budget.KEPT_SPEED)] * 2


@pytest.fixture(scope="module")
def alone() -> Trained:
    """What one process makes of ten steps."""
    return train(0, 10, ROWS, None, None)


def test_micro_batches_train_like_one_batch(alone: Trained) -> None:
    losses, weights = train(0, 10, 2, None, None)
    assert losses == pytest.approx(alone[0], abs=1e-4)
    np.testing.assert_allclose(weights, alone[1], atol=1e-3, rtol=1e-2)


def team_main(rank: int, *arguments: object) -> tuple[Trained, list[float]]:
    """Four ranks, of which two and two share the matrices out; and the norm of a gradient in teams of 4, 2 and 1."""
    collectives.init(Host())
    try:
        norms = []
        for size in (4, 2, 1):
            optim.team_size = lambda matrices, devices, size=size: size  # type: ignore[assignment]
            model = GPT(SHAPE)
            model.initialise(0)
            optimizer = MuonAdamW(groups(model, rates(SHAPE.dim, 4096)), compute_dtype=torch.float32)
            rows = batch(rank)
            head_loss(model(rows[:, :-1], dense(model, Sdpa())), model.head, rows[:, 1:], SHAPE.vocab).backward()
            square = optimizer.step(lr_scale=0.1, clip=1e6).square()
            collectives.all_reduce(square)
            norms.append(square.sqrt().item())
        optim.team_size = lambda matrices, devices: 2
        return train(*arguments), norms  # type: ignore[arg-type]
    finally:
        collectives.teardown()


def test_ranks_in_teams_train_like_one_and_save_everything_once(alone: Trained, tmp_path: Path) -> None:
    """What 1,024 ranks do (sizes/memory.py), with four."""
    found = run_ranks(team_main, 4, 0, 6, ROWS, None, str(tmp_path))
    for (losses, weights), norms in found:
        assert losses == pytest.approx(alone[0][:6], abs=1e-4)
        assert np.array_equal(weights, found[0][0][1]), "the ranks have different weights"
        assert norms == pytest.approx([norms[0]] * 3, rel=1e-5)
    losses, weights = train(6, 10, ROWS, str(tmp_path), None)
    assert losses == pytest.approx(alone[0][6:], abs=1e-4)
    np.testing.assert_allclose(weights, alone[1], atol=1e-3, rtol=1e-2)
    saved = newest(tmp_path)
    assert saved is not None
    kept = [shard for shards in saved.index().values() for shard, _ in shards]
    assert len({shard.key() for shard in kept}) == len(kept), "saved by both teams"


@pytest.mark.slow
def test_a_run_moves_between_one_three_two_and_one_ranks(alone: Trained, tmp_path: Path) -> None:
    places = [str(tmp_path / str(i)) for i in range(3)]
    found, _ = train(0, 2, ROWS, None, places[0])
    for number, ranks in enumerate((3, 2)):
        steps = 2 + 3 * number, 5 + 3 * number
        results = run_ranks(rank_main, ranks, *steps, ROWS, places[number], places[number + 1])
        assert all(np.array_equal(weights, results[0][1]) for _, weights in results), "the ranks have different weights"
        found += results[0][0]
    losses, weights = train(8, 10, ROWS, places[2], None)
    assert found + losses == pytest.approx(alone[0], abs=1e-4)
    np.testing.assert_allclose(weights, alone[1], atol=1e-3, rtol=1e-2)


def rl_that_ends(rank: int, place: str, problem: Exception) -> str:
    """What an rl stage says whose second rank meets this problem at some place of a step."""
    collectives.init(Host())

    def meet(*_: Any, **__: Any) -> Any:
        raise problem

    def finished(batch: int) -> Iterator[list[Any]]:
        if place == "rollouts" and rank == 1:
            meet()
        yield []

    stage: Any = RlStage.__new__(RlStage)
    source = SimpleNamespace(finished=finished, version=0, throughput=lambda *_: {})
    stage.source, stage.model, stage.folder, stage._slots = source, torch.nn.Linear(1, 1), Path(), []
    stage.train_model, stage.method = SimpleNamespace(place=torch.device("cpu")), SimpleNamespace(mean="token")
    stage.config, stage.answers, stage.longest = SimpleNamespace(updates=1, samples=1, workflow=""), 1, 1
    stage.rollout = SimpleNamespace(
        judge=SimpleNamespace(terms=[]), questions=SimpleNamespace(tasks=[SimpleNamespace(name="sums")])
    )
    stage._problem, stage._in_step = None, False
    empty = SimpleNamespace(rows=SimpleNamespace(inputs=[]), tokens=0, answers=0)
    stage._packed, stage.upload, stage.split = lambda slots: empty, lambda rows: rows, SimpleNamespace(rows=1)
    stage.model.shape, stage.tokenizer = SimpleNamespace(seq_len=4), SimpleNamespace(pad=0)
    stage.policy_loss = lambda *_: Loss(torch.ones((), requires_grad=True))
    stage._write_transcript = lambda *_: None
    if rank == 1:
        setattr(stage, {"loss": "policy_loss", "transcript": "_write_transcript", "rollouts": "unused"}[place], meet)
    try:
        for batch in stage.micro_batches(0):
            stage.forward_backward(batch)
        stage.correction(0)
    except UserError as said:
        return str(said)
    except ValueError as said:
        places = [place.name for place in traceback.extract_tb(said.__traceback__)]
        return f"{said} in {places[-1]}"
    finally:
        collectives.teardown()
    return ""


def test_a_rank_whose_answers_cannot_be_judged_ends_rl_with_its_sentence_on_every_rank() -> None:
    said = "--reward judge has judged none of 2 answers; mend the function"
    assert run_ranks(rl_that_ends, 2, "rollouts", UserError(said)) == [said] * 2


@pytest.mark.parametrize("place", ["rollouts", "loss", "transcript"])
def test_an_error_of_the_program_on_one_rank_of_rl_ends_it_on_every_rank_with_one_traceback(place: str) -> None:
    first, second = run_ranks(rl_that_ends, 2, place, ValueError("no such\nslot"), seconds=60)
    assert first == "rank 1 cannot go on (ValueError: no such slot); its own output has the traceback"
    assert second == "no such\nslot in meet"


def weights_that_cannot_be_sent(rank: int) -> str:
    """What each rank says when sending new weights meets an error of the program."""
    collectives.init(Host())

    def load(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such place")

    source: Any = SyncRolloutSource.__new__(SyncRolloutSource)
    source.rollout = SimpleNamespace(generator=SimpleNamespace(load=load))
    try:
        source._send({}, 1)
    except (UserError, RuntimeError) as said:
        return f"{type(said).__name__}: {said}"
    finally:
        collectives.teardown()
    return ""


def test_an_error_of_the_program_while_weights_are_sent_ends_rl_on_every_rank() -> None:
    first, second = run_ranks(weights_that_cannot_be_sent, 2, seconds=60)
    assert first == "RuntimeError: no such place"
    assert second == "RankFailed: rank 0 cannot go on (RuntimeError: no such place); its own output has the traceback"


def test_only_a_mistake_of_the_users_on_one_rank_keeps_launch_from_starting_again() -> None:
    """Status 2 on any rank is never restarted, so it must not be what the others make of a crash."""
    crash = rank_error(ValueError("no such slot"), 1)
    assert isinstance(crash, RankFailed)
    assert crash.status == 1
    assert [rank_error(kind("words"), 1).status for kind in (UserError, OutOfMemory)] == [2, 71]
