"""npu-smi and nvidia-smi readers: every layout is read through a real executable that prints it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from python_script import START

from ascendchat.chips import MIB
from ascendchat.device import smi
from ascendchat.device.smi import Problem, Readings

SAMPLES = Path(__file__).parent / "smi_samples"


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`tool("npu-smi", {"info": text, "info -m": text})` puts an executable on PATH that prints what it is asked."""
    monkeypatch.setattr(smi, "EXTRA_PATH", ())
    monkeypatch.setenv("PATH", str(tmp_path))
    smi._logic_ids.cache_clear()

    def make(name: str, answers: dict[str, str], status: int = 0) -> Path:
        script = tmp_path / name
        script.write_text(
            f"{START}import sys\nanswers = {answers!r}\n"
            "asked = ' '.join(sys.argv[1:])\n"
            "known = [k for k in answers if asked == k or (k.endswith('*') and asked.startswith(k[:-1]))]\n"
            "if not known: sys.exit(3)\n"
            f"sys.stdout.write(answers[known[0]])\nsys.exit({status})\n"
        )
        script.chmod(0o755)
        return script

    return make


def sample(name: str) -> str:
    return (SAMPLES / f"{name}.txt").read_text()


def readings(outcome: Readings | Problem) -> Readings:
    assert isinstance(outcome, Readings), outcome
    return outcome


def test_a2_table_gives_eight_devices_with_their_health_and_processes(tool) -> None:
    tool("npu-smi", {"info": sample("a2_25"), "info -m": sample("map_a2")})
    found = readings(smi.read())
    assert [d.index for d in found.devices] == list(range(8))
    assert {d.name for d in found.devices} == {"Ascend910B3"}
    assert found.version == "25.2.0"
    busy = found.devices[0]
    assert (busy.utilisation, busy.temperature, busy.power) == (87, 40, 90.5)
    assert (busy.memory_used, busy.memory_total) == (64122 * MIB, 65536 * MIB)
    assert found.devices[3].memory_used == 65099 * MIB, "no space before the slash"
    assert found.devices[5].health == "Alarm"
    assert [(p.pid, p.device, p.memory) for p in found.processes] == [
        (576489, 0, 60703 * MIB),
        (576490, 3, 61700 * MIB),
    ]


def test_a3_has_two_devices_per_npu_and_processes_go_to_the_right_die(tool) -> None:
    tool("npu-smi", {"info": sample("a3_25"), "info -m": "not understood"})
    found = readings(smi.read())
    assert [d.index for d in found.devices] == [0, 1, 2, 3]
    assert [d.power for d in found.devices] == [160.9, None, 161.9, None]
    assert [d.utilisation for d in found.devices] == [0, 7, 14, 21]
    assert found.processes == [smi.ProcessReading(812733, 1, "VLLMWorker_TP", 43210 * MIB)]
    container = sample("a3_25").replace("| 0     0  ", "| 0     8  ").replace("| 1     1  ", "| 1     9  ")
    assert [d.index for d in smi.parse_npu_table(container).devices] == [0, 1, 2, 3], "torch counts from 0 there"


def test_map_of_logic_ids_wins_over_the_order_and_names_the_chip(tool) -> None:
    swapped = "NPU ID   Chip ID   Chip Logic ID   Chip Name\n0 0 1 Ascend 910B4\n1 0 0 Ascend 910B4\n1 1 - Mcu\n"
    tool("npu-smi", {"info": sample("a2_26_container"), "info -m": swapped})
    found = readings(smi.read())
    assert [d.index for d in found.devices] == [1, 0]
    assert {p.device for p in found.processes} == {1}
    assert smi.parse_npu_map(sample("map_a3")) == {
        (n, c): (2 * n + c, "Ascend910_9392") for n in range(2) for c in range(2)
    }


def test_five_column_process_table_prefers_the_pid_inside_the_container(tool) -> None:
    tool("npu-smi", {"info": sample("a2_26_container")})
    found = readings(smi.read())
    assert [p.pid for p in found.processes] == [692318, 4021]
    assert [d.memory_total for d in found.devices] == [32768 * MIB] * 2


def test_chips_of_other_layouts_are_read(tool) -> None:
    """A 310P without HBM, a 910A whose HBM is not the host's column, a 950 with its name in a cell of its own."""
    tool("npu-smi", {"info": sample("310p")})
    found = readings(smi.read())
    assert [(d.index, d.name, d.power) for d in found.devices] == [(i, "Ascend310P3", None) for i in range(3)]
    assert (found.devices[2].memory_used, found.devices[2].memory_total) == (1399 * MIB, 44280 * MIB)
    assert found.processes == []
    assert [(d.name, d.memory_used, d.memory_total) for d in smi.parse_npu_table(sample("910a")).devices] == [
        ("Ascend910A", 0, 32255 * MIB),
        ("Ascend910ProB", 0, 32255 * MIB),
    ]
    found = smi.parse_npu_table(sample("950"))
    assert [(d.index, d.name, d.health, d.utilisation) for d in found.devices] == [
        (0, "Ascend950DT", "OK", 20),
        (1, "Ascend950DT", "Critical", 0),
    ]
    assert [(p.pid, p.device) for p in found.processes] == [(1001, 0), (101, 1)]


def test_blank_process_name_is_not_guessed_from_a_process_with_that_pid_here(tool) -> None:
    tool("npu-smi", {"info": sample("a2_25").replace("576490", f"{os.getpid():<6}")})
    process = readings(smi.read()).processes[1]
    assert (process.pid, process.name) == (os.getpid(), "")


def test_on_the_host_the_pid_of_the_host_is_taken_for_a_process_in_a_container() -> None:
    code = "import os; print(os.getpid(), flush=True); os.read(0, 1)"
    spaces = ["unshare", "--user", "--pid", "--fork", "--kill-child"]
    if not shutil.which("unshare") or subprocess.run([*spaces, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this kernel gives no pid namespaces: unshare --user --pid --fork true")
    child = subprocess.Popen(
        [*spaces, sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout is not None
        inside = int(child.stdout.readline())
        (host,) = map(int, Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split())
        assert host != inside
        row = "| 0       0                 | {:<13} | python3            | 1500                  | {:<23} |"
        shown = "\n".join(
            row.format(host, inside) if " 692400 " in line else line for line in sample("a2_26_container").splitlines()
        )
        assert [p.pid for p in smi.parse_npu_table(shown).processes] == [692318, host]
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize(
    ("name", "text", "status", "expected"),
    [
        ("npu-smi", "dcmi module initialize failed. ret is -8005\n", 0, "-8005"),
        ("npu-smi", "DrvMngGetConsoleLogLevel failed. (g_conLogLevel=3)\n", 0, "DrvMngGetConsoleLogLevel"),
        ("npu-smi", "something else\n", 7, "exit status 7"),
        ("npu-smi", "", 0, "listed no device"),
        ("nvidia-smi", "NVIDIA-SMI couldn't communicate with the NVIDIA driver.\n", 9, "couldn't communicate"),
    ],
)
def test_failure_of_a_tool_is_a_problem_that_quotes_it(tool, name: str, text: str, status: int, expected: str) -> None:
    tool(name, {"info" if name == "npu-smi" else f"--query-gpu={smi.GPU_QUERY}*": text}, status)
    outcome = smi.read()
    assert isinstance(outcome, Problem)
    assert expected in outcome.text
    assert not outcome.missing


def test_warning_above_a_whole_table_does_not_hide_the_devices(tool) -> None:
    tool("npu-smi", {"info": "DrvMngGetConsoleLogLevel failed. (g_conLogLevel=3)\n" + sample("a3_25")})
    assert len(readings(smi.read()).devices) == 4


def test_tool_that_hangs_is_given_up(tool, tmp_path: Path) -> None:
    (tmp_path / "npu-smi").write_text(f"{START}import time; time.sleep(30)\n")
    (tmp_path / "npu-smi").chmod(0o755)
    outcome = smi.read("npu-smi", timeout=0.5)
    assert isinstance(outcome, Problem)
    assert "did not answer" in outcome.text


def test_no_tool_at_all_is_a_problem_marked_missing(tool) -> None:
    outcome = smi.read()
    assert isinstance(outcome, Problem)
    assert outcome.missing
    assert "npu-smi and nvidia-smi" in outcome.text


def test_npu_smi_outside_path_is_found(tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool("npu-smi", {"info": sample("310p")})
    monkeypatch.setenv("PATH", "/nowhere")
    assert smi.locate("npu-smi") is None
    monkeypatch.setattr(smi, "EXTRA_PATH", (str(tmp_path),))
    assert readings(smi.read()).tool == "npu-smi"


def test_nvidia_smi_csv_gives_devices_and_processes(tool) -> None:
    gpus = (
        "0, NVIDIA H200, 93, 61, 512.30, 70112, 143771, GPU-aa\n"
        "1, NVIDIA H200, [N/A], 30, [Not Supported], 4, 143771, GPU-bb\n"
    )
    apps = "4242, /usr/bin/python3, 70000, GPU-aa\n4243, [Not Found], [N/A], GPU-bb\n"
    tool("nvidia-smi", {f"--query-gpu={smi.GPU_QUERY}*": gpus, f"--query-compute-apps={smi.APP_QUERY}*": apps})
    found = readings(smi.read())
    assert found.tool == "nvidia-smi"
    assert found.devices[0].memory_total == 143771 * MIB
    assert (found.devices[1].utilisation, found.devices[1].power) == (None, None)
    assert [(p.pid, p.device, p.name, p.memory) for p in found.processes] == [
        (4242, 0, "python3", 70000 * MIB),
        (4243, 1, "[Not Found]", None),
    ]
