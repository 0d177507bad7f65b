"""Progress of a recipe: a live view on a terminal, plain lines anywhere else.

    view = ProgressView("tiny", ["doctor", "base", ...], log, [None, 120.0, ...])    # estimated seconds of each stage
    with view: view.begin(1, "ascendchat base ..."); view.take(line); view.end(1, "done", 118.0)

The view has every stage with its state and time, the numbers of the current one (its last line of progress), the
remaining time of it and of all, and the last lines that it printed. All lines go to the log. On anything but a
terminal each stage prints for itself, and this prints a line for each. No torch.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ascendchat.config.train import STAGES
from ascendchat.eval.stages import stage_table, table_lines
from ascendchat.runs.console import clock, inert, is_live
from ascendchat.runs.run import read_metrics, run_folder

if TYPE_CHECKING:
    from rich.console import Group
    from rich.live import Live


PROGRESS = re.compile(r"step (\d+)/(\d+) \|.*")  # a line of runs/console.py
LEFT = re.compile(r"ETA (?:(\d+)d )?(\d+):(\d\d):(\d\d)")
MAX_TAIL_LINES = 6  # of output in the view
MAX_FAILURE_LINES = 40  # of output that stay on the terminal after a failure
MARKS = {"waits": " ", "runs": ">", "done": "✓", "skipped": "·", "left out": "-", "failed": "✗"}


def seconds_left(line: str) -> float | None:
    """Remaining seconds in a line of progress; None if it names none."""
    match = LEFT.search(line)
    if not match:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


class ProgressView:
    """The stages of a recipe while they run. Not `live`: the methods only record."""

    def __init__(self, run: str, names: list[str], log: Path, expected: list[float | None]) -> None:
        self.run, self.names, self.log, self.expected = run, names, log, expected
        self.live = is_live(sys.stdout)
        self.states = ["waits"] * len(names)
        self.took: list[float | None] = [None] * len(names)
        self.current = -1
        self.numbers = ""  # the last line of progress
        self.tail: deque[str] = deque(maxlen=MAX_FAILURE_LINES)
        self._begun = time.monotonic()
        self._stage_begun = self._begun
        self._lock = threading.Lock()
        self._live: Live | None = None
        self._file: IO[str] | None = None

    def __enter__(self) -> ProgressView:
        if self.live:
            from rich.console import Console as Terminal
            from rich.live import Live

            self.log.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.log, "a", encoding="utf-8", errors="backslashreplace")
            terminal = Terminal(file=sys.stdout, force_terminal=True)
            self._live = Live(get_renderable=self._render, console=terminal, transient=True, refresh_per_second=2)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
            for number, name in enumerate(self.names):
                print(self._row(number, name))
            if "failed" in self.states:
                print("\n".join([*self.tail, f"everything that was printed: {self.log}"]))
        if self._file is not None:
            self._file.close()

    def say(self, text: str) -> None:
        """Print a line of our own."""
        if self.live:
            self.take(text)
        else:
            print(text, flush=True)

    def begin(self, number: int, heading: str) -> None:
        """Record that a stage starts."""
        self.current, self.numbers, self._stage_begun = number, "", time.monotonic()
        self.states[number] = "runs"
        self.tail.clear()
        self.say(heading)

    def end(self, number: int, state: str, seconds: float | None = None) -> None:
        """Record that a stage is done, skipped, left out or has failed."""
        self.states[number], self.took[number] = state, seconds
        self.current = -1

    def take(self, line: str) -> None:
        """Record a line that the current stage printed."""
        line = inert(line.rstrip("\n"))
        with self._lock:
            if self._file is not None:
                self._file.write(line + "\n")
                self._file.flush()
            if match := PROGRESS.search(line):
                self.numbers = match[0]
            else:
                self.tail.append(line)

    def remaining(self) -> tuple[float | None, float, bool]:
        """(seconds of the current stage, of all remaining ones, True if every one of those is known)."""
        current = seconds_left(self.numbers)
        if current is None and self.current >= 0 and (estimated := self.expected[self.current]) is not None:
            current = max(0.0, estimated - (time.monotonic() - self._stage_begun))
        waiting = [self.expected[n] for n, state in enumerate(self.states) if state == "waits"]
        known = current is not None and None not in waiting
        return current, (current or 0.0) + sum(seconds or 0.0 for seconds in waiting), known

    def _row(self, number: int, name: str) -> str:
        state, took, estimated = self.states[number], self.took[number], self.expected[number]
        shown = clock(took) if took is not None else f"about {clock(estimated)}" if estimated else ""
        if state == "runs":
            shown = clock(time.monotonic() - self._stage_begun)
        return f" {MARKS[state]} {number + 1:>2} {name:<18} {state:<9} {shown}".rstrip()

    def _render(self) -> Group:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        current, all_of_them, known = self.remaining()
        ended = sum(state not in ("waits", "runs") for state in self.states)
        title = f"{self.run}: stage {min(ended + 1, len(self.names))} of {len(self.names)}"
        title += f", {clock(time.monotonic() - self._begun)} so far"
        if all_of_them:
            title += f", {'about' if known else 'at least'} {clock(all_of_them)} to go"
        parts: list[Text | Table] = [Text(title, style="bold")]
        for number, name in enumerate(self.names):
            style = {"runs": "bold", "waits": "dim", "failed": "red"}.get(self.states[number], "")
            parts.append(Text(self._row(number, name), style=style, no_wrap=True, overflow="ellipsis"))
        if match := PROGRESS.match(self.numbers):
            grid = Table.grid(padding=(0, 1))
            grid.add_column()
            grid.add_column(no_wrap=True, overflow="ellipsis")
            bar = ProgressBar(total=max(1, int(match[2])), completed=int(match[1]), width=16)
            grid.add_row(bar, Text(self.numbers))
            parts.append(grid)
        elif current is not None:
            parts.append(Text(f"ETA {clock(current)}"))
        with self._lock:
            lines = list(self.tail)[-MAX_TAIL_LINES:]
        parts += [Text(line, style="dim", no_wrap=True, overflow="ellipsis") for line in lines]
        return Group(*parts)


# The results of the stages of a run in one table: the end of `ascendchat speedrun`. No torch.

REWARD_OF = "reward_of_"  # before the name of a task, in metrics of RL


def summary(run: str) -> str:
    """Format one line per trained stage: steps, last loss, last validation; of RL, whose loss means little, the
    reward. Then the evaluation scores of each stage."""
    lines = [f"{'stage':<8} {'steps':>7} {'train loss':>11}  validation"]
    for stage in STAGES:
        path = run_folder(run, stage) / "metrics.jsonl"
        if not path.is_file():
            continue
        rows = read_metrics(path)
        losses = [row["loss"] for row in rows if "loss" in row]
        rewards = [row["reward"] for row in rows if "reward" in row]
        scores = [{k: v for k, v in row.items() if k.startswith(("bpb", "val", "accuracy"))} for row in rows]
        last: dict[str, Any] = next((score for score in reversed(scores) if score), {})
        shown = [f"{name} {value:.4f}" for name, value in last.items()]
        if rewards:
            shown.insert(0, f"reward {rise(rewards)}{by_task(rows)}")
        loss = "-" if rewards else f"{mean(losses[-20:]):.4f}"
        lines.append(f"{stage:<8} {rows[-1]['step'] if rows else 0:>7} {loss:>11}  {', '.join(shown)}")
    evaluations = stage_table(run)
    return "\n".join([*lines, *(["", *table_lines(evaluations)] if evaluations else [])])


def by_task(rows: Sequence[dict[str, Any]]) -> str:
    """Format the rise of the reward of each task, in brackets; "" where RL had one only."""
    names = dict.fromkeys(name for row in rows for name in row if name.startswith(REWARD_OF))
    shown = [f"{name.removeprefix(REWARD_OF)} {rise([row[name] for row in rows if name in row])}" for name in names]
    return f" ({', '.join(shown)})" if shown else ""


def rise(values: Sequence[float]) -> str:
    """Format the mean of the first ten steps and of the last ten."""
    return f"{mean(values[:10]):.4f} -> {mean(values[-10:]):.4f}"


def mean(values: Sequence[float]) -> float:
    """Mean; nan without any value."""
    return sum(values) / len(values) if values else float("nan")
