"""Ranks that a test file spawns are forked from a process that has torch and torch_npu imported (suites_server.py).

Importing both takes seconds, and test files of collectives spawn hundreds of processes. multiprocessing's own fork
server does it, forked from the process of the test before that loads the test file: spawned processes come from there,
with the variables that their parent has at that moment.
"""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing.context
import os
import signal
import socket
import sys
import time
import types
import unittest
from collections.abc import Mapping
from multiprocessing import forkserver, spawn, util
from typing import Any

PR_SET_PDEATHSIG = 1  # of Linux' prctl
KEY = "cannsim_environment"  # of what multiprocessing tells a new process about its parent
# A process that used an NPU takes seconds to end. Some tests count on it: their ranks end with results in a queue that
# the parent has yet to fetch from them.
LINGER_SECONDS = 1.0


def end_with_parent() -> None:
    """A server that is stopped leaves no test behind, and a test no ranks."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def provide_expecttest() -> None:
    """torch's own test classes inherit from this small package; without it a class that compares texts will do."""
    try:
        import expecttest  # type: ignore[import-not-found]  # noqa: F401
    except ImportError:
        module = types.ModuleType("expecttest")

        class TestCase(unittest.TestCase):
            def assertExpectedInline(self, actual: str, expected: str, skip: int = 0) -> None:
                assert actual.strip() == expected.strip(), f"{actual} is not {expected}"

        module.TestCase, module.ACCEPT = TestCase, False  # type: ignore[attr-defined]
        sys.modules["expecttest"] = module


def import_torch() -> None:
    provide_expecttest()
    importlib.import_module("torch")
    importlib.import_module("torch_npu.testing.testcase")


def start(process: Any) -> Any:
    from multiprocessing.popen_forkserver import Popen

    return Popen(process)


def start_server(close: int) -> None:
    """Fork the server, which has everything that this process has imported; it closes the descriptor given."""
    address = f"\0cannsim-suites-{os.getpid()}"  # no file
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        alive_reading, alive_writing = os.pipe()
        process = os.fork()
        if process == 0:
            try:
                end_with_parent()
                os.close(alive_writing)
                os.close(close)
                forkserver.main(os.dup(listener.fileno()), alive_reading, [])
            finally:
                os._exit(0)
    os.close(alive_reading)
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, alive_writing, process


def install(close: int) -> None:
    """From now on this process spawns through a fork server of its own."""
    describe, prepare, run = spawn.get_preparation_data, spawn.prepare, spawn._main

    def describe_with_variables(name: str) -> dict[str, Any]:
        return {**describe(name), KEY: dict(os.environ)}

    def prepare_with_variables(data: Mapping[str, Any]) -> None:
        os.environ.clear()
        os.environ.update(data[KEY])
        prepare(data)

    def run_and_linger(fd: int, parent_sentinel: int) -> int:
        end_with_parent()
        finish = util._exit_function  # type: ignore[attr-defined]

        def linger() -> None:
            time.sleep(LINGER_SECONDS)
            finish()

        util._exit_function = linger  # type: ignore[attr-defined]
        return run(fd, parent_sentinel)

    spawn.get_preparation_data, spawn.prepare = describe_with_variables, prepare_with_variables
    spawn._main = run_and_linger
    multiprocessing.context.SpawnProcess._Popen = staticmethod(start)  # type: ignore[method-assign,assignment]
    start_server(close)
