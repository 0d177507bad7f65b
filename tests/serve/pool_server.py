"""Real workers for the tests of the pool: a pool in this process with workers of its own, or a whole server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))
import engine_models as make

from ascendchat.checkpoint import Writer
from ascendchat.config.serve import ServeConfig
from ascendchat.infer.request import Request, Sampling
from ascendchat.nn.gpt import GPT
from ascendchat.serve.messages import Part
from ascendchat.serve.pool import Failure, Pool, Process, Ticket, joined

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 240  # seconds after which a test gives up, on however busy a machine
CONTEXT = 4096


def save(home: Path, model: GPT | None = None, run: str = "tiny", step: int = 1) -> Path:
    """A checkpoint of this model, by default a random one that talks on and on, in that $ASCENDCHAT_HOME."""
    model = make.model(seq_len=CONTEXT) if model is None else model
    folder = home / "runs" / run / "sft"
    state = {"stage": "sft", "shape": model.shape.to_dict(), "tokenizer": make.tokenizer().fingerprint}
    writer = Writer(folder, keep=100)
    writer.save(step, model=dict(model.state_dict()), shards={}, state=state)
    writer.wait()
    if not (folder / "tokenizer").exists():
        make.tokenizer().save(folder / "tokenizer")
    return folder / f"step_{step:06d}"


def request(tokens: int = 8, prompt: tuple[int, ...] = (1, 2, 3), **sampling: Any) -> Request:
    """Never ends by itself."""
    settings = {"temperature": 0.0, "stop_tokens": (), "tools": False, **sampling}
    return Request(list(prompt), Sampling(tokens, **settings))


async def whole(ticket: Ticket) -> Part:
    """The answer in one part."""
    return joined([part async for part in ticket])


async def outcome(ticket: Ticket) -> Part | Failure:
    try:
        return await whole(ticket)
    except Failure as failure:
        return failure


async def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, "it never happened"
        await asyncio.sleep(0.01)


def pid(process: Process) -> int:
    assert process.child is not None
    return process.child.process.pid


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """An asynchronous test, with an end in any case."""
    asyncio.run(asyncio.wait_for(test(), PATIENCE))


@contextlib.asynccontextmanager
async def pool(home: Path, **settings: Any) -> AsyncIterator[Pool]:
    """A pool whose workers answer; $ASCENDCHAT_HOME must be `home`."""
    if not (home / "runs").exists():
        save(home)
    config = ServeConfig(device_type="cpu", run="tiny", stage="sft", **{"slots": 4, **settings})
    made = Pool(config)
    try:
        await made.start()
        yield made
    finally:
        await made.close(0)


def children(number: int) -> list[int]:
    """Processes that a process has started and that have not ended, zombies included."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[1]) == number:
                found.append(int(path.parent.name))
    return found


def running(number: int) -> bool:
    """There is such a process, and it is no zombie."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def cpu_seconds(number: int) -> float:
    """Of a process so far."""
    fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Server:
    """`ascendchat serve` as a process of its own."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self.log = process, log

    @property
    def said(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def url(self) -> str:
        found = re.search(r"ready: (http://\S+)", self.said)
        assert found, self.said
        return found[1]

    @property
    def workers(self) -> list[int]:
        return children(self.process.pid)


def begin(home: Path, *flags: str, **environment: str) -> Server:
    """Start it; it may not be ready yet."""
    if not (home / "runs").exists():
        save(home)
    log = home / f"log{time.monotonic_ns()}"
    env = {**os.environ, **environment, "OMP_NUM_THREADS": "1", "ASCENDCHAT_HOME": str(home)}
    command = [
        sys.executable,
        "-m",
        "ascendchat",
        "serve",
        "--port=0",
        *(flags if any("device-type" in flag for flag in flags) else ("--device-type=cpu", *flags)),
    ]
    with log.open("wb") as file:
        return Server(subprocess.Popen(command, env=env, cwd=ROOT, stderr=file, stdout=file), log)


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.02)


@contextlib.contextmanager
def serving(home: Path, *flags: str, **environment: str) -> Iterator[Server]:
    """A server that answers; it is killed behind the test if it still runs."""
    server = begin(home, *flags, **environment)
    try:
        wait_until(lambda: "ready: " in server.said or server.process.poll() is not None)
        _ = server.url
        yield server
    finally:
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
        sys.stderr.write(server.said)


async def gather(*awaitables: Awaitable[Any]) -> list[Any]:
    return list(await asyncio.gather(*awaitables))
