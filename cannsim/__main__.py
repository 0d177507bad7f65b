"""Run a command on the simulated CANN, or list the simulated operators.

python -m cannsim run --devices 8 --chip Ascend910B3 --memory-gb 64 -- python train.py
python -m cannsim operators
python -m cannsim suites FOLDER          # other people's tests: suites.py
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import cannsim


def run(command: list[str], count: bool = False, boxed: bool = False, **machine: float | str | None) -> int:
    """Start the command as a child on a simulated machine of its own; returns its exit status."""
    if not command:
        print("cannsim: no command given; type: python -m cannsim run -- COMMAND", file=sys.stderr)
        return 2
    if not cannsim.built():
        print("cannsim: the libraries are not built; type: make cannsim", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="cannsim-", ignore_cleanup_errors=True) as folder:
        if "CANNSIM_STATE" not in os.environ:
            machine["state"] = os.path.join(folder, "state")
            os.mkdir(machine["state"])
        env = cannsim.environment(**machine)  # type: ignore[arg-type]
        if boxed:
            env["CANNSIM_BOXED"] = "1"
        trace = Path(folder, "trace.jsonl")
        if count:
            env["CANNSIM_TRACE"] = str(trace)
        try:
            child = subprocess.Popen(command, env=env)
        except FileNotFoundError:
            print(f"cannsim: command not found: {command[0]}", file=sys.stderr)
            return 127
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda received, frame: child.send_signal(received))
        status = child.wait()
        if count:
            print(counted(trace), file=sys.stderr)
        return status if status >= 0 else 128 - status


def counted(trace: Path) -> str:
    """What the processes of a trace launched, all together: `cannsim: 3 launches: {"aclnnAdd": 2, ...}`."""
    names = [json.loads(line)["name"] for line in trace.read_text().splitlines()] if trace.exists() else []
    launches = collections.Counter(name for name in names if cannsim.is_launch(name))
    return f"cannsim: {launches.total()} launches: {json.dumps(dict(launches.most_common()))}"


def main() -> int:
    if sys.argv[1:2] == ["suites"]:
        from cannsim import suites

        return suites.main(sys.argv[2:])
    parser = argparse.ArgumentParser(prog="python -m cannsim", description="Run a command on a simulated CANN.")
    commands = parser.add_subparsers(dest="action", required=True)
    runner = commands.add_parser("run", help="run a command on simulated NPUs")
    runner.add_argument("--devices", type=int, help="number of NPUs (default 1, or CANNSIM_DEVICES)")
    runner.add_argument("--chip", help="chip name (default Ascend910B3, or CANNSIM_CHIP)")
    runner.add_argument("--memory-gb", type=float, help="memory per NPU in GiB (default: the chip's)")
    runner.add_argument("--count", action="store_true", help="print at the end which operators were launched how often")
    runner.add_argument("--boxed", action="store_true", help="run operators that are not simulated on the CPU")
    runner.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    commands.add_parser("operators", help="print the table of simulated operators, in Markdown")
    commands.add_parser("suites", help="run public test suites and sort the results by cause")
    arguments = vars(parser.parse_args())
    if arguments.pop("action") == "operators":
        return run([sys.executable, "-m", "cannsim.operators_table"])
    command = arguments.pop("command")
    return run(command[1:] if command[:1] == ["--"] else command, **arguments)


if __name__ == "__main__":
    sys.exit(main())
