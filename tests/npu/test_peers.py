"""The comparison of cannsim/peers, by which other people's training on a simulated NPU is held against the CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PEERS = Path(__file__).resolve().parents[2] / "cannsim" / "peers"


def test_losses_that_differ_and_runs_without_an_npu_are_failures(tmp_path: Path) -> None:
    """Scripts that report made-up numbers."""
    report = "import json, os; open(os.environ['PEER_REPORT'], 'w').write(json.dumps(dict(tokens=[], versions={}, "
    scripts = {  # losses, launches, and the status of the comparison
        "same": ("[1.0]", "{'aclnnSiluBackward': 1}", 0),
        "far": ("[1.0 + (os.environ['PEER_DEVICE'] == 'npu')]", "{'aclnnSiluBackward': 1}", 1),
        "nan": ("[float('nan')]", "{'aclnnSiluBackward': 1}", 1),
        "idle": ("[1.0]", "{'aclnnAdd': 1}", 1),
    }
    for name, (losses, launches, _) in scripts.items():
        (tmp_path / f"{name}.py").write_text(f"{report}losses={losses}, launches={launches})))")
    (tmp_path / "missing.py").write_text("import no_such_package")
    ends = {
        name: subprocess.run([sys.executable, PEERS / "compare.py", tmp_path / f"{name}.py"], timeout=600).returncode
        for name in (*scripts, "missing")
    }
    assert ends == {**{name: end for name, (_, _, end) in scripts.items()}, "missing": 1}
