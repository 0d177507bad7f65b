"""Questions, answers and what they are worth: what a step of RL trains on.

questions = Questions(("gsm8k=0.7", "toy_problems=0.3"), tokenizer, seed=0, room=256)
asked = questions.ask(number)                             # question `number` of the run: a pure function of the seed
groups = Rollout(questions, generator, judge, ...).groups(numbers)
rows = pack(groups, weights, seq_len, pad)                # for train/rl.py
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ascendchat.config import UserError
from ascendchat.data.arrange import shuffled
from ascendchat.data.chat import render_prompt
from ascendchat.data.mixture import locate, parse_mixture, shares
from ascendchat.data.pack import best_fit
from ascendchat.data.tokenizer import Tokenizer
from ascendchat.infer.generator import Generator
from ascendchat.infer.request import Completion, Request, Sampling
from ascendchat.nn import IGNORE
from ascendchat.tasks import Task, load
from ascendchat.tasks.rewards import Judge

SPARE = 1 << 40  # number of the first question that is asked in place of another


@dataclass(frozen=True)
class Question:
    """One question of the run."""

    number: int
    task: Task
    index: int  # of its row
    prompt: list[int]


@dataclass
class Group:
    """The answers to one question."""

    question: Question
    answers: list[Completion]
    rewards: list[float]
    judged: int = 0  # answers that could be judged
    advantages: list[float] = field(default_factory=list)

    @property
    def differ(self) -> bool:
        return max(self.rewards) > min(self.rewards)


class Questions:
    """The questions of a run in their order: entries by weight, the rows of each in a new order every time round."""

    def __init__(self, data: Sequence[str], tokenizer: Tokenizer, seed: int, room: int, source: str = "") -> None:
        entries = parse_mixture(data)
        self.tokenizer, self.seed, self.room = tokenizer, seed, room
        self.tasks = [load(name, "train", source) for name, _ in entries]
        for (name, _), task in zip(entries, self.tasks):
            if task.kind != "reply":
                raise UserError(
                    f"--data {name}: its answers cannot be judged; choose tasks such as gsm8k, toy_problems"
                )
        weights = [float(len(task)) if weight is None else weight for (_, weight), task in zip(entries, self.tasks)]
        self.weights, self._shares = weights, shares(weights)
        self._order = cache(lambda which, epoch: shuffled(len(self.tasks[which]), seed, epoch, which))

    @property
    def per_epoch(self) -> int:
        return sum(map(len, self.tasks))

    @property
    def fingerprint(self) -> str:
        """Of what is asked."""
        digest = hashlib.sha256()
        for task, weight in zip(self.tasks, self.weights):
            digest.update(f"{task.name} {len(task)} {weight} {task.question(0)}\n".encode())
        return digest.hexdigest()[:16]

    def ask(self, number: int) -> Question:
        """Question `number` of the run."""
        which, row = locate(self._shares, number)
        epoch, place = divmod(row, len(self.tasks[which]))
        index = int(self._order(which, epoch)[place])
        prompt = render_prompt(self.tokenizer, self.tasks[which].prompt(index), self.room)
        return Question(number, self.tasks[which], index, prompt)


def answer_seed(seed: int, number: int, sample: int) -> int:
    """Of the noise of one answer: the same whatever is generated beside it, another one for every answer of a run."""
    return int.from_bytes(hashlib.sha256(f"{seed} {number} {sample}".encode()).digest()[:7], "big")


@dataclass
class Rollout:
    """Asks, lets answer and judges."""

    questions: Questions
    generator: Generator
    judge: Judge
    sampling: Sampling
    samples: int
    seed: int
    shape_reward: Callable[[float, Completion], float] = lambda reward, answer: reward

    def groups(self, numbers: Iterable[int]) -> list[Group]:
        """All answers to these questions. What cannot be judged counts like the worst answer of its group."""
        asked = [self.questions.ask(number) for number in numbers]
        requests = [
            Request(question.prompt, replace(self.sampling, seed=answer_seed(self.seed, question.number, sample)))
            for question in asked
            for sample in range(self.samples)
        ]
        answers = self.generator.generate(requests)
        owners = [question for question in asked for _ in range(self.samples)]
        rewards = self.judge.rewards(
            [(question.task, question.index, answer.text) for question, answer in zip(owners, answers)]
        )
        groups = []
        for i, question in enumerate(asked):
            span = slice(i * self.samples, (i + 1) * self.samples)
            known = [reward for reward in rewards[span] if reward is not None]
            worst = min(known, default=0.0)
            filled = [worst if reward is None else reward for reward in rewards[span]]
            shaped = [self.shape_reward(reward, answer) for reward, answer in zip(filled, answers[span])]
            groups.append(Group(question, answers[span], shaped, len(known)))
        return groups


@dataclass(frozen=True)
class TokenRows:
    """Answers packed into rows of T tokens, on the host."""

    inputs: NDArray[np.int64]  # (n, T)
    targets: NDArray[np.int64]  # (n, T), IGNORE where the model did not choose
    advantage: NDArray[np.float32]  # (n, T), like those below: of the target
    behaviour: NDArray[np.float32]
    weight: NDArray[np.float32]
    lengths: NDArray[np.int32]  # tokens of each segment, row after row

    @classmethod
    def empty(cls, rows: int, seq_len: int, pad: int) -> TokenRows:
        """Rows of padding, which nothing is learnt from."""
        size = (rows, seq_len)
        inputs, targets = np.full(size, pad, np.int64), np.full(size, IGNORE, np.int64)
        advantage, behaviour, weight = np.zeros((3, *size), np.float32)
        return cls(inputs, targets, advantage, behaviour, weight, np.full(rows, seq_len, np.int32))

    def cut(self, rows: int, pad: int, *, fill: bool = True) -> list[TokenRows]:
        """Parts of `rows` rows. The last is filled up with padding, as a compiled model wants it, or with fill=False
        has what is left; nothing at all becomes a part of padding."""
        seq_len = self.inputs.shape[1]
        missing = (-len(self.inputs) % rows if fill else 0) if len(self.inputs) else (rows if fill else 1)
        filler = TokenRows.empty(missing, seq_len, pad)
        columns = [np.concatenate((mine, more)) for mine, more in zip(self.columns, filler.columns)]
        lengths = np.concatenate((self.lengths, filler.lengths))
        ends = np.cumsum(lengths)  # segments never cross the end of a row
        parts = []
        for begin in range(0, len(columns[0]), rows):
            inside = (ends > begin * seq_len) & (ends <= (begin + rows) * seq_len)
            inputs, targets, advantage, behaviour, weight = (column[begin : begin + rows] for column in columns)
            parts.append(TokenRows(inputs, targets, advantage, behaviour, weight, lengths[inside]))
        return parts

    @property
    def columns(self) -> tuple[NDArray[Any], ...]:
        return self.inputs, self.targets, self.advantage, self.behaviour, self.weight


def pack(groups: Sequence[Group], weights: Sequence[float], seq_len: int, pad: int) -> TokenRows:
    """The answers of all groups in as few rows as they fit; `weights` are those of the tokens of each answer.

    A token that a tool put there is read and not learnt. A sequence of n tokens takes n - 1 places."""
    answers = [(group, i) for group in groups for i in range(len(group.answers))]
    lengths = [len(group.question.prompt) + len(group.answers[i].ids) - 1 for group, i in answers]
    members = best_fit(lengths, seq_len)
    rows = TokenRows.empty(len(members), seq_len, pad)
    segments: list[int] = []
    for row, numbers in enumerate(members):
        at = 0
        for number in numbers:
            group, i = answers[number]
            prompt, answer = group.question.prompt, group.answers[i]
            whole, begin = [*prompt, *answer.ids], at + len(prompt) - 1
            end = at + lengths[number]
            rows.inputs[row, at:end] = whole[:-1]
            chosen = np.array(answer.forced) == 0
            rows.targets[row, begin:end] = np.where(chosen, answer.ids, IGNORE)
            rows.behaviour[row, begin:end] = [0.0 if value is None else value for value in answer.logprobs]
            rows.advantage[row, begin:end] = group.advantages[i]
            rows.weight[row, begin:end] = weights[number]
            segments.append(lengths[number])
            at = end
        if at < seq_len:
            segments.append(seq_len - at)
    return replace(rows, lengths=np.array(segments, np.int32))
