"""`cannsim run` and its child: a signal for the one reaches the other, whenever it comes."""

from __future__ import annotations

import subprocess
import sys

# The signal comes before Popen returns, so before anybody could have waited for the child.
PROGRAM = """
import os, signal, subprocess, sys
from cannsim import __main__

class Popen(subprocess.Popen):
    def __init__(self, *known, **more):
        super().__init__(*known, **more)
        os.kill(os.getpid(), signal.SIGTERM)

__main__.subprocess.Popen = Popen
print(__main__.run_child([sys.executable, "-c", "import time; time.sleep(600)"], dict(os.environ)))
"""


def test_a_signal_right_behind_the_start_of_a_child_ends_it() -> None:
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert (found.returncode, found.stdout) == (0, "-15\n"), found.stderr
