"""Peers of cannsim/peers that are installed here train on a simulated NPU with the losses of the CPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

PEERS = Path(__file__).resolve().parents[2] / "cannsim" / "peers"


def compare(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PEERS / "compare.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
@pytest.mark.skipif("CANNSIM_PEERS" not in os.environ, reason="half a minute of imports; CANNSIM_PEERS=1 runs it")
@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs accelerate: pip install accelerate")
def test_a_loop_with_accelerate_trains_as_on_the_cpu() -> None:
    done = compare("hf_accelerate.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok" in done.stdout.split()


def test_losses_that_differ_and_runs_without_an_npu_are_failures(tmp_path: Path) -> None:
    """The comparison itself: scripts that report made-up numbers."""
    report = "import json, os; open(os.environ['PEER_REPORT'], 'w').write(json.dumps(dict(tokens=[], versions={}, "
    for name, losses, launches in [
        ("same", "[1.0]", "{'aclnnSiluBackward': 1}"),
        ("far", "[1.0 + (os.environ['PEER_DEVICE'] == 'npu')]", "{'aclnnSiluBackward': 1}"),
        ("nan", "[float('nan')]", "{'aclnnSiluBackward': 1}"),
        ("idle", "[1.0]", "{'aclnnAdd': 1}"),
    ]:
        (tmp_path / f"{name}.py").write_text(f"{report}losses={losses}, launches={launches})))")
    (tmp_path / "missing.py").write_text("import no_such_package")
    ends = {
        name: compare(str(tmp_path / f"{name}.py")).returncode for name in ("same", "far", "nan", "idle", "missing")
    }
    assert ends == {"same": 0, "far": 1, "nan": 1, "idle": 1, "missing": 1}
