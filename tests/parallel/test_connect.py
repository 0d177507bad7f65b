"""Joining a job: missing ranks are named in time, timeouts are ordered, nothing is left after an error."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from ranks import Host, run_ranks

from ascendchat.parallel import collectives
from ascendchat.parallel.connect import MissingRanks, order_timeouts

ASLEEP = 3000.0  # seconds, longer than run_ranks waits


def together(folder: str, rank: int, count: int) -> None:
    """Wait until `count` ranks have imported everything: a busy machine must not look like a missing rank."""
    Path(folder, f"ready_{rank}").touch()
    while len(list(Path(folder).glob("ready_*"))) < count:
        time.sleep(0.02)


def wait_for_a_rank_that_never_comes(rank: int, folder: str, count: int) -> str:
    together(folder, rank, count)
    try:
        collectives.init(Host(), connect_timeout=2.0)
    except MissingRanks as error:
        return str(error)
    raise AssertionError("nobody was missing")


@pytest.mark.slow
def test_ranks_that_never_arrive_are_named_within_the_timeout(tmp_path: Path) -> None:
    first, second, absent, _ = run_ranks(wait_for_a_rank_that_never_comes, 4, str(tmp_path), 2, absent=(2, 3))
    assert absent is None
    for text in (first, second):
        assert "ranks 2 (node 0), 3 (node 0) of 4 never arrived within 2 s" in text or "rank 0 closed the job" in text
        assert "rank_2.log" in text or "rank 0 closed" in text
    assert "never arrived within 2 s" in first, "rank 0 keeps the list and must name them"


@pytest.mark.slow
def test_a_missing_rank_0_is_named(tmp_path: Path) -> None:
    said = run_ranks(wait_for_a_rank_that_never_comes, 2, str(tmp_path), 1, absent=(0,))[1]
    assert "rank 0 never arrived" in said


def fall_asleep_in_the_first_collective(rank: int, folder: str) -> None:
    os.dup2(os.open(f"{folder}/said", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    together(folder, rank, 2)
    if rank == 1:
        collectives.warm_up = lambda me, place: time.sleep(ASLEEP)  # type: ignore[attr-defined]
    collectives.init(Host(), connect_timeout=2.0)


@pytest.mark.slow
def test_a_hang_in_the_first_collective_ends_the_job_in_time(tmp_path: Path) -> None:
    # Both ranks wait with a limit: the one that ends first may take the other's connection along.
    with pytest.raises(AssertionError, match=r"ended with status 1|Connection closed by peer"):
        run_ranks(fall_asleep_in_the_first_collective, 2, str(tmp_path))
    assert "arrived but did not finish the first collective within 2 s" in (tmp_path / "said").read_text()


def fail_after_init(rank: int) -> bool:
    collectives.init(Host(), connect_timeout=60.0)
    try:
        if rank == 0:
            raise ValueError("a bug")
        collectives.barrier()
    except (ValueError, RuntimeError):
        return True
    return False


def test_an_error_in_one_rank_does_not_keep_the_processes_alive() -> None:
    assert run_ranks(fail_after_init, 2, seconds=40.0)[0] is True


def test_one_process_needs_no_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    world = collectives.init(Host())
    assert (world.size, torch.distributed.is_initialized()) == (1, False)
    tensor = torch.tensor([3])
    collectives.all_reduce(tensor).wait()
    collectives.barrier()
    assert tensor.tolist() == [3]
    assert collectives.gather_objects("a") == ["a"]
    collectives.teardown()


LIBRARY = {"XCCL_CONNECT_TIMEOUT": "600"}


@pytest.mark.parametrize(
    ("timeout", "connect", "environ", "group", "expected_connect", "variables"),
    [
        (1800.0, None, {}, 1800.0, 600.0, {}),
        (1800.0, 5.0, {}, 1800.0, 5.0, {}),
        (1800.0, None, {"XCCL_CONNECT_TIMEOUT": "300"}, 1800.0, 300.0, {"XCCL_EXEC_TIMEOUT": "1740"}),
        (300.0, None, LIBRARY, 720.0, 600.0, {"XCCL_EXEC_TIMEOUT": "660"}),
        (1800.0, None, {**LIBRARY, "XCCL_EXEC_TIMEOUT": "1200"}, 1800.0, 600.0, {}),
        (1800.0, None, {**LIBRARY, "XCCL_EXEC_TIMEOUT": "7200"}, 7260.0, 600.0, {}),
    ],
    ids=["none", "given", "library", "short", "user", "user-long"],
)
def test_timeouts_fire_in_order(
    timeout: float,
    connect: float | None,
    environ: dict[str, str],
    group: float,
    expected_connect: float,
    variables: dict[str, str],
) -> None:
    found = order_timeouts("xccl", timeout, connect, environ)
    assert (found.group, found.connect, found.variables) == (group, expected_connect, variables)


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({**LIBRARY, "XCCL_EXEC_TIMEOUT": "7200"}, "not below the process group's timeout of 1800 s"),
        ({**LIBRARY, "XCCL_EXEC_TIMEOUT": "500"}, "XCCL_EXEC_TIMEOUT=500 is not above XCCL_CONNECT_TIMEOUT=600"),
        ({**LIBRARY, "XCCL_EXEC_TIMEOUT": "0"}, "waits for ever"),
        ({"XCCL_CONNECT_TIMEOUT": "long"}, "is not a number of seconds"),
    ],
)
def test_variables_in_the_wrong_order_are_explained(environ: dict[str, str], said: str) -> None:
    assert any(said in note for note in order_timeouts("xccl", 1800.0, None, environ).notes)
    assert order_timeouts("xccl", 1800.0, None, LIBRARY).notes == ()  # in the right order
