"""--profile: what a trace says, and the loop that records one. python -m pytest tests/train/test_profile.py"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from test_loop import ToyStage

from ascendchat.config.finetune import FinetuneConfig
from ascendchat.config.rl import RlConfig
from ascendchat.config.train import BaseConfig, MidConfig, SftConfig, TrainConfig
from ascendchat.device import pick
from ascendchat.runs.run import open_run
from ascendchat.runs.trace import advice, covered, own_time, read_trace, summarise, table
from ascendchat.train.loop import Options, fit


def event(name: str, begin: float, length: float, cat: str | None, pid: int = 1, tid: int = 1) -> dict[str, Any]:
    """A complete event; milliseconds."""
    return {"ph": "X", "name": name, "ts": begin * 1e3, "dur": length * 1e3, "pid": pid, "tid": tid, "cat": cat}


# 10 ms: 2 of data, a product of 4, an exchange of 3 of which 1 runs beside the product, 2 in which nothing was given.
CUDA = [
    event("aten::linear", 2, 2, "cpu_op"),
    event("aten::mm", 2.5, 1, "cpu_op"),
    event("cudaLaunchKernel", 2.6, 0.1, "cuda_runtime"),
    event("cudaStreamSynchronize", 8, 2, "cuda_runtime"),
    event("sm90_gemm", 2, 4, "kernel", tid=7),
    event("ncclDevKernel_AllReduce", 5, 3, "kernel", tid=8),
]


def stored(folder: Path, events: Any) -> Path:
    (folder / "trace.json").write_text(json.dumps(events))
    return folder / "trace.json"


def test_the_time_of_a_step_is_shared_out_to_what_used_it(tmp_path: Path) -> None:
    spans = read_trace(stored(tmp_path, {"traceEvents": CUDA}))
    found = summarise(spans, steps=1, seconds=0.010, waited=0.002, device=True)
    assert found.on_device
    assert found.launches == 1
    assert found.busy == pytest.approx(0.4)
    assert found.communication == pytest.approx(0.3)
    assert found.exposed == pytest.approx(0.2)
    assert found.waiting == pytest.approx(0.2)
    assert found.host_bound == pytest.approx(0.2)
    assert [operator.name for operator in found.operators] == ["sm90_gemm", "ncclDevKernel_AllReduce"]
    nested = [span for span in spans if span.kind == "operator"]  # one does not count what it called
    assert {o.name: round(o.seconds * 1e3, 6) for o in own_time(nested)} == {"aten::linear": 1.0, "aten::mm": 1.0}
    assert covered(nested) == pytest.approx(0.002)


def test_the_trace_of_an_npu_has_its_own_form(tmp_path: Path) -> None:
    """A list, times as text, the device's tasks in a process that is called Ascend Hardware."""
    named = {"ph": "M", "name": "process_name", "pid": 9, "args": {"name": "Ascend Hardware"}}
    events = [
        named,
        event("aten::mm", 0, 1, "cpu_op"),
        event("Enqueue@aclnnMatmul", 0, 0.1, "enqueue"),
        event("MatMulV3", 1, 5, None, pid=9),
        event("EVENT_WAIT", 6, 4, None, pid=9),
        event("hcom_allReduce__12", 6, 1, None, pid=4),
    ]
    for one in events[1:]:
        one["ts"] = f"{one['ts']:.3f}"
    found = summarise(read_trace(stored(tmp_path, events)), steps=1, seconds=0.010, waited=0.0, device=True)
    assert (found.launches, found.busy, found.exposed) == (1, pytest.approx(0.5), pytest.approx(0.1))
    assert found.host_bound == pytest.approx(0.4)


def test_without_times_of_the_device_the_table_says_so(tmp_path: Path) -> None:
    events = [event("aten::mm", 0, 1, "cpu_op"), event("Enqueue@aclnnMatmul", 0, 0.1, "enqueue")]
    found = summarise(read_trace(stored(tmp_path, events)), steps=1, seconds=0.010, waited=0.0, device=True)
    assert found.host_bound is None
    assert "gave no times of the device" in table(found, 1)


@pytest.mark.parametrize(
    ("spans", "waited", "word"),
    [
        ([("kernel", 0, 5)], 0.003, "waiting for data"),
        ([("kernel", 0, 5), ("nccl", 5, 4)], 0.0, "--total-batch-size"),
        ([("kernel", 0, 5)], 0.0, "--device-batch-size"),
        ([("kernel", 0, 9)], 0.0, "most of it in kernel"),
    ],
)
def test_the_advice_names_the_largest_loss(
    spans: list[tuple[str, int, int]], waited: float, word: str, tmp_path: Path
) -> None:
    events = [event(name, begin, length, "kernel") for name, begin, length in spans]
    read = read_trace(stored(tmp_path, {"traceEvents": events}))
    assert word in advice(summarise(read, steps=1, seconds=0.010, waited=waited, device=True))


class SlowData(ToyStage):
    """Half of the time of its steps is the wait for data."""

    def micro_batches(self, step: int) -> Iterable[int]:
        for batch in super().micro_batches(step):
            time.sleep(0.05)
            yield batch


def test_a_run_with_profile_leaves_a_trace_and_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_run(tmp_path, BaseConfig()) as run:
        fit(SlowData(), pick("cpu"), run, Options(profile=2, eval_every=-1))
    (folder,) = (tmp_path / "profile").iterdir()
    assert folder.name == "step_000004", "three steps warm up"
    assert {path.name for path in folder.iterdir()} == {"trace.json", "profile.json", "profile.txt"}
    found = json.loads((folder / "profile.json").read_text())
    assert found["steps"] == 2
    assert found["waiting"] > 0.1
    assert any(operator["name"].startswith("aten::") for operator in found["operators"])
    shown = capsys.readouterr().out
    assert "profile of steps 4 to 5, rank 0" in shown
    assert "waiting for data: put the prepared text on a local disk" in " ".join(shown.split())


def test_training_goes_on_where_its_profile_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "profile").touch()
    with open_run(tmp_path, BaseConfig()) as run:
        assert fit(ToyStage(steps=6), pick("cpu"), run, Options(profile=1, eval_every=-1)).step == 6
    (tmp_path / "profile").unlink()

    def full(path: Path, content: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ascendchat.train.profile.write_atomic", full)
    with open_run(tmp_path, BaseConfig()) as run:
        assert fit(ToyStage(steps=6), pick("cpu"), run, Options(profile=1, eval_every=-1)).step == 6
    shown = " ".join(capsys.readouterr().out.split())
    assert "(Not a directory); training goes on" in shown
    assert "(No space left on device); training goes on" in shown


def test_the_trace_ends_before_a_validation_and_fits_a_short_run(tmp_path: Path) -> None:
    with open_run(tmp_path, BaseConfig()) as run:
        fit(ToyStage(steps=4), pick("cpu"), run, Options(profile=3, eval_every=3))
    record = json.loads((tmp_path / "profile" / "step_000002" / "profile.json").read_text())
    assert record["steps"] == 2, "steps 2 and 3; the validation follows"


@pytest.mark.parametrize("kind", [BaseConfig, MidConfig, SftConfig, RlConfig, FinetuneConfig])
def test_every_training_command_hands_the_flag_to_the_loop(kind: type[TrainConfig]) -> None:
    assert Options.of(kind(profile=7), None).profile == 7
