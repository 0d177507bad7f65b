"""`cannsim trace` counts what processes launched, moved and held; the first error ends one that asked for it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cannsim import trace

PROGRAM = """
import os, torch, torch_npu
import torch.distributed as dist
rank = int(os.environ["RANK"])
torch.npu.set_device(rank)
dist.init_process_group("hccl")
x = torch.ones(1024, device="npu")
for _ in range(3 + rank):
    y = x + x
dist.all_reduce(x)
torch.ones(4, dtype=torch.int64).npu() >> 1  # on the AICPU
torch.npu.synchronize()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def traced(on_npu: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What is made of the lines that two ranks wrote to one file."""
    folder = tmp_path_factory.mktemp("trace")
    lines, chrome = folder / "trace.jsonl", folder / "deep" / "trace.json"
    on_npu(PROGRAM, ranks=2, CANNSIM_TRACE=lines, CANNSIM_TRACE_DETAIL=1)
    table = trace.report(lines, chrome)
    return {"table": table, "chrome": json.loads(chrome.read_text()), "processes": trace.processes(trace.read(lines))}


def test_a_trace_counts_launches_bytes_aicpu_and_collectives_of_each_rank(traced: dict[str, Any]) -> None:
    ranks = traced["processes"]
    assert [process.rank for process in ranks] == [0, 1]
    for process in ranks:
        assert process.launches["aclnnAdd"] == 3 + process.rank
        assert process.bytes["aclnnAdd"] == (3 + process.rank) * 3 * 4096, "two read, one written"
        assert process.launches["HcclAllReduce"] == 1
        assert process.bytes["HcclAllReduce"] == 4096
        assert process.aicpu == {"aclnnRightShift": 1}
        assert max(held for _, held in process.memory[process.rank]) >= 2 * 2**20


def test_the_table_shows_them(traced: dict[str, Any]) -> None:
    table = traced["table"]
    assert re.search(r"^cannsim: \d+ launches in 2 process\(es\), 2 of them on the AICPU$", table, re.MULTILINE)
    assert re.search(r"^aclnnAdd +7 +84.0 KiB$", table, re.MULTILINE)
    assert re.search(r"^aclnnRightShift +2 +\S+ \S+ +2$", table, re.MULTILINE)
    assert re.search(r"^HcclAllReduce +1 x, 4.0 KiB +1 x, 4.0 KiB$", table, re.MULTILINE)
    assert re.search(r"^rank 1 \(pid \d+\) NPU 1 +\S+ MiB", table, re.MULTILINE)
    assert "12 %" in table.splitlines()[-4]


def test_the_chrome_trace_has_rows_for_streams_and_a_curve_of_memory(traced: dict[str, Any]) -> None:
    events = traced["chrome"]["traceEvents"]
    names = {event["args"]["name"] for event in events if event["ph"] == "M" and event["name"] == "process_name"}
    assert {re.sub(r"\d+\)", "N)", name) for name in names} == {"rank 0 (pid N)", "rank 1 (pid N)"}
    tasks = [event for event in events if event["ph"] == "X"]
    assert sum(event["name"] == "aclnnAdd" for event in tasks) == 7
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in tasks)
    assert {event["name"] for event in tasks if event["cat"] == "collective"} == {"HcclAllReduce"}
    streams = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in tasks} == streams
    adds = [event for event in events if event["ph"] == "i" and event["name"] == "aclnnAdd"]
    assert all(event["args"]["bytes"] == 3 * 4096 for event in adds)
    assert {event["name"] for event in events if event["ph"] == "C"} == {"memory of NPU 0", "memory of NPU 1"}


def test_memory_over_time_shows_the_most_of_each_part() -> None:
    samples = [(0.5, 1024), (0.6, 0), (2.0, 4096), (7.9, 2048), (9.0, 0)]
    assert trace.over_time(samples, 0.0, 8.0, 4) == ["4.0 KiB", "4.0 KiB", "4.0 KiB", "4.0 KiB"]
    assert trace.over_time(samples[:2], 0.0, 8.0, 4) == ["1.0 KiB", "0 B", "0 B", "0 B"]


@pytest.mark.slow
def test_the_command_writes_the_trace_and_passes_on_the_status(tmp_path: Path) -> None:
    program = "import torch; x = torch.ones(8, device='npu'); x + x; torch.npu.synchronize(); exit(7)"
    command = [sys.executable, "-m", "cannsim", "trace", "-o", str(tmp_path / "t.json"), "--", sys.executable, "-c"]
    done = subprocess.run([*command, program], capture_output=True, text=True, timeout=600)
    assert done.returncode == 7
    assert re.search(r"^aclnnAdd +1 ", done.stderr, re.MULTILINE), done.stderr
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


FAILS = """
import torch
x = torch.ones(4).npu()
try:
    x + x
    torch.npu.synchronize()
except RuntimeError:
    pass
print("went on")
"""


def test_the_first_error_ends_the_process_if_asked(on_npu: Callable[..., Any]) -> None:
    fault = {"CANNSIM_FAULT": "aclnnAdd:1:507015"}
    assert "went on" in on_npu(FAILS, check=False, **fault)[0].output
    (stopped,) = on_npu(FAILS, check=False, CANNSIM_STOP_AT_FIRST_ERROR=1, **fault)
    assert stopped.status == "signal 6"
    assert "cannsim: stopped at the first error: EZ9999: Inner Error! The error from device" in stopped.output
    assert "went on" not in stopped.output


def test_an_operator_that_is_not_simulated_is_an_error_too(on_npu: Callable[..., Any]) -> None:
    call = "torch_npu.npu_random_choice_with_mask((torch.ones(4) > 0).npu(), 2, 1)[0].cpu()"
    program = f"import torch, torch_npu; {call}; print('went on')"
    (stopped,) = on_npu(program, check=False, CANNSIM_STOP_AT_FIRST_ERROR=1)
    assert stopped.status == "signal 6"
    assert "cannsim: stopped at the first error: EZ3002: Optype [" in stopped.output
    assert "went on" not in stopped.output


def test_memory_that_runs_out_is_no_such_error(on_npu: Callable[..., Any]) -> None:
    """torch_npu frees what it caches and tries again."""
    program = """
    import torch
    for megabytes in (200, 201, 202):
        x = torch.empty(megabytes * 2**20, dtype=torch.uint8, device="npu")
        del x
    print("went on")
    """
    (rank,) = on_npu(program, CANNSIM_MEMORY_GB=0.25, CANNSIM_STOP_AT_FIRST_ERROR=1)
    assert "went on" in rank.output
