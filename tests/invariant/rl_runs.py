"""RL runs of a tiny model: `ascendchat rl` in this process or in one that starts warm, and a real
`ascendchat serve --weight-updates` that can be killed and started again on its port."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import engine_models as make
from warm_process import Popen, ServerPopen, children

from ascendchat.checkpoint import Writer
from ascendchat.cli import main
from ascendchat.errors import UserError
from ascendchat.nn.gpt import GPT
from ascendchat.nn.optim import MuonAdamW, groups
from ascendchat.runs.run import read_metrics
from ascendchat.sizes.schedule import rates

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 600  # seconds after which a test gives up, on however busy a machine
KEY = "a-key-of-the-tests-1234"
REWARDS = '''
import os, time


def vowels(prompt, completion, **row):
    """Share of the bytes that are vowels, in steps: some groups have no difference."""
    found = sum(letter in "aeiouAEIOU" for letter in completion) / max(1, len(completion))
    return round(found * 12) / 12


async def waited(prompt, completion, **row):
    assert row["task"].startswith("toy_") and isinstance(row["answer"], str)
    return vowels(prompt, completion)


def moody(prompt, completion, **row):
    """Raises, dies or hangs for some answers."""
    mood = len(completion) % 8
    if mood == 0:
        raise RuntimeError("no mood")
    if mood == 1:
        os._exit(3)
    if mood == 2:
        time.sleep(3600)
    return vowels(prompt, completion)


async def twice(generator, row):
    """Two turns; some episodes raise."""
    talk = generator.talk(row["messages"])
    if sum((await talk.reply(max_tokens=8)).ids) % 5 == 0:
        raise RuntimeError("as told")
    talk.say("again")
    return talk.trajectory(await generator.reward(await talk.reply(max_tokens=12)))
'''
# `ascendchat rl` that kills itself in the step that is its first word.
DYING = f"""
import sys
sys.path.append({str(Path(__file__).parent)!r})
from dying import die
from ascendchat.cli import main
from ascendchat.rl.stage import RlStage

begin, last = RlStage.micro_batches, int(sys.argv[1])

def begin_or_die(self, step):
    return die() if step == last else begin(self, step)

RlStage.micro_batches = begin_or_die
sys.exit(main(sys.argv[2:]))
"""
COMMON = "--device-type cpu --sample-every 0 --log-every 1 --eval-every -1 --device-batch-size 2 --lr-multiplier 0.3"
MOST = 24  # tokens of an answer
SIZES = f"--data toy_arithmetic_en --prompts-per-step 4 --samples 4 --max-new-tokens {MOST} --save-every 2"


def talkative() -> GPT:
    """Random weights whose answers are of very different lengths: half of them end within 12 tokens."""
    made = make.model(3, seq_len=160)
    with torch.no_grad():
        made.head[make.tokenizer().specials["<|assistant_end|>"]] *= 4.0
    return made


def make_home(folder: Path, made: GPT) -> Path:
    """A run `tiny/sft` with this model."""
    optimizer = MuonAdamW(groups(made, rates(made.shape.dim, 4096)), compute_dtype=torch.float32)
    state = {"stage": "sft", "shape": made.shape.to_dict(), "tokenizer": make.tokenizer().fingerprint}
    writer = Writer(folder / "runs/tiny/sft")
    writer.save(1, model=dict(made.state_dict()), shards=optimizer.shards(), state=state)
    writer.wait()
    make.tokenizer().save(folder / "runs/tiny/sft/tokenizer")
    (folder / "judges.py").write_text(REWARDS, encoding="utf-8")
    return folder


def words(run: str, *more: str, steps: int = 6) -> list[str]:
    reward = ["--start", "tiny", "--run", run, "--reward", "judges:vowels", "--steps", str(steps)]
    return ["rl", *reward, *SIZES.split(), *COMMON.split(), *more]


def start(
    home: Path, command: list[str], how: Any = None, program: tuple[str, ...] = ("-m", "ascendchat")
) -> subprocess.Popen[bytes]:
    """What it says goes to home/log. `how`: a class like subprocess.Popen, by default one that starts warm."""
    variables = {"ASCENDCHAT_HOME": str(home), "ASCENDCHAT_API_KEYS": KEY, "OMP_NUM_THREADS": "1"}
    with (home / "log").open("ab") as log:
        words = [sys.executable, *program, *command]
        return (how or Popen)(words, env={**os.environ, **variables}, cwd=home, stdout=log, stderr=log)


def run_here(home: Path, command: list[str], status: int = 0) -> str:
    """Run it in this process, where a process of its own is not the point; what it said."""
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        patch.setenv("ASCENDCHAT_HOME", str(home))
        patch.setenv("ASCENDCHAT_API_KEYS", KEY)
        patch.chdir(home)
        found = main(command)
    assert found == status, said.getvalue()[-5000:]
    return said.getvalue()


def finish(home: Path, command: list[str], status: int = 0, how: Any = None) -> str:
    """Run it to its end; what it said."""
    log = home / "log"
    before = log.stat().st_size if log.exists() else 0
    process = start(home, command, how)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(PATIENCE)
    said = log.read_bytes()[before:].decode(errors="replace")
    if process.poll() is None:
        process.kill()
    assert process.returncode == status, said[-5000:]
    return said


def rows_of(home: Path, run: str) -> list[dict[str, float]]:
    return [row for row in read_metrics(home / "runs" / run / "rl") if "loss" in row]


def transcripts(home: Path, run: str) -> list[dict[str, Any]]:
    """Every answer of a run, as its transcripts have them."""
    files = sorted((home / "runs" / run / "rl/transcripts").glob("step_*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]


def done(home: Path, run: str) -> int:
    """Steps whose figures are written."""
    try:
        return max((int(row["step"]) for row in rows_of(home, run)), default=0)
    except (OSError, ValueError, UserError):
        return 0


def result(home: Path, run: str, steps: int) -> dict[str, bytes]:
    """The bytes of the last checkpoint."""
    folder = home / "runs" / run / "rl" / f"step_{steps:06d}"
    return {name: (folder / name).read_bytes() for name in ("model.safetensors", "optim-0-of-1.safetensors")}


def kill_in(home: Path, command: list[str], step: int) -> None:
    """kill -9 in that step, when the checkpoint before it is written."""
    process = start(home, [str(step), *command], program=("-c", DYING))
    assert process.wait(PATIENCE) == -signal.SIGKILL, (home / "log").read_text(errors="replace")[-5000:]


def wait_until(true: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < until, "it never happened"
        time.sleep(0.02)


class Server:
    """`ascendchat serve --weight-updates` on a port of its own."""

    def __init__(self, home: Path, *flags: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.home, self.flags, self.log = home, flags, home / f"server-{self.port}.log"
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Until it is ready."""
        self.begin()
        wait_until(lambda: self.ready or not self.running)
        assert self.running, self.log.read_text(errors="replace")[-3000:]

    def begin(self) -> None:
        variables = {"ASCENDCHAT_HOME": str(self.home), "OMP_NUM_THREADS": "1", "ASCENDCHAT_API_KEYS": KEY}
        command = [sys.executable, "-m", "ascendchat", "serve", "--device-type", "cpu", "--port", str(self.port)]
        command += ["--run", "tiny", "--stage", "sft", "--weight-updates", "--slots", "16", *self.flags]
        self._said = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("ab") as file:
            self.process = ServerPopen(
                command, env={**os.environ, **variables}, cwd=ROOT, stdout=file, stderr=file, start_new_session=True
            )

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def ready(self) -> bool:
        return b"ready: " in self.log.read_bytes()[self._said :]

    def kill(self) -> None:
        """As a machine that loses its power; its workers notice that the front is gone."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        self.process.kill()


def children_of(pid: int) -> list[int]:
    """Processes that a process has started, warm or not, the oldest first."""
    return sorted(children(pid))


@contextlib.contextmanager
def serving(home: Path, *flags: str) -> Iterator[Server]:
    server = Server(home, *flags)
    server.start()
    try:
        yield server
    finally:
        server.stop()
