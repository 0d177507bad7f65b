"""Evaluation on several ranks: each scores its share, and all of them know the whole result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core_bundle import write_bundle
from ranks import Host, run_ranks
from test_core import Hashed, text_rows

from ascendchat.eval.bits import bits_per_byte
from ascendchat.eval.core_benchmark import load_bundle, score_tasks
from ascendchat.eval.scorer import ModelScorer
from ascendchat.nn.attention import choose
from ascendchat.nn.gpt import GPT
from ascendchat.parallel import collectives
from ascendchat.sizes.shape import Shape

TEXTS = [f"{'the cat sat ' * n}on the mat." for n in range(13)]


def score(rank: int, folder: str) -> dict[str, Any]:
    collectives.init(Host())
    model = GPT(Shape.from_depth(2, vocab=41, dim=32, head_dim=16, seq_len=256))
    model.initialise(seed=0)
    scorer = ModelScorer(model, choose("cpu", torch.float32, 16)[0], torch.device("cpu"))
    report = score_tasks(load_bundle(Path(folder)), scorer, Hashed(), max_len=90, say=lambda text: None)
    bits = bits_per_byte(scorer, text_rows(Hashed(), TEXTS, 16), np.full(41, 2))
    collectives.teardown()
    tasks = {task.label: (task.correct, task.cropped) for task in report.tasks}
    return {"tasks": tasks, "core": report.to_dict()["core"], "bits": (bits.tokens, bits.bytes, bits.nats)}


@pytest.mark.slow
def test_three_ranks_give_the_result_of_one(tmp_path: Path) -> None:
    folder = str(write_bundle(tmp_path / "bundle"))
    alone = run_ranks(score, 1, folder)[0]
    assert alone["tasks"]["choice"][1] > 0  # some prompts were cut, so that the count is worth comparing
    for found in run_ranks(score, 3, folder, seconds=120):
        assert found["tasks"] == alone["tasks"]
        assert found["core"] == alone["core"]
        assert found["bits"] == pytest.approx(alone["bits"], rel=1e-6)
