"""Servers for the tests of the API: `ascendchat serve` as a process of its own, with tiny checkpoints made here."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))
import engine_models as make

from ascendchat.checkpoint import Writer
from ascendchat.nn.gpt import GPT

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 240  # seconds after which a test gives up, on however busy a machine
CONTEXT = 1024  # of the random model
SPECIAL = make.tokenizer().specials


def random_model() -> GPT:
    """Random weights: it says anything, and never the end."""
    return make.model(seq_len=CONTEXT)


def save(home: Path, model: GPT, run: str, stage: str = "sft") -> None:
    """A run with this model, and its tokenizer."""
    writer = Writer(home / "runs" / run / stage)
    state = {"stage": stage, "shape": model.shape.to_dict(), "tokenizer": make.tokenizer().fingerprint}
    writer.save(1, model=dict(model.state_dict()), shards={}, state=state)
    writer.wait()
    make.tokenizer().save(home / "tokenizer")


@dataclass
class Server:
    """A running one."""

    url: str
    name: str  # of its model
    log: Path

    def post(self, path: str, body: Any = None, **further: Any) -> httpx.Response:
        """One request."""
        return httpx.post(f"{self.url}{path}", json=body, timeout=PATIENCE, **further)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=PATIENCE)

    def chat(self, text: str = "hi", **fields: Any) -> httpx.Response:
        """A question."""
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **fields})

    def ids(self, text: str) -> list[int]:
        """The prompt of a question."""
        found = self.post("/tokenize", {"messages": [{"role": "user", "content": text}]})
        return list(found.json()["tokens"])


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error, whose envelope is checked."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert "Traceback" not in response.text
    return dict(body["error"])


@contextlib.contextmanager
def serving(home: Path, run: str, stage: str = "sft", *flags: str) -> Iterator[Server]:
    """Until the end of the block."""
    log = home / f"{run}.log"
    env = {**os.environ, "ASCENDCHAT_HOME": str(home), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "ascendchat", "serve", "--device-type", "cpu", "--port", "0", "--run", run]
    with log.open("wb") as file:
        process = subprocess.Popen([*command, "--stage", stage, *flags], env=env, cwd=ROOT, stderr=file, stdout=file)
    try:
        until = time.monotonic() + PATIENCE
        while not (found := re.search(r"ready: (http://\S+)", log.read_text(errors="replace"))):
            waits = process.poll() is None and time.monotonic() < until
            assert waits, log.read_text(errors="replace")
            time.sleep(0.05)
        yield Server(found[1], f"{run}/{stage}", log)
        assert process.poll() is None, log.read_text(errors="replace")[-3000:]
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
