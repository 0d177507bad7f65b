"""Prove that N devices work together: `ascendchat doctor --devices 8 [--device-type npu]`.

It starts `ascendchat launch --devices 8 -m ascendchat.doctor.collective RESULT`, so it tests the path that training
takes: launcher, port, rendezvous, device binding, backend. Every rank checks every number it receives.
Bandwidth is that of the algorithm: bytes of the tensor on one rank, divided by the time of one collective.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ascendchat.config.language import translate
from ascendchat.errors import UserError, home

if TYPE_CHECKING:
    import torch

CONNECT_TIMEOUT = 120.0  # seconds until a missing rank is named
SIZES = (1 << 20, 1 << 24, 1 << 28)  # bytes on one rank
HOST_SIZES = (1 << 16, 1 << 20, 1 << 24)  # bytes on one rank where a CPU does the work
ROUNDS = 5
MAX_LINK_RATIO = 8.0  # slowest to fastest link; cards of one machine may be joined by two kinds of link
HOST_NOISE = 0.05  # seconds that a message may take where a busy CPU carries it


def check_devices(devices: int, device_type: str | None, lang: str, as_json: bool = False) -> int:
    """Run the collectives on `devices` processes and print the result; exit status 0 when all was right."""
    if devices < 1:
        raise UserError(f"--devices {devices}: at least one is needed, for example ascendchat doctor --devices 2")
    name = f"doctor-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "result.json"
        command = [sys.executable, "-m", "ascendchat", "launch", "--devices", str(devices), "--run", name]
        command += ["--device-type", device_type] if device_type else []
        command += ["-m", "ascendchat.doctor.collective", str(answer)]
        status = subprocess.run(command, stdout=sys.stderr.fileno(), check=False).returncode
        result = json.loads(answer.read_text()) if status == 0 and answer.is_file() else None
    if result is None:
        if as_json:
            print(json.dumps({"ok": False, "devices": devices, "status": status, "run": str(home() / "runs" / name)}))
        elif lang == "zh":
            print(f"{devices} 个设备的集合通信失败；日志：{home() / 'runs' / name}")
        else:
            print(f"the collective on {devices} devices failed; logs: {home() / 'runs' / name}")
        return 2 if status == 2 else 1
    shutil.rmtree(home() / "runs" / name, ignore_errors=True)  # only logs of a success
    print(json.dumps(result) if as_json else "\n".join(report_lines(result, lang)))
    return 0 if result["ok"] else 1


def report_lines(result: dict[str, Any], lang: str) -> list[str]:
    """Format the result for people: right or wrong first, then bandwidth."""
    head = f"{result['devices']} x {result['device']} ({result['name']}), {result['backend']}: "
    if result["faults"]:
        head += ("结果错误：" if lang == "zh" else "WRONG RESULTS: ") + "; ".join(result["faults"][:3])
    else:
        head += "all_reduce 与 all_gather 结果正确" if lang == "zh" else "all_reduce and all_gather are right"
    if result["simulated"]:
        head += "（模拟设备，带宽无意义）" if lang == "zh" else " (simulated devices: the bandwidth means nothing)"
    if result["devices"] == 1:
        return [head, "单个设备无需通信" if lang == "zh" else "one device has nobody to talk to: no bandwidth"]
    lines = [
        head,
        "大小        all_reduce      all_gather" if lang == "zh" else "size        all_reduce      all_gather",
    ]
    for row in result["rows"]:
        size = f"{row['bytes'] >> 20} MiB" if row["bytes"] >= 1 << 20 else f"{row['bytes'] >> 10} KiB"
        lines.append(f"{size:<8} {row['all_reduce_gbs']:>8.2f} GB/s   {row['all_gather_gbs']:>8.2f} GB/s")
    return lines


def main(argv: list[str]) -> int:
    """Run one rank, started by torchrun."""
    from ascendchat.device.env import announce, prepare_environment

    try:
        announce(prepare_environment(None))
        from ascendchat.device import pick
        from ascendchat.parallel import collectives

        device = pick()
        world = collectives.init(device, timeout=300.0, connect_timeout=CONNECT_TIMEOUT)
        torch_device = device.bind(world.local_rank)
    except UserError as error:
        print(f"ascendchat doctor: {translate(str(error))}", file=sys.stderr)
        return 2
    rows, faults = [], []
    simulated = device.type != "cpu" and "CANNSIM_HOME" in os.environ
    for size in HOST_SIZES if simulated or device.type == "cpu" else SIZES:
        row, wrong = time_collectives(size, world.rank, world.size, torch_device, device.synchronize)
        rows.append(row)
        faults += wrong
    host = simulated or device.type == "cpu"
    links, slow = time_links(
        1 << 20 if host else 1 << 26, torch_device, device.synchronize, HOST_NOISE if host else 0.0
    )
    all_faults = collectives.gather_objects(faults)
    all_faults[0] += slow  # all ranks computed the same list from the gathered times
    result = {
        "ok": not any(all_faults),
        "devices": world.size,
        "device": device.type,
        "name": device.chip.name,
        "simulated": simulated,
        "backend": device.collective,
        "faults": [fault for faults_of_rank in all_faults for fault in faults_of_rank],
        "rows": rows,
        "links": links,
    }
    if world.rank == 0:
        Path(argv[0]).write_text(json.dumps(result), encoding="utf-8")
    collectives.teardown()
    return 0


def time_collectives(
    size: int, rank: int, world: int, device: torch.device, synchronize: Callable[[], None]
) -> tuple[dict[str, float], list[str]]:
    """Check and time both collectives on tensors of `size` bytes per rank: ({bytes, seconds, GB/s}, faults)."""
    import torch

    from ascendchat.parallel import collectives

    count = size // 4  # float32: every value below is a small whole number, so sums are exact
    pattern = (torch.arange(count, device=device) % 251).float()
    data = pattern + rank
    total = data.clone()
    collectives.all_reduce(total, "sum")
    gathered = torch.full((world * count,), -1.0, device=device)
    collectives.all_gather(gathered, data)
    faults = []
    if not torch.equal(total, pattern * world + sum(range(world))):
        faults.append(f"rank {rank}: all_reduce of {size} bytes")
    scattered = torch.full((count // world,), -1.0, device=device)
    divisible = data[: count // world * world]
    collectives.reduce_scatter(scattered, divisible)
    share = slice(rank * len(scattered), (rank + 1) * len(scattered))
    if not torch.equal(scattered, (pattern * world + sum(range(world)))[share]):
        faults.append(f"rank {rank}: reduce_scatter of {size} bytes")
    received = data.clone()
    collectives.broadcast(received, src=world - 1)
    if not torch.equal(received, pattern + (world - 1)):
        faults.append(f"rank {rank}: broadcast of {size} bytes leaves old values")
    ranks = torch.arange(world, device=device).float()
    if not torch.equal(gathered.view(world, count), pattern[None, :] + ranks[:, None]):
        faults.append(f"rank {rank}: all_gather of {size} bytes")
    reduce_time = seconds(lambda: collectives.all_reduce(total, "max"), synchronize, device)
    gather_time = seconds(lambda: collectives.all_gather(gathered, data), synchronize, device)
    return {
        "bytes": size,
        "all_reduce_s": reduce_time,
        "all_reduce_gbs": size / reduce_time / 1e9,
        "all_gather_s": gather_time,
        "all_gather_gbs": world * size / gather_time / 1e9,  # what arrives on one rank
    }, faults


def time_links(
    size: int, device: torch.device, synchronize: Callable[[], None], noise: float
) -> tuple[list[dict[str, Any]], list[str]]:
    """Time a message of `size` bytes from each rank to the next, one link at a time: (rows, slow links). A link is slow
    when its best of ROUNDS takes MAX_LINK_RATIO times as long as the fastest link's, and more than `noise` seconds."""
    import torch

    from ascendchat.parallel import collectives

    world = collectives.world()
    data, own_time = torch.zeros(size, dtype=torch.uint8, device=device), 0.0
    for source in range(world.size if world.size > 1 else 0):
        best, target = float("inf"), (source + 1) % world.size
        for _ in range(ROUNDS + 1):  # the first one connects
            collectives.barrier()
            start = time.perf_counter()
            if world.rank == source:
                torch.distributed.send(data, target)
            elif world.rank == target:
                torch.distributed.recv(data, source)
            synchronize()
            best = min(best, time.perf_counter() - start)
        own_time = best if world.rank == source else own_time
    times = collectives.gather_objects(own_time) if world.size > 1 else []
    fastest, rows, slow = min(times, default=0.0), [], []
    for source, elapsed in enumerate(times):
        link = f"{source} -> {(source + 1) % world.size}"
        rows.append({"link": link, "gbs": round(size / max(elapsed, 1e-9) / 1e9, 3)})
        if elapsed > max(MAX_LINK_RATIO * fastest, noise):
            slow.append(f"slow link {link}: {rows[-1]['gbs']} GB/s, the fastest has {size / fastest / 1e9:.3f}")
    return rows, slow


def seconds(collective: Callable[[], object], synchronize: Callable[[], None], device: torch.device) -> float:
    """Mean seconds of one call, on the slowest rank."""
    import torch

    from ascendchat.parallel import collectives

    collective()  # the first call of a size sets up buffers
    synchronize()
    collectives.barrier()
    start = time.perf_counter()
    for _ in range(ROUNDS):
        collective()
    synchronize()
    elapsed = torch.tensor([(time.perf_counter() - start) / ROUNDS], device=device)
    collectives.all_reduce(elapsed, "max")
    return max(float(elapsed.item()), 1e-9)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
