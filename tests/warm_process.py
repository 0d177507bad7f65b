"""Processes that start in a tenth of a second: forked from one that has imported torch, instead of from nothing.

    from warm_process import Popen, run           # as those of subprocess, for commands that begin with sys.executable
    run(words, how=ServerPopen)                   # what `ascendchat launch`, `serve` and `speedrun` start is warm, too
    run(words, how=TheirsPopen)                   # with transformers and peft imported, which take as long again

Importing torch takes 3 to 4 s of CPU time, more than most programs of the tests need for all the rest. The process is
a real one with its own environment, directory and files, which can be killed; what it shares with the others is the
state of freshly imported modules, the seed of Python's hashes, and /proc/N/{cmdline,environ}. So a test that compares
two processes starts one of them with plain `subprocess`, and so do tests of what is imported, of variables read at an
import, and of start-up itself. On other systems than Linux these are plain `subprocess`.

    python tests/warm_process.py SOCKET           # the process that forks; started at the first use, once per pytest
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import struct
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

NAME = "of {}"  # of a warm process, with the number of the one that asked for it
TORCHRUNS_OWN = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
READY = struct.Struct("i")  # a process number, then its exit status as waitpid gives it
PRELOADED = [
    "torch", "torch._dynamo", "torch.distributed.fsdp", "torch.utils.checkpoint", "numpy", "safetensors.torch",
    "torch.distributed.run", "pyarrow.parquet", "tiktoken", "tokenizers", "httpx", "rich.console", "rich.progress",
    "yaml", "ascendchat.cli", "ascendchat.train.pretrain", "ascendchat.train.chat", "ascendchat.train.chat",
    "ascendchat.rl.command", "ascendchat.engine.engine", "ascendchat.serve.app", "ascendchat.data.prepare",
    "ascendchat.speedrun.command",
]  # fmt: skip
THEIRS = [
    "transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto", "transformers.generation",
    "transformers.models.qwen2.modeling_qwen2", "peft", "ascendchat.models.folder", "ascendchat.train.finetune",
]  # fmt: skip


# ---- in the tests --------------------------------------------------------------------------------


@functools.cache
def nursery() -> socket.socket:
    """The way to the process that forks. It ends when this one does."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        words = [sys.executable, __file__, str(theirs.fileno())]
        process = subprocess.Popen(
            words, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )

    def end() -> None:
        process.terminate()
        process.wait()

    atexit.register(end)
    return ours


class _Warm(subprocess.Popen):  # type: ignore[type-arg]
    """A process whose parent is the one that forks, which says here how it ended."""

    handing_on = False
    theirs = False  # whether transformers and peft are imported, before anything is forked

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, _: Any, pass_fds: Any, *more: Any) -> None:
        (cwd, env, _, _, shell), pipes, start_new_session = more[:5], more[5:11], more[16]
        words = [os.fspath(word) for word in args]
        assert words[0] == sys.executable, f"only Python can start warm, not {words[0]}"
        assert not any((executable, preexec_fn, shell)), "not for a warm start"
        job = {
            "words": words[1:],
            "cwd": os.fspath(cwd or os.getcwd()),
            "env": dict(os.environ if env is None else env),
            "session": bool(start_new_session),
            "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
            "cores": [*os.sched_getaffinity(0)],
            "files": [0, 1, 2, *pass_fds],  # their numbers there
            "parent": os.getpid(),
            "way": self.handing_on,
            "theirs": self.theirs,
        }
        files = [theirs if theirs != -1 else own for own, theirs in enumerate((pipes[0], pipes[3], pipes[5]))]
        files += pass_fds
        if self.handing_on:
            files.append(nursery().fileno())
        self._child_created = False
        self._news, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(nursery(), [json.dumps(job).encode()], [theirs.fileno(), *files])
        self._close_pipe_fds(*pipes)
        self.pid = self._told(wait=True)
        self._child_created = True

    def _told(self, wait: bool) -> int | None:
        """The next number, None where there is none yet."""
        try:
            data = self._news.recv(READY.size, 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        assert data, "the process that forks has ended"
        return int(READY.unpack(data)[0])

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        status = self._told(wait=not wait_flags & os.WNOHANG)
        return (0, 0) if status is None else (self.pid, status)

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(False):  # else another thread waits for it
            try:
                pid, status = self._try_wait(os.WNOHANG) if self.returncode is None else (0, 0)
                if pid:
                    self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


class _WarmServer(_Warm):
    """`ascendchat serve` whose workers start warm, too, `speedrun` whose stages do, and `launch` whose ranks do.

    All are children of the process that forks, so they do not end with the one that has asked for them.
    """

    handing_on = True


class _WarmTheirs(_WarmServer):
    """Commands for models of Hugging Face."""

    theirs = True


WARM = sys.platform == "linux"
Popen: Any = _Warm if WARM else subprocess.Popen
ServerPopen: Any = _WarmServer if WARM else subprocess.Popen
TheirsPopen: Any = _WarmTheirs if WARM else subprocess.Popen


def warm_workers(how: Any = Popen) -> Any:
    """What a module shall take for `subprocess`, so that its children start warm."""
    return types.SimpleNamespace(**{**vars(subprocess), "Popen": how})


def children(number: int) -> list[int]:
    """Processes that a process has started, warm or not, and that have not ended, zombies included."""
    found = []
    for process in filter(str.isdecimal, os.listdir("/proc")):  # often asked: no Path, which takes twice as long
        with contextlib.suppress(OSError), open(f"/proc/{process}/stat") as file:
            name, _, fields = file.read().partition("(")[2].rpartition(")")
            if int(fields.split()[1]) == number or name == NAME.format(number):
                found.append(int(process))
    return found


def run(words: list[str], timeout: float | None = None, check: bool = False, how: Any = Popen, **settings: Any) -> Any:
    """subprocess.run, warm; `how`: one of the classes above."""
    if settings.pop("capture_output", False):
        settings.update(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with how(words, **settings) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(words, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


# ---- in the process that forks -------------------------------------------------------------------


def wait_for_work(jobs: socket.socket) -> list[str]:
    """Fork one process after the other; returns only in those, with the words of their command."""
    running: dict[int, socket.socket] = {}  # process number -> who waits for it

    def report(*_: object) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                with running.pop(ended[0]) as asking, contextlib.suppress(OSError):
                    asking.send(READY.pack(ended[1]))

    def end(*_: object) -> None:
        for number in running:  # what a test has left behind
            os.kill(number, signal.SIGKILL)
        os._exit(0)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGCHLD, report)
    while True:
        message, files, _, _ = socket.recv_fds(jobs, 1 << 20, 16)
        if not message:
            end()
        job = json.loads(message)
        if job["theirs"]:
            import_theirs()
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])  # until the number is known
        number = os.fork()
        if number == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            jobs.close()
            for asking in running.values():
                asking.close()
            return become(job, files)
        asking = socket.socket(fileno=files[0])
        for file in files[1:]:
            os.close(file)
        running[number] = asking
        with contextlib.suppress(OSError):
            asking.send(READY.pack(number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])


@functools.cache
def import_theirs() -> None:
    """As ascendchat does it, and the modules that most models need."""
    importlib.import_module("ascendchat.models.import_transformers").library()
    for name in THEIRS:
        importlib.import_module(name)
    gc.freeze()


def hand_on(way: socket.socket) -> None:
    """What this process starts begins warm, too."""
    globals()["nursery"] = lambda: way
    for name in ("ascendchat.serve.pool", "ascendchat.speedrun.command"):
        importlib.import_module(name).subprocess = warm_workers(ServerPopen)  # type: ignore[attr-defined]
    importlib.import_module(TORCHRUNS_OWN).Popen = ServerPopen  # type: ignore[attr-defined]
    os.execv = instead  # type: ignore[assignment]


def instead(path: str, words: list[str]) -> None:
    """For os.execv, by which a rank becomes the program that it shall run."""
    assert path == sys.executable, f"only Python can start warm, not {path}"
    open_files("-u" in words[:2])
    perform(*words[1 + (words[1] == "-u") :])


def open_files(flush: bool) -> None:
    """As Python does it at its start."""
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout.reconfigure(line_buffering=flush or os.isatty(1), write_through=flush)
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr.reconfigure(line_buffering=True, write_through=flush)


def become(job: dict[str, Any], files: list[int]) -> list[str]:
    """Take over what the process was given."""
    os.close(files[0])
    if job["way"]:
        hand_on(socket.socket(fileno=files.pop()))
    apart = [fcntl.fcntl(file, fcntl.F_DUPFD, 500) for file in files[1:]]  # no number is taken
    for file in files[1:]:
        os.close(file)
    for file, number in zip(apart, job["files"]):
        os.dup2(file, number)
        os.close(file)
    Path("/proc/self/comm").write_text(NAME.format(job["parent"]))
    os.sched_setaffinity(0, job["cores"])
    signal.pthread_sigmask(signal.SIG_SETMASK, job["blocked"])
    if job["session"]:
        os.setsid()
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update(job["env"])
    unbuffered = job["words"][0] == "-u"
    open_files(unbuffered or bool(os.environ.get("PYTHONUNBUFFERED")))
    return list(job["words"][unbuffered:])


def perform(kind: str, *words: str) -> None:
    """Do as Python does with these words, and end without taking all modules apart, which takes longer than to fork."""
    status: object = 0
    try:
        if kind == "-m":
            sys.path[0], sys.argv = os.getcwd(), list(words)
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        elif kind == "-c":
            sys.path[0], sys.argv = "", ["-c", *words[1:]]
            exec(compile(words[0], "<string>", "exec", dont_inherit=True), {"__name__": "__main__"})
        else:
            sys.path[0], sys.argv = os.path.dirname(kind), [kind, *words]
            runpy.run_path(kind, run_name="__main__")
    except SystemExit as end:
        status = end.code or 0
        if not isinstance(status, int):
            raise
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(status)


if __name__ == "__main__":
    # Whoever asked first may have had signals blocked (serve/pool.py): inherited, the end of the tests would be, too.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    link = socket.socket(fileno=int(sys.argv[1]))
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # so that collections in the forked do not write to every page
    perform(*wait_for_work(link))
