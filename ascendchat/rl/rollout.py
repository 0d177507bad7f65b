"""Questions, answers and what they are worth: what a step of RL trains on.

questions = Questions(("gsm8k=0.7", "toy_problems=0.3"), tokenizer, seed=0, room=256)
asked = questions.ask(number)                             # question `number` of the run: a pure function of the seed
rollout = Rollout(questions, generator, judge, ...)
answers, _ = rollout.extend(rollout.begin(asked), most=256, version=0)    # or some tokens now and more later
(group,) = rollout.judged([(asked, answers)])
rows = pack(groups, weight_of, seq_len, pad)              # for rl/stage.py
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

from ascendchat.data.chat.rows import best_fit
from ascendchat.data.chat.template import Counts, render_prompt
from ascendchat.data.corpus import shuffled
from ascendchat.data.mixture import locate, parse_mixture, shares
from ascendchat.data.tokenizer.tokenizer import Tokenizer
from ascendchat.engine.request import Completion, Generator, Request, Sampling
from ascendchat.errors import UserError
from ascendchat.nn import IGNORE
from ascendchat.remote.completions import joined, rest
from ascendchat.rl.questions import load_questions
from ascendchat.rl.rewards import Asked, Judge
from ascendchat.tasks.base import Task
from ascendchat.tasks.named import pass_at_k

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
    right: list[bool] = field(default_factory=list)  # of the answers that could be judged
    terms: list[dict[str, float]] = field(default_factory=list)  # of each reward, by name and without weights
    rejected: int = 0  # episodes of a workflow that have no answer here, of the groups before it in its place too
    first: tuple[int, int] | None = None  # `solved` of the group in whose place this one stands

    @property
    def differ(self) -> bool:
        return max(self.rewards, default=0.0) > min(self.rewards, default=0.0)

    @property
    def solved(self) -> tuple[int, int]:
        """(answers, right ones) to the question that was drawn first, by which pass@k is estimated: those that took its
        place were chosen for being neither easy nor hard."""
        return self.first or (len(self.right), sum(self.right))


class Questions:
    """The questions of a run in their order: entries by weight, the rows of each in a new order every time round."""

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
        """Of what is asked."""
        digest = hashlib.sha256()
        for task, weight in zip(self.tasks, self.weights):
            digest.update(f"{task.name} {len(task)} {weight} {task.question(0)}\n".encode())
        return digest.hexdigest()[:16]

    def cut(self, first: int) -> int:
        """How many of the first questions are too long."""
        counts = Counts()
        for number in range(first):
            self.ask(number, counts)
        return counts.cut_prompts

    def ask(self, number: int, counts: Counts | None = None) -> Question:
        """Question `number` of the run."""
        which, row = locate(self._shares, number)
        epoch, place = divmod(row, len(self.tasks[which]))
        index = int(self._order(which, epoch)[place])
        prompt = render_prompt(self.tokenizer, self.tasks[which].prompt(index), self.room, counts)
        return Question(number, self.tasks[which], index, prompt)


def answer_seed(seed: int, number: int, sample: int) -> int:
    """Of the noise of one answer: the same whatever is generated beside it, another one for every answer of a run."""
    return int.from_bytes(hashlib.sha256(f"{seed} {number} {sample}".encode()).digest()[:7], "big")


Begun = tuple[Request, Completion]  # and as much of its answer as is there
Generate = Callable[[Sequence[Request]], list[Completion]]


def begun(request: Request) -> Begun:
    """A request of whose answer nothing is there yet."""
    return request, Completion(finish_reason="cancelled")


class _Workflow(Protocol):
    """Makes episodes of questions; workflow.py has it."""

    def groups(self, asked: Sequence[Question], samples: int, generate: Generate) -> list[Group]: ...
    def close(self) -> None: ...


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
    workflow: _Workflow | None = None  # several turns: workflow.py
    tokens: int = 0  # generated so far
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, question: Question) -> list[Begun]:
        """Requests for all answers to a question; nothing is there of them yet."""
        seeds = [answer_seed(self.seed, question.number, sample) for sample in range(self.samples)]
        return [begun(Request(question.prompt, replace(self.sampling, seed=seed))) for seed in seeds]

    def extend(self, given: Sequence[Begun], most: int, version: int) -> tuple[list[Completion], bool]:
        """All answers with up to `most` tokens, those that they have already included. What can still go on has the
        finish reason "cancelled".

        Tokens of weights older than `version` are left out, as a server gives them that was started again: then the
        second value is True."""
        tokenizer, context = self.questions.tokenizer, self.generator.context
        answers = [answer for _, answer in given]
        going = [
            i for i, answer in enumerate(answers) if answer.finish_reason == "cancelled" and len(answer.ids) < most
        ]
        more = self.generator.generate([rest(*given[i], tokenizer, most) for i in going])
        stale = False
        for i, part in zip(going, more):
            if not len(part.ids) == len(part.logprobs) == len(part.versions) == len(part.forced):
                raise UserError("the generator has not said the log-probability of every token; RL needs them all")
            if min(part.versions, default=version) < version:
                stale = True
            else:
                answers[i] = joined(*given[i], part, tokenizer, context)
        self.count(more)
        return answers, stale

    def count(self, answers: Iterable[Completion]) -> None:
        """These were generated."""
        with self._lock:
            self.tokens += sum(len(answer.ids) for answer in answers)

    def judged(self, asked: Sequence[tuple[Question, list[Completion]]]) -> list[Group]:
        """Whole answers become groups. What cannot be judged counts like the worst answer of its group."""
        if any(answer.finish_reason == "cancelled" for _, answers in asked for answer in answers):
            raise ValueError("half an answer cannot be judged")
        verdicts = iter(
            self.judge.verdicts(
                [
                    Asked(question.task, question.index, answer.text, question.prompt, answer.ids, answer.finish_reason)
                    for question, answers in asked
                    for answer in answers
                ]
            )
        )
        groups = []
        for question, answers in asked:
            found = [next(verdicts) for _ in answers]
            known = [verdict for verdict in found if verdict.reward is not None]
            worst = min((verdict.reward for verdict in known if verdict.reward is not None), default=0.0)
            filled = [worst if verdict.reward is None else verdict.reward for verdict in found]
            shaped = [self.shape_reward(reward, answer) for reward, answer in zip(filled, answers)]
            right, terms = [verdict.right for verdict in known], [verdict.terms for verdict in found]
            groups.append(Group(question, answers, shaped, len(known), right=right, terms=terms))
        return groups

    def close(self) -> None:
        """End the processes of the judge and of the workflow."""
        self.judge.close()
        if self.workflow is not None:
            self.workflow.close()


def pass_sums(groups: Sequence[Group], samples: int) -> dict[int, tuple[float, float]]:
    """k -> (sum of the unbiased estimates of pass@k, groups with enough answers for one), for powers of two and all."""
    counts = [group.solved for group in groups]
    return {
        k: (
            sum(pass_at_k(answers, right, k) for answers, right in counts if answers >= k),
            float(sum(answers >= k for answers, _ in counts)),
        )
        for k in sorted({*(1 << i for i in range(samples.bit_length())), samples})
    }


def term_sums(groups: Sequence[Group], names: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Of each term of the rewards: (sum, number) over the answers for which it is known."""
    known = [terms for group in groups for terms in group.terms]
    return {name: (sum(t.get(name, 0.0) for t in known), float(sum(name in t for t in known))) for name in names}


def task_sums(groups: Sequence[Group], names: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Of each task: (sum of its rewards, number of its answers)."""
    of = {
        name: [reward for group in groups if group.question.task.name == name for reward in group.rewards]
        for name in names
    }
    return {name: (sum(rewards), float(len(rewards))) for name, rewards in of.items()}


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
