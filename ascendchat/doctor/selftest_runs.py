"""Whole runs of `ascendchat selftest`, as commands that a user could type: collectives, training, resume, speed."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ascendchat.doctor.selftest_case import Settings, Verdict, cleaned, end_of, last_words
from ascendchat.runs.run import read_metrics, stored_rows

STEPS, QUICK_STEPS = 200, 40
ROW, LEAST_ROWS = 64, 8  # tokens, and rows of a batch; the batch is the same on the CPU
WINDOW, APART = 10, 0.1  # nats: the mean distance of so many losses in a row from the CPU's, which has more bits
FALLS = 0.5  # nats by which the loss must fall, or following would mean little
DEPTHS = (4, 12, 20)
PROGRAM = [sys.executable, "-m", "ascendchat"]


def examine(names: Sequence[str], settings: Settings) -> Iterator[Verdict]:
    """The items among `names`, in their order; `training` and `resume` are two verdicts on one run."""
    parts: dict[tuple[str, ...], Callable[[], Iterable[Verdict]]] = {
        ("collectives",): lambda: [collectives(settings)],
        ("training", "resume"): lambda: training(settings),
        ("speed",): lambda: [speed(settings)],
    }
    for own, part in parts.items():
        began, left = time.monotonic(), [name for name in own if name in names]
        try:
            for verdict in part() if left else ():
                if verdict.name in left:
                    left.remove(verdict.name)
                    yield timed(verdict, began)
        except Exception as error:  # noqa: BLE001 (a verdict too: the others must not be lost)
            with (settings.folder / f"{own[0]}.log").open("a", encoding="utf-8") as log:
                traceback.print_exc(file=log)
            first = next(iter(str(error).splitlines()), "")
            yield from (timed(Verdict(name, "failed", f"{type(error).__name__}: {first}"), began) for name in left)


def timed(verdict: Verdict, began: float) -> Verdict:
    verdict.seconds = time.monotonic() - began
    return verdict


def device_flags(settings: Settings) -> list[str]:
    return ["--device-type", settings.about["device"]]


def launch(settings: Settings) -> list[str]:
    return ["launch", "--devices", str(settings.devices), "--grace", "5", *device_flags(settings)]


def collectives(settings: Settings) -> Verdict:
    """Every collective on all devices, every number checked; bandwidth per size, time per link."""
    name = "collectives"
    if settings.devices == 1:
        return Verdict(name, "skipped", "one device has nobody to talk to")
    answer, log = settings.folder / "collectives.json", settings.folder / "collectives.log"
    words = [*PROGRAM, *launch(settings), "--run", name]
    ending = end_of([*words, "-m", "ascendchat.doctor.collective", str(answer)], log, settings)
    if ending or not answer.is_file():
        return Verdict(name, "failed", ending or "no result was written")
    found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    facts = {"rows": found["rows"], "links": found["links"]}
    if found["faults"]:
        return Verdict(name, "failed", cleaned("; ".join(found["faults"][:3])), facts=facts)
    best = found["rows"][-1]
    said = f"{found['devices']} devices: all_reduce {best['all_reduce_gbs']:.2f} GB/s"
    return Verdict(name, "held", said + (" (simulated)" if found["simulated"] else ""), facts=facts)


# ---- training -----------------------------------------------------------------------------------


def prepare_data(home: Path) -> list[str]:
    """A tokenizer and token shards of the embedded world; the flag that names them."""
    from itertools import islice

    from ascendchat.data import toyworld
    from ascendchat.data.prepare import prepare
    from ascendchat.data.tokenizer.tokenizer import train_tokenizer

    home.mkdir(exist_ok=True)
    texts = list(islice(toyworld.documents("train"), 400))
    source = home / "texts.jsonl"
    source.write_text("\n".join(json.dumps({"text": text}) for text in texts), encoding="utf-8")
    train_tokenizer(texts, 512).save(home / "tokenizer")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        prepare([str(source)], home / "tokenizer", home / "texts", val_fraction=0.1, workers=1)
    return ["--data", str(home / "texts")]


def training(settings: Settings) -> Iterator[Verdict]:
    """A tiny model on all devices, one of whose ranks is killed in the middle, against the same on one CPU."""
    home, devices, steps = settings.folder / "home", settings.devices or 1, QUICK_STEPS if settings.quick else STEPS
    if not settings.about["trains"]:
        yield from (Verdict(name, "skipped", "this chip is for inference") for name in ("training", "resume"))
        return
    rows = devices * -(-LEAST_ROWS // devices)
    sizes = f"--depth 2 --dim 64 --head-dim 32 --max-seq-len {ROW} --total-batch-size {rows * ROW}".split()
    sizes += f"--eval-every -1 --sample-every 0 --num-iterations {steps} --save-every {steps // 8}".split()
    base = ["base", *prepare_data(home), *sizes, "--run-name"]
    ending = end_of([*PROGRAM, *base, "host", "--device-type", "cpu"], settings.folder / "host.log", settings)
    if ending:
        yield from (Verdict(name, "failed", f"on the CPU: {ending}") for name in ("training", "resume"))
        return
    killed: list[int] = []
    words = [*PROGRAM, *launch(settings), "--run", "device", "--max-restarts", "1", *base, "device"]
    words += [*device_flags(settings), "--device-batch-size", str(rows // devices)]
    ending = end_of(words, settings.folder / "device.log", settings, lambda: kill_once(home, killed))
    folder = home / "runs" / "device" / "base"
    right, found = losses(home / "runs" / "host" / "base"), losses(folder)
    said, facts = compare(right, found), {"losses": found[:: steps // 20], "host": right[:: steps // 20]}
    if not found:
        yield from (Verdict(name, "failed", ending or "no step was done") for name in ("training", "resume"))
        return
    said = f"{ending}; {said}" if ending else said
    if said:
        yield Verdict("training", "failed", said, facts=facts)
    else:
        yield Verdict("training", "held", f"{steps} losses follow those of the CPU, {right[0]:.2f} to {found[-1]:.2f}")
    again = [int(row["resumed_at"]) for row in stored_rows(folder / "metrics.jsonl") if "resumed_at" in row]
    if ending or (killed and not again):
        yield Verdict("resume", "failed", ending or "it began anew")
    elif not killed:
        yield Verdict("resume", "skipped", "the run was over before a rank could be killed")
    elif jump := compare(right[again[-1] :], found[again[-1] :], falls=0.0):
        yield Verdict("resume", "failed", f"after step {again[-1]}: {jump}")
    else:
        yield Verdict("resume", "held", f"killed, and went on from step {again[-1]} as if nothing had been")


def losses(folder: Path) -> list[float]:
    path = folder / "metrics.jsonl"
    return [row["loss"] for row in read_metrics(path) if "loss" in row] if path.is_file() else []


def compare(right: Sequence[float], found: Sequence[float], falls: float = FALLS) -> str:
    """What is wrong with these losses, or "". A nan is wrong too."""
    if len(found) != len(right):
        return f"{len(found)} of {len(right)} steps were done"
    for start in range(max(1, len(right) - WINDOW + 1)):
        pairs = list(zip(right[start : start + WINDOW], found[start : start + WINDOW]))
        apart = sum(abs(a - b) for a, b in pairs) / max(1, len(pairs))
        if not apart <= APART:
            return f"from step {start + 1} on the losses are {apart:.2g} nats from the CPU's"
    if falls and not found[-1] < found[0] - falls:
        return f"the loss went from {found[0]:.3f} to {found[-1]:.3f} only"
    return ""


def kill_once(home: Path, killed: list[int]) -> int:
    """Kill the last rank when the first checkpoint is there; what is returned changes as the run goes on."""
    folder = home / "runs" / "device"
    if not killed and any((folder / "base").glob("step_*")):
        marks = sorted((folder / "logs" / "attempt_0").glob("rank_*.pid"))
        if marks and (pid := marks[-1].read_text(encoding="ascii").partition(" ")[0]).isdigit():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
                killed.append(int(pid))
    metrics = folder / "base" / "metrics.jsonl"
    return metrics.stat().st_size if metrics.is_file() else 0


# ---- speed --------------------------------------------------------------------------------------


def printed(log: Path) -> dict[str, Any]:
    """The row of `bench train`, {} if there is none; libraries may have warned of something behind it."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    row: dict[str, Any] = json.loads(next((line for line in reversed(lines) if line.startswith('{"depth"')), "{}"))
    return row


def speed(settings: Settings) -> Verdict:
    """`bench train` of three depths on one device: tokens per second, MFU and memory."""
    about = settings.about
    if settings.quick or not about["trains"]:
        return Verdict("speed", "skipped", "--quick" if settings.quick else "this chip is for inference")
    if about["simulated"] or about["device"] == "cpu":
        return Verdict("speed", "skipped", "the speed of a CPU says nothing here")
    facts: dict[str, Any] = {}
    for depth in DEPTHS:
        log = settings.folder / f"speed-{depth}.log"
        ending = end_of([*PROGRAM, "bench", "train", "--depth", str(depth), *device_flags(settings)], log, settings)
        if "status 2)" in ending:  # refused: it would not fit
            facts[str(depth)] = {"skipped": cleaned(last_words(log))}
        elif ending:
            return Verdict("speed", "failed", f"depth {depth}: {ending}", facts=facts)
        elif row := printed(log):
            facts[str(depth)] = row
        else:
            return Verdict("speed", "failed", f"depth {depth}: no result was printed", facts=facts)
    done = [f"d{depth} {row['tokens_per_second']:,} tokens/s" for depth, row in facts.items() if "mfu" in row]
    return Verdict("speed", "held" if done else "skipped", ", ".join(done) or "no depth fits", facts=facts)
