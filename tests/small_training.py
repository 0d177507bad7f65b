"""A small model in training, for tests that compare devices and kernels with the CPU, and what a small run reads."""

from __future__ import annotations

import multiprocessing
import random
from pathlib import Path

import pytest
import torch

from ascendchat.data.prepare import prepare
from ascendchat.data.tokenizer.tokenizer import train_tokenizer
from ascendchat.nn.attention import Attention
from ascendchat.nn.gpt import GPT, dense
from ascendchat.nn.loss import head_loss
from ascendchat.nn.optim import MuonAdamW, groups
from ascendchat.sizes.schedule import lr_scale, rates
from ascendchat.sizes.shape import Shape


def train_model(shape: Shape, place: torch.device, dtype: torch.dtype, ops: object = None) -> tuple[GPT, MuonAdamW]:
    model = GPT(shape, ops)  # type: ignore[arg-type]
    model.initialise(0)
    model = model.to_compute(dtype).to(place)
    made = groups(model, rates(shape.dim, 4096))
    return model, MuonAdamW(made, compute_dtype=dtype, few_launches=ops is not None)


def losses(shape: Shape, place: torch.device, kernel: Attention, ops: object, steps: int) -> list[float]:
    model, optimizer = train_model(shape, place, torch.float32, ops)
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(0, shape.vocab, (8, shape.seq_len + 1), generator=generator)
    attend, found = dense(model, kernel), []
    for step in range(steps):
        batch = data[torch.randint(0, 8, (2,), generator=generator)].to(place)
        loss = head_loss(model(batch[:, :-1], attend), model.head, batch[:, 1:], shape.vocab)
        loss.backward()
        optimizer.step(lr_scale=0.075 * lr_scale(step, steps, warmup=5), momentum=0.9, matrix_decay=0.1)
        found.append(loss.item())
    return found


def prepared_home(folder: Path) -> str:
    """A tokenizer of 300 tokens and prepared text in what becomes ASCENDCHAT_HOME, and the flag that names the text."""
    chance, words = random.Random(0), "red blue tree river stone bird walks sings under over the a".split()
    texts = [" ".join(chance.choices(words, k=chance.randint(5, 60))) + "." for _ in range(100)]
    (folder / "text.txt").write_text("\n".join(texts), encoding="utf-8")
    train_tokenizer(texts, 300).save(folder / "tokenizer")
    forked = multiprocessing.get_context("fork")  # a worker that starts anew imports for a second
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ascendchat.data.prepare.multiprocessing.get_context", lambda way: forked)
        prepare([str(folder / "text.txt")], folder / "tokenizer", folder / "words", val_fraction=0.1, workers=1)
    return f"--data={folder / 'words'}"
