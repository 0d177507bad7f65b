"""How much faster stream and async are than sync: the same work, answers of very different lengths, one core each.

python tests/invariant/measure_rhythms.py [STEPS]      # on a machine that has nothing else to do; some minutes

The model is a table in the weights of a transformer: nine of ten answers end after 24 tokens or so, the tenth after
hundreds. It is trained, but so slowly that the lengths stay what they are.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # torch_npu may be here without a CANN
os.environ["OMP_NUM_THREADS"] = "1"
import rl_runs as runs
import torch
from engine_models import tokenizer

from ascendchat.nn.gpt import GPT
from ascendchat.plan.shape import Shape

LETTERS, SHORT, LONG = 16, 24, 200  # letters of a kind; tokens of an answer on average
REWARD = """
import zlib


def chance(prompt, completion, **row):
    return float(zlib.crc32(completion.encode()) % 2)
"""
WORK = "--prompts-per-step 16 --samples 4 --max-new-tokens 256 --refill 0 --save-every -1 --lr-multiplier 0.000001"


def table() -> GPT:
    """Lower-case letters follow each other until the end, upper-case ones for longer; few answers begin with those."""
    text = tokenizer()
    shape = Shape.from_depth(4, vocab=text.vocab_size, seq_len=384, dim=256, head_dim=32, value_embeddings=False)
    made = GPT(shape)
    made.initialise(0)
    lower, upper = range(97, 97 + LETTERS), range(65, 65 + LETTERS)
    end = text.specials["<|assistant_end|>"]
    with torch.no_grad():
        made.embed.weight.zero_()
        made.embed.weight[:, 2] = 1.0  # whatever else comes before an answer
        for kind, letters in enumerate((lower, upper)):
            made.embed.weight[list(letters), 2] = 0.0
            made.embed.weight[list(letters), kind] = 1.0
        made.head.zero_()
        unit = math.sqrt(shape.dim)  # of a normed vector with a single number
        made.head[:, :3] = -6.0 / unit
        for kind, (letters, length) in enumerate(((lower, SHORT), (upper, LONG))):
            made.head[list(letters), kind] = 6.0 / unit
            made.head[end, kind] = (6.0 + math.log(LETTERS / (length - 1))) / unit
        made.head[list(lower), 2] = 6.0 / unit
        made.head[list(upper), 2] = (6.0 - math.log(9.0)) / unit
    return made


def seconds(home: Path, *flags: str, steps: int) -> tuple[float, dict[str, float]]:
    """Of a whole run, and means of its figures."""
    run = flags[1]
    command = runs.words(run, *WORK.split(), "--reward", "luck:chance", *flags, steps=steps)
    runs.finish(home, command)
    rows = runs.rows_of(home, run)
    names = "answer_tokens", "trainer_waited", "rollouts_waited", "staleness_mean", "staleness_max", "reward"
    return sum(row["seconds"] for row in rows), {name: statistics.mean(row[name] for row in rows) for name in names}


def main(steps: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    assert len(cores) > 1, "this takes two cores"
    with tempfile.TemporaryDirectory() as folder:
        home = runs.make_home(Path(folder), table())
        (home / "luck.py").write_text(REWARD, encoding="utf-8")
        os.sched_setaffinity(0, {cores[0]})  # what is started from here inherits it
        with runs.serving(home, "--slots", "192") as server:
            os.sched_setaffinity(0, {cores[1]})
            base = 0.0
            for rhythm in ("sync", "stream", "async"):
                where = "--rhythm", rhythm, "--rollouts", server.url, "--staleness", "2"
                took, seen = seconds(home, *where, steps=steps)
                base = base or took
                figures = ", ".join(f"{name} {value:.2f}" for name, value in seen.items())
                print(f"{rhythm:7} {took:7.1f} s  {base / took:5.2f}x  {figures}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 12)
