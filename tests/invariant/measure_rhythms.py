"""How much faster stream and async are than sync: the same work, answers of very different lengths, real training.

python tests/invariant/measure_rhythms.py [STEPS] [ROUNDS]      # some minutes; also on a machine that is busy

The server is a real one whose engine is paced: a step that extends all answers by a token takes no less than a fixed
time, however many answers there are, as on an accelerator that is bound by its memory. So generating is waiting, and
does not take the trainer's cores. The pace is chosen so that the longest answer takes TAIL times as long as training on
a batch. The rhythms take turns, since the machine may be busier at one time than at another.

The model is a table in the weights of a transformer: nine of ten answers end after 24 tokens or so, the tenth after
hundreds. Its reward is the share of vowels, which it learns.
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
MOST, ANSWERS = 256, 64  # tokens of an answer; answers of a step, which are also the slots of the server
TAIL = 1.3
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
    import os, time
    from ascendchat.infer.engine import Engine

    step = Engine.step

    def paced(self):
        begin = time.monotonic()
        step(self)
        with open(os.environ["PACE"]) as file:
            left = float(file.read() or 0) - (time.monotonic() - begin)
        time.sleep(max(0.0, left))

    Engine.step = paced
"""


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


def figures(home: Path, run: str, rhythm: str, url: str, *, steps: int, seed: int) -> list[dict[str, float]]:
    """Of each step of a run."""
    flags = [*WORK.split(), "--reward", "letters:vowels", "--seed", str(seed), "--staleness", "2"]
    runs.finish(home, runs.words(run, *flags, "--rhythm", rhythm, "--rollouts", url, steps=steps))
    return runs.rows_of(home, run)


def mean(rows: list[dict[str, float]], name: str) -> float:
    return statistics.mean(row[name] for row in rows)


def set_pace(home: Path, url: str) -> None:
    """By a few steps in turn: seconds of a token, so that the longest answer takes TAIL times as long as training."""
    rows = figures(home, "calibrate", "sync", url, steps=WARM + 3, seed=100)[WARM:]
    training = statistics.median(row["seconds"] - row["trainer_waited"] for row in rows)
    pace = TAIL * training / MOST
    (home / "pace").write_text(str(pace), encoding="utf-8")
    print(f"training takes {training:.2f} s a step; a token {pace * 1e3:.1f} ms; was {mean(rows, 'trainer_waited'):.2f}")


def main(steps: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        home = runs.make_home(Path(folder), table())
        for name, text in (("letters.py", REWARD), ("sitecustomize.py", PACED), ("pace", "0.001")):
            (home / name).write_text(text, encoding="utf-8")
        os.environ |= {"PACE": str(home / "pace"), "PYTHONPATH": str(home)}
        seen: dict[str, list[dict[str, float]]] = {rhythm: [] for rhythm in RHYTHMS}
        last: dict[str, list[float]] = {rhythm: [] for rhythm in RHYTHMS}
        with runs.serving(home, "--slots", str(ANSWERS)) as server:
            set_pace(home, server.url)
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
