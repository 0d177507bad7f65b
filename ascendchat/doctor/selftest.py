"""The first hour with a card: `ascendchat selftest [--devices 8] [--quick]`, which ends with one small file to send.

Every operator of ours against float64 (selftest_operators.py), what the device promises (selftest_device.py), and whole
runs (selftest_runs.py): collectives, a training that follows the CPU's, kill and resume, speed. Items run in processes
of their own: where one dies or hangs, its item has failed, and a new one goes on with the next. No torch in this one.

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
from ascendchat.doctor.selftest_case import Settings, Verdict, cleaned, end_of, too_many
from ascendchat.errors import UserError, nearest
from ascendchat.files import write_atomic
from ascendchat.version import __version__

if TYPE_CHECKING:
    from ascendchat.config.commands import SelftestConfig


# The environment of training, that of generation, and commands as a user types them.
TRAINING = (
    "versions", "norm", "rotary", "block", "attention", "documents", "log-sum-exp", "head-loss", "optimizer", "memory",
    "queue",
)  # fmt: skip
GENERATION = ("decode", "mask", "noise", "graph", "hot-path")
RUNS = ("collectives", "training", "resume", "speed")
ITEMS = (*TRAINING, *GENERATION, *RUNS)
ZH = {"held": "通过", "failed": "失败", "skipped": "跳过"}


def run(config: SelftestConfig) -> int:
    """The command; exit status 0 when everything held."""
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
    settings = Settings(logs, config.devices, config.device_type, config.quick, config.deadline)
    names = [name for name in ITEMS if name in (config.only or ITEMS)]
    verdicts: list[Verdict] = []
    keep = False
    try:
        save(out, settings, verdicts)  # before the hour, not behind it, is told that nothing can be written there
        with ended_by_signals():
            for verdict in examine(names, settings):
                verdicts.append(verdict)
                save(out, settings, verdicts)
                word = ZH[verdict.verdict] if language() == "zh" else verdict.verdict
                print(f"{word:<8} {verdict.name:<12} {verdict.seconds:>6.1f} s  {verdict.said}", flush=True)
        keep = failed = any(one.verdict == "failed" for one in verdicts)
    except (KeyboardInterrupt, SystemExit):
        keep = True
        print(f"ascendchat selftest: {out} has what was found so far; logs: {logs}", file=sys.stderr)
        raise
    finally:
        if not keep:
            shutil.rmtree(logs, ignore_errors=True)  # logs of a success, and what its runs wrote
    found = result(settings, verdicts)
    if language() == "zh":
        print(f"{summary(found)}\n请把 {out} 发给我们：其中没有主机名和用户名。" + (f"日志：{logs}" if failed else ""))
    else:
        print(f"{summary(found)}\nplease send {out}: it names no host and no user" + (f"; logs: {logs}" * failed))
    return 1 if failed else 0


def save(out: Path, settings: Settings, verdicts: Sequence[Verdict]) -> None:
    """Write the file, with the verdicts that there are by now."""
    try:
        write_atomic(out, json.dumps(result(settings, verdicts), indent=1) + "\n")
    except OSError as error:
        raise UserError(f"--out: {out} cannot be written ({error.strerror}); name another file") from None


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP (a terminal that was closed) end this process as Ctrl-C does, and with it what it has started
    in sessions of their own. A signal that is ignored (nohup) stays so."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def examine(names: Sequence[str], settings: Settings) -> Iterator[Verdict]:
    """Every item, in the order of ITEMS; the first process is always started, for what it says about the device."""
    from ascendchat.doctor import selftest_runs

    yield from in_workers([name for name in names if name in TRAINING], "training", settings)
    if not settings.about:  # no device: nothing else can be tried
        return
    settings.devices = settings.devices or settings.about["visible"]
    yield from in_workers([name for name in names if name in GENERATION], "generation", settings)
    yield from selftest_runs.examine([name for name in names if name in RUNS], settings)


def in_workers(names: Sequence[str], kind: str, settings: Settings) -> Iterator[Verdict]:
    """Items inside processes of selftest_device.py: a new one behind each item that ended its process."""
    left, number = list(names), 0
    while left or not settings.about:
        number += 1
        answers, log = settings.folder / f"{kind}-{number}.jsonl", settings.folder / f"{kind}-{number}.log"
        answers.touch()
        words = [sys.executable, "-m", "ascendchat.doctor.selftest_device", str(answers)]
        words += [settings.device_type or "", "quick" if settings.quick else "whole", str(settings.devices or 1), *left]
        environment = settings.environment
        announce(prepare_environment(settings.device_type, generates=kind == "generation", environ=environment))
        ending = end_of(words, log, settings, partial(size_of, answers), environment)
        rows = answered(answers)
        done = [Verdict(**row["verdict"]) for row in rows if "verdict" in row]
        for row in rows:
            settings.about |= row.get("about", {})
        if settings.about and too_many(settings.devices or 1, settings.about):
            there = settings.about["visible"]
            raise UserError(f"--devices {settings.devices}: {there} can be seen here; ask for at most {there}")
        yield from done
        left = left[len(done) :]
        if not settings.about:  # it found no device
            yield from (Verdict(name, "failed", ending) for name in left or ["device"])
            return
        if left and {"begun": left[0]} in rows:
            yield Verdict(left.pop(0), "failed", ending)
        elif left and not done:  # the device cannot be opened any more
            yield from (Verdict(name, "failed", ending) for name in left)
            return


def answered(answers: Path) -> list[dict[str, Any]]:
    """The rows that a process wrote; without the last one where it was killed in the middle of it."""
    lines = answers.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def size_of(path: Path) -> int:
    return path.stat().st_size


def result(settings: Settings, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """What the file holds."""
    about = {key: value for key, value in settings.about.items() if key != "visible"}
    tried = [one.name for one in verdicts]
    missing = [Verdict(name, "skipped", "not tried") for name in ITEMS if name not in tried]
    return {
        "format": 1,
        "ascendchat": __version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        **about,
        "devices": settings.devices or 0,
        "quick": settings.quick,
        "items": [
            {**asdict(one), "said": cleaned(one.said), "seconds": round(one.seconds, 1)}
            for one in (*verdicts, *missing)
        ],
    }


def named(found: dict[str, Any], verdict: str) -> list[str]:
    return [item["name"] for item in found["items"] if item["verdict"] == verdict]


def summary(found: dict[str, Any]) -> str:
    """What held, in one line."""
    failed, skipped = named(found, "failed"), named(found, "skipped")
    text = f"{len(named(found, 'held'))} of {len(found['items']) - len(skipped)} held"
    text += f"; failed: {', '.join(failed)}" if failed else ""
    return text + (f"; not tried: {', '.join(skipped)}" if skipped else "")


def read_result(path: Path) -> dict[str, Any]:
    """A file that `selftest` wrote."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        summary(found)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(
            f"{path} is not a file of `ascendchat selftest`; give the selftest.json that it wrote"
        ) from None
    return found


def table_row(found: dict[str, Any]) -> str:
    """A row of docs/en/hardware.md."""
    chip = f"{found.get('chip', '?')} × {found['devices']}" + (" (simulated)" if found.get("simulated") else "")
    software: dict[str, str] = found.get("software", {})
    below = ", ".join(f"{name} {version}" for name, version in software.items() if name != "torch_npu")
    cells = [chip, below or "-", software.get("torch_npu", "-"), found.get("torch", "-"), found.get("date", "-")]
    return "| " + " | ".join([*cells, summary(found) + (" (quick)" if found.get("quick") else "")]) + " |"
