"""Show the devices live: `ascendchat doctor --watch`. A table on a terminal, plain lines into a file or a pipe.

On a machine without devices it shows the CPU and its memory, which is what a run on CPU uses.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ascendchat.chips import cpu_count
from ascendchat.device import smi
from ascendchat.doctor.checks_system import memory_bytes
from ascendchat.doctor.machine import gib
from ascendchat.errors import UserError

if TYPE_CHECKING:
    from rich.console import RenderableType

HEAD = {
    "en": ("device", "use", "memory", "temperature", "power", "health", "processes"),
    "zh": ("设备", "利用率", "内存", "温度", "功耗", "状态", "进程"),
}


@dataclass
class CpuUsage:
    """Remembers the last count of busy and idle ticks: load is the difference between two readings."""

    busy: int = 0
    total: int = 0

    def use(self, stat: Path = Path("/proc/stat")) -> float:
        """Percent of the CPU in use since the last call."""
        try:
            ticks = [int(word) for word in stat.read_text().splitlines()[0].split()[1:9]]
        except (OSError, ValueError, IndexError):  # macOS: the load average is the nearest there is
            return min(100.0, 100.0 * os.getloadavg()[0] / cpu_count())
        total, busy = sum(ticks), sum(ticks) - ticks[3] - ticks[4]  # 3 idle, 4 waiting for input or output
        spent = total - self.total
        percent = 100.0 * (busy - self.busy) / spent if spent > 0 else 0.0
        self.busy, self.total = busy, total
        return percent


def device_rows(readings: smi.Readings | smi.Problem, cpu: CpuUsage) -> list[tuple[str, ...]]:
    """One row of text per device; the CPU where there is none."""
    if isinstance(readings, smi.Problem):
        available, total = memory_bytes(Path("/"))
        load = f"{os.getloadavg()[0]:.1f}"
        name = f"cpu ({cpu_count()} cores, load {load})"
        return [(name, f"{cpu.use():.0f}%", f"{gib(total - available)} / {gib(total)}", "", "", "", "")]
    content: list[tuple[str, ...]] = []
    for device in readings.devices:
        running = [p for p in readings.processes if p.device == device.index]
        processes = ", ".join(f"{p.name or '?'}:{p.pid}" + (f" {gib(p.memory)}" if p.memory else "") for p in running)
        used = "" if device.memory_used is None else gib(device.memory_used)
        total_memory = "" if device.memory_total is None else gib(device.memory_total)
        content.append(
            (
                f"{device.index} {device.name}",
                "" if device.utilisation is None else f"{device.utilisation:.0f}%",
                f"{used} / {total_memory}" if total_memory else "",
                "" if device.temperature is None else f"{device.temperature:.0f} °C",
                "" if device.power is None else f"{device.power:.0f} W",
                device.health,
                processes,
            )
        )
    return content


def device_table(content: list[tuple[str, ...]], problem: str, lang: str) -> RenderableType:
    """Build the table of one moment, for a terminal."""
    from rich.table import Table
    from rich.text import Text

    view = Table(box=None, pad_edge=False, caption=problem or None)
    for title in HEAD[lang]:
        view.add_column(title, overflow="fold")
    for row in content:
        sick = row[5] not in ("", "OK")
        view.add_row(*(Text(cell, style="red" if sick else "") for cell in row))
    return view


def watch_devices(interval: float, lang: str, rounds: int | None = None) -> int:
    """Show the devices every `interval` seconds until Ctrl-C, or `rounds` times."""
    if interval <= 0:
        raise UserError(f"--interval {interval}: give a number of seconds above 0, for example --interval 2")
    cpu = CpuUsage()
    cpu.use()
    try:
        if sys.stdout.isatty():
            _live(interval, lang, rounds, cpu)
        else:
            _lines(interval, rounds, cpu)
    except KeyboardInterrupt:
        pass  # Ctrl-C is how a user ends this view
    return 0


def _look(cpu: CpuUsage) -> tuple[list[tuple[str, ...]], str]:
    readings = smi.read()
    problem = readings.text if isinstance(readings, smi.Problem) and not readings.missing else ""
    return device_rows(readings, cpu), problem


def _live(interval: float, lang: str, rounds: int | None, cpu: CpuUsage) -> None:
    from rich.live import Live

    time.sleep(min(interval, 0.2))  # a load needs two readings
    done = 0
    with Live(device_table(*_look(cpu), lang), auto_refresh=False, screen=False) as live:
        while rounds is None or done < rounds:
            live.update(device_table(*_look(cpu), lang), refresh=True)
            done += 1
            time.sleep(interval)


def _lines(interval: float, rounds: int | None, cpu: CpuUsage) -> None:
    done = 0
    while rounds is None or done < rounds:
        time.sleep(interval if done else min(interval, 0.2))
        content, problem = _look(cpu)
        stamp = time.strftime("%H:%M:%S")
        for row in content:
            print(stamp, "  ".join(cell for cell in row if cell), flush=True)
        if problem:
            print(stamp, problem, flush=True)
        done += 1
