"""The command `cannsim` (or `python -m cannsim`): run a program on simulated NPUs, and ask what the simulator knows.

cannsim run --devices 8 --chip Ascend910B3 --memory-gb 64 -- python train.py
cannsim trace -o trace.json -- python train.py
cannsim explain "EZ3002: Optype [Identity] ..."
cannsim operators
cannsim suites FOLDER                    # other people's tests: suites.py
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import cannsim
from cannsim import build


def run(
    command: list[str],
    *,
    count: bool = False,
    trace: Path | None = None,
    stop: bool = False,
    boxed: bool = False,
    **machine: object,
) -> int:
    """Start the command as a child on a simulated machine of its own; returns its exit status.

    count: print at the end what was launched. trace: write every event there. stop: the first error ends the process.
    boxed: operators that are not simulated run on the CPU.
    """
    if not command:
        print("cannsim: no command given; type: cannsim run -- COMMAND", file=sys.stderr)
        return 2
    build.ensure()
    with tempfile.TemporaryDirectory(prefix="cannsim-", ignore_cleanup_errors=True) as folder:
        if "CANNSIM_STATE" not in os.environ:
            machine["state"] = os.path.join(folder, "state")
            os.mkdir(str(machine["state"]))
        env = cannsim.environment(**machine)  # type: ignore[arg-type]
        lines = Path(folder, "trace.jsonl")
        if count or trace:
            env["CANNSIM_TRACE"] = str(lines)
        if trace:
            env["CANNSIM_TRACE_DETAIL"] = "1"
        if boxed:
            env["CANNSIM_BOXED"] = "1"
        if stop:  # each operator is waited for, so that the Python stack shows the line of the error
            env |= {"CANNSIM_STOP_AT_FIRST_ERROR": "1", "ASCEND_LAUNCH_BLOCKING": "1", "PYTHONFAULTHANDLER": "1"}
        try:
            if trace:  # before the run, not behind it, is told that nothing can be written there
                trace.parent.mkdir(parents=True, exist_ok=True)
                trace.open("a").close()
        except OSError as error:
            print(f"cannsim: -o {trace} cannot be written ({error.strerror}); name another file", file=sys.stderr)
            return 2
        try:
            status = run_child(command, env)
        except OSError as error:
            print(f"cannsim: {command[0]} cannot be started ({error.strerror})", file=sys.stderr)
            return 127
        if count:
            print(counted(lines), file=sys.stderr)
        if trace:
            from cannsim.trace import report

            print(report(lines, trace), file=sys.stderr)
        return status if status >= 0 else 128 - status


def run_child(command: list[str], env: dict[str, str]) -> int:
    """Until it ends. What was sent to this process alone is passed on; the signals of a terminal (Ctrl-C, hanging up)
    come from the kernel and reach the child without us: a second one would cut short what it does at the first."""
    numbers = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    # Before the child is there: a signal that came right behind its start would end this process and leave it alone.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*numbers, signal.SIGCHLD})
    try:
        restore = functools.partial(signal.pthread_sigmask, signal.SIG_SETMASK, before)
        child = subprocess.Popen(command, env=env, preexec_fn=restore)
        while child.poll() is None:
            received = signal.sigtimedwait({*numbers, signal.SIGCHLD}, 1.0)
            if received and received.si_signo in numbers and received.si_code <= 0:  # above 0: by the kernel
                child.send_signal(received.si_signo)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return child.returncode


def counted(trace: Path) -> str:
    """What the processes of a trace launched, all together: `cannsim: 3 launches: {"aclnnAdd": 2, ...}`."""
    from cannsim.trace import read

    rows = read(trace)
    launches = collections.Counter(row["name"] for row in rows if "call" in row and cannsim.is_launch(row["name"]))
    return f"cannsim: {launches.total()} launches: {json.dumps(dict(launches.most_common()))}"


def chips() -> list[str]:
    """The names that --chip takes, from the table of the runtime."""
    table = (build.ROOT / "src" / "runtime" / "config.cpp").read_text()
    return re.findall(r'^ {4}\{"(Ascend[^"]+)"', table, re.MULTILINE)


def device_count(text: str) -> int:
    if not text.isdigit() or int(text) > 64:
        raise argparse.ArgumentTypeError(f"{text} is no number of NPUs from 0 to 64")
    return int(text)


def process_count(text: str) -> int:
    if not text.isdigit() or not 0 < int(text) <= 2**20:
        raise argparse.ArgumentTypeError(f"{text} is no number of processes above 0")
    return int(text)


def chip_name(text: str) -> str:
    if text not in chips():
        raise argparse.ArgumentTypeError(f"{text} is not known; take one of {', '.join(chips())}")
    return text


def gibibytes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no number of GiB above 0")
    return value


def options() -> argparse.ArgumentParser:
    machine = argparse.ArgumentParser(add_help=False)
    machine.add_argument("--devices", type=device_count, help="number of NPUs (default 1, or CANNSIM_DEVICES)")
    machine.add_argument("--chip", type=chip_name, help="chip name (default Ascend910B3, or CANNSIM_CHIP)")
    machine.add_argument("--memory-gb", type=gibibytes, help="memory per NPU in GiB (default: the chip's)")
    machine.add_argument(
        "--processes-per-device",
        type=process_count,
        metavar="N",
        help="processes that may hold one NPU (default: the chip's, 63 or 64; 32 as in a virtual machine)",
    )
    machine.add_argument(
        "--stop-at-first-error",
        action="store_true",
        dest="stop",
        help="the first operator, collective or call that fails ends the process and shows where",
    )
    machine.add_argument("--boxed", action="store_true", help="run operators that are not simulated on the CPU")
    parser = argparse.ArgumentParser(prog="cannsim", description="torch_npu on simulated Ascend NPUs.")
    parser.add_argument("--version", action="version", version=f"cannsim {cannsim.__version__}")
    commands = parser.add_subparsers(dest="action", required=True)
    runner = commands.add_parser("run", parents=[machine], help="run a command on simulated NPUs")
    runner.add_argument("--count", action="store_true", help="print at the end which operators were launched how often")
    tracer = commands.add_parser("trace", parents=[machine], help="run a command and record what it did on the NPUs")
    tracer.add_argument(
        "-o", "--output", type=Path, default=Path("trace.json"), help="Chrome trace (default trace.json)"
    )
    for command in (runner, tracer):
        command.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    builder = commands.add_parser("build", help="build the libraries now and print their folder")
    builder.add_argument("--verbose", action="store_true", help="show the compiler's output")
    commands.add_parser("operators", help="print the table of simulated operators, in Markdown")
    commands.add_parser("suites", help="run public test suites and sort the results by cause", add_help=False)
    explainer = commands.add_parser("explain", help="say what an error or an operator means to the simulator")
    explainer.add_argument("text", nargs="*", help="an error text or names of operators (default: standard input)")
    return parser


def act(arguments: argparse.Namespace) -> int:
    given = vars(arguments)
    action = given.pop("action")
    if action in ("run", "trace"):
        command = given.pop("command")
        given["trace"] = given.pop("output", None)
        return run(command[1:] if command[:1] == ["--"] else command, **given)
    if action == "build":
        print(build.ensure(given["verbose"]))
        return 0
    if action == "operators":
        return run([sys.executable, "-m", "cannsim.operators_table"])
    from cannsim.explain import explain

    answer = explain(" ".join(given["text"]) or sys.stdin.read())
    print(answer or "cannsim explain: no operator and no error code in this text; give the whole message")
    return 0 if answer else 1


def main() -> int:
    try:
        if sys.argv[1:2] == ["suites"]:
            from cannsim import suites

            return suites.main(sys.argv[2:])
        return act(options().parse_args())
    except build.CannotBuild as error:
        print(f"cannsim: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
