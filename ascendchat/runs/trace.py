"""What the trace of a few training steps says: `ascendchat base --profile 5` prints it and keeps it in the run folder.

    found = summarise(read_trace(path), steps=5, seconds=1.2, waited=0.1)      # train/profile.py
    print(table(found, first=3))

Reads the Chrome trace that the profilers of torch and torch_npu write. Times in seconds; a step's time is shared out as
device busy + communication that nothing hides + waiting for data + host-bound (nothing was given to the device).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ascendchat.config.language import cells, pad, translate

KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of torch's profiler for work of the device
LAUNCHES = ("cuda_runtime", "cuda_driver", "enqueue")  # calls of the host that give the device work
EXCHANGE = re.compile(r"nccl|hccl|^hcom_|^gloo:|^c10d::", re.I)
IDLE = re.compile(r"WAIT|EVENT_RECORD", re.I)  # tasks of a stream that compute nothing
LISTED = 10  # operators in the table


class _Span(NamedTuple):
    """One event of a trace, in seconds on the trace's clock."""

    name: str
    kind: Literal["operator", "kernel", "exchange", "launch"]
    begin: float
    end: float
    thread: tuple[Any, Any]


class _Operator(NamedTuple):
    """One line of the table: seconds and calls of all traced steps together."""

    name: str
    calls: int
    seconds: float


@dataclass(frozen=True)
class _Profile:
    """Shares are of the traced steps' time, 0 to 1."""

    steps: int
    seconds: float
    operators: tuple[_Operator, ...]  # the longest first
    launches: int  # kernels given to the device; operators where there is no device beside the host
    on_device: bool  # whether the trace has times of a device
    busy: float
    communication: float  # all of it
    exposed: float  # the part that no computation hides
    waiting: float  # for the next micro-batch
    host_bound: float | None  # None: the profiler gave no times of the device


def read_trace(path: Path) -> list[_Span]:
    """The events of a Chrome trace that say where time goes."""
    stored = json.loads(path.read_text(encoding="utf-8"))
    events: list[dict[str, Any]] = stored["traceEvents"] if isinstance(stored, dict) else stored
    hardware = {e["pid"] for e in events if e.get("ph") == "M" and e.get("args", {}).get("name") == "Ascend Hardware"}
    return [span for event in events if event.get("ph") == "X" and (span := _span(event, hardware))]


def _span(event: Mapping[str, Any], hardware: set[Any]) -> _Span | None:
    name, category = str(event.get("name")), event.get("cat")
    kernel = category in KERNELS or (event.get("pid") in hardware and not IDLE.search(name))
    if EXCHANGE.search(name) and (kernel or category in ("cpu_op", None)):
        kind: Literal["operator", "kernel", "exchange", "launch"] = "exchange"
    elif kernel:
        kind = "kernel"
    elif category == "cpu_op":
        kind = "operator"
    elif category == "enqueue" or (category in LAUNCHES and "Launch" in name):
        kind = "launch"
    else:
        return None
    begin = float(event["ts"]) / 1e6  # microseconds; torch_npu writes them as text
    return _Span(name, kind, begin, begin + float(event["dur"]) / 1e6, (event.get("pid"), event.get("tid")))


def covered(spans: Iterable[_Span]) -> float:
    """Seconds in which at least one of the spans was under way."""
    total, reached = 0.0, float("-inf")
    for span in sorted(spans, key=lambda s: s.begin):
        total += max(0.0, span.end - max(span.begin, reached))
        reached = max(reached, span.end)
    return total


def own_time(spans: Iterable[_Span]) -> list[_Operator]:
    """Operators by the time that they did not spend in operators which they called; the longest first."""
    seconds: dict[str, float] = {}
    calls: dict[str, int] = {}
    open_calls: dict[tuple[Any, Any], list[_Span]] = {}
    for span in sorted(spans, key=lambda s: (s.begin, -s.end)):
        stack = open_calls.setdefault(span.thread, [])
        while stack and stack[-1].end <= span.begin:
            stack.pop()
        if stack:
            seconds[stack[-1].name] -= min(span.end, stack[-1].end) - span.begin
        seconds[span.name] = seconds.get(span.name, 0.0) + span.end - span.begin
        calls[span.name] = calls.get(span.name, 0) + 1
        stack.append(span)
    return sorted((_Operator(name, calls[name], took) for name, took in seconds.items()), key=lambda o: -o.seconds)


def summarise(spans: Sequence[_Span], *, steps: int, seconds: float, waited: float, device: bool) -> _Profile:
    """The profile of `steps` steps that took `seconds`, `waited` of them for data. `device`: there is one beside the
    host, so that host operators say nothing of how busy it is."""
    by = {kind: [s for s in spans if s.kind == kind] for kind in ("operator", "kernel", "exchange", "launch")}
    on_device = bool(by["kernel"])
    work = by["kernel"] if on_device else by["operator"]
    busy, exchange = covered(work) / seconds, covered(by["exchange"]) / seconds
    either = covered([*work, *by["exchange"]]) / seconds
    launches = len(by["kernel"]) or len(by["launch"]) or len(by["operator"])
    known = on_device or not device
    return _Profile(
        steps=steps,
        seconds=seconds,
        operators=tuple(own_time([*work, *by["exchange"]] if on_device else [*by["operator"], *by["exchange"]])),
        launches=launches,
        on_device=on_device,
        busy=min(1.0, busy),
        communication=min(1.0, exchange),
        exposed=max(0.0, either - busy),
        waiting=min(1.0, waited / seconds),
        host_bound=max(0.0, 1 - either - waited / seconds) if known else None,
    )


def advice(found: _Profile) -> str:
    """What to try first, by rule: the largest loss of time that a setting can change."""
    if found.waiting >= 0.1:
        return translate(
            f"{found.waiting:.0%} of the time is spent waiting for data: put the prepared text on a local disk; in RL, "
            "give the rollouts more devices or let them run further ahead (--staleness)."
        )
    if found.exposed >= 0.15:
        return translate(
            f"{found.exposed:.0%} of the time is communication that nothing hides: a larger --total-batch-size "
            "exchanges less often per token; `ascendchat doctor --devices N` measures the links."
        )
    if found.host_bound is None:
        return translate(
            "The profiler gave no times of the device (a simulated NPU has none), so only the host's side is shown."
        )
    if found.host_bound >= 0.3:
        return translate(
            f"The device waits for the host {found.host_bound:.0%} of the time: a larger --device-batch-size gives "
            f"each of the {found.launches / found.steps:,.0f} launches of a step more to do."
        )
    first = found.operators[0].name if found.operators else "-"
    return translate(f"Nothing stands out: the time is computing, most of it in {first}.")


def table(found: _Profile, first: int) -> str:
    """The profile for people; `first` is the number of the first traced step, from 1."""
    last, each = first + found.steps - 1, found.seconds / found.steps
    busy = translate("device busy") if found.on_device else translate("in operators of the host")
    rows = [
        (busy, f"{found.busy:.1%}"),
        (translate("host-bound"), translate("not known") if found.host_bound is None else f"{found.host_bound:.1%}"),
        (translate("waiting for data"), f"{found.waiting:.1%}"),
        (translate("communication"), f"{found.communication:.1%}"),
        (translate("communication, not hidden"), f"{found.exposed:.1%}"),
        (translate("launches per step"), f"{found.launches / found.steps:,.0f}"),
    ]
    lines = [translate(f"profile of steps {first} to {last}, rank 0: {each:.4g} s per step")]
    lines += [f"  {pad(label, 28)} {value}" for label, value in rows]
    head = translate("calls per step"), translate("ms per step"), translate("share")
    lines.append("  " + pad(translate("operator"), 48) + "".join(" " * (16 - cells(word)) + word for word in head))
    for name, calls, seconds in found.operators[:LISTED]:
        shown = name if len(name) <= 46 else name[:45] + "~"
        share = seconds / found.seconds
        lines.append(f"  {shown:<48}{calls / found.steps:>16,.1f}{seconds / found.steps * 1e3:>16.3f}{share:>16.1%}")
    return "\n".join([*lines, advice(found)])
