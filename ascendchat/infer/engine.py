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
from ascendchat.infer.request import Completion, Piece, Request, Sampling
from ascendchat.infer.sampling import Mode, mode_of
from ascendchat.infer.text import TextStream
from ascendchat.infer.tools import calculate
from ascendchat.nn.attention import Attention
from ascendchat.nn.gpt import GPT

PREFILL_TOKENS = 16384  # of one pass over new prompts, padding included

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


class PendingPass(NamedTuple):
    """A pass whose result has not been looked at: (job, its pass number, column), and how to wait for it."""

    rows: list[tuple[Job, int, int]]
    result: Callable[[], Tensor]  # (2, columns) on the host: ids and log probabilities


class Engine:
    """Runs requests in `slots` rows of up to `context` tokens. Not for several threads: one thread steps it.

    `graphs`: False where nothing can be captured, as in a trainer's process on NPUs. `version`: of the model's weights.
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
            self._extend()
        for name, tensor in own.items():
            tensor.copy_(weights[name])
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
        """Let waiting requests in, extend all rows by a token, and look at what has come back."""
        while self._admit():
            self._collect(self.ahead)
        self._extend()

    # ---- passes --------------------------------------------------------------------------------

    def _admit(self) -> bool:
        """Read the prompts of the longest waiting requests that fit free slots and one pass."""
        free = [slot for slot, job in enumerate(self.running) if job is None]  # the lowest first: a step runs a prefix
        batch: list[Job] = []
        width = 0
        while self.waiting and len(batch) < len(free):
            width = max(width, padded_length(len(self.waiting[0].request.prompt)))
            if batch and width * (len(batch) + 1) > PREFILL_TOKENS:
                break
            batch.append(self.waiting.popleft())
        if not batch:
            return False
        for job, slot in zip(batch, free):
            job.slot, self.running[slot] = slot, job
            job.completion.version = self.version  # weights may have come while it waited
        mode = _together(batch)
        result = self.decoder.prefill([job.request for job in batch], [job.slot for job in batch], mode)
        self._await(batch, range(len(batch)), result)
        return True

    def _extend(self) -> None:
        """All rows by a token; when there is nothing more to start, wait for the rest."""
        started = self._launch()
        self._collect(self.ahead if started else 0)

    def _launch(self) -> bool:
        """Start one decoding step for all rows that need it."""
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
        over: list[Job] = []
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
                if job.done:
                    over.append(job)
        if over:
            self.decoder.leave([job.slot for job in over])

    # ---- what a token means --------------------------------------------------------------------

    def _accept(self, job: Job, token: int, logprob: float | None, number: int = 0) -> None:
        """The next token of a row: chosen by the model in pass `number`, or forced (no probability)."""
        forced, answer, sampling = logprob is None, job.completion, job.request.sampling
        stops = token in job.stops and not forced
        if not stops or sampling.keep_stop:
            answer.ids.append(token)
            answer.forced.append(forced)
            if sampling.logprobs:
                answer.logprobs.append(logprob)
        if stops:
            return self._finish(job, "stop")
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


class EngineStream:
    """The generator.Stream of one job. A step of the engine is never cut in the middle: a signal handler that closes
    the stream during one takes effect right behind it."""

    def __init__(self, engine: Engine, job: Job) -> None:
        self._engine, self._job = engine, job
        self._pieces: deque[Piece] = deque()
        self._stepping = self._closed = False

    @property
    def completion(self) -> Completion:
        return self._job.completion

    def __iter__(self) -> EngineStream:
        return self

    def __next__(self) -> Piece:
        while not self._pieces and not self._job.done:
            self._stepping = True
            try:
                self._engine.step()
                self._pieces.extend(self._job.take())
            finally:
                self._stepping = False
            if self._closed:
                self.close()
        if not self._pieces:
            raise StopIteration
        return self._pieces.popleft()

    def close(self) -> None:
        self._closed = True
        if not self._stepping:
            self._engine.cancel(self._job)
            self._pieces.extend(self._job.take())

    def __del__(self) -> None:  # forgotten, for instance by a loop that was left: nobody can read on
        self._engine.cancel(self._job)


def _together(jobs: Sequence[Job]) -> Mode:
    """What at least one of the rows needs."""
    return Mode(*(any(column) for column in zip(*{job.mode for job in jobs})))
