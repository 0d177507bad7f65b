"""The process from which the tests fork others (tests/warm_process.py) ends with the tests."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
PROGRAM = """
import signal, sys
sys.path.insert(0, sys.argv[1])
from warm_process import nursery
stop = {signal.SIGINT, signal.SIGTERM}
signal.pthread_sigmask(signal.SIG_BLOCK, stop)
nursery()
signal.pthread_sigmask(signal.SIG_UNBLOCK, stop)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="processes start warm on Linux only")
def test_it_ends_though_signals_were_blocked_when_it_was_started() -> None:
    words = [sys.executable, "-c", PROGRAM, str(TESTS)]
    with subprocess.Popen(words, env={**os.environ, "PYTHONPATH": str(TESTS.parent)}, start_new_session=True) as tests:
        try:
            assert tests.wait(120) == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(tests.pid, signal.SIGKILL)
