"""The inference engine: different prompts generate together, rows leave when they are done and new ones enter.

    engine = Engine(model, kernel, tokenizer, device, place, slots=16, context=2048)
    engine.generate([Request(prompt, Sampling(temperature=0.7, seed=1)), ...])     # -> [Completion, ...]
    for text in engine.stream(Request(prompt)): print(text, end="")
    job = engine.add(request); engine.step()                                      # or turn by turn, as chat does

`ascendchat chat` and `ascendchat eval chat` generate through here. decode.py is what runs on the device; this file is
the host's side: who is in which slot, what each sampled token means, calculator calls, endings.

The host reads results one step late where the device works on its own: while it looks at the tokens of step n, step
n + 1 runs. A row that turns out to be over has then run one step too many, which nobody sees.

What a request generates does not depend on its neighbours: its noise is a hash of its seed, the position and the token.
Greedy and seeded answers are equal unless two tokens are equal to within the rounding of a matrix product, whose order
of summation a device may choose by the number of rows.

Context: prompt and answer together hold at most `context` tokens; an answer that reaches the end finishes with reason
"length". `chat_prompt` makes a conversation fit first, by the rule of data.chat.render_prompt: the oldest exchanges go,
then the system message, then the beginning of the last exchange.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ascendchat.data.chat import Message, render_prompt
from ascendchat.data.tokenizer import Tokenizer
from ascendchat.device import Device
from ascendchat.infer.decode import Decoder, width_of
from ascendchat.infer.request import Completion, Piece, Request, Sampling
from ascendchat.infer.sampling import Mode
from ascendchat.infer.text import TextStream
from ascendchat.infer.tools import calculate
from ascendchat.nn.attention import Attention
from ascendchat.nn.gpt import GPT

PREFILL_TOKENS = 16384  # of one pass over new prompts, padding included

__all__ = ["Completion", "Engine", "Job", "Piece", "Request", "Sampling"]


class Job:
    """One request on its way."""

    def __init__(self, request: Request, tokenizer: Tokenizer, context: int) -> None:
        way = request.sampling
        self.request, self.completion = request, Completion()
        self.text = TextStream(tokenizer, way.stop)
        self.limit = min(way.max_tokens, context - len(request.prompt))  # tokens to generate at most
        chosen = way.temperature > 0
        narrow = way.top_k > 0 or way.top_p < 1 or way.min_p > 0
        self.mode = Mode(chosen, chosen and narrow, way.repetition_penalty != 1.0)
        special = tokenizer.specials
        self.stops = frozenset(
            (special["<|assistant_end|>"], tokenizer.bos) if way.stop_tokens is None else way.stop_tokens
        )
        self.watched = self.stops | {special["<|tool_end|>"]}  # tokens that mean something
        self.plain = not way.stop and not way.logprobs  # all others need no look
        self.slot = -1
        self.launched = 0  # passes that will bring a token of this row: the prompt's is the first
        self.forced: deque[int] = deque()  # tokens of a tool's result still to be put in
        self.force_from = 0  # pass whose input is the first of them
        self.discard = 0  # coming results that forced tokens replace
        self.done = False
        self._fresh: list[Piece] = []
        self._read = 0  # ids that have become text

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


class Flight(NamedTuple):
    """A pass whose result has not been looked at: (job, its pass number, column), and how to wait for it."""

    rows: list[tuple[Job, int, int]]
    result: Callable[[], Tensor]  # (2, columns) on the host: ids and log probabilities


class Engine:
    """Runs requests in `slots` rows of up to `context` tokens. Not for several threads: one thread steps it."""

    def __init__(
        self, model: GPT, kernel: Attention, tokenizer: Tokenizer, device: Device, place: torch.device, *, slots: int,
        context: int, compiled: bool = False,
    ) -> None:  # fmt: skip
        self.tokenizer, self.device, self.context = tokenizer, device, context
        self.decoder = Decoder(model, kernel, device, place, slots=slots, context=context, compiled=compiled)
        self.vocab = model.shape.vocab
        special = tokenizer.specials
        self.tool_end, self.output = special["<|tool_end|>"], (special["<|output_start|>"], special["<|output_end|>"])
        self.waiting: deque[Job] = deque()
        self.running: list[Job | None] = [None] * slots  # by slot
        self.ahead = 1 if device.pin else 0  # passes in flight while results are looked at
        self._flights: deque[Flight] = deque()

    # ---- for callers ---------------------------------------------------------------------------

    def chat_prompt(self, messages: Sequence[Message], sampling: Sampling) -> list[int]:
        """The prompt of a conversation, shortened so that the answer has its max_tokens, or half of the context."""
        return render_prompt(self.tokenizer, messages, self.context - min(sampling.max_tokens, self.context // 2))

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """All answers, in the order of the requests."""
        jobs = [self.add(request) for request in requests]
        while not all(job.done for job in jobs):
            self.step()
        return [job.completion for job in jobs]

    def stream(self, request: Request) -> Iterator[str]:
        """The visible text of one answer as it comes, whole characters only. Closing the iterator ends the request."""
        for piece in self.pieces(request):
            if piece.kind == "text":
                yield piece.text

    def pieces(self, request: Request) -> Iterator[Piece]:
        """Like `stream`, with tool calls and their results."""
        job = self.add(request)
        try:
            while not job.done:
                self.step()
                yield from job.take()
        finally:
            self.cancel(job)

    def add(self, request: Request) -> Job:
        """Queue a request; it enters when a slot is free."""
        prompt = request.prompt
        if not prompt or min(prompt) < 0 or max(prompt) >= self.vocab:
            raise ValueError(f"a prompt needs at least one token, each between 0 and {self.vocab - 1}")
        if len(prompt) >= self.context:
            raise ValueError(f"a prompt of {len(prompt)} tokens leaves no room for an answer in {self.context}")
        job = Job(request, self.tokenizer, self.context)
        self.waiting.append(job)
        return job

    def cancel(self, job: Job) -> None:
        """End a request now; nothing happens if it is over."""
        if not job.done:
            if job in self.waiting:
                self.waiting.remove(job)
            self._finish(job, "cancelled")

    def step(self) -> None:
        """Let waiting requests in, extend all rows by a token, and look at what has come back."""
        while self._admit():
            self._land(self.ahead)
        if not self._launch():
            self._land(0)  # nothing more to start: wait for the rest
        self._land(self.ahead)

    # ---- passes --------------------------------------------------------------------------------

    def _admit(self) -> bool:
        """Read the prompts of the longest waiting requests that fit free slots and one pass."""
        free = [slot for slot, job in enumerate(self.running) if job is None]  # the lowest first: a step runs a prefix
        batch: list[Job] = []
        width = 0
        while self.waiting and len(batch) < len(free):
            width = max(width, width_of(len(self.waiting[0].request.prompt)))
            if batch and width * (len(batch) + 1) > PREFILL_TOKENS:
                break
            batch.append(self.waiting.popleft())
        if not batch:
            return False
        for job, slot in zip(batch, free):
            job.slot, self.running[slot] = slot, job
        mode = _together(batch)
        result = self.decoder.prefill([job.request for job in batch], [job.slot for job in batch], mode)
        self._fly(batch, range(len(batch)), result)
        return True

    def _launch(self) -> bool:
        """One decoding step for all rows that need it."""
        for job in [job for job in self.running if job is not None and job.forced]:
            while job.forced and job.launched == job.limit and not job.done:  # no room to go on behind the result
                self._accept(job, job.forced.popleft(), None)
            if job.forced and job.launched >= job.force_from and not job.done:
                self.decoder.override[job.slot] = job.forced[0]
                self._accept(job, job.forced.popleft(), None)
        jobs = [job for job in self.running if job is not None and job.launched < job.limit]
        if not jobs:
            return False
        longest = max(len(job.request.prompt) + job.launched for job in jobs)
        result = self.decoder.step(max(job.slot for job in jobs) + 1, longest, _together(jobs))
        self._fly(jobs, [job.slot for job in jobs], result)
        return True

    def _fly(self, jobs: Sequence[Job], columns: Sequence[int], result: Tensor) -> None:
        """Start the copy of a result to the host."""
        rows = [(job, job.launched, column) for job, column in zip(jobs, columns)]
        for job in jobs:
            job.launched += 1
        self._flights.append(Flight(rows, self.device.fetch(result)))

    def _land(self, leave: int) -> None:
        """Look at results, oldest first, until only `leave` are in flight."""
        over: list[Job] = []
        while len(self._flights) > leave:
            rows, landed = self._flights.popleft()
            result = landed()  # waits for this pass, not for the one behind it
            ids, logprobs = result[0].long().tolist(), result[1].tolist()
            for job, number, column in rows:
                if job.done:
                    continue
                if job.discard:
                    job.discard -= 1
                    continue
                token, known = ids[column], job.completion
                if job.plain and token not in job.watched and len(known.ids) + 1 < job.limit:  # the usual case, fast
                    known.ids.append(token)
                    known.forced.append(False)
                    continue
                self._accept(job, token, logprobs[column], number)
                if job.done:
                    over.append(job)
        if over:
            self.decoder.leave([job.slot for job in over])

    # ---- what a token means --------------------------------------------------------------------

    def _accept(self, job: Job, token: int, logprob: float | None, number: int = 0) -> None:
        """The next token of a row: chosen by the model in pass `number`, or forced (no probability)."""
        forced, done, way = logprob is None, job.completion, job.request.sampling
        if token in job.stops and not forced:
            return self._finish(job, "stop")
        done.ids.append(token)
        done.forced.append(forced)
        if way.logprobs:
            done.logprobs.append(logprob)
        if way.stop:
            job.read()
            if job.text.stopped:
                return self._finish(job, "stop")
        if len(done.ids) >= job.limit:
            return self._finish(job, "length")
        if token == self.tool_end and not forced and way.tools:
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


def _together(jobs: Sequence[Job]) -> Mode:
    """What at least one of the rows needs."""
    return Mode(*(any(column) for column in zip(*{job.mode for job in jobs})))
