"""`--profile N` of every training command: N steps under the profiler, a table of where their time goes.

    profiler = Profiler(5, device, run.folder / "profile", first=0, last=100, say=print)     # train/loop.py
    profiler.before(step); ...; profiler.after(step, ends=False)

The trace, the table and its numbers go to profile/step_000004 in the run folder; rank 0 only.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ascendchat.config.language import translate
from ascendchat.device import Device
from ascendchat.files import write_atomic
from ascendchat.runs.trace import advice, read_trace, summarise, table

WARM_UP = 3  # steps before the trace: the first ones allocate and compile


class Profiler:
    """Traces `steps` steps, from the fourth on if the run is long enough; it ends early before anything that is not
    training (a validation, a checkpoint)."""

    def __init__(
        self, steps: int, device: Device, folder: Path, *, first: int, last: int, say: Callable[[str], None]
    ) -> None:
        self.steps, self.device, self.folder, self.say = steps, device, folder, say
        self.begin = max(first, min(first + WARM_UP, last - steps))
        self._stop: Callable[[], Path] | None = None
        self._since = self._waited = 0.0

    @property
    def place(self) -> Path:
        return self.folder / f"step_{self.begin + 1:06d}"

    def before(self, step: int) -> None:
        """Start the trace before its first step."""
        if step == self.begin:
            try:
                self.place.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                return self._lost(error)
            self.device.synchronize()
            self._stop = self.device.trace(self.place)
            self._since, self._waited = time.perf_counter(), 0.0

    def feed(self, micro_batches: Callable[[int], Iterable[Any]], step: int) -> Iterator[Any]:
        """Yield the micro-batches of a step and add up the time to get them."""
        since = time.perf_counter()
        for batch in micro_batches(step):
            self._waited += time.perf_counter() - since
            yield batch
            since = time.perf_counter()
        self._waited += time.perf_counter() - since

    def after(self, step: int, ends: bool) -> None:
        """Stop and report when the last step is done; `ends`: something else than training comes next."""
        done = step + 1 - self.begin
        if self._stop is None or (done < self.steps and not ends):
            return
        self.device.synchronize()
        seconds, stop, self._stop = time.perf_counter() - self._since, self._stop, None
        try:
            self._report(stop(), done, seconds)
        except OSError as error:
            self._lost(error)

    def _lost(self, error: OSError) -> None:
        self.say(f"the profile could not be written to {self.place} ({error.strerror}); training goes on")

    def _report(self, trace: Path, done: int, seconds: float) -> None:
        beside = self.device.type != "cpu"
        summary = summarise(read_trace(trace), steps=done, seconds=seconds, waited=self._waited, device=beside)
        text = table(summary, self.begin + 1)
        record = dataclasses.asdict(summary) | {"first_step": self.begin + 1, "advice": advice(summary)}
        record["operators"] = [operator._asdict() for operator in summary.operators]
        write_atomic(self.place / "profile.json", json.dumps(record, indent=1, ensure_ascii=False))
        write_atomic(self.place / "profile.txt", text + "\n")
        self.say(text)
        self.say(translate(f"the trace is {trace}; open it in Perfetto or chrome://tracing"))
