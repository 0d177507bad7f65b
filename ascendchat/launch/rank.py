"""Becomes one rank: `python rank.py FOLDER [node_K_]`, started by the torchrun inside `ascendchat launch`.

It sends its output to FOLDER/rank_N.log, makes sure that it dies with its parent, and then replaces itself by Python
with the arguments in FOLDER/program.json: what runs is what plain torchrun would have run, but torchrun never sees the
flags of the program (it would take --run for its own --run-path). Standard library only, to start fast.

All nodes of a job write to one FOLDER. N counts the ranks of all nodes; every other file is of one node only, and with
several nodes its name begins with `node_K_`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from ascendchat.processes import FILES, die_with_parent, started

# torchrun must be able to import torch even if the plug-in of a device is broken, so it runs with "0". The ranks get
# the user's own value back.
AUTOLOAD, KEPT_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD", "ASCENDCHAT_KEPT_AUTOLOAD"
PROGRAM = "program.json"
MARK = "ASCENDCHAT_RANK_PROCESS"  # content of the pid file, inherited by all that a rank starts: shows whose they are


def log_file(folder: Path, rank: int) -> Path:
    """Where everything that one rank prints goes."""
    return folder / f"rank_{rank}.log"


def node_prefix(nodes: int, node: int) -> str:
    """How the names of this node's own files begin: nodes share the folder."""
    return f"node_{node}_" if nodes > 1 else ""


def enter(argv: list[str]) -> list[str]:
    """Redirect, note the process id and when it started; the arguments of Python with which this rank goes on."""
    folder, node, rank = Path(argv[0]), "".join(argv[1:]), int(os.environ["RANK"])
    die_with_parent(signal.SIGKILL)
    log = os.open(log_file(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.environ[MARK] = f"{os.getpid()} {started(os.getpid())}"
    os.environ[FILES] = str(folder / f"{node}rank_")
    (folder / f"{node}rank_{rank}.pid").write_text(os.environ[MARK], encoding="ascii")
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    kept = os.environ.pop(KEPT_AUTOLOAD, "")
    if kept:
        os.environ[AUTOLOAD] = kept
    else:
        os.environ.pop(AUTOLOAD, None)
    program: list[str] = json.loads((folder / f"{node}{PROGRAM}").read_text(encoding="utf-8"))
    return program


def main(argv: list[str]) -> None:
    """Never returns."""
    os.execv(sys.executable, [sys.executable, "-u", *enter(argv)])


if __name__ == "__main__":
    main(sys.argv[1:])
