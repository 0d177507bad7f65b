"""`ascendchat` commands that train: in this process, or in one that gets a signal in the middle of a step.

prepare_texts(home, sentences(200))                         # a tokenizer and a corpus
said = finish(home, ["base", ...])                          # to the end
status, said = signalled(home, ["base", ...], 5, SIGKILL)   # sent by itself in its fifth step: never too late
"""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import warm_process

from ascendchat.cli import main
from ascendchat.data.prepare import prepare
from ascendchat.data.tokenizer.tokenizer import train_tokenizer

WORDS = ["red", "blue", "tree", "river", "stone", "bird", "walks", "sings", "under", "over", "the", "a"]
SIGNALLED = """
import os, sys
from ascendchat.cli import main
from ascendchat.train import loop

def train_step(stage, step, *more):
    if step + 1 == int(sys.argv[1]):
        os.kill(os.getpid(), int(sys.argv[2]))
    return plain(stage, step, *more)

plain, loop.train_step = loop.train_step, train_step
sys.exit(main(sys.argv[3:]))
"""


def sentence(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words)) + "."


def sentences(count: int) -> list[str]:
    """Of 5 to 60 words, always the same ones."""
    rng = random.Random(0)
    return [sentence(rng, rng.randint(5, 60)) for _ in range(count)]


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def prepare_texts(home: Path, texts: list[str]) -> Path:
    """A tokenizer of 300 tokens for these texts, and a corpus of them, of which a tenth is held out."""
    train_tokenizer(texts, 300).save(home / "tokenizer")
    source = write_lines(home / "text.jsonl", [{"text": text} for text in texts])
    prepare([str(source)], home / "tokenizer", home / "words", val_fraction=0.1, workers=1)
    return home / "words"


def finish(home: Path, words: list[str], status: int = 0) -> str:
    """The command in this process, in the folder that is also $ASCENDCHAT_HOME; what it said."""
    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(output), redirect_stderr(output):
        patch.setenv("ASCENDCHAT_HOME", str(home))
        patch.chdir(home)
        assert main(words) == status, output.getvalue()
    return output.getvalue()


def run_apart(home: Path, words: list[str], how: Any = warm_process.Popen) -> tuple[int, str]:
    """Python with these words in a process of its own: its status, and what it said."""
    environment = {**os.environ, "ASCENDCHAT_HOME": str(home), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = warm_process.run([sys.executable, *words], how=how, env=environment, cwd=home, **both)
    return done.returncode, done.stdout


def signalled(
    home: Path, words: list[str], step: int, number: signal.Signals, how: Any = warm_process.Popen
) -> tuple[int, str]:
    """The command, which sends itself a signal when this step begins."""
    return run_apart(home, ["-c", SIGNALLED, str(step), str(int(number)), *words], how)
