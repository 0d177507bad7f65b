"""What the processes of a command did on the simulated NPUs: a file for chrome://tracing or Perfetto, and a table.

    cannsim trace -o trace.json -- torchrun --nproc-per-node 2 train.py

All processes append to one file of JSON lines (src/runtime/trace.cpp says what is in a line). Counts, bytes and memory
are exact; times are those of this CPU and say nothing about an NPU.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cannsim

Line = dict[str, Any]


@dataclass
class Process:
    """What one process launched, moved and held."""

    pid: int
    rank: int  # -1: it has none
    launches: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    aicpu: Counter[str] = field(default_factory=Counter)
    memory: dict[int, list[tuple[float, int]]] = field(default_factory=dict)  # device -> (seconds, bytes)

    @property
    def name(self) -> str:
        return f"rank {self.rank} (pid {self.pid})" if self.rank >= 0 else f"pid {self.pid}"

    def add(self, line: Line) -> None:
        name, event = line["name"], line.get("event")
        if event is None:
            self.launches[name] += cannsim.is_launch(name)
        elif event == "bytes":
            self.bytes[name] += line["value"]
        elif event == "calls" and name.startswith("aicpu/"):
            self.aicpu[name.removeprefix("aicpu/")] += line["value"]
        elif event == "memory":
            self.memory.setdefault(line["device"], []).append((line["seconds"], line["value"]))


def read(path: Path) -> list[Line]:
    """The lines of a trace in the order of time. A line that was cut short (a full disk) is left out."""
    found: list[Line] = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return sorted(found, key=lambda line: line["seconds"])


def processes(lines: list[Line]) -> list[Process]:
    """The processes of a trace, by rank, then by start."""
    found: dict[int, Process] = {}
    for line in lines:
        found.setdefault(line["pid"], Process(line["pid"], line["rank"])).add(line)
    return sorted(found.values(), key=lambda process: process.rank)


def chrome(lines: list[Line]) -> Iterator[Line]:
    """The events of the Trace Event Format: a row per thread and per stream, a curve of memory per device."""
    start = min((line["begin" if "begin" in line else "seconds"] for line in lines), default=0.0)
    rows: set[tuple[int, int]] = set()
    last: dict[tuple[int, int], Line] = {}  # the arguments of each thread's last call, to which later lines add
    for process in processes(lines):
        yield {"ph": "M", "name": "process_name", "pid": process.pid, "args": {"name": process.name}}
    for line in lines:
        pid, name, event = line["pid"], line["name"], line.get("event")
        if event == "memory":
            curve = f"memory of NPU {line['device']}"
            args = {"bytes": line["value"]}
            yield {"ph": "C", "name": curve, "pid": pid, "ts": _micro(line["seconds"] - start), "args": args}
        elif event == "task":
            row = 1000 * (line["device"] + 1) + line["stream"]  # below the ids of threads
            if (pid, row) not in rows:
                rows.add((pid, row))
                args = {"name": f"NPU {line['device']} stream {line['stream']}"}
                yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": row, "args": args}
            lasts = _micro(line["seconds"] - line["begin"])
            kind = "collective" if name.startswith("Hccl") else "task"
            begin = _micro(line["begin"] - start)
            yield {"ph": "X", "cat": kind, "name": name, "pid": pid, "tid": row, "ts": begin, "dur": lasts}
        elif event is None:
            args = {"device": line["device"], "call": line["call"]}
            last[pid, line["thread"]] = args
            at = {"pid": pid, "tid": line["thread"], "ts": _micro(line["seconds"] - start)}
            yield {"ph": "i", "s": "t", "cat": "call", "name": name, **at, "args": args}
        elif (pid, line["thread"]) in last:
            what = "bytes" if event == "bytes" else name.split("/")[0]
            last[pid, line["thread"]][what] = last[pid, line["thread"]].get(what, 0) + line["value"]


def _micro(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def size(count: float) -> str:
    """123456 -> 120.6 KiB."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def aligned(rows: list[list[str]]) -> list[str]:
    """The rows as lines; the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    padded = [
        [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))] for row in rows
    ]
    return ["  ".join(row).rstrip() for row in padded]


def over_time(samples: list[tuple[float, int]], start: float, end: float, columns: int = 8) -> list[str]:
    """The most memory held in each of equal parts of the time between start and end."""
    held, at, shown = 0, 0, []
    for column in range(1, columns + 1):
        until = start + (end - start) * column / columns
        most = held
        while at < len(samples) and (samples[at][0] <= until or column == columns):
            held = samples[at][1]
            most = max(most, held)
            at += 1
        shown.append(size(most))
    return shown


def table(lines: list[Line]) -> str:
    """Launches, bytes, AICPU operators, collectives per rank and memory over time."""
    found = [process for process in processes(lines) if process.launches.total() or process.memory]
    launches, moved, aicpu = Counter[str](), Counter[str](), Counter[str]()
    for process in found:
        launches += process.launches
        moved += process.bytes
        aicpu += process.aicpu
    text = [f"cannsim: {launches.total()} launches in {len(found)} process(es), {aicpu.total()} of them on the AICPU"]
    operators = [(name, count) for name, count in launches.most_common() if not name.startswith("Hccl")]
    if operators:
        rows = [[name, str(count), size(moved[name]), str(aicpu[name] or "")] for name, count in operators]
        text += ["", *aligned([["operator", "launches", "bytes", "on the AICPU"], *rows])]
    collectives = [name for name in launches if name.startswith("Hccl")]
    if collectives:
        cells = [[f"{p.launches[name]} x, {size(p.bytes[name])}" for p in found] for name in collectives]
        rows = [[name, *cell] for name, cell in zip(collectives, cells)]
        text += ["", *aligned([["collective", *(process.name for process in found)], *rows])]
    held = [(process, device, process.memory[device]) for process in found for device in sorted(process.memory)]
    if held:
        start, end = lines[0]["seconds"], lines[-1]["seconds"]
        rows = [
            [f"{process.name} NPU {device}", size(max(count for _, count in samples)), *over_time(samples, start, end)]
            for process, device, samples in held
        ]
        parts = [f"{100 * (i + 1) // 8} %" for i in range(8)]
        text += ["", *aligned([["memory, until % of the time", "peak", *parts], *rows])]
    return "\n".join(text)


def report(path: Path, output: Path) -> str:
    """Write the Chrome trace of the lines in `path` to `output`; returns the table."""
    lines = read(path)
    events = ",\n".join([json.dumps(event) for event in [*chrome(lines)]])  # complete when the last line was read
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text('{"displayTimeUnit": "ms", "traceEvents": [\n' + events + "\n]}\n")
    return (
        f"{table(lines)}\ncannsim: the trace is in {output}; open it with https://ui.perfetto.dev or chrome://tracing"
    )
