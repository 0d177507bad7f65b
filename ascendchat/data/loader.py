"""Prefetching for every training command, e.g. `ascendchat base`: batches are ready before the loop asks for them."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ascendchat.data.mixture import Batch, MixtureLoader


@dataclass(frozen=True)
class MicroBatch:
    """Input of one forward pass, on the device."""

    inputs: torch.Tensor  # (B, T) int64
    targets: torch.Tensor  # (B, T) int64, IGNORE where there is nothing to learn
    lengths: NDArray[np.int32]  # tokens of each segment, row after row, on the host
    step_targets: int  # targets that are not IGNORE, in the whole step, over all ranks: the divisor of its loss


_HostBatch = tuple[NDArray[np.int64], NDArray[np.int32], int]  # inputs and targets (2, B, T): one copy to the device


def _cut(batch: Batch, rows: int, step_targets: int) -> list[_HostBatch]:
    """Cut a rank's slice of the global batch into micro-batches of so many rows."""
    count, seq_len = batch.inputs.shape
    ends = np.cumsum(batch.lengths)  # tokens up to the end of each segment
    cut = []
    for first in range(0, count, rows):
        part = slice(first, min(first + rows, count))
        begin, end = np.searchsorted(ends, (part.start * seq_len, part.stop * seq_len), side="right")
        cut.append((np.stack([batch.inputs[part], batch.targets[part]]), batch.lengths[begin:end], step_targets))
    return cut


class Prefetcher:
    """Gathers the batches of coming steps in a thread; `take(step)` uploads and returns one step's micro-batches.

    The thread touches no device: pinning or copying from a second thread would break a graph that is being captured.
    """

    def __init__(
        self,
        batches: MixtureLoader,
        device: torch.device,
        *,
        rows: tuple[int, int],
        micro_batch: int,
        pin: bool = False,
        depth: int = 3,
    ) -> None:
        """rows: this rank's slice of the global batch; micro_batch: rows per forward pass (the last may have fewer)."""
        self.batches, self.device, self.rows, self.micro_batch = batches, device, rows, micro_batch
        self.pin, self.depth = pin, depth
        self._next = -1  # the step that the queue yields next; -1: no thread yet
        self._queue: queue.Queue[list[_HostBatch] | BaseException] = queue.Queue()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self, step: int) -> list[MicroBatch]:
        """Return the micro-batches of a step. Steps in order are ready at once; any other step restarts the thread
        there."""
        if step != self._next:
            self._start(step)
        batches = self._queue.get()
        if isinstance(batches, BaseException):
            self.close()
            raise batches
        self._next = step + 1
        return [self._upload(joined) for joined in batches]

    def _start(self, step: int) -> None:
        self.close()
        self._next, self._stop, self._queue = step, threading.Event(), queue.Queue(maxsize=self.depth)
        self._thread = threading.Thread(
            target=self._run, args=(step, self._queue, self._stop), name="prefetch", daemon=True
        )
        self._thread.start()

    def _run(self, step: int, out: queue.Queue[list[_HostBatch] | BaseException], stop: threading.Event) -> None:
        batches: list[_HostBatch] | BaseException
        start, end = self.rows
        while not stop.is_set():
            try:
                batches = _cut(self.batches.batch(step, start, end), self.micro_batch, self.batches.targets(step))
            except BaseException as error:  # noqa: BLE001 (raised again by take, in the caller's thread)
                batches = error
            while not stop.is_set():  # a full queue must not keep `close` waiting
                try:
                    out.put(batches, timeout=0.1)
                    break
                except queue.Full:
                    continue
            if isinstance(batches, BaseException):
                return
            step += 1

    def _upload(self, joined: _HostBatch) -> MicroBatch:
        both = torch.from_numpy(joined[0])
        if self.pin:
            both = both.pin_memory()
        both = both.to(self.device, non_blocking=self.pin)
        return MicroBatch(both[0], both[1], joined[1], joined[2])

    def close(self) -> None:
        """Stop the thread and wait for it."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._thread, self._next = None, -1

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
