"""Rollouts: questions are answered several times each, the answers judged, the groups packed into rows.

questions = QuestionMixture(("gsm8k=0.7", "toy_problems=0.3"), tokenizer, seed=0, room=256)
question = questions.ask(number)                     # question `number` of the run: a pure function of the seed
rollout = Rollout(questions, generator, judge, ...)
(group,) = rollout.groups([question])                # its answers and their rewards
rows = pack(groups, weight_of, seq_len, pad)         # for rl/stage.py
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ascendchat.data.chat.render import Counts, render_prompt
from ascendchat.data.chat.rows import best_fit
from ascendchat.data.corpus import shuffled
from ascendchat.data.mixture import locate, parse_mixture, shares
from ascendchat.data.tokenizer.tokenizer import Tokenizer
from ascendchat.engine.request import Completion, Generator, Request, Sampling
from ascendchat.errors import UserError
from ascendchat.nn import IGNORE
from ascendchat.rl.grpo import length_penalty
from ascendchat.rl.questions import load_questions
from ascendchat.rl.rewards import Judge, Judgement, JudgeRequest
from ascendchat.tasks.by_name import pass_at_k
from ascendchat.tasks.task import Task

RESAMPLED = 1 << 40  # number of the first question that is asked in place of another


@dataclass(frozen=True)
class TaskQuestion:
    """One question of the run."""

    number: int
    task: Task
    index: int  # of its row
    prompt: list[int]


@dataclass
class AnswerGroup:
    """The answers to one question, with their rewards."""

    question: TaskQuestion
    answers: list[Completion]
    rewards: list[float]
    judged: int = 0  # number of answers that could be judged
    advantages: list[float] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)  # one for each answer that could be judged
    terms: list[dict[str, float]] = field(
        default_factory=list
    )  # one for each answer: the terms of its reward by name, unweighted
    rejected: int = 0  # workflow episodes without an answer, also of the groups it replaces
    first: tuple[int, int] | None = None  # `solved` of the first group that was resampled in its slot

    @property
    def differ(self) -> bool:
        return max(self.rewards, default=0.0) > min(self.rewards, default=0.0)

    @property
    def solved(self) -> tuple[int, int]:
        """(answers, right answers) to the first question of the slot, for an unbiased pass@k: those that replaced it
        were selected for being neither easy nor hard."""
        return self.first or (len(self.right), sum(self.right))


class QuestionMixture:
    """The questions of a run in their order: a weighted mixture of tasks, each shuffled anew every epoch."""

    def __init__(self, data: Sequence[str], tokenizer: Tokenizer, seed: int, room: int, source: str = "") -> None:
        entries = parse_mixture(data)
        self.tokenizer, self.seed, self.room = tokenizer, seed, room
        self.tasks = [load_questions(name, "train", source) for name, _ in entries]
        weights = [float(len(task)) if weight is None else weight for (_, weight), task in zip(entries, self.tasks)]
        self.weights, self._shares = weights, shares(weights)
        self._order = cache(lambda which, epoch: shuffled(len(self.tasks[which]), seed, epoch, which))

    @property
    def per_epoch(self) -> int:
        return sum(map(len, self.tasks))

    @property
    def fingerprint(self) -> str:
        """Hash of the question set."""
        digest = hashlib.sha256()
        for task, weight in zip(self.tasks, self.weights):
            digest.update(f"{task.name} {len(task)} {weight} {task.question(0)}\n".encode())
        return digest.hexdigest()[:16]

    def cut(self, first: int) -> int:
        """Count the questions before number `first` that are too long."""
        counts = Counts()
        for number in range(first):
            self.ask(number, counts)
        return counts.cut_prompts

    def ask(self, number: int, counts: Counts | None = None) -> TaskQuestion:
        """TaskQuestion `number` of the run: a pure function of the seed."""
        which, row = locate(self._shares, number)
        epoch, place = divmod(row, len(self.tasks[which]))
        index = int(self._order(which, epoch)[place])
        prompt = render_prompt(self.tokenizer, self.tasks[which].prompt(index), self.room, counts)
        return TaskQuestion(number, self.tasks[which], index, prompt)


def answer_seed(seed: int, number: int, sample: int) -> int:
    """Sampling seed of one answer: it depends on nothing else in the batch, and every answer of a run has another."""
    return int.from_bytes(hashlib.sha256(f"{seed} {number} {sample}".encode()).digest()[:7], "big")


Generate = Callable[[Sequence[Request]], list[Completion]]


class _Workflow(Protocol):
    """Runs episodes of several turns; workflow.py implements it."""

    def groups(self, questions: Sequence[TaskQuestion], samples: int, generate: Generate) -> list[AnswerGroup]: ...
    def close(self) -> None: ...


@dataclass
class Rollout:
    """Makes groups of answers: generates and judges them. Several threads may use a remote generator."""

    questions: QuestionMixture
    generator: Generator
    judge: Judge
    sampling: Sampling
    samples: int
    seed: int
    soft_length: float = 0.0  # share of max_tokens over which answers lose reward; see length_penalty
    workflow: _Workflow | None = None  # several turns: workflow.py
    tokens: int = 0  # generated so far
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def groups(self, questions: Sequence[TaskQuestion]) -> list[AnswerGroup]:
        """Generate and judge `samples` answers to each question."""
        if self.workflow is not None:
            groups = self.workflow.groups(questions, self.samples, self.generate)
            if not self.generator.elsewhere:  # the workflow steps the engine itself
                self._count(answer for group in groups for answer in group.answers)
            return groups
        answers = self.generate([self._request(one, i) for one in questions for i in range(self.samples)])
        at = range(0, len(answers), self.samples)
        return self._judged(questions, [answers[i : i + self.samples] for i in at])

    def _request(self, question: TaskQuestion, sample: int) -> Request:
        seed = answer_seed(self.seed, question.number, sample)
        return Request(question.prompt, replace(self.sampling, seed=seed))

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Whole answers with the log-probability of every token."""
        answers = self.generator.generate(requests)
        for answer in answers:
            if answer.finish_reason == "cancelled":
                raise ValueError("half an answer cannot be judged")
            if not len(answer.ids) == len(answer.logprobs) == len(answer.versions) == len(answer.forced):
                raise UserError("the generator has not said the log-probability of every token; RL needs them all")
        self._count(answers)
        return answers

    def _count(self, answers: Iterable[Completion]) -> None:
        with self._lock:
            self.tokens += sum(len(answer.ids) for answer in answers)

    def _judged(self, questions: Sequence[TaskQuestion], answers: Sequence[list[Completion]]) -> list[AnswerGroup]:
        """Groups of whole answers. One that cannot be judged gets the worst reward of its group."""
        requests = [
            JudgeRequest(one.task, one.index, answer.text, one.prompt, answer.ids, answer.finish_reason)
            for one, own in zip(questions, answers)
            for answer in own
        ]
        verdicts = iter(self.judge.verdicts(requests))
        return [self._group(question, own, [next(verdicts) for _ in own]) for question, own in zip(questions, answers)]

    def _group(self, question: TaskQuestion, answers: list[Completion], verdicts: Sequence[Judgement]) -> AnswerGroup:
        judged = [verdict for verdict in verdicts if verdict.reward is not None]
        worst = min((verdict.reward for verdict in judged if verdict.reward is not None), default=0.0)
        rewards = [worst if verdict.reward is None else verdict.reward for verdict in verdicts]
        if share := self.soft_length:
            limit = self.sampling.max_tokens
            rewards = [
                reward + length_penalty(len(answer.ids), limit, share) for reward, answer in zip(rewards, answers)
            ]
        right, terms = [verdict.right for verdict in judged], [verdict.terms for verdict in verdicts]
        return AnswerGroup(question, answers, rewards, len(judged), right=right, terms=terms)

    def close(self) -> None:
        """End the processes of the judge and the workflow."""
        self.judge.close()
        if self.workflow is not None:
            self.workflow.close()


def pass_sums(groups: Sequence[AnswerGroup], samples: int) -> dict[int, tuple[float, float]]:
    """Per k, powers of two and all samples: (sum of unbiased estimates of pass@k, groups with at least k answers)."""
    counts = [group.solved for group in groups]
    return {
        k: (
            sum(pass_at_k(answers, right, k) for answers, right in counts if answers >= k),
            float(sum(answers >= k for answers, _ in counts)),
        )
        for k in sorted({*(1 << i for i in range(samples.bit_length())), samples})
    }


def term_sums(groups: Sequence[AnswerGroup], names: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Per reward term: (sum, number) over the answers that have it."""
    rows = [terms for group in groups for terms in group.terms]
    return {name: (sum(t.get(name, 0.0) for t in rows), float(sum(name in t for t in rows))) for name in names}


def task_sums(groups: Sequence[AnswerGroup], names: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Per task: (sum of its rewards, number of its answers)."""
    of = {
        name: [reward for group in groups if group.question.task.name == name for reward in group.rewards]
        for name in names
    }
    return {name: (sum(rewards), float(len(rewards))) for name, rewards in of.items()}


@dataclass(frozen=True)
class TokenRows:
    """Answers packed into rows of T tokens, numpy arrays on the host."""

    inputs: NDArray[np.int64]  # (n, T)
    targets: NDArray[np.int64]  # (n, T), IGNORE where the model did not choose
    advantage: NDArray[np.float32]  # (n, T), per target token like the columns below
    behaviour: NDArray[np.float32]  # log-probability by the weights that generated the token
    weight: NDArray[np.float32]
    proximal: NDArray[np.float32]  # log-probability before the first update; NaN: by the trained policy itself
    lengths: NDArray[np.int32]  # tokens of each segment, row after row

    @classmethod
    def empty(cls, rows: int, seq_len: int, pad: int) -> TokenRows:
        """Rows of padding, without targets."""
        size = (rows, seq_len)
        inputs, targets = np.full(size, pad, np.int64), np.full(size, IGNORE, np.int64)
        advantage, behaviour, weight = np.zeros((3, *size), np.float32)
        proximal = np.full(size, np.nan, np.float32)
        return cls(inputs, targets, advantage, behaviour, weight, proximal, np.full(rows, seq_len, np.int32))

    def cut(self, rows: int, pad: int, *, fill: bool = True) -> list[TokenRows]:
        """Split into parts of `rows` rows. The last is filled up with padding, since a compiled model has one shape, or
        with fill=False is shorter; no rows at all become one part of padding."""
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


def pack(groups: Sequence[AnswerGroup], weight_of: Callable[[Completion], float], seq_len: int, pad: int) -> TokenRows:
    """Pack the answers of all groups, each behind its prompt, into few rows by best fit.

    `weight_of`: loss weight of each token of an answer. Tokens that a tool wrote are inputs without a target. A
    sequence of n tokens takes n - 1 positions, since inputs and targets are shifted by one."""
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
