"""Time of a few traced training steps by kind: `ascendchat base --profile 5` prints it and stores it in the run.

    profile = summarise(read_trace(path), steps=5, seconds=1.2, waited=0.1, device=True)  # train/profile.py
    print(table(profile, first=3))

Reads the Chrome trace that the profilers of torch and torch_npu write. Times are in seconds; a step's time is device
busy + exposed communication + waiting for data + host-bound (the device had no work).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ascendchat.config.language import cells, pad, translate

KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of torch's profiler for work on the device
LAUNCHES = ("cuda_runtime", "cuda_driver", "enqueue")  # host calls that launch work on the device
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
    """The result of a trace; shares are parts of the time of the traced steps, 0 to 1."""

    steps: int
    seconds: float
    operators: tuple[_Operator, ...]  # the longest first
    launches: int  # kernels launched; operators where there is no device beside the host
    on_device: bool  # the trace has times of a device
    busy: float
    communication: float  # all of it
    exposed: float  # the part that does not overlap with computation
    waiting: float  # for the next micro-batch
    host_bound: float | None  # None: the profiler gave no times of the device


def read_trace(path: Path) -> list[_Span]:
    """The operators, kernels, launches and collectives of a Chrome trace."""
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
    """Seconds in which at least one of the spans was running."""
    total, reached = 0.0, float("-inf")
    for span in sorted(spans, key=lambda s: s.begin):
        total += max(0.0, span.end - max(span.begin, reached))
        reached = max(reached, span.end)
    return total


def own_time(spans: Iterable[_Span]) -> list[_Operator]:
    """Operators by self time, without the operators that they call; the longest first."""
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
    """The profile of `steps` steps that took `seconds`, `waited` of them for data. `device`: computation runs on a
    device beside the host, so the times of host operators do not tell how busy it is."""
    by = {kind: [s for s in spans if s.kind == kind] for kind in ("operator", "kernel", "exchange", "launch")}
    on_device = bool(by["kernel"])
    work = by["kernel"] if on_device else by["operator"]
    busy, exchange = covered(work) / seconds, covered(by["exchange"]) / seconds
    either = covered([*work, *by["exchange"]]) / seconds
    launches = len(by["kernel"]) or len(by["launch"]) or len(by["operator"])
    has_times = on_device or not device
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
        host_bound=max(0.0, 1 - either - waited / seconds) if has_times else None,
    )


def advice(profile: _Profile) -> str:
    """A sentence about the largest loss of time that a setting can change, by rule."""
    if profile.waiting >= 0.1:
        return translate(
            f"{profile.waiting:.0%} of the time is spent waiting for data: put the prepared text on a local disk; in "
            "RL, give the rollouts more devices or let them run further ahead (--staleness)."
        )
    if profile.exposed >= 0.15:
        return translate(
            f"{profile.exposed:.0%} of the time is communication that nothing hides: a larger --total-batch-size "
            "exchanges less often per token; `ascendchat doctor --devices N` measures the links."
        )
    if profile.host_bound is None:
        return translate(
            "The profiler gave no times of the device (a simulated NPU has none), so only the host's side is shown."
        )
    if profile.host_bound >= 0.3:
        return translate(
            f"The device waits for the host {profile.host_bound:.0%} of the time: a larger --device-batch-size gives "
            f"each of the {profile.launches / profile.steps:,.0f} launches of a step more to do."
        )
    first = profile.operators[0].name if profile.operators else "-"
    return translate(f"Nothing stands out: the time is computing, most of it in {first}.")


def table(profile: _Profile, first: int) -> str:
    """The profile as text; `first` is the number of the first traced step, from 1."""
    last, each = first + profile.steps - 1, profile.seconds / profile.steps
    busy = translate("device busy") if profile.on_device else translate("in operators of the host")
    rows = [
        (busy, f"{profile.busy:.1%}"),
        (
            translate("host-bound"),
            translate("not known") if profile.host_bound is None else f"{profile.host_bound:.1%}",
        ),
        (translate("waiting for data"), f"{profile.waiting:.1%}"),
        (translate("communication"), f"{profile.communication:.1%}"),
        (translate("communication, not hidden"), f"{profile.exposed:.1%}"),
        (translate("launches per step"), f"{profile.launches / profile.steps:,.0f}"),
    ]
    lines = [translate(f"profile of steps {first} to {last}, rank 0: {each:.4g} s per step")]
    lines += [f"  {pad(label, 28)} {value}" for label, value in rows]
    head = translate("calls per step"), translate("ms per step"), translate("share")
    lines.append("  " + pad(translate("operator"), 48) + "".join(" " * (16 - cells(word)) + word for word in head))
    for name, calls, seconds in profile.operators[:LISTED]:
        shown = name if len(name) <= 46 else name[:45] + "~"
        share = seconds / profile.seconds
        lines.append(
            f"  {shown:<48}{calls / profile.steps:>16,.1f}{seconds / profile.steps * 1e3:>16.3f}{share:>16.1%}"
        )
    return "\n".join([*lines, advice(profile)])
