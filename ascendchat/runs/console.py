"""Progress on the console of rank 0: a live bar on a terminal, plain ASCII lines anywhere else.

    with Console(total=1000, log_every=10, telemetry=read_devices) as console:
        console.update(120, loss=2.5, tokens_per_second=9.1e5, mfu=0.43, memory=(21e9, 64e9), seconds_left=3600)

Seen in `ascendchat base`. CI and TERM=dumb get plain lines, NO_COLOR a bar without colours.
"""

from __future__ import annotations

import math
import os
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from ascendchat.chips import GIB

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live


# Controls (C0 but tab and line feed, DEL, C1) and overrides of the writing direction.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True)
class Telemetry:
    """A reading of one device by the vendor's tool; None for values that the tool does not give."""

    index: int
    utilisation: float | None = None
    "percent"
    temperature: float | None = None
    "degrees Celsius"
    memory_used: int | None = None
    "bytes"
    memory_total: int | None = None
    "bytes"


def inert(text: str) -> str:
    """Make control characters visible. Text of a model or a data set may hold any of them, and a terminal would move
    its cursor or change its clipboard. Each character is treated alone, so a stream may be cut anywhere."""

    def shown(control: re.Match[str]) -> str:
        code = ord(control.group())
        return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"

    return _CONTROL.sub(shown, text.replace("\r\n", "\n"))


def clock(seconds: float) -> str:
    """Write a duration: 3725 -> 1:02:05, with days in front if there are any."""
    minutes, second = divmod(int(seconds + 0.5), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days}d " * (days > 0) + f"{hour}:{minute:02d}:{second:02d}"


def _gib(used: float, total: float | None) -> str:
    return f"{used / GIB:.1f}/{total / GIB:.1f} GiB" if total else f"{used / GIB:.1f} GiB"


def status(step: int, total: int, fields: dict[str, Any]) -> str:
    """One line of ASCII: step, loss, tok/s, MFU, memory, time left, then any other number as `name value`."""
    fields = dict(fields)
    parts = [f"step {step}/{total}"]
    if (loss := fields.pop("loss", None)) is not None:
        parts.append(f"loss {loss:.4f}")
    if (rate := fields.pop("tokens_per_second", None)) is not None:
        parts.append(f"{rate:,.0f} tok/s")
    if (mfu := fields.pop("mfu", None)) is not None:
        parts.append(f"MFU {100 * mfu:.1f}%")
    if (memory := fields.pop("memory", None)) is not None:
        parts.append("mem " + (_gib(*memory) if isinstance(memory, tuple) else _gib(memory, None)))
    if (left := fields.pop("seconds_left", None)) is not None:
        parts.append(f"ETA {clock(left)}")
    for name, value in fields.items():
        parts.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
    return " | ".join(parts)


def devices(readings: list[Telemetry]) -> str:
    """One line for all devices: mean use, highest temperature, fullest memory; "" without any reading."""
    use = [r.utilisation for r in readings if r.utilisation is not None]
    heat = [r.temperature for r in readings if r.temperature is not None]
    memory = [(r.memory_used, r.memory_total) for r in readings if r.memory_used is not None]
    parts = []
    if use:
        parts.append(f"use {sum(use) / len(use):.0f}%" + (f" (min {min(use):.0f}%)" if len(use) > 1 else ""))
    if heat:
        parts.append(f"{max(heat):.0f} C")
    if memory:
        parts.append(_gib(*max(memory, key=lambda pair: pair[0])))
    if not parts:
        return ""
    name = f"device {readings[0].index}" if len(readings) == 1 else f"{len(readings)} devices"
    return f"{name}: " + ", ".join(parts)


def is_live(stream: TextIO) -> bool:
    """True if a bar can be drawn: on a terminal that understands cursor moves, outside of CI."""
    ci = os.environ.get("CI", "").lower() not in ("", "0", "false")
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb") and not ci


class Console:
    """Shows where training is. With `main=False` (ranks other than 0) every method does nothing."""

    def __init__(
        self,
        total: int,
        *,
        title: str = "",
        log_every: int = 1,
        telemetry: Callable[[], list[Telemetry]] | None = None,
        poll_seconds: float = 10.0,
        main: bool = True,
        stream: TextIO | None = None,
    ) -> None:
        self.total = total
        self.title = title
        self.log_every = max(1, log_every)
        self.main = main
        self.stream: TextIO = stream or sys.stdout
        self._telemetry = telemetry
        self._poll_seconds = poll_seconds
        self._step = 0
        self._fields: dict[str, Any] = {}
        self._devices = ""
        self._live: Live | None = None
        self._ended = threading.Event()
        self._writing = threading.Lock()  # the polling thread may have to say that the tool failed

    def __enter__(self) -> Console:
        if not self.main:
            return self
        if is_live(self.stream):
            self._live = self._bar()
            self._live.start()
        if self._telemetry is not None:
            # A thread, because a vendor's tool takes seconds and can hang: training must never wait for it.
            threading.Thread(target=self._poll, name="telemetry", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _bar(self) -> Live:
        from rich.console import Console as Terminal
        from rich.live import Live

        terminal = Terminal(file=self.stream, force_terminal=True)
        # transient: gone at the end. rich also redirects sys.stdout and sys.stderr, so that a print() anywhere
        # appears above the bar.
        return Live(get_renderable=self._render, console=terminal, transient=True, refresh_per_second=2)

    def _render(self) -> RenderableType:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 1))
        grid.add_column()
        grid.add_column(no_wrap=True, overflow="ellipsis")
        bar = ProgressBar(total=max(1, self.total), completed=min(self._step, self.total), width=16)
        grid.add_row(bar, Text(self._line()))
        if self._devices:
            grid.add_row("", Text(self._devices, style="dim"))
        return grid

    def _line(self) -> str:
        return f"{self.title} " * bool(self.title) + status(self._step, self.total, self._fields)

    def _poll(self) -> None:
        assert self._telemetry is not None
        while not self._ended.is_set():
            try:
                self._devices = devices(self._telemetry())
            except Exception as error:  # noqa: BLE001 (any failure of a vendor's tool; said once)
                self._devices = ""
                if not self._ended.is_set():
                    self.print(f"device readings stopped: {type(error).__name__}: {error}")
                return
            self._ended.wait(self._poll_seconds)

    def update(self, step: int, **fields: Any) -> None:
        """Show a step: loss, tokens_per_second, mfu (0 to 1), memory (bytes: used or (used, total)), seconds_left..."""
        if not self.main:
            return
        self._step, self._fields = step, fields
        if self._live is None and (step % self.log_every == 0 or step >= self.total):
            self.print(self._line() + (f" | {self._devices}" if self._devices else ""))

    def print(self, text: str) -> None:
        """Print a message, on a terminal above the bar. Control characters in it are shown, not obeyed."""
        if not self.main:
            return
        text = inert(str(text))
        encoding = getattr(self.stream, "encoding", None) or "utf-8"
        text = text.encode(encoding, "backslashreplace").decode(encoding)  # a Chinese sample on an ASCII stream
        with self._writing:
            if self._live is not None:
                self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
            else:
                try:
                    self.stream.write(text + "\n")
                    self.stream.flush()
                except OSError:  # the reader is gone (`| tee` was killed); the run continues without output
                    self.main = False

    def close(self) -> None:
        """Remove the bar and print its last line. Closing twice does nothing."""
        self._ended.set()
        if self._live is not None:
            self._live.stop()
            self._live = None
            if self._fields:
                self.print(self._line())


# Throughput, MFU, time left and smoothing: the one place where they are computed, shown by every stage and `bench`.


@dataclass(frozen=True)
class _Speed:
    """Throughput of a stretch of training."""

    tokens_per_second: float
    "over all devices"
    mfu: float | None
    "model FLOPs over the peak of all devices, 0 to 1; None if the peak is unknown"


def speed(
    tokens: float, seconds: float, flops_per_token: float = 0.0, peak_flops: float | None = None, devices: int = 1
) -> _Speed:
    """Throughput of `tokens` on all devices together in `seconds`; `peak_flops` of one device at the dtype in use.

    A stretch too short for the clock (0 s) has speed 0 rather than infinity.
    """
    if tokens < 0 or seconds < 0 or devices < 1:
        raise ValueError(f"speed of {tokens} tokens in {seconds} s on {devices} devices")
    rate = tokens / seconds if seconds > 0 else 0.0
    return _Speed(rate, rate * flops_per_token / (peak_flops * devices) if peak_flops else None)


def eta(done: float, total: float, seconds: float) -> float | None:
    """Seconds left when `done` of `total` took `seconds`; None before anything is done.

    After a resume, count from there: done and total without the steps of earlier sessions.
    """
    if done <= 0:
        return None
    return max(0.0, (total - done) * seconds / done)


class Smooth:
    """Exponential average without the bias of a zero start: the first value is returned as it is.

    NaN and infinities are returned unchanged, so that they are seen, and do not enter the average.
    """

    def __init__(self, beta: float = 0.9) -> None:
        self.beta = beta
        self._sum = 0.0
        self._weight = 0.0

    def add(self, value: float) -> float:
        if not math.isfinite(value):
            return value
        self._sum = self.beta * self._sum + (1 - self.beta) * value
        self._weight = self.beta * self._weight + (1 - self.beta)
        return self._sum / self._weight
