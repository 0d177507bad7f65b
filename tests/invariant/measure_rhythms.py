"""How much faster stream and async are than sync: the same work, answers of very different lengths.

python tests/invariant/measure_rhythms.py [STEPS] [ROUNDS]      # some minutes; also on a machine that is busy

Everything is real, the server, the weights that go to it, the gradients, but of a tiny model; and both sides are paced,
as if each had an accelerator: extending all answers by a token takes no less than TOKEN seconds, however many answers
there are (a decoder is bound by its memory), and training on a row of tokens ROW seconds more than it does. So both
sides mostly wait, on however busy a machine, and what is measured is who waits for whom. The rhythms take turns.

The model is a table in the weights of a transformer: 19 of 20 answers end after 12 tokens or so, the other after
a hundred. The longest answer takes about as long as training on a batch. The reward is the share of vowels.
"""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # torch_npu may be here without a CANN
os.environ["OMP_NUM_THREADS"] = "1"
import rl_runs as runs
import torch
from engine_models import tokenizer

from ascendchat.nn.gpt import GPT
from ascendchat.sizes.shape import Shape

LETTERS, SHORT, LONG = 16, 12, 100  # letters of a kind; tokens of an answer on average
MOST, ANSWERS = 128, 64  # tokens of an answer; answers of a step, which are also the slots of the server
TOKEN, ROW = 0.14, 0.8  # seconds
WARM = 2  # steps of a run that are not counted
WORK = f"--prompts-per-step 16 --samples 4 --max-new-tokens {MOST} --refill 0 --save-every -1 --lr-multiplier 0.02"
RHYTHMS = "sync", "stream", "async"
FIGURES = "seconds", "answer_tokens", "trainer_waited", "rollouts_waited", "staleness_mean", "staleness_max", "reward"
REWARD = """
def vowels(prompt, completion, **row):
    return sum(letter in "aeiouAEIOU" for letter in completion) / max(1, len(completion))
"""
PACED = """
import sys

if "ascendchat.serve.worker" in sys.orig_argv:
    import time
    from ascendchat.engine.engine import Engine

    step = Engine.step

    def paced(self):
        begin = time.monotonic()
        step(self)
        time.sleep(max(0.0, TOKEN - (time.monotonic() - begin)))

    Engine.step = paced
elif "rl" in sys.orig_argv:
    import time
    from ascendchat.rl.stage import RlStage

    plain = RlStage.forward_backward

    def paced(self, batch, scale=1.0):
        time.sleep(ROW * len(batch.inputs))
        return plain(self, batch, scale)

    RlStage.forward_backward = paced
""".replace("TOKEN", str(TOKEN)).replace("ROW", str(ROW))


def table() -> GPT:
    """Lower-case letters follow each other until the end, upper-case ones for longer; few answers begin with those."""
    text = tokenizer()
    shape = Shape.from_depth(2, vocab=text.vocab_size, seq_len=192, dim=64, head_dim=32, value_embeddings=False)
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
        made.head[list(upper), 2] = (6.0 - math.log(19.0)) / unit
    return made


def figures(home: Path, run: str, rhythm: str, url: str, *, steps: int, seed: int) -> list[dict[str, float]]:
    """Of each step of a run."""
    flags = [*WORK.split(), "--reward", "letters:vowels", "--seed", str(seed), "--staleness", "2"]
    command = runs.words(run, *flags, "--rollout-mode", rhythm, "--rollouts", url, steps=steps)
    runs.finish(home, command)
    return runs.rows_of(home, run)


def mean(rows: list[dict[str, float]], name: str) -> float:
    return statistics.mean(row[name] for row in rows)


def main(steps: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        home = runs.make_home(Path(folder), table())
        for name, text in (("letters.py", REWARD), ("sitecustomize.py", PACED)):
            (home / name).write_text(text, encoding="utf-8")
        os.environ["PYTHONPATH"] = str(home)
        runs.Popen = runs.ServerPopen = subprocess.Popen  # those that start warm know no sitecustomize
        seen: dict[str, list[dict[str, float]]] = {rhythm: [] for rhythm in RHYTHMS}
        last: dict[str, list[float]] = {rhythm: [] for rhythm in RHYTHMS}
        with runs.serving(home, "--slots", str(ANSWERS)) as server:
            for number in range(rounds):
                for rhythm in RHYTHMS if number % 2 == 0 else reversed(RHYTHMS):
                    rows = figures(home, f"{rhythm}-{number}", rhythm, server.url, steps=steps, seed=number)
                    seen[rhythm] += rows[WARM:]
                    last[rhythm].append(statistics.mean(row["reward"] for row in rows[-steps // 4 :]))
                    shown = ", ".join(f"{name} {mean(rows[WARM:], name):.2f}" for name in FIGURES)
                    print(f"{rhythm:7} {shown}", flush=True)
        base = mean(seen["sync"], "seconds")
        for rhythm, rows in seen.items():
            took = mean(rows, "seconds")
            first = max(row["staleness_max"] for row in rows)
            rewards = " ".join(f"{reward:.3f}" for reward in last[rhythm])
            print(f"{rhythm:7} {took:6.2f} s/step  {base / took:5.2f}x  oldest {first:.0f}  last rewards {rewards}")


if __name__ == "__main__":
    given = [int(word) for word in sys.argv[1:]]
    main(*(given + [12, 2][len(given) :]))
