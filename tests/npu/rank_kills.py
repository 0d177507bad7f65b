"""Kill random ranks of a training run on simulated NPUs, again and again: it ends bit for bit as if nobody had.

    python -m cannsim run --devices 8 -- python tests/npu/rank_kills.py --devices 8 --kills 50 --seconds 550 FOLDER

A tiny `ascendchat base` runs under `ascendchat launch --max-restarts`. At random moments a random rank gets SIGKILL;
the time until the next training step is told, and where it went, as seen from outside: in the files of the ranks.
After --seconds the run is stopped in order; the same command goes on with it. FOLDER/kills.jsonl has a line per kill.
tests/npu/test_rank_kills.py does it once, on two devices.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ascendchat.data.prepare import prepare
from ascendchat.data.tokenizer.tokenizer import train_tokenizer
from ascendchat.runs.run import read_metrics

ROOT = Path(__file__).resolve().parents[2]
WORDS = ["red", "blue", "tree", "river", "stone", "bird", "walks", "sings", "under", "over", "the", "a"]
SIZES = "--depth 2 --dim 64 --head-dim 32 --max-seq-len 64 --total-batch-size 512 --device-batch-size 1"
RHYTHM = "--eval-every -1 --sample-every 0 --log-every 1 --save-every 2 --keep 1"
PATIENCE = 300.0  # seconds until a step comes, on however busy a machine
LOOK = 0.02  # seconds between two looks at the files
# What rank 0 prints on its way, and what the time before it was spent on.
MILES = {
    "end of the others": r"",  # the folder of the next attempt is there
    "start": r"^",  # the log of its rank 0 is there
    "connect": r"npu: Ascend",
    "load": r"continuing after step|steps of \d+ tokens",
    "first step": r" step \d+/\d+ \|",
}


def make_data(folder: Path) -> None:
    rng = random.Random(0)
    texts = [" ".join(rng.choice(WORDS) for _ in range(rng.randint(5, 60))) + "." for _ in range(300)]
    source = folder / "text.jsonl"
    source.write_text("\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8")
    train_tokenizer(texts, 300).save(folder / "tokenizer")
    prepare([str(source)], folder / "tokenizer", folder / "words", val_fraction=0.1, workers=1)


def command(folder: Path, run: str, steps: int) -> list[str]:
    """The training itself, as `ascendchat` takes it."""
    where = ["--data", str(folder / "words"), "--device-type", "npu", "--run", run, "--num-iterations", str(steps)]
    return ["base", *SIZES.split(), *RHYTHM.split(), *where]


class Job:
    """A launch of `base`, watched from outside."""

    def __init__(self, folder: Path, run: str, devices: int, steps: int, restarts: int) -> None:
        self.logs, self.devices = folder / "runs" / run / "logs", devices
        words = ["launch", "--devices", str(devices), "--max-restarts", str(restarts), *command(folder, run, steps)]
        environment = {**os.environ, "ASCENDCHAT_HOME": str(folder), "OMP_NUM_THREADS": "1"}
        with open(folder / f"{run}.log", "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ascendchat", *words], env=environment, cwd=ROOT, stdout=log, stderr=log
            )
        self.attempt = 0

    @property
    def folder(self) -> Path:
        return self.logs / f"attempt_{self.attempt}"

    def text(self) -> str:
        """What rank 0 of this attempt has printed so far."""
        path = self.folder / "rank_0.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def step(self) -> int:
        found = re.findall(r" step (\d+)/\d+ \|", self.text())
        return int(found[-1]) if found else 0

    def pids(self) -> dict[int, int]:
        files = self.folder.glob("rank_*.pid")
        return {int(path.stem.split("_")[1]): int(path.read_text().split()[0]) for path in files}

    def wait_for(self, condition: Any, what: str) -> None:
        until = time.monotonic() + PATIENCE
        while not condition():
            assert self.process.poll() is None, f"ended with {self.process.returncode} while waiting for {what}"
            assert time.monotonic() < until, f"{PATIENCE} s without {what}"
            time.sleep(LOOK)

    def kill(self, rank: int) -> dict[str, float]:
        """Seconds from the kill to the next step, by what they were spent on."""
        os.kill(self.pids()[rank], signal.SIGKILL)
        last, spent = time.monotonic(), {}
        self.attempt += 1
        for name, sign in MILES.items():
            if not sign:
                self.wait_for(self.folder.is_dir, name)
            elif sign == "^":
                self.wait_for(lambda: (self.folder / "rank_0.log").exists(), name)
            else:
                self.wait_for(lambda sign=sign: re.search(sign, self.text()), name)
            now = time.monotonic()
            spent[name], last = now - last, now
        return {"seconds": sum(spent.values()), **spent}

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(PATIENCE)


def outcome(folder: Path, run: str) -> tuple[dict[int, float], dict[str, bytes]]:
    """The loss of every step, and what the last checkpoint holds."""
    stage = folder / "runs" / run / "base"
    losses = {row["step"]: row["loss"] for row in read_metrics(stage) if "loss" in row}
    last = stage / (stage / "latest").read_text().strip()
    return losses, {path.name: path.read_bytes() for path in last.glob("*.safetensors")}


def finished(folder: Path, run: str, steps: int) -> bool:
    latest = folder / "runs" / run / "base" / "latest"
    return latest.exists() and latest.read_text().strip() == f"step_{steps:06d}"


def plain_run(folder: Path, devices: int, steps: int) -> None:
    """The run that nobody disturbs."""
    job = Job(folder, "whole", devices, steps, 0)
    assert job.process.wait(3 * PATIENCE) == 0, (folder / "whole.log").read_text()[-3000:]


def killed_run(
    folder: Path, devices: int, steps: int, kills: int, seconds: float, seed: int = 0
) -> list[dict[str, Any]]:
    """Go on until all kills are done and the run has ended, or the time is over; all kills so far."""
    rng, book, end = random.Random(0), folder / "kills.jsonl", time.monotonic() + seconds
    plan = sorted(rng.sample(range(1, steps - 2), kills))
    victims = [(step, rng.randrange(devices), rng.random()) for step in plan]
    done = [json.loads(line) for line in book.read_text().splitlines()] if book.exists() else []
    for old in (folder / "runs" / "killed" / "logs").glob("attempt_*"):
        old.rename(folder / f"{time.time_ns()}_{old.name}")
    job = Job(folder, "killed", devices, steps, kills)
    try:
        for step, rank, part in victims[len(done) :]:
            job.wait_for(lambda step=step: job.step() >= step or time.monotonic() > end, f"step {step}")
            if time.monotonic() > end:
                return done
            time.sleep(part)  # anywhere in a step, also while a checkpoint is written
            spent = job.kill(rank)
            busy = os.getloadavg()[0]
            done.append({"kill": len(done) + 1, "after_step": step, "rank": rank, "load_average": busy, **spent})
            with open(book, "a") as file:
                file.write(json.dumps(done[-1]) + "\n")
            print({name: round(value, 2) for name, value in done[-1].items()}, flush=True)
        while job.process.poll() is None and time.monotonic() < end:
            time.sleep(LOOK)
        attempts = len(list((folder / "runs" / "killed" / "logs").glob("attempt_*")))
        assert attempts == job.attempt + 1, f"{attempts - 1} restarts for {job.attempt} kills"
    finally:
        job.stop()
    return done


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seconds", type=float, default=550)
    flags = parser.parse_args()
    folder, began = flags.folder.resolve(), time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "words" / "manifest.json").exists():
        make_data(folder)
    if not finished(folder, "whole", flags.steps):
        plain_run(folder, flags.devices, flags.steps)
        print(f"undisturbed: {time.monotonic() - began:.1f} s", flush=True)
    left = flags.seconds - (time.monotonic() - began)
    done = killed_run(folder, flags.devices, flags.steps, flags.kills, left)
    seconds = sorted(kill["seconds"] for kill in done)
    if seconds:
        print(
            f"{len(done)} kills: median {statistics.median(seconds):.2f} s, most {seconds[-1]:.2f} s to the next step"
        )
        for name in MILES:
            print(f"  {name:<18} median {statistics.median(kill[name] for kill in done):.2f} s")
    if not finished(folder, "killed", flags.steps):
        print("not at the end: the same command goes on")
        return 3
    same = [a == b for a, b in zip(outcome(folder, "whole"), outcome(folder, "killed"))]
    print(f"losses of all {flags.steps} steps the same: {same[0]}; weights and optimizer state the same: {same[1]}")
    return 0 if all(same) else 1


if __name__ == "__main__":
    sys.exit(main())
