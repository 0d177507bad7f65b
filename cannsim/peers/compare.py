"""Run scripts of this folder on the CPU and on simulated NPUs, and print how far their losses are apart.

    python cannsim/peers/compare.py                              # all; a script whose packages are missing is left out
    python cannsim/peers/compare.py --ranks 2 hf_trainer.py      # two processes: over gloo, and over HCCL

Each script is a program of its own: `cannsim run -- python cannsim/peers/hf_trainer.py`. The CPU's run is the same
program without cannsim and without torch_npu. Ends with status 1 if a script fails, if its losses are
further apart than --tolerance, or if no gradient was computed on the NPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from cannsim import build, environment

HERE = Path(__file__).resolve().parent
SHARED = ("compare.py", "tiny.py")


class Failed(RuntimeError):
    """A script did not end well: the end of its output."""


class Missing(RuntimeError):
    """A package that a script needs is not installed."""


def run(script: Path, ranks: int, npus: int, folder: Path) -> dict[str, Any]:
    """What the script reported on a machine with so many NPUs."""
    result, machine = folder / f"report-{npus}.json", folder / "machine"
    env = {**os.environ, "PEER_DEVICE": "cpu", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    if ranks > 1:
        env["ACCELERATE_USE_CPU"] = "true"  # else accelerate has every rank train alone
    if npus:
        machine.mkdir()
        env = {**environment(devices=npus, state=str(machine)), "PEER_DEVICE": "npu"}
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    done = subprocess.run(
        [sys.executable, *launcher, str(script)],
        env={**env, "PEER_REPORT": str(result)},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if done.returncode == 0 and result.exists():
        return dict(json.loads(result.read_text()))
    if missing := re.findall(r"^(?:\[rank\d\]: )?ModuleNotFoundError: (.*)", done.stdout, re.MULTILINE):
        raise Missing(missing[-1])
    where = f"{npus} simulated NPUs" if npus else "the CPU"
    raise Failed(f"on {where} it ended with {done.returncode}:\n{done.stdout[-4000:]}")


def compare(script: Path, ranks: int, tolerance: float) -> tuple[str, bool]:
    """A line on this script, and whether all is well."""
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        cpu, npu = (run(script, ranks, npus, Path(folder)) for npus in (0, ranks))
    rounded = [" ".join(f"{loss:.5f}" for loss in each["losses"]) for each in (cpu, npu)]
    apart = max((abs(a - b) for a, b in zip(cpu["losses"], npu["losses"])), default=float("inf"))
    launches = sum(npu["launches"].values())
    gradients = sum(count for name, count in npu["launches"].items() if re.search("Grad|Backward", name))
    versions = ", ".join(f"{name} {version}" for name, version in npu["versions"].items())
    well = len(cpu["losses"]) == len(npu["losses"]) and apart <= tolerance and gradients > 0
    end = "ok" if well and cpu["tokens"] == npu["tokens"] else "FAILED"
    lines = [
        f"{script.stem}: {versions}; ranks: {ranks}",
        f"  CPU {rounded[0]}",
        f"  NPU {rounded[1]}",
        *([f"  tokens {each['tokens']}" for each in (cpu, npu)] if cpu["tokens"] or npu["tokens"] else []),
        f"  largest difference {apart:.1e}; {launches} launches, {gradients} of gradients; {end}",
    ]
    return "\n".join(lines), end == "ok"


def main() -> int:
    parser = argparse.ArgumentParser(description="Peers on the CPU and on simulated NPUs.")
    parser.add_argument("scripts", nargs="*", help="scripts of this folder (default: all)")
    parser.add_argument("--ranks", type=int, default=1, help="processes, each with an NPU of its own (default 1)")
    parser.add_argument("--tolerance", type=float, default=1e-4, help="between two losses (default 0.0001)")
    given = parser.parse_args()
    try:
        build.ensure()
    except build.CannotBuild as error:
        print(f"compare.py: {error}", file=sys.stderr)
        return 2
    scripts = [HERE / name for name in given.scripts] or sorted(p for p in HERE.glob("*.py") if p.name not in SHARED)
    failed = 0
    for script in scripts:
        try:
            line, well = compare(script, given.ranks, given.tolerance)
        except Missing as error:
            line, well = f"{script.stem}: left out ({error})", not given.scripts
        except Failed as error:
            line, well = f"{script.stem}: FAILED {error}", False
        print(line, flush=True)
        failed += not well
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
