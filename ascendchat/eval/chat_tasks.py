"""Evaluates a chat model on one task: multiple choice by the logits of the letters, other tasks by its replies.

    evaluate_task(task, evaluator)                     # -> Outcome; `ascendchat eval chat` does it for every task

Multiple choice takes one forward pass for many prompts: where the answer begins, the letter with the highest logit is
the model's choice. Without access to the model, its Generator is asked for one token that must be a letter. For other
tasks the model generates, and the task judges the text. Each of N ranks takes every N-th row, and all of them get all
results.
"""

from __future__ import annotations

import hashlib
import os
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Protocol

import torch
from torch import Tensor

from ascendchat.data.chat.render import Counts, Encoder, render_prompt
from ascendchat.engine.padding import padded_length, stack, to_device
from ascendchat.engine.request import Generator, Request, Sampling, prompt_room
from ascendchat.errors import UserError
from ascendchat.eval.core_benchmark import centre
from ascendchat.eval.scorer import batches
from ascendchat.nn.attention import Attention, dense
from ascendchat.nn.model import LanguageModel
from ascendchat.parallel import collectives
from ascendchat.tasks.by_name import pass_at_k
from ascendchat.tasks.task import Task

CHUNK = 1024  # prompts submitted at a time
SHUFFLE_SEED = 1337  # decides which rows are taken when not all are: tables are sorted by subject
MEASURED_PROMPTS = 32  # of each task, to check their length before the start
JUDGES = 4  # programs of HumanEval that run at once, per rank

Chosen = Callable[[], list[int]]


class _Chooser(Protocol):
    """A model that chooses between tokens."""

    reserved: int  # tokens of the context that a prompt must leave free

    def submit(self, prompts: Sequence[list[int]], options: Sequence[list[int]]) -> Chosen:
        """Begin. The returned function waits, and gives for each prompt the index of its most likely next token among
        `options`."""


class ModelChooser:
    """Chooses with a model in this process; the host waits for the device only when results are read."""

    reserved = 0

    def __init__(
        self,
        model: LanguageModel,
        kernel: Attention,
        device: torch.device,
        *,
        max_tokens: int,
        max_len: int,
        pin: bool = False,
    ) -> None:
        self.model, self.kernel, self.put = model, kernel, partial(to_device, place=device, pin=pin)
        self.max_tokens, self.room = max_tokens, padded_length(max_len)

    @torch.no_grad()
    def submit(self, prompts: Sequence[list[int]], options: Sequence[list[int]]) -> Chosen:
        order: list[int] = []
        parts: list[Tensor] = []
        for batch in batches([len(prompt) for prompt in prompts], self.max_tokens):
            order += batch
            parts.append(self.choose([prompts[i] for i in batch], [options[i] for i in batch]))

        def collect() -> list[int]:
            flat = torch.cat(parts).tolist() if parts else []
            by_prompt = dict(zip(order, flat))
            return [by_prompt[i] for i in range(len(prompts))]

        return collect

    def choose(self, prompts: Sequence[list[int]], options: Sequence[list[int]]) -> Tensor:
        """(B,) index of the chosen option. Padding stands behind the prompts, where a causal model cannot see it."""
        tokens = self.put(stack(prompts, padded_length(max(map(len, prompts)))))
        hidden = self.model(tokens, dense(self.model, self.kernel, self.room))  # (B, T, C)
        last = self.put([i * hidden.size(1) + len(prompt) - 1 for i, prompt in enumerate(prompts)])
        final = hidden.flatten(0, 1).index_select(0, last).float()  # (B, C)
        width = max(map(len, options))
        # Rows with fewer options repeat their first one: of equals the first is chosen.
        ids = self.put([[*row, *[row[0]] * (width - len(row))] for row in options])  # (B, O)
        heads = self.model.head.index_select(0, ids.flatten()).float().view(len(prompts), width, -1)  # (B, O, C)
        # A soft cap on logits keeps their order, so it can be left out.
        return torch.bmm(heads, final[:, :, None])[:, :, 0].argmax(dim=1)


class GeneratorChooser:
    """Chooses with any Generator, local or remote: by the likeliest next token among the options."""

    reserved = 1

    def __init__(self, generator: Generator) -> None:
        self.generator = generator

    def submit(self, prompts: Sequence[list[int]], options: Sequence[list[int]]) -> Chosen:
        greedy = partial(Sampling, max_tokens=1, temperature=0.0, stop_tokens=(), tools=False)
        requests = [Request(p, greedy(allowed_tokens=tuple(row))) for p, row in zip(prompts, options)]
        answers = self.generator.generate(requests)
        return lambda: [row.index(answer.ids[0]) for row, answer in zip(options, answers)]


@dataclass(frozen=True)
class TaskEvaluator:
    """The model to evaluate, and the settings of its replies."""

    tokenizer: Encoder
    chooser: _Chooser
    generator: Generator  # writes replies
    max_tokens: int = 512  # of a reply
    samples: int = 1  # replies per question
    temperature: float = 0.0
    seed: int = 0
    max_rows: int | None = None  # per task

    def room(self, task: Task) -> int:
        """Tokens that a prompt may have: all but those of the reply, which takes half of the context at most."""
        context = self.generator.context
        return context - self.chooser.reserved if task.kind == "choice" else prompt_room(context, self.max_tokens)


@dataclass
class Outcome:
    """The result of one task."""

    name: str
    kind: str
    split: str
    rows: int  # evaluated
    rows_in_task: int
    accuracy: float  # of one answer: the mean over samples where several are drawn
    baseline: float
    centred: float
    pass_at: dict[str, float]  # k -> chance that one of k answers is right; for tasks answered in words
    cropped: int  # prompts that lost their beginning
    seconds: float
    right: list[int] = field(default_factory=list, repr=False)  # per row: number of right answers


def selection(task: Task, limit: int | None) -> list[int]:
    """The rows to evaluate: all, or the first ones in a shuffled order that is the same in every run."""
    rows = list(range(len(task)))
    if limit is None or limit >= len(rows):
        return rows
    random.Random(SHUFFLE_SEED).shuffle(rows)
    return rows[:limit]


def check_room(tasks: Sequence[Task], evaluator: TaskEvaluator) -> None:
    """Refuse a --context in which not even the shortest of a task's first prompts is whole: a score would say nothing
    about the model."""
    for task in tasks:
        rows = selection(task, evaluator.max_rows)[:MEASURED_PROMPTS]
        shortest = min((len(render_prompt(evaluator.tokenizer, task.prompt(row))) for row in rows), default=0)
        context, room = evaluator.generator.context, evaluator.room(task)
        if shortest > room:
            raise UserError(
                f"--context {context} leaves a prompt {room} tokens, and those of {task.name} have {shortest} and "
                "more; give a larger --context, or leave it out"
            )


def evaluate_task(task: Task, evaluator: TaskEvaluator) -> Outcome:
    """Evaluate one task on all ranks."""
    began, world = time.perf_counter(), collectives.world()
    chosen, counts = selection(task, evaluator.max_rows), Counts()
    mine = chosen[world.rank :: world.size]
    own = (_choices if task.kind == "choice" else _replies)(task, evaluator, mine, counts)
    gathered = collectives.gather_objects((dict(zip(mine, own)), counts.cut_prompts))
    every = {row: right for part, _ in gathered for row, right in part.items()}
    right = [every[row] for row in chosen]
    samples = 1 if task.kind == "choice" else evaluator.samples
    accuracy = sum(right) / (len(right) * samples) if right else float("nan")
    pass_at = {}
    if task.kind != "choice" and right:
        for k in sorted({1, *(2**i for i in range(1, samples.bit_length())), samples}):
            pass_at[str(k)] = sum(pass_at_k(samples, each, k) for each in right) / len(right)
    return Outcome(
        name=task.name,
        kind=task.kind,
        split=task.split,
        rows=len(chosen),
        rows_in_task=len(task),
        accuracy=accuracy,
        baseline=task.baseline,
        centred=centre(accuracy, task.baseline),
        pass_at=pass_at,
        cropped=sum(cut for _, cut in gathered),
        seconds=time.perf_counter() - began,
        right=right,
    )


def _choices(task: Task, evaluator: TaskEvaluator, rows: Sequence[int], counts: Counts) -> list[int]:
    """1 for every row whose right letter was chosen, else 0."""
    token = cache(lambda letter: evaluator.tokenizer.encode(letter)[0])
    pending: list[Chosen] = []
    for first in range(0, len(rows), CHUNK):
        part = rows[first : first + CHUNK]
        prompts = [render_prompt(evaluator.tokenizer, task.prompt(row), evaluator.room(task), counts) for row in part]
        pending.append(evaluator.chooser.submit(prompts, [[token(x) for x in task.letters(row)] for row in part]))
    answers = [answer for chosen in pending for answer in chosen()]
    return [int(answer == task.answer(row)) for row, answer in zip(rows, answers)]


def seed_of(*key: object) -> int:
    """A seed that depends on the question and the sample alone, not on rank or batch."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=4).digest(), "big") >> 1


def _replies(task: Task, evaluator: TaskEvaluator, rows: Sequence[int], counts: Counts) -> list[int]:
    """The number of right replies to each row. Replies are judged while the next ones are generated."""
    limit = evaluator.room(task)
    sampling = partial(Sampling, evaluator.max_tokens, evaluator.temperature)
    verdicts: list[Future[bool]] = []
    with ThreadPoolExecutor(min(JUDGES, os.cpu_count() or 1)) as judges:
        for first in range(0, len(rows), CHUNK):
            part = rows[first : first + CHUNK]
            prompts = [render_prompt(evaluator.tokenizer, task.prompt(row), limit, counts) for row in part]
            samples = [(row, prompt, i) for row, prompt in zip(part, prompts) for i in range(evaluator.samples)]
            seeds = [seed_of(evaluator.seed, task.name, row, i) for row, _, i in samples]
            requests = [Request(prompt, sampling(seed=seed)) for (_, prompt, _), seed in zip(samples, seeds)]
            answers = evaluator.generator.generate(requests)
            verdicts += [judges.submit(task.correct, row, reply.text) for (row, _, _), reply in zip(samples, answers)]
        flat = [verdict.result() for verdict in verdicts]
    return [sum(flat[i : i + evaluator.samples]) for i in range(0, len(flat), evaluator.samples)]
