"""Run folders, metrics.jsonl under kill -9, and the arithmetic of speed: `pytest tests/runs/test_run_folder.py`."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ascendchat.config import parse
from ascendchat.errors import UserError, home
from ascendchat.runs import run as record
from ascendchat.runs.console import Smooth, eta, speed
from ascendchat.runs.run import open_run, read_facts, read_metrics, run_folder


@dataclass(frozen=True)
class SampleConfig:
    """A config."""

    depth: int = 12
    run: str = "名字: yes"
    track: tuple[str, ...] = ("a", "b")
    lr: float | None = None


def strict(line: bytes) -> dict:
    """JSON as the standard has it: NaN and Infinity are refused."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(line, parse_constant=refuse)


def steps(folder: Path) -> list[int]:
    return [row["step"] for row in read_metrics(folder)]


def test_run_folder_is_under_home_and_refuses_names_that_leave_it() -> None:
    assert run_folder("demo-1", "base") == home() / "runs" / "demo-1" / "base"
    for name in ("", "..", "a/b", "/tmp", ".hidden", "a b"):
        with pytest.raises(UserError, match="cannot name a run"):
            run_folder(name, "base")


def test_config_and_facts_are_saved_and_config_reads_back(tmp_path: Path) -> None:
    config = SampleConfig(depth=3, lr=1e-4)
    with open_run(tmp_path / "r", config, facts={"chip": "X1", "world": 2}) as run:
        run.note(attention="reference")
    assert parse(SampleConfig, ["--config", str(tmp_path / "r" / "config.yaml")]) == config
    facts = json.loads((tmp_path / "r" / "run.json").read_text())
    assert facts["chip"] == "X1"
    assert facts["attention"] == "reference"
    assert facts["argv"] == sys.argv
    assert facts["packages"]["rich"]
    assert facts["status"] == "finished"
    assert facts["ended"] >= facts["started"]
    assert sorted(p.name for p in (tmp_path / "r").iterdir()) == [".lock", "config.yaml", "metrics.jsonl", "run.json"]


def test_status_says_how_the_run_ended(tmp_path: Path) -> None:
    for error, status in ((KeyboardInterrupt, "stopped"), (SystemExit, "stopped"), (RuntimeError, "failed")):
        with pytest.raises(error), open_run(tmp_path, SampleConfig()):
            raise error
        assert json.loads((tmp_path / "run.json").read_text())["status"] == status


def test_resume_keeps_the_identity_and_the_history(tmp_path: Path) -> None:
    open_run(tmp_path, SampleConfig()).close("stopped")
    first = json.loads((tmp_path / "run.json").read_text())
    open_run(tmp_path, SampleConfig(), resume_step=5).close()
    open_run(tmp_path, SampleConfig(), resume_step=9).close()
    facts = json.loads((tmp_path / "run.json").read_text())
    assert (facts["id"], facts["created"]) == (first["id"], first["created"])
    assert [(h["resume_step"], h["status"]) for h in facts["history"]] == [(None, "stopped"), (5, "finished")]


def test_values_json_cannot_hold_are_written_strictly_and_read_back(tmp_path: Path) -> None:
    with open_run(tmp_path, SampleConfig()) as run:
        run.log(1, loss=math.nan, norm=math.inf, low=-math.inf, ok=True, none=None, n=np.int64(7), x=np.float32(0.5))
        run.log(2, sample="一\n\ud800", odd=object(), many=[1.0, math.nan], core={"arc": math.inf}, arr=np.ones(3))
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines()
    assert [strict(line)["step"] for line in lines] == [1, 2]
    first, second = read_metrics(tmp_path)
    assert math.isnan(first["loss"])
    assert (first["norm"], first["low"], first["ok"], first["none"]) == (math.inf, -math.inf, True, None)
    assert (first["n"], first["x"]) == (7, 0.5)
    assert second["sample"] == "一\n\ud800"
    assert math.isnan(second["many"][1])
    assert second["core"] == {"arc": math.inf}


def test_resume_supersedes_later_rows_and_the_file_only_grows(tmp_path: Path) -> None:
    with open_run(tmp_path, SampleConfig()) as run:
        for step in range(1, 9):
            run.log(step, loss=float(step))
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with open_run(tmp_path, SampleConfig(), resume_step=5) as run:
        run.log(6, loss=60.0)
        run.log(6, val=1.0)  # an evaluation has a row of its own
    after = (tmp_path / "metrics.jsonl").read_bytes()
    assert after.startswith(before)
    assert b'{"resumed_at": 5' in after
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6, 6]
    assert read_metrics(tmp_path)[5]["loss"] == 60.0
    said: list[str] = []
    with open_run(tmp_path, SampleConfig(), say=said.append) as run:
        run.log(0, val=3.0)
    assert steps(tmp_path) == [0]
    assert "starts anew" in said[0]


def test_a_row_is_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, written = os.write, []
    with open_run(tmp_path, SampleConfig()) as run:
        monkeypatch.setattr(os, "write", lambda fd, data: written.append(bytes(data)) or real(fd, data))
        run.log(1, text="x" * 100_000)
        run.log(2, loss=1.0)
        monkeypatch.setattr(os, "write", real)
    assert [strict(data)["step"] for data in written] == [1, 2]
    assert b"".join(written) == (tmp_path / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("tail", [b'{"step": 3, "lo', b"\x00\x00\x00\n", b'{"step": 3}\x00', b"[1]\n"])
def test_torn_tail_is_removed_and_said(tmp_path: Path, tail: bytes) -> None:
    with open_run(tmp_path, SampleConfig()) as run:
        run.log(1, loss=1.0)
        run.log(2, loss=2.0)
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    said: list[str] = []
    with open_run(tmp_path, SampleConfig(), resume_step=2, say=said.append) as run:
        run.log(3, loss=3.0)
    assert f"torn ({len(tail)} bytes)" in said[0]
    assert path.read_bytes().startswith(whole + b'{"resumed_at"')
    assert steps(tmp_path) == [1, 2, 3]


def test_reader_leaves_out_an_unfinished_line_and_names_a_damaged_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2')
    assert steps(path) == [1]
    for damaged in (b"rubbish", b"[" * 100_000):
        path.write_bytes(b'{"step": 1}\n' + damaged + b'\n{"step": 3}\n')
        with pytest.raises(UserError, match="line 2"):
            read_metrics(path)
        assert read_facts(path) == {}
    with pytest.raises(UserError, match="cannot read"):
        read_metrics(tmp_path / "absent")


WRITER = """
import dataclasses, itertools, sys
from pathlib import Path
from ascendchat.runs.run import open_run
SampleConfig = dataclasses.make_dataclass("SampleConfig", [("depth", int, 12)])
run = open_run(Path(sys.argv[1]), SampleConfig())
for step in itertools.count(1):
    run.log(step, loss=step * 0.5, text="x" * (step % 3000))
"""


def writer(folder: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], cwd=Path(__file__).parents[2])


def wait_for_rows(folder: Path, size: int) -> None:
    path, deadline = folder / "metrics.jsonl", time.monotonic() + 60
    while not (path.exists() and path.stat().st_size > size):
        assert time.monotonic() < deadline, "the writer wrote nothing"
        time.sleep(0.005)


def test_kill_9_leaves_only_whole_rows_and_a_second_writer_is_refused(tmp_path: Path) -> None:
    children = {tmp_path / name: writer(tmp_path / name) for name in ("a", "b")}
    try:
        for folder in children:
            wait_for_rows(folder, 3000)
        with pytest.raises(UserError, match="another process is writing"):
            open_run(tmp_path / "a", SampleConfig())
    finally:
        for child in children.values():
            child.kill()
            assert child.wait() == -signal.SIGKILL
    for folder in children:
        lines = (folder / "metrics.jsonl").read_bytes().split(b"\n")
        lines.pop()  # a killed write may leave part of a long row: nobody reads it, and the next run removes it
        for row in map(strict, lines):
            assert (row["loss"], len(row["text"])) == (row["step"] * 0.5, row["step"] % 3000)
        got = steps(folder)
        assert got == list(range(1, got[-1] + 1)), "a row is missing or double"
    with open_run(tmp_path / "a", SampleConfig(), resume_step=2) as run:  # the lock went with its process
        run.log(3, loss=0.0)
    assert steps(tmp_path / "a") == [1, 2, 3]


def test_other_ranks_write_nothing_and_an_unwritable_folder_is_one_sentence(tmp_path: Path) -> None:
    with open_run(tmp_path / "r", SampleConfig(), main=False) as run:
        run.log(1, loss=2.0)
        run.note(a=1)
    assert not (tmp_path / "r").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="ASCENDCHAT_HOME"):
        open_run(tmp_path / "file" / "run", SampleConfig())


def test_a_full_disk_is_said_once_and_leaves_no_half_row(tmp_path: Path) -> None:
    said: list[str] = []
    run = open_run(tmp_path, SampleConfig(), say=said.append)
    run.log(1, loss=1.0)
    size = (tmp_path / "metrics.jsonl").stat().st_size
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, old[1]))  # a file of this process cannot grow past it
    try:
        run.log(2, loss=2.0)
        run.log(3, loss=3.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert (tmp_path / "metrics.jsonl").stat().st_size == size
    run.log(4, loss=4.0)
    run.close()
    assert steps(tmp_path) == [1, 4]
    assert len(said) == 1
    assert "cannot be written" in said[0]


def test_speed_and_time_left_of_known_figures() -> None:
    # 524,288 tokens in 0.5 s on 8 devices of 1e15 FLOPS at 1e9 FLOPs a token
    s = speed(524_288, 0.5, 1e9, 1e15, 8)
    assert s.tokens_per_second == 1_048_576
    assert s.mfu == pytest.approx(0.131072)
    assert speed(10, 2).mfu is None
    assert speed(10, 0, 1.0, 1.0).tokens_per_second == 0
    with pytest.raises(ValueError):
        speed(10, -1)

    assert speed(10 * 524_288, 0.5, 1e9, 1e15, 80).mfu == pytest.approx(0.131072)
    assert eta(0, 100, 5.0) is None
    assert eta(25, 100, 50.0) == 150.0
    assert eta(100, 100, 50.0) == 0.0
    assert eta(101, 100, 50.0) == 0.0


def test_smooth_equals_the_weighted_mean_and_survives_nan() -> None:
    smooth = Smooth(0.5)
    assert smooth.add(4.0) == 4.0
    assert smooth.add(1.0) == pytest.approx((0.25 * 4 + 0.5 * 1) / 0.75)
    assert math.isnan(smooth.add(math.nan))
    assert smooth.add(1.0) == pytest.approx((0.125 * 4 + 0.25 * 1 + 0.5 * 1) / 0.875)


def test_record_does_not_import_torch_rich_or_a_tracker() -> None:
    code = (
        "import sys, ascendchat.runs.run;"
        "print([m for m in ('torch', 'rich', 'tensorboard', 'swanlab', 'wandb', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_rows_are_read_in_time_that_resumes_do_not_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = 0

    class Step(int):
        def __le__(self, other: int) -> bool:
            nonlocal looked
            looked += 1
            return int(self) <= other

    def looks(size: int) -> int:
        nonlocal looked
        looked, stored = 0, list[dict[str, Any]]()
        for step in range(size):
            stored += [{"step": Step(step)}, {"resumed_at": step}]
        monkeypatch.setattr(record, "stored_rows", lambda path: stored)
        assert [row["step"] for row in read_metrics("metrics.jsonl")] == list(range(size))
        return looked

    assert looks(200) <= 2.2 * looks(100)


@pytest.mark.parametrize(
    ("stored", "left"),
    [
        ([1, 2, 3, "2", 3, 4], [1, 2, 3, 4]),
        ([1, 2, 3, "2", "1", 2], [1, 2]),
        ([1, 2, 3, "1", 2, "5", 3], [1, 2, 3]),
        ([3, 1, 2, "2", 1], [1, 2, 1]),
        ([1, "0"], []),
    ],
)
def test_rows_that_a_later_resume_replaced_do_not_count(
    stored: list[int | str], left: list[int], tmp_path: Path
) -> None:
    rows = [{"resumed_at": int(row)} if isinstance(row, str) else {"step": row} for row in stored]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert steps(tmp_path) == left


@pytest.mark.parametrize("value", ['"7"', "null", "true", "[1]", "{}", '"NaN"', "1e999"])
@pytest.mark.parametrize("name", ["step", "resumed_at"])
def test_a_row_whose_step_is_no_number_is_named(name: str, value: str, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1}}\n{{"{name}": {value}, "loss": 1.0}}\n')
    with pytest.raises(UserError, match=r"line 2 is not one of its rows; delete that line"):
        read_metrics(tmp_path)
