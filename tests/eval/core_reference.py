"""CORE in the plainest way: one example per forward pass, every prompt encoded and run whole, all logits made.

The batched evaluation (ascendchat/eval) is tested against this, and its speed is measured against it:

    results = run(model, dense(model, kernel), tokenizer, load_bundle(folder), torch.device("cpu"))
    results["copa"][0].correct, results["copa"][0].means

It shares no code with the evaluation but the bundle's reader.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch

from ascendchat.eval.core_benchmark import CoreTask
from ascendchat.nn.loss import softcap


class Judged(NamedTuple):
    """One example: right or wrong, mean nats per option (empty for language modelling), greedy hits, prompt cut."""

    correct: bool
    means: list[float]
    hits: list[bool]
    cropped: bool


def texts_of(task: CoreTask, index: int, rows: list[dict[str, Any]]) -> list[str]:
    """The prompts of one row, with the demonstrations drawn from all other rows."""
    text = ""
    if task.shots > 0:
        others = [i for i in range(len(rows)) if i != index]
        for i in random.Random(1234 + index).sample(others, task.shots):
            shot = rows[i]
            if task.kind == "multiple_choice":
                text += shot["query"] + task.delimiter + shot["choices"][shot["gold"]]
            elif task.kind == "schema":
                text += shot["context_options"][shot["gold"]] + task.delimiter + shot["continuation"]
            else:
                text += shot["context"].strip() + task.delimiter + shot["continuation"]
            text += "\n\n"
    row = rows[index]
    if task.kind == "multiple_choice":
        return [text + row["query"] + task.delimiter + choice for choice in row["choices"]]
    if task.kind == "schema":
        return [text + context + task.delimiter + row["continuation"] for context in row["context_options"]]
    without = text + row["context"].strip() + task.delimiter
    return [without.strip(), without + row["continuation"]]


def spans_of(task: CoreTask, ids: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """The sequences to run, and where the scored part of each begins."""
    if task.kind == "language_modeling":
        without, whole = ids
        same = 0
        while same < min(len(without), len(whole)) and without[same] == whole[same]:
            same += 1
        return [whole], [same]
    same = 0
    if task.kind == "multiple_choice":
        while all(same < len(row) for row in ids) and len({row[same] for row in ids}) == 1:
            same += 1
        return ids, [same for _ in ids]
    while all(same < len(row) for row in ids) and len({row[-1 - same] for row in ids}) == 1:
        same += 1
    return ids, [len(row) - same for row in ids]


@torch.no_grad()
def judge(
    model: Any,
    attend: Any,
    tokenizer: Any,
    task: CoreTask,
    index: int,
    rows: list[dict[str, Any]],
    device: Any,
    max_len: int,
) -> Judged:
    """One example, one forward pass."""
    bos = tokenizer.specials["<|bos|>"]
    ids = [[bos] + tokenizer.encode(text) for text in texts_of(task, index, rows)]
    sequences, starts = spans_of(task, ids)
    cropped = False
    for i, sequence in enumerate(sequences):
        extra = len(sequence) - max_len
        if extra > 0:
            sequences[i] = sequence[-max_len:]
            starts[i] = max(1, starts[i] - extra)
            cropped = True
    longest = max(len(sequence) for sequence in sequences)
    batch = torch.tensor([sequence + [bos] * (longest - len(sequence)) for sequence in sequences], device=device)
    logits = softcap(model(batch, attend) @ model.head[: model.shape.vocab].t())
    log_probabilities = torch.log_softmax(logits, dim=-1)
    means: list[float] = []
    hits: list[bool] = []
    for i, (sequence, start) in enumerate(zip(sequences, starts)):
        wanted = batch[i, start : len(sequence)]
        before = slice(start - 1, len(sequence) - 1)
        if task.kind == "language_modeling":
            hits = (logits[i, before].argmax(-1) == wanted).tolist()
        else:
            means.append(float(-log_probabilities[i, before].gather(-1, wanted[:, None]).mean()))
    if task.kind == "language_modeling":
        return Judged(len(hits) > 0 and all(hits), means, hits, cropped)
    return Judged(means.index(min(means)) == rows[index]["gold"], means, hits, cropped)


def run(
    model: Any,
    attend: Any,
    tokenizer: Any,
    tasks: list[CoreTask],
    device: Any,
    *,
    max_rows: int | None = None,
    max_len: int | None = None,
) -> dict[str, list[Judged]]:
    """All examples of all tasks that are there, in the order of the tasks' rows."""
    results = {}
    for task in tasks:
        if task.missing:
            continue
        rows = task.rows[:max_rows]
        limit = max_len or model.shape.seq_len
        results[task.label] = [judge(model, attend, tokenizer, task, i, rows, device, limit) for i in range(len(rows))]
    return results
