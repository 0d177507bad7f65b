"""The inference engine: different prompts generate together, rows leave when they are done and new ones enter.

    engine = Engine(model, kernel, tokenizer, device, place, slots=16, context=2048)
    engine.generate([Request(prompt, Sampling(temperature=0.7, seed=1)), ...])     # -> [Completion, ...]
    for piece in engine.stream(Request(prompt)): print(piece.text, end="")
    job = engine.add(request); engine.step()                                      # or step by step, as the bench does

The Generator (generator.py) of a model in this process: `ascendchat chat` and `ascendchat eval chat` generate through
here. decode.py is what runs on the device; this file is the host's side: who is in which slot, what each sampled token
means, calculator calls, endings.

The host reads results one step late where the device works on its own: while it looks at the tokens of step n, step
n + 1 runs. A row that turns out to be over has then run one step too many, which nobody sees.

What a request generates does not depend on its neighbours: its noise is a hash of its seed, the position and the token.
Greedy and seeded answers are equal unless two tokens are equal to within the rounding of a matrix product, whose order
of summation a device may choose by the number of rows.

A prompt that begins as one whose tokens are still in the cache is read behind them (prefix.py, reading.py). While long
prompts are read, in pieces, the rows that run go on.

Context: prompt and answer together hold at most `context` tokens; an answer that reaches the end finishes with reason
"length". Callers make a conversation fit first: render_prompt(tokenizer, messages, prompt_room(context, max_tokens)).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ascendchat.data.tokenizer import Tokenizer
from ascendchat.device import Device
from ascendchat.infer.decode import Decoder
from ascendchat.infer.generator import Weights
from ascendchat.infer.inputs import padded_length
from ascendchat.infer.prefix import Prefixes, as_tokens, rounds
from ascendchat.infer.reading import UNDECIDED, Reading
from ascendchat.infer.request import Completion, Piece, Request, Sampling
from ascendchat.infer.sampling import Mode, mode_of
from ascendchat.infer.stream import EngineStream
from ascendchat.infer.text import TextStream
from ascendchat.infer.tools import calculate
from ascendchat.nn.attention import Attention
from ascendchat.nn.gpt import GPT

# Prompt tokens that are read between two decoding steps, where the device works on its own and where it does not
PREFILL_TOKENS = {True: 16384, False: 512}

__all__ = ["Completion", "Engine", "Job", "Piece", "Request", "Sampling"]


class Job:
    """One request on its way."""

    def __init__(self, request: Request, tokenizer: Tokenizer, context: int, version: int) -> None:
        sampling, special = request.sampling, tokenizer.specials
        self.request, self.completion = request, Completion(version=version)
        self.text = TextStream(tokenizer, sampling.stop)
        self.limit = min(sampling.max_tokens, context - len(request.prompt))  # tokens to generate at most
        self.mode = mode_of(sampling)
        usual = (special["<|assistant_end|>"], tokenizer.bos)
        self.stops = frozenset(usual if sampling.stop_tokens is None else sampling.stop_tokens)
        self.watched = self.stops | {special["<|tool_end|>"]}  # tokens that mean something
        self.plain = not sampling.stop and not sampling.logprobs  # all others need no look
        self.slot = -1
        self.tokens = as_tokens(request.prompt)
        self.cached = UNDECIDED  # tokens of the prompt that are in its slot
        self.launched = 0  # passes that will bring a token of this row: the prompt's is the first
        self.forced: deque[int] = deque()  # tokens of a tool's result still to be put in
        self.force_from = 0  # pass whose input is the first of them
        self.discard = 0  # coming results that forced tokens replace
        self.done = False
        self._fresh: list[Piece] = []
        self._read = 0  # ids that have become text

    def begin(self, cached: int) -> None:
        """Its prompt will be read behind so many tokens that the cache has."""
        self.cached = self.completion.cached_tokens = cached

    def take(self) -> list[Piece]:
        """The text that came since the last call."""
        self.read()
        fresh, self._fresh = self._fresh, []
        return fresh

    def read(self) -> None:
        """Turn new ids into text; put off until somebody asks, for a batch of hundreds has microseconds per token."""
        self._fresh += self.text.feed_all(self.completion.ids[self._read :])
        self._read = len(self.completion.ids)

    def finish(self, reason: Literal["stop", "length", "cancelled"]) -> None:
        self.read()
        self._fresh += self.text.close()
        self.completion.text, self.completion.finish_reason, self.done = self.text.text, reason, True


class PendingPass(NamedTuple):
    """A pass whose result has not been looked at: (job, its pass number, column), and how to wait for it."""

    rows: list[tuple[Job, int, int]]
    result: Callable[[], Tensor]  # (2, columns) on the host: ids and log probabilities


class Engine:
    """Runs requests in `slots` rows of up to `context` tokens. Not for several threads: one thread steps it.

    `graphs`: False where nothing can be captured, as in a trainer's process on NPUs. `version`: of the model's weights.
    `reuse`: False reads every prompt from its beginning, whatever the cache still has of it. `prefill_tokens`: so many
    tokens of prompts, padding included, are read between two steps of the rows that run; longer prompts are cut.
    """

    def __init__(
        self,
        model: GPT,
        kernel: Attention,
        tokenizer: Tokenizer,
        device: Device,
        place: torch.device,
        *,
        slots: int,
        context: int,
        compiled: bool = False,
        graphs: bool = True,
        version: int = 0,
        reuse: bool = True,
        prefill_tokens: int | None = None,
    ) -> None:
        self.tokenizer, self.device, self.context, self.version = tokenizer, device, context, version
        sizes = {"slots": slots, "context": context}
        self.decoder = Decoder(model, kernel, device, place, **sizes, compiled=compiled, graphs=graphs)
        self.vocab = model.shape.vocab
        special = tokenizer.specials
        self.tool_end, self.output = special["<|tool_end|>"], (special["<|output_start|>"], special["<|output_end|>"])
        self.waiting: deque[Job] = deque()
        self.running: list[Job | None] = [None] * slots  # by slot
        self.ahead = 1 if device.pin else 0  # passes that run while the results of earlier ones are looked at
        self._pending: deque[PendingPass] = deque()
        self.prefill_tokens = prefill_tokens or PREFILL_TOKENS[device.pin]
        self.prefixes = Prefixes(slots, self.decoder.cache.places, reuse)
        self.reading = Reading(self.prefixes)
        self._left: list[int] = []  # slots whose requests are over, which the decoder does not know yet

    # ---- the Generator -------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """All answers, in the order of the requests."""
        jobs = [self._job(request) for request in requests]
        self.waiting.extend(jobs)
        while not all(job.done for job in jobs):
            self.step()
        return [job.completion for job in jobs]

    def stream(self, request: Request) -> EngineStream:
        """One answer as it comes, whole characters only, with tool calls and their results."""
        return EngineStream(self, self.add(request))

    @torch.no_grad()
    def load(self, weights: Weights, version: int) -> None:
        """Answer with these weights from now on; see Generator.load. They are copied into the tensors that are there,
        so that captured graphs stay valid."""
        own = self.decoder.model.state_dict()
        if odd := sorted(set(own) ^ set(weights)):
            problem = "missing" if odd[0] in own else "unknown"
            raise ValueError(f"these weights do not fit the model: {odd[0]} is {problem}")
        for name, tensor in own.items():
            if weights[name].shape != tensor.shape:
                sizes = f"{tuple(weights[name].shape)} instead of {tuple(tensor.shape)}"
                raise ValueError(f"these weights do not fit the model: {name} is {sizes}")
        while any(self.running):
            self._read()
            self._extend()
        for name, tensor in own.items():
            tensor.copy_(weights[name])
        self.prefixes.clear()
        self.version = version

    # ---- step by step --------------------------------------------------------------------------

    def add(self, request: Request) -> Job:
        """Queue a request; it enters when a slot is free."""
        job = self._job(request)
        self.waiting.append(job)
        return job

    def pause(self, mode: str) -> None:
        """Placeholder of the seam: the branch `sampling` has it."""
        raise ValueError(f"pause {mode!r} is not there yet")

    def resume(self) -> None:
        """See pause."""

    def _job(self, request: Request) -> Job:
        prompt, allowed = request.prompt, request.sampling.allowed_tokens
        if not prompt or min(prompt) < 0 or max(prompt) >= self.vocab:
            raise ValueError(f"a prompt needs at least one token, each between 0 and {self.vocab - 1}")
        if allowed and not 0 <= min(allowed) <= max(allowed) < self.vocab:
            raise ValueError(f"allowed_tokens must lie between 0 and {self.vocab - 1}")
        if len(prompt) >= self.context:
            raise ValueError(f"a prompt of {len(prompt)} tokens leaves no room for an answer in {self.context}")
        return Job(request, self.tokenizer, self.context, self.version)

    def cancel(self, job: Job) -> None:
        """End a request now; nothing happens if it is over."""
        if not job.done:
            if job in self.waiting:
                self.waiting.remove(job)
            self._finish(job, "cancelled")

    def step(self) -> None:
        """Let waiting requests in, read prompts, extend all rows by a token, and look at what has come back."""
        self._enter()
        self._read()
        self._extend()

    # ---- passes --------------------------------------------------------------------------------

    def _enter(self) -> None:
        """The longest waiting requests take the free slots."""
        if not self.waiting:
            return
        free = self._free()
        while self.waiting and free:
            job = self.waiting.popleft()
            top = max((slot for slot, other in enumerate(self.running) if other is not None), default=-1)
            self.reading.enter(job, free, top)
            free.remove(job.slot)
            self.running[job.slot] = job
            job.completion.version = self.version  # weights may have come while it waited

    def _free(self) -> list[int]:
        """The free slots; what the others have written by now is noted."""
        for job in self.running:
            if job is not None and job.launched:
                self.prefixes.wrote(job.slot, self._written(job))
        return [slot for slot, job in enumerate(self.running) if job is None]

    def _written(self, job: Job) -> int:
        """Positions that a row has written at most: the token of the newest pass is not in the cache yet. A row that
        has all its tokens may run once more before that is seen."""
        return len(job.tokens) + job.launched - 1 + (self.ahead if job.launched >= job.limit else 0)

    def _read(self) -> None:
        """Read prompts, in as many passes as the rows that run can wait for."""
        left = self.prefill_tokens
        while self.reading.jobs:
            self._dismiss()
            self.reading.begin(self._free())
            for copies in rounds(self.reading.copies):
                self.decoder.copy(copies)
            self.reading.copies.clear()
            parts = self.reading.next_pass(left, left == self.prefill_tokens)
            if not parts:
                return
            left -= len(parts) * padded_length(max(part.end - part.start for part in parts))
            jobs, starts, ends = zip(*parts)
            requests, slots = [job.request for job in jobs], [job.slot for job in jobs]
            result = self.decoder.prefill(requests, slots, _together(jobs), starts, ends)
            whole = [column for column, part in enumerate(parts) if self.reading.done(part)]
            if whole:
                self._await([jobs[column] for column in whole], whole, result)
                self._collect(self.ahead)

    def _dismiss(self) -> None:
        """Tell the decoder who is over, before the next pass."""
        if self._left:
            self.decoder.leave(self._left)
            self._left = []

    def _extend(self) -> None:
        """All rows by a token; when there is nothing more to start, wait for the rest."""
        started = self._launch()
        self._collect(self.ahead if started else 0)

    def _launch(self) -> bool:
        """Start one decoding step for all rows that need it."""
        self._dismiss()
        for job in [job for job in self.running if job is not None and job.forced]:
            while job.forced and job.launched == job.limit and not job.done:  # no room to go on behind the result
                self._accept(job, job.forced.popleft(), None)
            if job.forced and job.launched >= job.force_from and not job.done:
                self.decoder.override[job.slot] = job.forced[0]
                self._accept(job, job.forced.popleft(), None)
        jobs = [job for job in self.running if job is not None and 0 < job.launched < job.limit]
        if not jobs:
            return False
        longest = max(len(job.request.prompt) + job.launched for job in jobs)
        result = self.decoder.step(max(job.slot for job in jobs) + 1, longest, _together(jobs))
        self._await(jobs, [job.slot for job in jobs], result)
        return True

    def _await(self, jobs: Sequence[Job], columns: Sequence[int], result: Tensor) -> None:
        """Start the copy of a pass's result to the host; `_collect` will look at it."""
        rows = [(job, job.launched, column) for job, column in zip(jobs, columns)]
        for job in jobs:
            job.launched += 1
        self._pending.append(PendingPass(rows, self.device.fetch(result)))

    def _collect(self, leave: int) -> None:
        """Look at results, oldest first, until only `leave` are pending."""
        while len(self._pending) > leave:
            rows, fetched = self._pending.popleft()
            result = fetched()  # waits for this pass, not for the one behind it
            ids, logprobs = result[0].long().tolist(), result[1].tolist()
            for job, number, column in rows:
                if job.done:
                    continue
                if job.discard:
                    job.discard -= 1
                    continue
                token, answer = ids[column], job.completion
                if job.plain and token not in job.watched and len(answer.ids) + 1 < job.limit:  # the usual case, fast
                    answer.ids.append(token)
                    answer.forced.append(False)
                    continue
                self._accept(job, token, logprobs[column], number)

    # ---- what a token means --------------------------------------------------------------------

    def _accept(self, job: Job, token: int, logprob: float | None, number: int = 0) -> None:
        """The next token of a row: chosen by the model in pass `number`, or forced (no probability)."""
        forced, answer, sampling = logprob is None, job.completion, job.request.sampling
        if token in job.stops and not forced:
            return self._finish(job, "stop")
        answer.ids.append(token)
        answer.forced.append(forced)
        if sampling.logprobs:
            answer.logprobs.append(logprob)
        if sampling.stop:
            job.read()
            if job.text.stopped:
                return self._finish(job, "stop")
        if len(answer.ids) >= job.limit:
            return self._finish(job, "length")
        if token == self.tool_end and not forced and sampling.tools:
            self._call_tool(job, number)
        return None

    def _call_tool(self, job: Job, number: int) -> None:
        """The model has closed a call in pass `number`: its result comes next, whatever the model thinks."""
        job.read()
        call, job.text.call = job.text.call, ""
        if call:
            start, end = self.output
            job.forced.extend([start, *self.tokenizer.encode(calculate(call)), end])
            job.discard, job.force_from = len(job.forced), number + 2  # pass number + 1 has <|tool_end|> as its input

    def _finish(self, job: Job, reason: Literal["stop", "length", "cancelled"]) -> None:
        job.finish(reason)
        if job.slot >= 0 and self.running[job.slot] is job:
            self.running[job.slot] = None
            self._left.append(job.slot)
            self.reading.leave(job)
            if job.launched:  # what was read and chosen stays, for prompts that begin with it
                there = [*job.request.prompt, *job.completion.ids][: len(job.tokens) + job.launched - 1]
                self.prefixes.keep(job.slot, there, self._written(job))


def _together(jobs: Sequence[Job]) -> Mode:
    """What at least one of the rows needs."""
    return Mode(*(any(column) for column in zip(*{job.mode for job in jobs})))
