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

from ascendchat.doctor.selftest_case import ItemResult, SelftestSettings, anonymised, last_message, run_to_end
from ascendchat.runs.run import read_metrics, stored_rows

STEPS, QUICK_STEPS = 200, 40
ROW, MIN_ROWS = 64, 8  # tokens of a row, rows of a batch; the batch is the same on the CPU
WINDOW = 10  # consecutive losses whose mean distance from the CPU's, in nats, is at most MAX_DISTANCE
MAX_DISTANCE = 0.1  # nats; the CPU computes with more bits
MIN_LOSS_DROP = 0.5  # nats; with less, following the CPU would prove little
DEPTHS = (4, 12, 20)
PROGRAM = [sys.executable, "-m", "ascendchat"]


def run_items(names: Sequence[str], settings: SelftestSettings) -> Iterator[ItemResult]:
    """Run the items among `names`, in their order; `training` and `resume` are two results of one run."""
    parts: dict[tuple[str, ...], Callable[[], Iterable[ItemResult]]] = {
        ("collectives",): lambda: [collectives(settings)],
        ("training", "resume"): lambda: training(settings),
        ("speed",): lambda: [speed(settings)],
    }
    for group, run in parts.items():
        began, left = time.monotonic(), [name for name in group if name in names]
        try:
            for verdict in run() if left else ():
                if verdict.name in left:
                    left.remove(verdict.name)
                    yield timed(verdict, began)
        except Exception as error:  # noqa: BLE001 (a verdict too: the others must not be lost)
            with (settings.folder / f"{group[0]}.log").open("a", encoding="utf-8") as log:
                traceback.print_exc(file=log)
            first = next(iter(str(error).splitlines()), "")
            yield from (timed(ItemResult(name, "failed", f"{type(error).__name__}: {first}"), began) for name in left)


def timed(verdict: ItemResult, began: float) -> ItemResult:
    verdict.seconds = time.monotonic() - began
    return verdict


def device_flags(settings: SelftestSettings) -> list[str]:
    return ["--device-type", settings.about["device"]]


def launch(settings: SelftestSettings) -> list[str]:
    return ["launch", "--devices", str(settings.devices), "--grace", "5", *device_flags(settings)]


def collectives(settings: SelftestSettings) -> ItemResult:
    """Run every collective on all devices and check every number; bandwidth per size, time per link."""
    name = "collectives"
    if settings.devices == 1:
        return ItemResult(name, "skipped", "one device has nobody to talk to")
    answer, log = settings.folder / "collectives.json", settings.folder / "collectives.log"
    command = [*PROGRAM, *launch(settings), "--run", name]
    ending = run_to_end([*command, "-m", "ascendchat.doctor.collective", str(answer)], log, settings)
    if ending or not answer.is_file():
        return ItemResult(name, "failed", ending or "no result was written")
    report: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    facts = {"rows": report["rows"], "links": report["links"]}
    if report["faults"]:
        return ItemResult(name, "failed", anonymised("; ".join(report["faults"][:3])), facts=facts)
    best = report["rows"][-1]
    message = f"{report['devices']} devices: all_reduce {best['all_reduce_gbs']:.2f} GB/s"
    return ItemResult(name, "held", message + (" (simulated)" if report["simulated"] else ""), facts=facts)


# ---- training -----------------------------------------------------------------------------------


def prepare_data(home: Path) -> list[str]:
    """Make a tokenizer and token shards of the embedded world; returns the flag that names them."""
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


def training(settings: SelftestSettings) -> Iterator[ItemResult]:
    """Train a tiny model on all devices, kill one rank in the middle, and compare with the same training on one CPU."""
    home, devices, steps = settings.folder / "home", settings.devices or 1, QUICK_STEPS if settings.quick else STEPS
    if not settings.about["trains"]:
        yield from (ItemResult(name, "skipped", "this chip is for inference") for name in ("training", "resume"))
        return
    rows = devices * -(-MIN_ROWS // devices)
    sizes = f"--depth 2 --dim 64 --head-dim 32 --max-seq-len {ROW} --total-batch-size {rows * ROW}".split()
    sizes += f"--eval-every -1 --sample-every 0 --num-iterations {steps} --save-every {steps // 8}".split()
    base = ["base", *prepare_data(home), *sizes, "--run-name"]
    ending = run_to_end([*PROGRAM, *base, "host", "--device-type", "cpu"], settings.folder / "host.log", settings)
    if ending:
        yield from (ItemResult(name, "failed", f"on the CPU: {ending}") for name in ("training", "resume"))
        return
    killed: list[int] = []
    command = [*PROGRAM, *launch(settings), "--run", "device", "--max-restarts", "1", *base, "device"]
    command += [*device_flags(settings), "--device-batch-size", str(rows // devices)]
    ending = run_to_end(command, settings.folder / "device.log", settings, lambda: kill_once(home, killed))
    folder = home / "runs" / "device" / "base"
    host_losses, losses_here = losses(home / "runs" / "host" / "base"), losses(folder)
    message, facts = (
        compare(host_losses, losses_here),
        {"losses": losses_here[:: steps // 20], "host": host_losses[:: steps // 20]},
    )
    if not losses_here:
        yield from (ItemResult(name, "failed", ending or "no step was done") for name in ("training", "resume"))
        return
    message = f"{ending}; {message}" if ending else message
    if message:
        yield ItemResult("training", "failed", message, facts=facts)
    else:
        yield ItemResult(
            "training", "held", f"{steps} losses follow those of the CPU, {host_losses[0]:.2f} to {losses_here[-1]:.2f}"
        )
    resumed_at = [int(row["resumed_at"]) for row in stored_rows(folder / "metrics.jsonl") if "resumed_at" in row]
    if ending or (killed and not resumed_at):
        yield ItemResult("resume", "failed", ending or "it began anew")
    elif not killed:
        yield ItemResult("resume", "skipped", "the run was over before a rank could be killed")
    elif jump := compare(host_losses[resumed_at[-1] :], losses_here[resumed_at[-1] :], min_drop=0.0):
        yield ItemResult("resume", "failed", f"after step {resumed_at[-1]}: {jump}")
    else:
        yield ItemResult("resume", "held", f"killed, and went on from step {resumed_at[-1]} as if nothing had been")


def losses(folder: Path) -> list[float]:
    path = folder / "metrics.jsonl"
    return [row["loss"] for row in read_metrics(path) if "loss" in row] if path.is_file() else []


def compare(expected: Sequence[float], measured: Sequence[float], min_drop: float = MIN_LOSS_DROP) -> str:
    """Sentence about what is wrong with these losses, or "". A nan is wrong too."""
    if len(measured) != len(expected):
        return f"{len(measured)} of {len(expected)} steps were done"
    for start in range(max(1, len(expected) - WINDOW + 1)):
        pairs = list(zip(expected[start : start + WINDOW], measured[start : start + WINDOW]))
        distance = sum(abs(a - b) for a, b in pairs) / max(1, len(pairs))
        if not distance <= MAX_DISTANCE:
            return f"from step {start + 1} on the losses are {distance:.2g} nats from the CPU's"
    if min_drop and not measured[-1] < measured[0] - min_drop:
        return f"the loss went from {measured[0]:.3f} to {measured[-1]:.3f} only"
    return ""


def kill_once(home: Path, killed: list[int]) -> int:
    """Kill the last rank when the first checkpoint is there; the returned size grows as the run goes on."""
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


def printed_row(log: Path) -> dict[str, Any]:
    """The row that `bench train` printed, {} if there is none; libraries may have printed warnings after it."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    row: dict[str, Any] = json.loads(next((line for line in reversed(lines) if line.startswith('{"depth"')), "{}"))
    return row


def speed(settings: SelftestSettings) -> ItemResult:
    """Run `bench train` of three depths on one device: tokens per second, MFU and memory."""
    about = settings.about
    if settings.quick or not about["trains"]:
        return ItemResult("speed", "skipped", "--quick" if settings.quick else "this chip is for inference")
    if about["simulated"] or about["device"] == "cpu":
        return ItemResult("speed", "skipped", "the speed of a CPU says nothing here")
    facts: dict[str, Any] = {}
    for depth in DEPTHS:
        log = settings.folder / f"speed-{depth}.log"
        ending = run_to_end([*PROGRAM, "bench", "train", "--depth", str(depth), *device_flags(settings)], log, settings)
        if "status 2)" in ending:  # refused: it would not fit
            facts[str(depth)] = {"skipped": anonymised(last_message(log))}
        elif ending:
            return ItemResult("speed", "failed", f"depth {depth}: {ending}", facts=facts)
        elif row := printed_row(log):
            facts[str(depth)] = row
        else:
            return ItemResult("speed", "failed", f"depth {depth}: no result was printed", facts=facts)
    done = [f"d{depth} {row['tokens_per_second']:,} tokens/s" for depth, row in facts.items() if "mfu" in row]
    return ItemResult("speed", "held" if done else "skipped", ", ".join(done) or "no depth fits", facts=facts)
