"""`ascendchat doctor` as users run it: in a process of its own, on this machine."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from warm_process import ServerPopen
from warm_process import run as run_warm

from ascendchat.cli import main
from ascendchat.device import smi
from ascendchat.device.env import AUTOLOAD, look
from ascendchat.doctor import checks, collective, probe
from ascendchat.doctor.machine import faults
from ascendchat.doctor.watch import CpuUsage, device_rows, watch_devices
from ascendchat.errors import home

SAMPLES = Path(__file__).parents[1] / "device" / "smi_samples"


def doctor(*flags: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """The command with plain settings: torch_npu is loaded as for any user, and no network is asked."""
    base = {k: v for k, v in os.environ.items() if k != AUTOLOAD}
    command = [sys.executable, "-m", "ascendchat", "doctor", "--lang", "en", *flags]
    settings = {**base, "HF_HUB_OFFLINE": "1", **environ}
    return subprocess.run(command, env=settings, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch_npu") is None, reason="torch_npu is not installed")
@pytest.mark.skipif(look().cann, reason="CANN is loaded here, so `import torch` does not fail")
def test_doctor_runs_where_import_torch_fails_and_names_the_way_out() -> None:
    """And where a stored file is missing: one failed check is status 1, with its fix."""
    folder = home() / "tokenizer"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps({"files": {"tokenizer.json": {"bytes": 9, "sha256": ""}}}))
    done = doctor("--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["ok"]) == (1, False)
    (stored,) = [c for c in report["checks"] if "tokenizer.json: missing" in c["found"]]
    assert (stored["status"], stored["fix"].startswith("rm -r ")) == ("fail", True)
    check = next(c for c in report["checks"] if c["name"] == "torch_npu")
    assert check["status"] in ("warn", "fail")
    assert "ImportError: libhccl.so" in check["found"]
    assert "set_env.sh" in json.dumps(check)
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in json.dumps(check)
    assert report["device"]["count"] >= 1
    assert report["next"].split()[0] in ("ascendchat", "source", "export", "rm")


def test_probe_reports_a_crash_a_hang_and_noise_around_the_answer() -> None:
    crashed = probe.run_probe("import os; os.abort()", os.environ)
    assert not crashed.ok
    assert "status" in crashed.error
    assert probe.run_probe("import time; time.sleep(60)", os.environ, timeout=0.5).error == "no answer within 0 s"
    noise = "print('warning: noise'); out['x'] = 1; import atexit, os; atexit.register(os.abort)"
    noisy = probe.run_probe(noise, os.environ)
    assert noisy.values == {"x": 1}


def test_wheels_probe_tells_missing_from_broken(tmp_path: Path) -> None:
    (tmp_path / "brokenwheel.py").write_text("raise ImportError('libarrow.so: wrong ELF class')")
    found = probe.ask_wheels(["numpy", "brokenwheel", "notthere"], {**os.environ, "PYTHONPATH": str(tmp_path)}).values
    assert found["numpy"]
    assert found["brokenwheel"] == "!libarrow.so: wrong ELF class"
    assert found["notthere"] is None


def test_every_fault_has_its_words_in_both_languages_and_values_for_their_holes() -> None:
    told = {(name, kind): fault for name, kinds in faults().items() for kind, fault in kinds.items()}
    used = set()
    for path in Path(checks.__file__).parent.glob("checks_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "fault":
                name, kind = (getattr(arg, "value", "/dev/davinci*") for arg in node.args[:2])
                given = {keyword.arg for keyword in node.keywords} | ({"status"} if len(node.args) > 2 else set())
                fault = told[name, kind]
                assert ("status" in given) != ("status" in fault), (name, kind)
                assert set(re.findall(r"{(\w+)}", json.dumps(fault))) == given - {"status"}, (name, kind)
                used.add((name, kind))
    assert used == set(told)
    for fault in told.values():
        assert {"found", "why", "fix"} <= set(fault) <= {"status", "found", "why", "fix"}
        assert fault.get("status", "warn") in ("warn", "fail")
        for text in fault.values():
            if not isinstance(text, str):
                assert not re.search(r"[\u4e00-\u9fff]", text["en"])
                assert re.search(r"[\u4e00-\u9fff]", text["zh"])
                assert set(text) == {"en", "zh"}


def test_doctor_modules_do_not_import_torch() -> None:
    names = ["doctor", "doctor.checks", "doctor.checks_npu", "doctor.checks_system"]
    names += ["doctor.probe", "doctor.watch", "doctor.clean", "doctor.collective", "device.smi"]
    code = "; ".join(f"import ascendchat.{n}" for n in names) + "; import sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ------------------------------------------------------------------------------------------------------ --watch


def test_watch_prints_devices_as_plain_lines_when_not_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "npu-smi").write_text(f"#!/bin/sh\n[ $# = 1 ] && /bin/cat '{SAMPLES / 'a3_25.txt'}'\n")
    (tmp_path / "npu-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(smi, "EXTRA_PATH", ())
    smi._logic_ids.cache_clear()
    assert watch_devices(0.01, "en", rounds=2) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8  # four devices, twice
    assert "1 Ascend910  7%  45.4 GiB / 64.0 GiB  37 °C  OK  VLLMWorker_TP:812733 42.2 GiB" in lines[1]


def test_numbers_that_mean_nothing_are_refused() -> None:
    assert main(["doctor", "--watch", "--interval", "0"]) == main(["doctor", "--devices", "0"]) == 2


def test_watch_shows_the_cpu_where_there_is_no_device() -> None:
    (row,) = device_rows(smi.Problem("none", missing=True), CpuUsage())
    assert row[0].startswith("cpu (")
    assert row[1].endswith("%")
    assert "GiB" in row[2]


def test_cpu_use_is_the_busy_share_between_two_readings(tmp_path: Path) -> None:
    stat, cpu = tmp_path / "stat", CpuUsage()
    stat.write_text("cpu  100 0 100 700 100 0 0 0 0 0\n")
    cpu.use(stat)
    stat.write_text("cpu  150 0 125 750 175 0 0 0 0 0\n")  # 75 busy of 200
    assert cpu.use(stat) == pytest.approx(37.5)


# ---------------------------------------------------------------------------------------------------- --devices


@pytest.mark.slow
def test_collective_on_two_processes_is_checked_and_timed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(collective, "subprocess", SimpleNamespace(run=partial(run_warm, how=ServerPopen)))
    assert main(["doctor", "--devices", "2", "--device-type", "cpu", "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert (result["ok"], result["devices"], result["backend"], result["faults"]) == (True, 2, "gloo", [])
    assert [row["bytes"] for row in result["rows"]] == [1 << 16, 1 << 20, 1 << 24]
    assert all(row["all_reduce_gbs"] > 0.001 and row["all_gather_gbs"] > 0.001 for row in result["rows"])
    assert list((home() / "runs").glob("doctor-*")) == []


def test_wrong_collective_results_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from ascendchat.parallel import collectives

    def lossy(output: torch.Tensor, input: torch.Tensor) -> None:
        output.copy_(input)
        output[-1] += 1  # one element arrives wrong

    _, right = collective.time_collectives(4096, 0, 1, torch.device("cpu"), lambda: None)
    assert right == []
    monkeypatch.setattr(collectives, "all_gather", lossy)
    _, faults = collective.time_collectives(4096, 0, 1, torch.device("cpu"), lambda: None)
    assert faults == ["rank 0: all_gather of 4096 bytes"]
