"""Throughput, MFU, time left and smoothing: the one place where they are computed, shown by every stage and `bench`."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Speed:
    """How fast a stretch of training went."""

    tokens_per_second: float
    "over all devices"
    mfu: float | None
    "model FLOPs over the peak of all devices, 0 to 1; None when the peak is not known"


def speed(
    tokens: float, seconds: float, flops_per_token: float = 0.0, peak_flops: float | None = None, devices: int = 1
) -> Speed:
    """`tokens` of all devices together, done in `seconds`; `peak_flops` of one device at the dtype in use.

    A stretch too short for the clock (0 s) has speed 0 rather than infinity.
    """
    if tokens < 0 or seconds < 0 or devices < 1:
        raise ValueError(f"speed of {tokens} tokens in {seconds} s on {devices} devices")
    rate = tokens / seconds if seconds > 0 else 0.0
    return Speed(rate, rate * flops_per_token / (peak_flops * devices) if peak_flops else None)


def eta(done: float, total: float, seconds: float) -> float | None:
    """Seconds left when `done` of `total` took `seconds`. None before anything is done.

    After a resume, count from there: done and total without the steps of earlier sessions.
    """
    if done <= 0:
        return None
    return max(0.0, (total - done) * seconds / done)


class Smooth:
    """Exponential average without the bias of a zero start: the first value is returned as it is.

    NaN and infinities are returned as they come, so that they are seen, and are kept out of the average.
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
