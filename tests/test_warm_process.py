"""Processes of the tests that start warm behave as those of subprocess."""

from __future__ import annotations

import socket
import threading

import pytest
from warm_process import READY, WARM, Popen


@pytest.mark.skipif(not WARM, reason="Popen is that of subprocess here")
def test_a_look_at_a_process_takes_nothing_from_the_thread_that_waits_for_it() -> None:
    """Its end is told once: who took it away from the other one left that with an error."""
    process = Popen.__new__(Popen)
    process.pid, process.returncode, process._waitpid_lock = 7, None, threading.Lock()
    process._news, theirs = socket.socketpair()
    with process._news, theirs:
        theirs.send(READY.pack(2 << 8))
        with process._waitpid_lock:  # as wait() in another thread
            assert process.poll() is None
        assert process.wait(1) == 2
