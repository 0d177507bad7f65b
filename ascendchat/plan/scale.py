"""Beyond one node: exchange, waiting for the slowest, failures. `ascendchat plan --depth 26 --devices 1024` prints it.

    growth(...)        step time from one node to N, each device with the same work
    reliability(...)   failures per day, seconds to recover, share of the time that is lost

The formulas are in docs/en/scale.md. Only the bytes and the number of exchanges are measured (on simulated NPUs, see
tests/npu/test_scale_npu.py); links come from chips.py, the rest are assumptions with a flag each.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from ascendchat.chips import Chip
from ascendchat.config.commands import PlanConfig
from ascendchat.sizes.batch import Fabric, Split, duration

HOST_COPY = 10e9  # bytes per second from a device to its host's memory: the only time a checkpoint holds training up


def fabric_of(config: PlanConfig) -> Fabric:
    """The assumptions about the network that the user may set."""
    return Fabric(hop=config.hop_microseconds * 1e-6, jitter=config.jitter)


def growth(
    config: PlanConfig, chip: Chip, split: Split, flops: float, exchanged: Callable[[int], int], recompute: float
) -> list[dict[str, Any]]:
    """One row per number of devices, from one node (or all) to `config.devices`: the work of a device stays the same,
    so the batch grows with the devices, and any growth of the step is the price of being many. `exchanged`: bytes
    of a step, by devices."""
    sizes = [chip.devices_per_node]
    while sizes[-1] * 2 < config.devices:
        sizes.append(sizes[-1] * 2)
    rows: list[dict[str, Any]] = []
    for devices in [*sizes, config.devices]:
        work = dataclasses.replace(split, devices=devices)
        one = exchanged(min(devices, chip.devices_per_node))
        time = duration(flops, exchanged(devices), chip, work, 1, config.mfu, None, recompute, fabric_of(config), one)
        first = rows[0]["step_seconds"] if rows else time.step_seconds
        rows.append(
            {
                "devices": devices,
                "total_tokens": work.total,
                "step_seconds": time.step_seconds,
                "communication_seconds": time.communication_seconds,
                "waiting_seconds": time.waiting_seconds,
                "tokens_per_second": time.tokens_per_second,
                "efficiency": first / time.step_seconds,
            }
        )
    return rows


def reliability(config: PlanConfig, held: int, checkpoint: int, step_seconds: float) -> dict[str, float]:
    """What failures cost. `held`: bytes that the device with most of it copies to its host for a checkpoint;
    `checkpoint`: bytes of all devices together."""
    devices = config.devices
    between = config.device_mtbf_hours * 3600 / devices  # seconds between two failures of the job
    pause = held / HOST_COPY
    restart = config.restart_seconds + checkpoint / (config.storage_speed * 1e9)
    interval = config.save_every * step_seconds
    best = math.sqrt(2 * pause * between)
    return {
        "failures_per_day": 86400 / between,
        "seconds_between_failures": between,
        "checkpoint_bytes": checkpoint,
        "pause_seconds": pause,
        "save_every": config.save_every,
        "restart_seconds": restart,
        "recover_seconds": restart + interval / 2,
        "lost_share": lost(interval, pause, restart, between),
        "best_save_every": max(1, round(best / step_seconds)),
        "best_lost_share": lost(max(best, step_seconds), pause, restart, between),
    }


def lost(interval: float, pause: float, restart: float, between: float) -> float:
    """Share of the time: pauses for checkpoints, and per failure the restart and half an interval done twice."""
    return min(1.0, pause / interval + (restart + interval / 2) / between)
