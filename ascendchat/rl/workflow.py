"""Runs workflows of several turns, and makes groups of their trajectories: `ascendchat rl --workflow try-again`.

    workflows = Workflows("my_flows:Twice", tokenizer, generator, judge, sampling, seed=0, room=256, context=512)
    workflows.groups(questions, samples=8)                 # as Rollout.judged gives them, for the same packing and loss

episode.py is what a workflow sees; it runs in another process and asks for answers of the model. With the engine in
this process, the engine takes a step only when every episode waits for the model or is over: so which requests run
beside one another does not depend on the speed of anything, and a run that is resumed generates the same numbers, bit
for bit. A generator elsewhere is asked as the requests come, and by several threads at once where groups are generated
beside training. An episode that raises, hangs or returns None is left out
of its group and counted as rejected.
"""

from __future__ import annotations

import hashlib
import math
import os
import queue
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile
from typing import Any

from ascendchat.data.tokenizer.tokenizer import Tokenizer
from ascendchat.engine.engine import Engine, RequestState
from ascendchat.engine.request import Completion, Generator, Request, Sampling
from ascendchat.errors import UserError
from ascendchat.rl.episode import Trajectory, run_episode
from ascendchat.rl.rewards import Judge, JudgeRequest, row_of
from ascendchat.rl.rollout import AnswerGroup, Generate, TaskQuestion, answer_seed
from ascendchat.sandbox.pool import WORKERS, Failure, Pool, Questions

ELSEWHERE = 256  # episodes under way at once when the generator is not in this process
UNLIMITED = 1 << 30  # episodes in one process: how many there are is decided here


def turn_seed(seed: int, number: int, sample: int, turn: int) -> int:
    """Sampling seed of one turn; that of the first is the seed of an answer without a workflow."""
    first = answer_seed(seed, number, sample)
    return first if not turn else int.from_bytes(hashlib.sha256(f"{first} {turn}".encode()).digest()[:7], "big")


@dataclass(eq=False)
class _Batch:
    """The questions that an episode asked at once, and the answers so far: they go back together."""

    episode: int
    questions: Questions
    answers: list[tuple[Any, str] | None]
    writes: int  # answers of the model that are missing
    jobs: list[RequestState] = field(default_factory=list)


class Workflows:
    """Workflows of a run."""

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        generator: Generator,
        judge: Judge,
        sampling: Sampling,
        *,
        seed: int,
        room: int,
        context: int,
        timeout: float = 60.0,
        least: int = 0,
        say: Callable[[str], None] = print,
    ) -> None:
        """`room`: tokens of a first prompt; `context`: of a whole trajectory. `timeout`: seconds that an episode may
        take between two answers. `least`: episodes after which one must have worked."""
        self.name, self.generator, self.judge, self.say = name, generator, judge, say
        self.sampling, self.seed, self.context, self.vocab = sampling, seed, context, tokenizer.vocab_size
        self.problem, self.works, self._said = "", False, False
        self.least, self.tried = least, 0
        runner, workers = partial(run_episode, tokenizer, context, room), min(WORKERS, os.cpu_count() or 1)
        self.pool = Pool(runner, timeout, workers=workers, room=UNLIMITED)
        try:
            self.pool.submit((name,), attempts=1).result()
        except Failure as problem:
            self.pool.close()
            raise UserError(f"--workflow {name}: {problem}; write try-again, calculator or module:function") from None

    def groups(
        self, questions: Sequence[TaskQuestion], samples: int, generate: Generate | None = None
    ) -> list[AnswerGroup]:
        """Run `samples` episodes of each question. `generate`: asks a remote generator, for whole answers."""
        episodes = [(question, sample) for question in questions for sample in range(samples)]
        ask = generate or self.generator.generate
        way = _Elsewhere(self, episodes, ask) if self.generator.elsewhere else _Here(self, episodes)
        found = [self.accept(question, outcome) for (question, _), outcome in zip(episodes, way.run())]
        self.works, self.tried = self.works or any(found), self.tried + len(found)
        if found and not self.works and self.tried >= self.least:
            self.judge.check_worked(self.tried)
            raise UserError(
                f"--workflow {self.name} has finished none of {self.tried} episodes: {self.problem}; mend it"
            )
        parts = [found[i * samples : (i + 1) * samples] for i in range(len(questions))]
        return [group_of(question, [one for one in part if one], samples) for question, part in zip(questions, parts)]

    def accept(self, question: TaskQuestion, outcome: Future[Any]) -> Trajectory | None:
        """A trajectory that can be trained on, or None; the first problem is said."""
        try:
            trajectory: Trajectory | None = outcome.result()
            if trajectory is None or trajectory.reward is None:
                self.problem = self.problem or "it rejects every episode"
                return None
            check(trajectory, question.prompt[0], self.context, self.vocab)
            return trajectory
        except (Failure, ValueError, TypeError, AttributeError) as problem:
            self.problem = str(problem)
            if not self._said:
                self.say(f"--workflow {self.name} failed: {problem}; such episodes are left out")
            self._said = True
            return None

    def close(self) -> None:
        """End its processes; episodes under way have failed, which is nothing to tell of."""
        self._said = True
        self.pool.close()


class _Episodes:
    """The episodes of one call on their way."""

    def __init__(self, flows: Workflows, episodes: Sequence[tuple[TaskQuestion, int]], width: int) -> None:
        self.flows, self.episodes, self.width = flows, episodes, width
        self.inbox: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self.outcomes: list[Future[Any]] = [Future() for _ in episodes]
        self.waiting = deque(range(len(episodes)))
        self.batches: dict[int, list[_Batch]] = {}  # of each episode under way: what it has asked

    def begin(self) -> None:
        """Begin as many episodes as there is room for."""
        while self.waiting and len(self.batches) < self.width:
            number = self.waiting.popleft()
            question, _ = self.episodes[number]
            self.batches[number] = []
            args = self.flows.name, row_of(question.task, question.index)
            call = self.flows.pool.submit(args, shared=True, attempts=1, hear=partial(self._hear, number))
            self.outcomes[number] = call
            call.add_done_callback(partial(self._over, number))

    def _hear(self, number: int, what: str, *details: Any) -> None:
        """From any thread: `groups` reads it in its own."""
        self.inbox.put((number, what, *details))

    def _over(self, number: int, _: Future[Any]) -> None:
        self._hear(number, "over")

    def read(self) -> None:
        """Wait for one message."""
        number, what, *details = self.inbox.get()
        if what == "over":
            self.drop(self.batches.pop(number, []))
        elif what == "again":  # its process was lost with what it had asked
            self.drop(self.batches[number])
            self.batches[number] = []
        elif what == "answered":
            self.answered(*details)
        elif what == "broken":  # the generator: the run must know
            raise details[0]
        else:
            self.asked(number, details[0])

    def asked(self, number: int, questions: Questions) -> None:
        writes = sum(question[0] == "generate" for _, question in questions.asked)
        batch = _Batch(number, questions, [None] * len(questions.asked), writes)
        self.batches[number].append(batch)
        for place, (_, (what, *details)) in enumerate(questions.asked):
            if what == "generate":
                try:
                    self.generate(batch, place, self.request(number, *details))
                except (ValueError, TypeError) as problem:
                    self.answered(batch, place, None, str(problem))
            else:
                self.judge(batch, place, *details)

    def request(self, number: int, turn: int, ids: list[int], given: dict[str, Any]) -> Request:
        """The run's sampling, but for what the workflow says."""
        (question, sample), flows = self.episodes[number], self.flows
        left = flows.context - len(ids)
        if left < 1:
            raise ValueError(f"a prompt of {len(ids)} tokens leaves no room for an answer in {flows.context}")
        ours = {"seed": turn_seed(flows.seed, question.number, sample, turn), "logprobs": True, "keep_stop": True}
        sampling = replace(flows.sampling, **{**given, **ours})
        return Request(ids, replace(sampling, max_tokens=min(sampling.max_tokens, left)))

    def judge(self, batch: _Batch, place: int, reply: str, ids: list[int], finish: str) -> None:
        question, _ = self.episodes[batch.episode]
        asked = JudgeRequest(question.task, question.index, reply, question.prompt, ids, finish)

        def done(verdict: Future[Any]) -> None:
            self._hear(batch.episode, "answered", batch, place, verdict.result().reward, "")

        self.flows.judge.submit(asked).add_done_callback(done)

    def answered(self, batch: _Batch, place: int, value: Any, problem: str = "") -> None:
        """One answer; when it is the last of its batch, they go back."""
        if batch not in self.batches.get(batch.episode, []):
            return  # the episode is over, or was begun again
        batch.answers[place] = value, problem
        batch.writes -= batch.questions.asked[place][1][0] == "generate"
        if None not in batch.answers:
            self.batches[batch.episode].remove(batch)
            self.flows.pool.answer(batch.questions, [answer for answer in batch.answers if answer])

    def generate(self, batch: _Batch, place: int, request: Request) -> None:
        raise NotImplementedError

    def drop(self, batches: Sequence[_Batch]) -> None:
        """Nobody waits for these any longer."""

    def run(self) -> list[Future[Any]]:
        raise NotImplementedError


class _Here(_Episodes):
    """With the engine in this process, which takes a step when nobody else has anything to do."""

    def __init__(self, flows: Workflows, episodes: Sequence[tuple[TaskQuestion, int]]) -> None:
        engine = flows.generator
        assert isinstance(engine, Engine)
        super().__init__(flows, episodes, len(engine.running))
        self.engine = engine
        self.fresh: list[tuple[int, int, int, _Batch, Request]] = []
        self.jobs: dict[RequestState, tuple[_Batch, int]] = {}

    def generate(self, batch: _Batch, place: int, request: Request) -> None:
        self.fresh.append((batch.episode, batch.questions.asked[place][0], place, batch, request))

    def run(self) -> list[Future[Any]]:
        self.begin()
        while self.batches:
            while any(not any(batch.writes for batch in batches) for batches in self.batches.values()):
                self.read()
                self.begin()
            if not self.enter():
                continue  # one was refused, and has something to do
            self.engine.step()
            for job in [job for job in self.jobs if job.done]:
                batch, place = self.jobs.pop(job)
                self.answered(batch, place, job.completion)
        return self.outcomes

    def enter(self) -> bool:
        """Give the engine what was asked, in an order that depends on nothing but the episodes."""
        fresh, self.fresh = sorted(self.fresh, key=lambda one: one[:2]), []
        refused = False
        for *_, place, batch, request in fresh:
            if batch not in self.batches.get(batch.episode, []):
                continue
            try:
                job = self.engine.add(request)
            except ValueError as problem:
                self.answered(batch, place, None, str(problem))
                refused = True
            else:
                batch.jobs.append(job)
                self.jobs[job] = batch, place
        return bool(self.jobs) and not refused

    def drop(self, batches: Sequence[_Batch]) -> None:
        for job in [job for batch in batches for job in batch.jobs]:
            self.engine.cancel(job)
            self.jobs.pop(job, None)


class _Elsewhere(_Episodes):
    """With a generator that is asked from many threads."""

    def __init__(self, flows: Workflows, episodes: Sequence[tuple[TaskQuestion, int]], ask: Generate) -> None:
        super().__init__(flows, episodes, ELSEWHERE)
        self.ask = ask
        self.threads = ThreadPoolExecutor(ELSEWHERE, thread_name_prefix="episode")

    def generate(self, batch: _Batch, place: int, request: Request) -> None:
        def done(answers: Future[list[Completion]]) -> None:
            problem = answers.exception()
            if problem is None:
                self._hear(batch.episode, "answered", batch, place, answers.result()[0], "")
            elif isinstance(problem, ValueError):
                self._hear(batch.episode, "answered", batch, place, None, str(problem))
            else:
                self._hear(batch.episode, "broken", problem)

        self.threads.submit(self.ask, [request]).add_done_callback(done)

    def run(self) -> list[Future[Any]]:
        try:
            self.begin()
            while self.batches:
                self.read()
                self.begin()
        finally:
            self.threads.shutdown(wait=False, cancel_futures=True)
        return self.outcomes


def check(trajectory: Trajectory, begin: int, context: int, vocab: int) -> None:
    """Raise a ValueError for a trajectory that cannot be trained on. `begin`: the first token of every prompt."""
    size = len(trajectory.ids)
    if not size == len(trajectory.forced) == len(trajectory.logprobs) == len(trajectory.versions):
        raise ValueError("a trajectory has as many forced, logprobs and versions as ids")
    if not 1 < size <= context + 1:
        raise ValueError(f"a trajectory of {size} tokens does not fit into {context}")
    if not all(0 <= token < vocab for token in trajectory.ids):
        raise ValueError(f"the tokens of a trajectory lie between 0 and {vocab - 1}")
    written = [value for value, forced in zip(trajectory.logprobs, trajectory.forced) if not forced]
    if not written or not trajectory.forced[0] or trajectory.ids[0] != begin:
        raise ValueError("a trajectory begins as a prompt does and has tokens that the model wrote")
    if not all(value is not None and math.isfinite(value) for value in written):
        raise ValueError("a token that the model wrote has no log-probability")
    if not math.isfinite(float(trajectory.reward or 0.0)):
        raise ValueError(f"the reward is {trajectory.reward}")


def group_of(question: TaskQuestion, trajectories: Sequence[Trajectory], samples: int) -> AnswerGroup:
    """The group of a question; its prompt is what all trajectories begin with before the model writes."""
    begins = [one.ids[: one.forced.index(False)] for one in trajectories]
    shared = takewhile(lambda tokens: len(set(tokens)) == 1, zip(*begins))
    prompt = [tokens[0] for tokens in shared] or question.prompt
    answers = [
        Completion(
            one.ids[len(prompt) :],
            one.text,
            [None if forced else value for value, forced in zip(one.logprobs, one.forced)][len(prompt) :],
            one.forced[len(prompt) :],
            "length" if one.finish == "length" else "stop",
            one.versions[len(prompt)],
            one.versions[len(prompt) :],
        )
        for one in trajectories
    ]
    rewards = [float(one.reward or 0.0) for one in trajectories]
    right = [reward > 0 for reward in rewards]
    return AnswerGroup(
        replace(question, prompt=prompt), answers, rewards, len(answers), right=right, rejected=samples - len(answers)
    )
