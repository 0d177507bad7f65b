"""The first hour with a card: `ascendchat selftest [--devices 8] [--quick]`, which ends with one small file to send.

It compares every operator of ours with float64 (selftest_operators.py), checks what the device promises
(selftest_device.py), and does whole runs (selftest_runs.py): collectives, a training that follows the CPU's, kill and
resume, speed. Items run in processes of their own: where one dies or hangs, its item has failed, and a new process goes
on with the next. No torch in this one.

    ascendchat selftest --table selftest.json       # such files as rows of docs/en/hardware.md
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from ascendchat.config.language import language
from ascendchat.device.env import announce, prepare_environment
from ascendchat.doctor.selftest_case import ItemResult, SelftestSettings, anonymised, more_than_visible, run_to_end
from ascendchat.errors import UserError, nearest
from ascendchat.files import write_atomic
from ascendchat.version import __version__

if TYPE_CHECKING:
    from ascendchat.config.commands import SelftestConfig


# Items that run in the environment of training, in that of generation, and as commands that a user types.
TRAINING = (
    "versions", "norm", "rotary", "block", "attention", "documents", "log-sum-exp", "head-loss", "optimizer", "memory",
    "queue",
)  # fmt: skip
GENERATION = ("decode", "mask", "noise", "graph", "hot-path")
RUNS = ("collectives", "training", "resume", "speed")
ITEMS = (*TRAINING, *GENERATION, *RUNS)
ZH = {"held": "通过", "failed": "失败", "skipped": "跳过"}


def run(config: SelftestConfig) -> int:
    """Run `ascendchat selftest`; exit status 0 when everything held."""
    if bool(config.files) != config.table:
        raise UserError("--table and files belong together: ascendchat selftest --table selftest.json")
    if config.table:
        print("\n".join(table_row(read_result(Path(name))) for name in config.files))
        return 0
    for name in config.only:
        if name not in ITEMS:
            raise UserError(f"--only: there is no item {name!r}; {nearest(name, list(ITEMS))}")
    out = Path(config.out)
    if not out.parent.is_dir():
        raise UserError(f"--out: there is no folder {out.parent}; name one that exists")
    logs = Path(tempfile.mkdtemp(prefix="ascendchat-selftest-"))
    settings = SelftestSettings(logs, config.devices, config.device_type, config.quick, config.deadline)
    names = [name for name in ITEMS if name in (config.only or ITEMS)]
    verdicts: list[ItemResult] = []
    keep_logs = False
    try:
        save(out, settings, verdicts)  # fails now, not after an hour, where nothing can be written
        with exit_on_signals():
            for verdict in run_items(names, settings):
                verdicts.append(verdict)
                save(out, settings, verdicts)
                word = ZH[verdict.verdict] if language() == "zh" else verdict.verdict
                print(f"{word:<8} {verdict.name:<12} {verdict.seconds:>6.1f} s  {verdict.said}", flush=True)
        keep_logs = failed = any(item.verdict == "failed" for item in verdicts)
    except (KeyboardInterrupt, SystemExit):
        keep_logs = True
        print(f"ascendchat selftest: {out} has what was found so far; logs: {logs}", file=sys.stderr)
        raise
    finally:
        if not keep_logs:
            shutil.rmtree(logs, ignore_errors=True)  # logs of a success, and what its runs wrote
    report = result(settings, verdicts)
    if language() == "zh":
        print(f"{summary(report)}\n请把 {out} 发给我们：其中没有主机名和用户名。" + (f"日志：{logs}" if failed else ""))
    else:
        print(f"{summary(report)}\nplease send {out}: it names no host and no user" + (f"; logs: {logs}" * failed))
    return 1 if failed else 0


def save(out: Path, settings: SelftestSettings, verdicts: Sequence[ItemResult]) -> None:
    """Write the result file, with the items that are done by now."""
    try:
        write_atomic(out, json.dumps(result(settings, verdicts), indent=1) + "\n")
    except OSError as error:
        raise UserError(f"--out: {out} cannot be written ({error.strerror}); name another file") from None


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP (a terminal that was closed) end this process as Ctrl-C does, and with it the processes
    that it started in sessions of their own. A signal that is ignored (nohup) stays so."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_items(names: Sequence[str], settings: SelftestSettings) -> Iterator[ItemResult]:
    """Run every item, in the order of ITEMS; the first process always starts, for what it reports about the device."""
    from ascendchat.doctor import selftest_runs

    yield from run_in_workers([name for name in names if name in TRAINING], "training", settings)
    if not settings.about:  # no device: nothing else can be tried
        return
    settings.devices = settings.devices or settings.about["visible"]
    yield from run_in_workers([name for name in names if name in GENERATION], "generation", settings)
    yield from selftest_runs.run_items([name for name in names if name in RUNS], settings)


def run_in_workers(names: Sequence[str], kind: str, settings: SelftestSettings) -> Iterator[ItemResult]:
    """Run items inside processes of selftest_device.py: a new one after each item that ended its process."""
    left, number = list(names), 0
    while left or not settings.about:
        number += 1
        answers, log = settings.folder / f"{kind}-{number}.jsonl", settings.folder / f"{kind}-{number}.log"
        answers.touch()
        command = [sys.executable, "-m", "ascendchat.doctor.selftest_device", str(answers)]
        command += [
            settings.device_type or "",
            "quick" if settings.quick else "whole",
            str(settings.devices or 1),
            *left,
        ]
        environment = settings.environment
        announce(prepare_environment(settings.device_type, generates=kind == "generation", environ=environment))
        ending = run_to_end(command, log, settings, partial(size_of, answers), environment)
        rows = read_answers(answers)
        done = [ItemResult(**row["verdict"]) for row in rows if "verdict" in row]
        for row in rows:
            settings.about |= row.get("about", {})
        if settings.about and more_than_visible(settings.devices or 1, settings.about):
            visible = settings.about["visible"]
            raise UserError(f"--devices {settings.devices}: {visible} can be seen here; ask for at most {visible}")
        yield from done
        left = left[len(done) :]
        if not settings.about:  # there is no device
            yield from (ItemResult(name, "failed", ending) for name in left or ["device"])
            return
        if left and {"begun": left[0]} in rows:
            yield ItemResult(left.pop(0), "failed", ending)
        elif left and not done:  # the device cannot be opened any more
            yield from (ItemResult(name, "failed", ending) for name in left)
            return


def read_answers(answers: Path) -> list[dict[str, Any]]:
    """Read the rows that a process wrote, without the last one if the process was killed in the middle of it."""
    lines = answers.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def size_of(path: Path) -> int:
    return path.stat().st_size


def result(settings: SelftestSettings, verdicts: Sequence[ItemResult]) -> dict[str, Any]:
    """Build the content of the result file."""
    about = {key: value for key, value in settings.about.items() if key != "visible"}
    done = [item.name for item in verdicts]
    missing = [ItemResult(name, "skipped", "not tried") for name in ITEMS if name not in done]
    return {
        "format": 1,
        "ascendchat": __version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        **about,
        "devices": settings.devices or 0,
        "quick": settings.quick,
        "items": [
            {**asdict(item), "said": anonymised(item.said), "seconds": round(item.seconds, 1)}
            for item in (*verdicts, *missing)
        ],
    }


def named(report: dict[str, Any], outcome: str) -> list[str]:
    return [item["name"] for item in report["items"] if item["verdict"] == outcome]


def summary(report: dict[str, Any]) -> str:
    """Sum up the result in one line."""
    failed, skipped = named(report, "failed"), named(report, "skipped")
    text = f"{len(named(report, 'held'))} of {len(report['items']) - len(skipped)} held"
    text += f"; failed: {', '.join(failed)}" if failed else ""
    return text + (f"; not tried: {', '.join(skipped)}" if skipped else "")


def read_result(path: Path) -> dict[str, Any]:
    """Read a file that `selftest` wrote."""
    try:
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        summary(report)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(
            f"{path} is not a file of `ascendchat selftest`; give the selftest.json that it wrote"
        ) from None
    return report


def table_row(report: dict[str, Any]) -> str:
    """Format the result as a row of docs/en/hardware.md."""
    chip = f"{report.get('chip', '?')} × {report['devices']}" + (" (simulated)" if report.get("simulated") else "")
    software: dict[str, str] = report.get("software", {})
    below = ", ".join(f"{name} {version}" for name, version in software.items() if name != "torch_npu")
    cells = [chip, below or "-", software.get("torch_npu", "-"), report.get("torch", "-"), report.get("date", "-")]
    return "| " + " | ".join([*cells, summary(report) + (" (quick)" if report.get("quick") else "")]) + " |"
