"""`ascendchat selftest`: verdicts of items that cannot be had otherwise, what is sent, and the table."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from ascendchat.cli import main
from ascendchat.device import pick
from ascendchat.doctor import selftest, selftest_case, selftest_operators, selftest_runs
from ascendchat.doctor.selftest_case import ItemResult, SelftestSettings
from ascendchat.doctor.selftest_device import perform
from ascendchat.doctor.selftest_operators import SelftestBench, Wrong

ROOT = Path(__file__).resolve().parents[2]


def sent(**more: object) -> dict[str, object]:
    items = [{"name": "norm", "verdict": "held"}, {"name": "mask", "verdict": "failed"}, {"name": "speed"}]
    items[2]["verdict"] = "skipped"
    software = {"torch_npu": "2.13.0", "CANN": "9.1.0"}
    return {"chip": "Ascend910B3", "devices": 8, "date": "2026-11-16", "torch": "2.13.0", "software": software,
            "items": items, **more}  # fmt: skip


def test_files_become_rows_of_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, more in enumerate(({}, {"simulated": True, "quick": True})):
        (tmp_path / f"{number}.json").write_text(json.dumps(sent(**more)), encoding="utf-8")
    assert main(["selftest", "--table", str(tmp_path / "0.json"), str(tmp_path / "1.json")]) == 0
    told = "1 of 2 held; failed: mask; not tried: speed"
    assert capsys.readouterr().out.splitlines() == [
        f"| Ascend910B3 × 8 | CANN 9.1.0 | 2.13.0 | 2.13.0 | 2026-11-16 | {told} |",
        f"| Ascend910B3 × 8 (simulated) | CANN 9.1.0 | 2.13.0 | 2.13.0 | 2026-11-16 | {told} (quick) |",
    ]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--table"], "belong together"),
        (["x.json"], "belong together"),
        (["--table", "absent.json"], "is not a file of `ascendchat selftest`"),
        (["--only", "nrom"], "norm"),
        (["--out", "no/such/folder/x.json"], "there is no folder"),
        (["--out", "ascendchat", "--only", "versions", "--device-type", "mps"], "ascendchat cannot be written"),
    ],
)
def test_wrong_input_is_one_sentence(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", *flags]) == 2
    assert said in capsys.readouterr().err


def test_what_is_sent_names_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTNAME", "node7.lab.example")
    assert selftest.anonymised("node7.lab.example, rank 3 on node7") == "<name>, rank 3 on <name>"
    text = f"at {Path.home()}/x/y.py on {socket.gethostname()} (10.1.2.33), see /var/log/npu/slog:\n  code 507015"
    anonymised = selftest.anonymised(text)
    for name in (str(Path.home() / "x"), socket.gethostname(), "10.1.2.33", "/var"):
        assert name not in anonymised
    assert "code 507015" in anonymised
    assert len(selftest.anonymised("x" * 999)) == selftest_case.MAX_MESSAGE_CHARS


def test_losses_must_follow_and_fall() -> None:
    right = [5.0 - 0.02 * step for step in range(60)]
    assert selftest_runs.compare(right, [loss + 0.01 for loss in right]) == ""
    assert "59 of 60" in selftest_runs.compare(right, right[:-1])
    stale = right[:40] + [loss + 0.8 for loss in right[40:]]
    assert "from step 33 on" in selftest_runs.compare(right, stale)
    assert "nan" in selftest_runs.compare(right, [*right[:-1], float("nan")])
    assert "only" in selftest_runs.compare([5.0] * 60, [5.0] * 60)


def test_an_error_of_one_element_and_a_nan_are_found() -> None:
    right = torch.rand(64, dtype=torch.float64) + 1
    found = right.float()
    assert selftest_operators.relative_error("sum", found, right, 1e-3) < 1e-6
    found[7] += 0.1
    with pytest.raises(Wrong, match="sum: off by"):
        selftest_operators.relative_error("sum", found, right, 1e-3)
    found[7] = float("nan")
    with pytest.raises(Wrong, match="sum: nan"):
        selftest_operators.relative_error("sum", found, right, 1e-3)


def test_gradients_are_compared_too() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return x * 2

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            return grad  # should be doubled

    from ascendchat.device import pick

    bench = SelftestBench(pick("cpu"), torch.device("cpu"), quick=True)
    inputs = [bench.random_tensor(4, 4)]
    right = selftest_operators.against_float64(bench, "twice", lambda x: x * 2, lambda x: x * 2, inputs)
    assert right == {"twice": 0.0}
    with pytest.raises(Wrong, match="gradient 1 of twice"):
        selftest_operators.against_float64(bench, "twice", Twice.apply, lambda x: x * 2, inputs)


def test_a_process_that_says_nothing_is_ended_at_the_deadline(tmp_path: Path) -> None:
    settings = SelftestSettings(tmp_path, 1, "cpu", True, deadline=0.5)
    assert selftest.run_to_end(["sleep", "600"], tmp_path / "log", settings) == "no answer within 0.5 s"


@pytest.mark.slow
def test_a_process_without_a_device_fails_all_its_items(tmp_path: Path) -> None:
    settings = SelftestSettings(tmp_path, 1, "mps", True, deadline=120)
    verdicts = list(selftest.run_items(["norm", "decode", "speed"], settings))
    assert [(one.name, one.verdict) for one in verdicts] == [("norm", "failed")]
    assert "Apple" in verdicts[0].said
    settings.about = {"device": "mps", "visible": 1}  # an earlier process has found one, and it died since
    (verdict,) = selftest.run_in_workers(["mask"], "generation", settings)
    assert (verdict.name, verdict.verdict) == ("mask", "failed")
    assert "Apple" in verdict.said


INTERRUPTED = """
import signal
import sys
from ascendchat import cli
from ascendchat.doctor import selftest

def run_items(names, settings):
    yield selftest.ItemResult("versions", "held")
    words = ["sh", "-c", "echo $$ > pid.new; mv pid.new pid; exec sleep 600"]
    selftest.run_to_end(words, settings.folder / "log", settings)

selftest.run_items = run_items
for number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)  # whoever runs the tests may ignore them (nohup)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(cli.main(["selftest", "--out", "sent.json", "--only", "versions,norm"]))
"""


def gone(process: int) -> bool:
    """Within half a minute: one that has ended is there until process 1, its new parent, has asked for its status."""
    for _ in range(600):
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_what_was_started_and_keeps_what_was_found(tmp_path: Path, number: signal.Signals) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", INTERRUPTED], cwd=tmp_path, env=environment) as command:
        while command.poll() is None and not (tmp_path / "pid").exists():
            time.sleep(0.02)
        command.send_signal(number)
        assert command.wait(60) == 128 + number
    assert gone(int((tmp_path / "pid").read_text()))
    items = {item["name"]: item["verdict"] for item in json.loads((tmp_path / "sent.json").read_text())["items"]}
    assert (items["versions"], items["norm"], items["speed"]) == ("held", "skipped", "skipped")


def test_an_error_of_one_run_is_its_verdict_and_the_others_go_on(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("no folder: nothing can be prepared there")
    settings = SelftestSettings(tmp_path, 1, "cpu", False, 900, {"simulated": False, "device": "cpu", "trains": True})
    verdicts = list(selftest_runs.run_items(["training", "resume", "speed"], settings))
    assert [(one.name, one.verdict) for one in verdicts] == [
        ("training", "failed"), ("resume", "failed"), ("speed", "skipped"),
    ]  # fmt: skip
    assert "File exists" in verdicts[0].said


def test_the_row_of_a_bench_is_found_before_warnings(tmp_path: Path) -> None:
    (tmp_path / "log").write_text('mfu 0.3\n{"depth": 4, "mfu": 0.3}\n[W1116] Warning: queue is not empty\n')
    assert selftest_runs.printed_row(tmp_path / "log") == {"depth": 4, "mfu": 0.3}
    (tmp_path / "log").write_text("nothing\n")
    assert selftest_runs.printed_row(tmp_path / "log") == {}


def test_speed_means_nothing_on_a_cpu(tmp_path: Path) -> None:
    settings = SelftestSettings(tmp_path, 1, "cpu", False, 900, {"simulated": False, "device": "cpu", "trains": True})
    assert selftest_runs.speed(settings) == ItemResult("speed", "skipped", "the speed of a CPU says nothing here")


@pytest.mark.slow
def test_a_training_that_is_killed_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    settings = SelftestSettings(tmp_path, 1, "cpu", True, 900, {"simulated": False, "device": "cpu", "trains": True})
    training, resume = selftest_runs.training(settings)
    assert (training.name, training.verdict) == ("training", "held"), training
    assert (resume.name, resume.verdict) == ("resume", "held"), resume
    assert "killed, and went on from step" in resume.said


def test_logsumexps_in_another_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = SelftestBench(pick("cpu"), torch.device("cpu"), quick=True)
    assert perform(bench, "log-sum-exp").verdict == "held"
    whole = selftest_operators.flash_attn_varlen_func

    def by_token(*arguments: Any, **options: Any) -> Any:
        """As if the order of CANN were that of the shape."""
        out, lse, more = whole(*arguments, **options)
        return out, lse.flatten().view(lse.size(1), lse.size(0)).T, more

    monkeypatch.setattr(selftest_operators, "flash_attn_varlen_func", by_token)
    found = perform(bench, "log-sum-exp")
    assert (found.verdict, "log-sum-exp of documents: off by" in found.said) == ("failed", True)
