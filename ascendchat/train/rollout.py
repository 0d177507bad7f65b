"""Questions, answers and what they are worth: what a step of RL trains on.

questions = Questions(("gsm8k=0.7", "toy_problems=0.3"), tokenizer, seed=0, room=256)
asked = questions.ask(number)                             # question `number` of the run: a pure function of the seed
rollout = Rollout(questions, generator, judge, ...)
(answers,), _ = rollout.extend([(asked, [])], most=256, version=0)    # or some tokens now and more later
(group,) = rollout.judged([(asked, answers)])
rows = pack(groups, weight_of, seq_len, pad)              # for train/policy.py
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
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
from ascendchat.infer.partial import joined, rest
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
    """Asks, lets answer and judges. Several threads may use it where the generator is elsewhere."""

    questions: Questions
    generator: Generator
    judge: Judge
    sampling: Sampling
    samples: int
    seed: int
    shape_reward: Callable[[float, Completion], float] = lambda reward, answer: reward
    tokens: int = 0  # generated so far
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def extend(
        self, asked: Sequence[tuple[Question, list[Completion]]], most: int, version: int
    ) -> tuple[list[list[Completion]], bool]:
        """All answers to each question with up to `most` tokens, those that they have already included. What can still
        go on has the finish reason "cancelled"; at first there may be no answers at all.

        Tokens of weights older than `version` are left out, as a server gives them that was started again: then the
        second value is True."""
        tokenizer, context = self.questions.tokenizer, self.generator.context
        fresh = [Completion(finish_reason="cancelled")] * self.samples
        answers = [list(begun or fresh) for _, begun in asked]
        going = [
            (i, sample)
            for i, begun in enumerate(answers)
            for sample, answer in enumerate(begun)
            if answer.finish_reason == "cancelled" and len(answer.ids) < most
        ]
        wholes = [self.request(asked[i][0], sample) for i, sample in going]
        begun = [answers[i][sample] for i, sample in going]
        more = self.generator.generate([rest(*pair, tokenizer, most) for pair in zip(wholes, begun)])
        stale = False
        for (i, sample), whole, before, part in zip(going, wholes, begun, more):
            if not len(part.ids) == len(part.logprobs) == len(part.versions) == len(part.forced):
                raise UserError("the generator has not said the log-probability of every token; RL needs them all")
            if min(part.versions, default=version) < version:
                stale = True
            else:
                answers[i][sample] = joined(whole, before, part, tokenizer, context)
        with self._lock:
            self.tokens += sum(len(part.ids) for part in more)
        return answers, stale

    def request(self, question: Question, sample: int) -> Request:
        """For one of the answers to a question."""
        seed = answer_seed(self.seed, question.number, sample)
        return Request(question.prompt, replace(self.sampling, seed=seed))

    def judged(self, asked: Sequence[tuple[Question, list[Completion]]]) -> list[Group]:
        """Whole answers become groups. What cannot be judged counts like the worst answer of its group."""
        if any(answer.finish_reason == "cancelled" for _, answers in asked for answer in answers):
            raise ValueError("half an answer cannot be judged")
        with self._lock:
            rewards = iter(
                self.judge.rewards(
                    [(question.task, question.index, answer.text) for question, answers in asked for answer in answers]
                )
            )
        groups = []
        for question, answers in asked:
            found = [next(rewards) for _ in answers]
            known = [reward for reward in found if reward is not None]
            worst = min(known, default=0.0)
            filled = [worst if reward is None else reward for reward in found]
            shaped = [self.shape_reward(reward, answer) for reward, answer in zip(filled, answers)]
            groups.append(Group(question, answers, shaped, len(known)))
        return groups


@dataclass(frozen=True)
class TokenRows:
    """Answers packed into rows of T tokens, on the host."""

    inputs: NDArray[np.int64]  # (n, T)
    targets: NDArray[np.int64]  # (n, T), IGNORE where the model did not choose
    advantage: NDArray[np.float32]  # (n, T), like those below: of the target
    behaviour: NDArray[np.float32]
    weight: NDArray[np.float32]
    proximal: NDArray[np.float32]  # not a number: that of the policy when it is trained
    lengths: NDArray[np.int32]  # tokens of each segment, row after row

    @classmethod
    def empty(cls, rows: int, seq_len: int, pad: int) -> TokenRows:
        """Rows of padding, which nothing is learnt from."""
        size = (rows, seq_len)
        inputs, targets = np.full(size, pad, np.int64), np.full(size, IGNORE, np.int64)
        advantage, behaviour, weight = np.zeros((3, *size), np.float32)
        proximal = np.full(size, np.nan, np.float32)
        return cls(inputs, targets, advantage, behaviour, weight, proximal, np.full(rows, seq_len, np.int32))

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
            inputs, targets, advantage, behaviour, weight, proximal = (each[begin : begin + rows] for each in columns)
            parts.append(TokenRows(inputs, targets, advantage, behaviour, weight, proximal, lengths[inside]))
        return parts

    @property
    def columns(self) -> tuple[NDArray[Any], ...]:
        return self.inputs, self.targets, self.advantage, self.behaviour, self.weight, self.proximal


def pack(groups: Sequence[Group], weight_of: Callable[[Completion], float], seq_len: int, pad: int) -> TokenRows:
    """The answers of all groups in as few rows as they fit; `weight_of` is that of the tokens of an answer.

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
            rows.weight[row, begin:end] = weight_of(answer)
            segments.append(lengths[number])
            at = end
        if at < seq_len:
            segments.append(seq_len - at)
    return replace(rows, lengths=np.array(segments, np.int32))
