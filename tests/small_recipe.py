"""A recipe with every kind of stage, each of a few steps on a few texts, for tests of the whole way.

path = write_recipe(folder)      # own.yaml, and the files that it names
"""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path

WORDS = ["red", "blue", "tree", "river", "stone", "bird", "walks", "sings", "under", "over", "the", "a"]
SHORT = "device_batch_size: 2, total_batch_size: 256, save_every: 4, eval_every: -1, sample_every: 0, log_every: 1"
RECIPE = """
about: every stage, a few steps of each
run: tiny
stages:
  - tokenizer train: {{source: [{text}], vocab_size: 300}}
  - data prepare: {{source: [{text}], out: $HOME/data/words, val_fraction: 0.1, workers: 1}}
  - base: {{depth: 2, dim: 32, head_dim: 16, max_seq_len: 64, data: [$HOME/data/words], num_iterations: {steps},
           {short}}}
  - mid: {{data: [{chats}, $HOME/data/words], num_iterations: {steps}, {short}}}
  - sft: {{data: [{chats}], num_iterations: {steps}, {short}}}
  - rl: {{data: [toy_arithmetic_en], prompts_per_step: 2, samples: 2, refill: 0, max_new_tokens: 4, num_iterations: 2,
         device_batch_size: 2, eval_every: -1, save_every: 1, sample_every: 0}}
  - eval chat: {{stage: rl, tasks: [toy_arithmetic_en], max_per_task: 4, max_new_tokens: 4}}
"""


def write_recipe(folder: Path, steps: int) -> Path:
    """The recipe in a folder, with training stages of so many steps."""
    rng = random.Random(0)
    texts = [" ".join(rng.choice(WORDS) for _ in range(rng.randint(5, 40))) + "." for _ in range(200)]
    text, chats = folder / "text.jsonl", folder / "chats.jsonl"
    text.write_text("\n".join(json.dumps({"text": t}) for t in texts), encoding="utf-8")
    turns = [[{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in pairwise(texts)]
    chats.write_text("\n".join(json.dumps({"messages": turn}) for turn in turns), encoding="utf-8")
    path = folder / "own.yaml"
    path.write_text(RECIPE.format(text=text, chats=chats, steps=steps, short=SHORT), encoding="utf-8")
    return path
