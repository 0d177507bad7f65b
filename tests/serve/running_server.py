"""A real `ascendchat serve` in a process of its own, with a tiny checkpoint made here."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "unit"))
import engine_models as make

from ascendchat.checkpoint import Writer
from ascendchat.nn.gpt import GPT

ROOT = Path(__file__).resolve().parents[2]
LONGEST_START = 300  # seconds
SERVE = ("ascendchat", "serve")


def save(home: Path, model: GPT, run: str = "tiny", stage: str = "sft") -> Path:
    """A checkpoint of this model with the tokenizer of bytes, in that $ASCENDCHAT_HOME."""
    folder = home / "runs" / run / stage
    state = {"stage": stage, "shape": model.shape.to_dict(), "tokenizer": make.tokenizer().fingerprint}
    writer = Writer(folder)
    writer.save(1, model=dict(model.state_dict()), shards={}, state=state)
    writer.wait()
    make.tokenizer().save(folder / "tokenizer")
    return folder / "step_000001"


def listening(url: str) -> bool:
    host, _, port = url.rpartition("//")[2].rpartition(":")
    try:
        socket.create_connection((host, int(port)), 5).close()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def serving(home: Path, *flags: str, module: Sequence[str] = SERVE, **variables: str) -> Iterator[str]:
    """The address of a server of the model in `home`, on a free port; it ends with SIGTERM."""
    environment = {**os.environ, "ASCENDCHAT_HOME": str(home), "OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, "-m", *module, "--device-type=cpu", "--port", "0", "--drain", "5"]
    server = subprocess.Popen([*command, *flags], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    guard = threading.Timer(LONGEST_START, server.kill)
    guard.start()
    assert server.stderr is not None
    said: list[str] = []
    try:
        for line in server.stderr:
            said.append(line)
            if found := re.search(r"ready: (http://\S+)", line):
                break
        else:
            raise AssertionError("".join(said))
        while server.poll() is None and not listening(found[1]):
            time.sleep(0.02)
        guard.cancel()
        reader = threading.Thread(target=lambda: said.extend(server.stderr), daemon=True)  # type: ignore[arg-type]
        reader.start()
        yield found[1]
    finally:
        guard.cancel()
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()
        sys.stderr.write("".join(said))
