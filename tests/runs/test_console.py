"""The console of rank 0, on a real terminal (pty) and on plain files: `pytest tests/runs/test_console.py`."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ascendchat.runs.console import Console, Telemetry, clock, devices, inert, status

GIB = 1024**3
ROOT = Path(__file__).parents[2]


def test_control_characters_and_bidi_overrides_are_made_inert_in_any_pieces() -> None:
    text = "\x1b[2Ja\tb\r\nc\x00\x85\x9bd\u202e\u2069e\x7f\n你"
    shown = r"\x1b[2Ja" + "\tb\n" + r"c\x00\x85\x9bd\u202e\u2069e\x7f" + "\n你"
    assert inert(text) == shown
    assert "".join(inert(letter) for letter in text) == shown.replace("b\n", "b" + r"\x0d" + "\n")
    assert inert("naïve \u200f עברית 😀") == "naïve \u200f עברית 😀"


SHOW = """
import sys, time
from ascendchat.runs.console import Console, Telemetry
def telemetry():
    return [Telemetry(0, 97.0, 61.0, 30 * 1024**3, 64 * 1024**3)]
with Console(40, title="base", telemetry=telemetry, log_every=20) as console:
    for step in range(1, 41):
        console.update(step, loss=9.0 / step, tokens_per_second=123456.0, mfu=0.412, memory=(2 * 1024**3, 64 * 1024**3),
                       seconds_left=3725.0 - step)
        time.sleep(0.05)
        if step == 10:
            print("a plain print")
            print("to stderr", file=sys.stderr)
        if step == 20:
            console.print("[bold]a message 中文[/bold] \\x1b[2J\\rend")
print("after")
"""


def on_terminal(code: str, **environment: str) -> str:
    """Run Python on a terminal of its own and return every byte that reached it."""
    leader, follower = pty.openpty()
    env = {k: v for k, v in os.environ.items() if k not in ("CI", "NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    env.update({"TERM": "xterm-256color", "PYTHONPATH": str(ROOT), "COLUMNS": "150", "PYTHONUTF8": "1", **environment})
    child = subprocess.Popen([sys.executable, "-c", code], stdin=follower, stdout=follower, stderr=follower, env=env)
    os.close(follower)
    received = b""
    while True:
        try:
            part = os.read(leader, 65536)
        except OSError:  # Linux: the terminal is closed
            break
        if not part:
            break
        received += part
    os.close(leader)
    assert child.wait(120) == 0, received.decode()
    return received.decode()


def screen(received: str) -> list[str]:
    """What a person sees in the end: a small terminal that knows the moves the bar uses, and refuses others."""
    lines, row, column = [""], 0, 0
    for found in re.finditer(r"\x1b\[(\??[\d;]*)([A-Za-z])|[\r\n]|[^\x1b\r\n]+|\x1b", received):
        text, (number, move) = found.group(), found.groups()
        if text == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif text == "\r":
            column = 0
        elif move == "A":
            row -= int(number or 1)
        elif move == "K":
            lines[row] = "" if number == "2" else lines[row][:column]
        elif move in ("m", "h", "l"):  # colours, cursor on and off
            continue
        elif move is None and text != "\x1b":
            lines[row] = lines[row][:column].ljust(column) + text + lines[row][column + len(text) :]
            column += len(text)
        else:
            raise AssertionError(f"unexpected terminal sequence {text!r}")
    return [line.rstrip() for line in lines]


def test_bar_on_a_terminal_shows_everything_and_is_removed_cleanly() -> None:
    received = on_terminal(SHOW)
    shown = re.sub(r"\x1b\[[\d;]*m", "", received)
    assert re.search(r"step \d+/40 \| loss \d\.\d{4} \| 123,456 tok/s \| MFU 41\.2% \| mem 2\.0/64\.0 GiB", shown)
    assert re.search(r"ETA 1:0[12]:\d\d", shown)
    assert "device 0: use 97%, 61 C, 30.0/64.0 GiB" in shown
    assert received.count("\x1b[?25l") == received.count("\x1b[?25h") == 1, "the cursor stays hidden"
    assert [line for line in screen(received) if line] == [
        "a plain print",
        "to stderr",
        "[bold]a message 中文[/bold] \\x1b[2J\\x0dend",
        "base step 40/40 | loss 0.2250 | 123,456 tok/s | MFU 41.2% | mem 2.0/64.0 GiB | ETA 1:01:25",
        "after",
    ]


@pytest.mark.slow
def test_no_color_keeps_the_bar_without_colours() -> None:
    received = on_terminal(SHOW, NO_COLOR="1")
    assert "\x1b[2K" in received
    assert not re.search(r"\x1b\[(\d+;)*(3[0-8]|4[0-8]|9\d)[;m]", received)


@pytest.mark.parametrize("environment", [{"CI": "true"}, pytest.param({"TERM": "dumb"}, marks=pytest.mark.slow)])
def test_ci_and_dumb_terminals_get_plain_lines(environment: dict[str, str]) -> None:
    received = on_terminal(SHOW, **environment)
    assert "\x1b" not in received
    assert re.findall(r"step (\d+)/40", received) == ["20", "40"]


def test_without_a_terminal_lines_are_plain_ascii_one_per_log_every() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SHOW],
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "FORCE_COLOR": "1", "PYTHONIOENCODING": "ascii"},
        check=True,
    )
    assert re.fullmatch(rb"[\x20-\x7e\n]*", done.stdout)
    lines = done.stdout.decode().splitlines()
    assert lines[0] == "a plain print"
    assert lines[1].startswith("base step 20/40 | loss 0.4500 | 123,456 tok/s | MFU 41.2% | mem 2.0/64.0 GiB | ETA")
    assert lines[1].endswith("| device 0: use 97%, 61 C, 30.0/64.0 GiB")
    assert lines[2] == "[bold]a message \\u4e2d\\u6587[/bold] \\x1b[2J\\x0dend"
    assert [line.split()[2] for line in lines[3:4]] == ["40/40"]
    assert lines[4:] == ["after"]


def test_training_never_waits_for_a_tool_that_hangs() -> None:
    release, out = threading.Event(), io.StringIO()

    def hangs() -> list[Telemetry]:
        release.wait(120)
        return []

    started = time.monotonic()
    with Console(2, telemetry=hangs, stream=out) as console:
        console.update(1, loss=1.0)
        console.update(2, loss=1.0)
    assert time.monotonic() - started < 60
    release.set()
    assert out.getvalue() == "step 1/2 | loss 1.0000\nstep 2/2 | loss 1.0000\n"


def test_a_failing_tool_is_reported_once_then_left_alone() -> None:
    calls, out = [], io.StringIO()

    def fails() -> list[Telemetry]:
        calls.append(1)
        raise FileNotFoundError("no such tool")

    with Console(1, telemetry=fails, poll_seconds=0.01, stream=out):
        deadline = time.monotonic() + 60
        while not out.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
    assert len(calls) == 1
    assert out.getvalue() == "device readings stopped: FileNotFoundError: no such tool\n"


def test_readings_are_renewed_while_training_goes_on() -> None:
    seen, out = threading.Event(), io.StringIO()
    use = iter(range(1000))

    def telemetry() -> list[Telemetry]:
        n = next(use)
        if n == 3:  # the reading before has arrived
            seen.set()
        return [Telemetry(0, utilisation=min(n, 2))]

    with Console(9, telemetry=telemetry, poll_seconds=0.01, stream=out) as console:
        assert seen.wait(60)
        console.update(1)
    assert "device 0: use 2%" in out.getvalue()


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with Console(1, main=False, telemetry=lambda: pytest.fail("polled")) as console:
        console.update(1, loss=1.0)
        console.print("x")
    assert capsys.readouterr().out == ""


def test_a_closed_pipe_does_not_end_the_run() -> None:
    code = (
        "import sys\nfrom ascendchat.runs.console import Console\n"
        "sys.stdin.readline()\n"
        "with Console(9) as console:\n    [console.update(n, loss=1.0) for n in range(9)]\n"
        "print('ran to the end', file=sys.stderr)\nsys.stdout = None\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    )
    assert child.stdout is not None
    child.stdout.close()  # `| tee log` was killed
    child.stdout = None
    _, err = child.communicate(b"go\n")
    assert b"ran to the end" in err


def test_status_and_clock() -> None:
    assert clock(0) == "0:00:00"
    assert clock(3725.4) == "1:02:05"
    assert clock(59.7) == "0:01:00"
    assert clock(90061) == "1d 1:01:01"
    assert status(1, 2, {}) == "step 1/2"
    assert (
        status(1, 2, {"memory": 3 * GIB, "reward": 0.25, "epoch": 3})
        == "step 1/2 | mem 3.0 GiB | reward 0.25 | epoch 3"
    )
    assert status(1, 2, {"loss": float("nan"), "mfu": None}) == "step 1/2 | loss nan"


def test_devices_are_summed_up_in_one_line() -> None:
    assert devices([]) == ""
    assert devices([Telemetry(0)]) == ""
    assert devices([Telemetry(3, temperature=55.0)]) == "device 3: 55 C"
    eight = [Telemetry(i, 90.0 + i, 50.0 + i, i * GIB, 64 * GIB) for i in range(8)]
    assert devices(eight) == "8 devices: use 94% (min 90%), 57 C, 7.0/64.0 GiB"
