"""Compiles a stranger's grammar where it can do no harm: in a process with limits, which may die of it.

    trial = Trial(tokenizer)
    trial.reason(Grammar("regex", "("))        # why it cannot be compiled; "" when it can

    python -m ascendchat.infer.trial           the other process: a tokenizer, then grammars, as pickles on its input

The process starts with the first grammar (about half a second) and stays. Its limit is processor time, not time on the
clock, so that a busy machine refuses nothing; the parent's patience is for a process that does not run at all.
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

import ascendchat
from ascendchat.data.tokenizer import Tokenizer
from ascendchat.infer.request import Grammar

CPU_SECONDS = 3.0  # for one grammar
MEMORY = 4 << 30  # bytes of address space
STACK = 4 << 20  # bytes: half of what the engine's thread usually has, so what passes here passes there
PATIENCE = 120.0  # seconds on the clock
TOO_MUCH = "it takes too much time or memory to compile"


class Trial:
    """The parent's side. Not for several threads at once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.process: subprocess.Popen[bytes] | None = None

    def reason(self, grammar: Grammar) -> str:
        """Why a grammar cannot be compiled; empty when it can."""
        if self.process is None or self.process.poll() is not None:
            self.process = self._start()
        answer = self._ask(self.process, grammar)
        if answer is None:
            self.process.kill()
            self.process.wait()
            self.process = None
            return TOO_MUCH
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        path = [str(Path(ascendchat.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        one = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, "-m", "ascendchat.infer.trial"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **one, "PYTHONPATH": os.pathsep.join(path)},
        )
        assert process.stdin is not None
        pickle.dump(getattr(self.tokenizer, "for_grammars", self.tokenizer), process.stdin)
        return process

    def _ask(self, process: subprocess.Popen[bytes], grammar: Grammar) -> str | None:
        """The other process's answer; None when it died or never came."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            pickle.dump(grammar, process.stdin)
            process.stdin.flush()
        except BrokenPipeError:
            return None
        ready, _, _ = select.select([process.stdout], [], [], PATIENCE)
        line = process.stdout.readline() if ready else b""
        return str(json.loads(line)) if line.endswith(b"\n") else None


def main() -> None:
    """The other process: answers until its input ends."""
    from ascendchat.infer.grammar import compiled, vocabulary

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the terminal is meant for the parent
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK)
    tokens = vocabulary(pickle.load(sys.stdin.buffer))

    def compile_one(grammar: Grammar, reasons: list[str]) -> None:
        try:
            compiled(tokens, grammar).deep_copy()
            reasons.append("")
        except ValueError as error:
            reasons.append(str(error) or "it makes no sense")

    while True:
        try:
            grammar = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        reasons: list[str] = []
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # its signal ends the process
        worker = threading.Thread(target=compile_one, args=(grammar, reasons))
        worker.start()
        worker.join()
        signal.setitimer(signal.ITIMER_PROF, 0)
        if not reasons:  # an error that nobody thought of: the parent sees the end of this process
            return
        print(json.dumps(reasons[0]), flush=True)


if __name__ == "__main__":
    main()
