"""Run a command on the simulated CANN.

python -m cannsim run --devices 8 --chip Ascend910B3 --memory-gb 64 -- python train.py
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile

import cannsim


def run(arguments: argparse.Namespace) -> int:
    """Start the command as a child on its own simulated machine; returns its exit status."""
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        print("cannsim: no command given; type: python -m cannsim run -- COMMAND", file=sys.stderr)
        return 2
    if not cannsim.built():
        print("cannsim: the libraries are not built; type: make cannsim", file=sys.stderr)
        return 2
    state = None if "CANNSIM_STATE" in os.environ else tempfile.mkdtemp(prefix="cannsim-")
    env = cannsim.environment(
        devices=arguments.devices, chip=arguments.chip, memory_gb=arguments.memory_gb, state=state
    )
    try:
        try:
            child = subprocess.Popen(command, env=env)
        except FileNotFoundError:
            print(f"cannsim: command not found: {command[0]}", file=sys.stderr)
            return 127
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda received, frame: child.send_signal(received))
        status = child.wait()
        return status if status >= 0 else 128 - status
    finally:
        if state is not None:
            shutil.rmtree(state, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m cannsim", description="Run a command on a simulated CANN.")
    commands = parser.add_subparsers(dest="action", required=True)
    runner = commands.add_parser("run", help="run a command on simulated NPUs")
    runner.add_argument("--devices", type=int, help="number of NPUs (default 1, or CANNSIM_DEVICES)")
    runner.add_argument("--chip", help="chip name (default Ascend910B3, or CANNSIM_CHIP)")
    runner.add_argument("--memory-gb", type=float, help="memory per NPU in GiB (default: the chip's)")
    runner.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    return run(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
