"""Runs workflows of several turns, and makes groups of their trajectories: `ascendchat rl --workflow try-again`.

    workflows = Workflows("my_flows:Twice", tokenizer, generator, judge, sampling, seed=0, room=256, context=512)
    workflows.groups(questions, samples=8)                 # AnswerGroups, as for single answers

episode.py is what a workflow sees; it runs in another process and asks for answers of the model. The engine of this
process takes a step only when every episode waits for the model or is over: so the requests that share a batch do not
depend on the speed of anything, and a resumed run generates the same bits. A remote generator gets requests as they
come, from several threads where groups are generated during training. An episode that raises, hangs or returns None is
left out of its group and counted as rejected.
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

MAX_REMOTE = 256  # episodes under way at once with a remote generator
UNLIMITED = 1 << 30  # episodes in one process: this file bounds them


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
    """Runs the episodes of a workflow in a pool of processes."""

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
        take between two answers. `least`: number of episodes of which one must have worked."""
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
        way = _RemoteEpisodes(self, episodes, ask) if self.generator.elsewhere else _LocalEpisodes(self, episodes)
        trajectories = [self.accept(question, outcome) for (question, _), outcome in zip(episodes, way.run())]
        self.works, self.tried = self.works or any(trajectories), self.tried + len(trajectories)
        if trajectories and not self.works and self.tried >= self.least:
            self.judge.check_worked(self.tried)
            raise UserError(
                f"--workflow {self.name} has finished none of {self.tried} episodes: {self.problem}; mend it"
            )
        parts = [trajectories[i * samples : (i + 1) * samples] for i in range(len(questions))]
        return [group_of(question, [one for one in part if one], samples) for question, part in zip(questions, parts)]

    def accept(self, question: TaskQuestion, outcome: Future[Any]) -> Trajectory | None:
        """The trajectory, if it can be trained on; the first problem is printed."""
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
        """End its processes; that episodes under way fail is not printed."""
        self._said = True
        self.pool.close()


class _Episodes:
    """The episodes of one call of `groups`."""

    def __init__(self, flows: Workflows, episodes: Sequence[tuple[TaskQuestion, int]], width: int) -> None:
        self.flows, self.episodes, self.width = flows, episodes, width
        self.inbox: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self.outcomes: list[Future[Any]] = [Future() for _ in episodes]
        self.waiting = deque(range(len(episodes)))
        self.batches: dict[int, list[_Batch]] = {}  # questions of each episode under way

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
        """Called from any thread; `read` handles it in that of `groups`."""
        self.inbox.put((number, what, *details))

    def _over(self, number: int, _: Future[Any]) -> None:
        self._hear(number, "over")

    def read(self) -> None:
        """Wait for one message and handle it."""
        number, what, *details = self.inbox.get()
        if what == "over":
            self.drop(self.batches.pop(number, []))
        elif what == "again":  # its process died, and the episode begins anew
            self.drop(self.batches[number])
            self.batches[number] = []
        elif what == "answered":
            self.answered(*details)
        elif what == "broken":  # the generator failed, which ends the run
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

    def request(self, number: int, turn: int, ids: list[int], overrides: dict[str, Any]) -> Request:
        """A request with the run's sampling and the fields that the workflow overrides."""
        (question, sample), flows = self.episodes[number], self.flows
        left = flows.context - len(ids)
        if left < 1:
            raise ValueError(f"a prompt of {len(ids)} tokens leaves no room for an answer in {flows.context}")
        fixed = {"seed": turn_seed(flows.seed, question.number, sample, turn), "logprobs": True, "keep_stop": True}
        sampling = replace(flows.sampling, **{**overrides, **fixed})
        return Request(ids, replace(sampling, max_tokens=min(sampling.max_tokens, left)))

    def judge(self, batch: _Batch, place: int, reply: str, ids: list[int], finish: str) -> None:
        question, _ = self.episodes[batch.episode]
        request = JudgeRequest(question.task, question.index, reply, question.prompt, ids, finish)

        def done(verdict: Future[Any]) -> None:
            self._hear(batch.episode, "answered", batch, place, verdict.result().reward, "")

        self.flows.judge.submit(request).add_done_callback(done)

    def answered(self, batch: _Batch, place: int, value: Any, problem: str = "") -> None:
        """Note one answer; with the last of its batch, all go back to the episode."""
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
        """Cancel these batches: their episode is over, or begins anew."""

    def run(self) -> list[Future[Any]]:
        raise NotImplementedError


class _LocalEpisodes(_Episodes):
    """Episodes with the engine of this process, which takes a step when every episode waits for it."""

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
        """Queue new requests in an order that depends on the episodes alone; False if nothing is to be generated."""
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


class _RemoteEpisodes(_Episodes):
    """Episodes with a remote generator, one thread per request."""

    def __init__(self, flows: Workflows, episodes: Sequence[tuple[TaskQuestion, int]], ask: Generate) -> None:
        super().__init__(flows, episodes, MAX_REMOTE)
        self.ask = ask
        self.threads = ThreadPoolExecutor(MAX_REMOTE, thread_name_prefix="episode")

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
    """The group of a question; its prompt is the common beginning of all trajectories before the model writes."""
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
