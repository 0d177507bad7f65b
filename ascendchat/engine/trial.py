"""Compiles a stranger's grammar where it can do no harm: in a process with limits, which may die of it.

    trial = Trial(tokenizer)
    trial.reason(Grammar("regex", "("))        # why it cannot be compiled; "" when it can. From any thread

    python -m ascendchat.engine.trial           the other process: a tokenizer, then grammars, as pickles on its input

Each grammar is compiled in a fork of that process, which starts with the first one (about half a second) and stays. The
limit is processor time, not time on the clock, so that a busy machine refuses nothing; the parent's patience is for a
process that does not run at all. A grammar gets QUICK_SECONDS first, which is many times what an honest one needs; what
is not done by then stands in another queue, before another process, and nobody but its like waits for it.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from ascendchat.data.tokenizer.tokenizer import Tokenizer
from ascendchat.engine.request import Grammar

QUICK_SECONDS = 0.25  # for one grammar, of processor time
CPU_SECONDS = 3.0  # for one that was not done by then
MEMORY = 4 << 30  # bytes of address space
STACK = 4 << 20  # bytes: half of what the engine's thread usually has, so what passes here passes there
PATIENCE = 120.0  # seconds on the clock
ENDING = 1.0  # seconds on the clock, for a process whose output has ended
TOO_MUCH = "it takes too much time or memory to compile"
SLOW = "SLOW"  # the process's answer where its fork has reached the limit of time
MOST_ANSWER = 4096  # characters of a reason: a pipe takes them at once
NICE = 5  # answers under way come first


class Trial:
    """The parent's side: two lanes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.quick, self.thorough = Lane(tokenizer), Lane(tokenizer)

    def reason(self, grammar: Grammar) -> str:
        """Why a grammar cannot be compiled; empty when it can."""
        reason = self.quick.reason(grammar, QUICK_SECONDS)
        if reason is None:
            reason = self.thorough.reason(grammar, CPU_SECONDS)
        return TOO_MUCH if reason is None else reason


class Lane:
    """One process, and whoever waits for it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def reason(self, grammar: Grammar, seconds: float) -> str | None:
        """As that of Trial; None when the time was not enough."""
        with self._lock:
            for _ in range(2):  # a process that was killed says nothing of the grammar: it is tried once more
                if self.process is None or self.process.poll() is not None:
                    self.process = self._start()
                answer = self._ask(self.process, (grammar, seconds))
                if answer is not None:
                    return None if answer == SLOW else answer
                if self._end() >= 0:
                    break
            return TOO_MUCH

    def _end(self) -> int:
        """How the process that gave no answer has ended; 0 when it had to be ended."""
        process, self.process = self.process, None
        assert process is not None
        try:
            return process.wait(ENDING)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return 0

    def _start(self) -> subprocess.Popen[bytes]:
        path = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        one = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, "-m", "ascendchat.engine.trial"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **one, "PYTHONPATH": os.pathsep.join(path)},
        )
        assert process.stdin is not None
        pickle.dump(getattr(self.tokenizer, "for_grammars", self.tokenizer), process.stdin)
        return process

    def _ask(self, process: subprocess.Popen[bytes], job: tuple[Grammar, float]) -> str | None:
        """The other process's answer; None when it died or never came."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            pickle.dump(job, process.stdin)
            process.stdin.flush()
        except BrokenPipeError:
            return None
        ready, _, _ = select.select([process.stdout], [], [], PATIENCE)
        line = process.stdout.readline() if ready else b""
        return str(json.loads(line)) if line.endswith(b"\n") else None


def main() -> None:
    """The other process: answers until its input ends."""
    from ascendchat.engine.grammar import vocabulary

    os.nice(NICE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the terminal is meant for the parent
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK)
    tokens = vocabulary(pickle.load(sys.stdin.buffer))
    while True:
        try:
            grammar, seconds = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        print(json.dumps(tried(tokens, grammar, seconds)), flush=True)


def tried(tokens: Any, grammar: Grammar, seconds: float) -> str:
    """What a fork of this process says of a grammar."""
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process
        worker = threading.Thread(target=compile_one, args=(tokens, grammar, theirs))
        worker.start()
        worker.join()
        os._exit(0)
    os.close(theirs)
    _, status = os.waitpid(child, 0)
    with open(ours, encoding="utf-8", errors="replace") as file:
        answer = file.read()
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
        return SLOW
    return answer[1:] if answer else TOO_MUCH  # it has died, or of an error that nobody thought of


def compile_one(tokens: Any, grammar: Grammar, out: int) -> None:
    """In a thread, whose stack has a size that is known: writes "." and the reason."""
    from ascendchat.engine.grammar import compiled

    try:
        compiled(tokens, grammar).deep_copy()
        reason = ""
    except ValueError as error:
        reason = str(error) or "it makes no sense"
    os.write(out, b"." + reason.encode("utf-8", "replace")[:MOST_ANSWER])


if __name__ == "__main__":
    main()
