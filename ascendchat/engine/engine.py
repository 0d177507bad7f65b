"""The inference engine: different prompts generate together, rows leave when they are done and new ones enter.

    engine = Engine(model, kernel, tokenizer, device, place, slots=16, context=2048)
    engine.generate([Request(prompt, Sampling(temperature=0.7, seed=1)), ...])     # -> [Completion, ...]
    for piece in engine.stream(Request(prompt)): print(piece.text, end="")
    job = engine.add(request); engine.step()                                      # or step by step, as the bench does

The Generator (request.py) of a model in this process. decode.py is what runs on the device; this file is the host's
side: who is in which slot, what each sampled token means, calculator calls, endings. engine.py is one request on its
way, grammar.py what a row with a grammar may say next.

The host reads results one step late where the device works on its own: while it looks at the tokens of step n, step
n + 1 runs. A row that turns out to be over has then run one step too many, which nobody sees. A row with a grammar
needs its last token before it can choose the next: while there is one, every result is read before the next step.

What a request generates does not depend on its neighbours: its noise is a hash of its seed, the position and the token.
Greedy and seeded answers are equal unless two tokens are equal to within the rounding of a matrix product, whose order
of summation a device may choose by the number of rows.

A prompt that begins as one whose tokens are still in the cache is read behind them (prefix.py, prefix.py). While long
prompts are read, in pieces, the rows that run go on.

Context: prompt and answer together hold at most `context` tokens; an answer that reaches the end finishes with reason
"length". Callers make a conversation fit first: render_prompt(tokenizer, messages, prompt_room(context, max_tokens)).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from ascendchat.checkpoint import check_fit
from ascendchat.data.tokenizer.tokenizer import Tokenizer
from ascendchat.device import Device
from ascendchat.engine.batch_state import Ints, Rows, Sheet
from ascendchat.engine.calculator import calculate
from ascendchat.engine.decode import Decoder, power
from ascendchat.engine.detokenize import TextStream
from ascendchat.engine.grammar import Matcher, grammars
from ascendchat.engine.padding import padded_length
from ascendchat.engine.prefix import (
    LEAST_REUSE,
    LEAST_REUSE_ALONE,
    UNDECIDED,
    Copy,
    Prefixes,
    Reading,
    as_tokens,
    head_of,
    rounds,
)
from ascendchat.engine.request import Completion, Piece, Request, Sampling, Weights
from ascendchat.engine.sampling import Mode, mode_of, ranked
from ascendchat.nn.attention import Attention
from ascendchat.nn.model import LanguageModel

# Prompt tokens that are read between two decoding steps, where the device works on its own and where it does not
PREFILL_TOKENS = {True: 16384, False: 512}
TOGETHER = 8  # of a batch, an eighth of all slots enters together: a pass over few prompts costs as much as over many

PauseMode = Literal["wait", "abort", "keep"]

__all__ = ["Completion", "Engine", "Job", "PauseMode", "Piece", "Request", "Sampling"]


class Engine:
    """Runs requests in `slots` rows of up to `context` tokens. Not for several threads: one thread steps it.

    `graphs`: False where nothing can be captured, as in a trainer's process on NPUs. `version`: of the model's weights.
    `reuse`: False reads every prompt from its beginning; `least_reuse`: tokens in the cache that are worth going on
    behind. `prefill_tokens`: so many tokens of prompts, padding included, are read between two steps of the rows that
    run; longer prompts are cut. `kept`: dtype of the cache, if not the model's.
    """

    elsewhere = False

    def __init__(
        self,
        model: LanguageModel,
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
        least_reuse: int | None = None,
        prefill_tokens: int | None = None,
        kept: torch.dtype | None = None,
    ) -> None:
        self.tokenizer, self.device, self.context, self.version = tokenizer, device, context, version
        sizes = {"slots": slots, "context": context}
        self.decoder = Decoder(model, kernel, device, place, **sizes, compiled=compiled, graphs=graphs, kept=kept)
        self.vocab, special = model.shape.vocab, tokenizer.specials
        self.tool_end, self.output = special["<|tool_end|>"], (special["<|output_start|>"], special["<|output_end|>"])
        self.waiting: deque[Job] = deque()
        self.running: list[Job | None] = [None] * slots  # by slot
        self.ahead = 1 if device.pin else 0  # passes that run while the results of earlier ones are looked at
        self.paused: PauseMode | None = None
        self._pending: deque[_PendingPass] = deque()
        self.prefill_tokens = prefill_tokens or PREFILL_TOKENS[device.pin]
        least = least_reuse or (LEAST_REUSE_ALONE if device.pin else LEAST_REUSE)
        self.prefixes = Prefixes(slots, self.decoder.cache.places, reuse, self._written_in, least)
        self.reading = Reading(self.prefixes)
        self.forgotten: list[Job] = []  # whose streams nobody holds any more
        self._left: list[int] = []  # slots whose requests are over, which the decoder does not know yet
        self._group = 1  # requests that enter together at least, while others run
        self.sheet, self.gather = Sheet(slots, context, self.vocab), _Gather(self)

    # ---- the Generator -------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """All answers, in the order of the requests."""
        if self.paused:
            raise RuntimeError("the engine is paused, and would never answer: resume() it first")
        jobs = [self._job(request) for request in requests]
        self.waiting.extend(jobs)
        self._group = max(1, len(self.running) // TOGETHER)  # nobody waits for a single one of them
        try:
            for job in jobs:
                while not job.done:
                    self.step()
        finally:
            self._group = 1
            for job in jobs:
                self.cancel(job)  # after an error: nobody waits for them any more
            if any(job.completion.finish_reason == "cancelled" for job in jobs):
                self.prefixes.clear()  # a pass that failed may have overwritten what a slot had
        return [job.completion for job in jobs]

    def stream(self, request: Request) -> _EngineStream:
        """One answer as it comes, whole characters only, with tool calls and their results."""
        return _EngineStream(self, self.add(request))

    @torch.no_grad()
    def load(self, weights: Weights, version: int, *, interrupt: bool = False, checked: bool = False) -> None:
        """Answer with these weights from now on; see Generator.load. They are copied into the tensors that are there,
        so that captured graphs stay valid. After pause("keep") answers under way go on with them. `checked`: by fits.
        """
        if not checked:
            self.fits(weights)
        while any(self.running) and self.paused != "keep" and not interrupt:
            self._read()
            self._extend()
        for name, tensor in self.decoder.model.state_dict().items():
            tensor.copy_(weights[name])
        self.renew(version)

    def fits(self, weights: Weights) -> None:
        """Weights that `load` would not take are a ValueError."""
        check_fit(self.decoder.model.state_dict(), weights)

    def pause(self, mode: PauseMode) -> None:
        """Let no waiting request in until resume(). Running ones: "wait", they are finished by further steps, or by
        load(); "abort", they end here, as cancelled; "keep", they stand still with their cache, and after resume() they
        go on with whatever weights are there: Completion.versions then says which token came from which."""
        if mode not in get_args(PauseMode):
            raise ValueError(f"pause by one of {', '.join(get_args(PauseMode))}, not {mode!r}")
        self.paused = mode
        if mode != "wait":
            self._collect(0)
        for job in self.running if mode == "abort" else ():
            if job is not None:
                self.cancel(job)

    def resume(self) -> None:
        """Go on after pause()."""
        self.paused = None

    def renew(self, version: int) -> None:
        """A trainer has changed the model's own tensors, in this process: forget what the old wrote."""
        self.prefixes.clear()
        self.reading.restart()
        self.version = version

    def prepare(self, say: Callable[[str], None] = print) -> None:
        """Compile for one row and for all slots, before any request comes."""
        self.decoder.prepare(sorted({1, len(self.running)}), say)

    # ---- step by step --------------------------------------------------------------------------

    def add(self, request: Request, matcher: Matcher | None = None) -> Job:
        """Queue a request; it enters when a slot is free. `matcher`: of its grammar, where it is compiled already."""
        job = self._job(request, matcher)
        self.waiting.append(job)
        return job

    def _job(self, request: Request, matcher: Matcher | None = None) -> Job:
        prompt, sampling = request.prompt, request.sampling
        if not prompt or min(prompt) < 0 or max(prompt) >= self.vocab:
            raise ValueError(f"a prompt needs at least one token, each between 0 and {self.vocab - 1}")
        named = {"allowed_tokens": sampling.allowed_tokens, "logit_bias": [token for token, _ in sampling.logit_bias]}
        for name, tokens in named.items():
            if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocab:
                raise ValueError(f"the tokens of {name} must lie between 0 and {self.vocab - 1}")
        if len(prompt) >= self.context:
            raise ValueError(f"a prompt of {len(prompt)} tokens leaves no room for an answer in {self.context}")
        allowed = np.isin(np.arange(self.vocab), sampling.allowed_tokens) if sampling.allowed_tokens else None
        if matcher is None and sampling.grammar is not None:
            matcher = grammars(self.tokenizer).matcher(sampling.grammar, request.salt)
        job = Job(request, self.tokenizer, self.context, self.version, allowed, matcher)
        if matcher is not None and not allowed_next([job], self.tokenizer, self.vocab).any():
            raise ValueError("allowed_tokens has none with which the grammar can begin")
        return job

    def cancel(self, job: Job) -> None:
        """End a request now; nothing happens if it is over."""
        if not job.done:
            if job in self.waiting:
                self.waiting.remove(job)
            self._finish(job, "cancelled")

    def step(self) -> None:
        """Let waiting requests in, read prompts, extend all rows by a token, look at what came back; see pause()."""
        if not self.paused:
            self._enter()
        if self.paused != "keep":
            self._read()
            self._extend()

    def _enter(self) -> None:
        """The longest waiting requests take the free slots."""
        free = self.sheet.free() if self.waiting else []
        if not free or len(free) < min(self._group, len(self.waiting), len(self.running)):
            return
        top = max((slot for slot, other in enumerate(self.running) if other is not None), default=-1)
        while self.waiting and free:
            job = self.waiting.popleft()
            self.reading.enter(job, free, top)
            free.remove(job.slot)
            self.running[job.slot], top = job, max(top, job.slot)
            job.enter(self.sheet)

    def _written_in(self, slot: int) -> int | None:
        job = self.running[slot]
        return None if job is None or not job.launched else self._written(job)

    def _written(self, job: Job) -> int:
        """Positions that a row has written at most: the token of the newest pass is not in the cache yet. A row that
        has all its tokens may run once more before that is seen."""
        return len(job.tokens) + job.launched - 1 + (self.ahead if job.launched >= job.limit else 0)

    def _read(self) -> None:
        """Read prompts, in as many passes as the rows that run can wait for."""
        while self.forgotten:
            self.cancel(self.forgotten.pop())
        left = self.prefill_tokens
        while self.reading.jobs or self.reading.copies:  # of a request that ended before it was read, too
            self._dismiss()
            self.reading.begin(self.sheet.free())
            for copies in rounds(self.reading.copies):
                self.decoder.copy(copies)
            self.reading.copies.clear()
            parts = self.reading.next_pass(left, left == self.prefill_tokens)
            if not parts:
                return
            left -= len(parts) * padded_length(max(part.end - part.start for part in parts))
            jobs, starts, ends = zip(*parts)
            requests, slots = [job.request for job in jobs], [job.slot for job in jobs]
            mode = together(jobs)
            if mode.restricted or self.decoder.barred is not None:  # what the slot's last request barred must not stay
                self._restrict(jobs)
            result = self.decoder.prefill(requests, slots, mode, starts, ends)
            whole = [column for column, part in enumerate(parts) if self.reading.done(part)]
            for column in whole:
                jobs[column].completion.version = self.version  # weights may have come while it waited
            if whole:
                self._await(np.array([slots[column] for column in whole]), result, np.array(whole))
                self._collect(self.ahead)

    def _dismiss(self) -> None:
        """Tell the decoder who is over, before the next pass."""
        if self._left:
            self.decoder.leave(self._left)
            self._left = []

    def _extend(self) -> None:
        """All rows by a token; when there is nothing more to start, wait for the rest."""
        self._collect(self.ahead if self._launch() else 0)

    def _launch(self) -> bool:
        """Start one decoding step for all rows that need it."""
        sheet = self.sheet
        self.gather()
        if sheet.bound.any():
            self._collect(0)
        if sheet.forced.any():
            self._force()
        slots = sheet.runs()
        if bound := [job for slot in slots[sheet.bound[slots]] if (job := self.running[slot]) is not None]:
            self._restrict(bound)
            slots = sheet.runs()  # without those that can choose nothing
        if not len(slots):
            return False
        self._dismiss()  # also who ended just now: a step must not write behind what its slot keeps
        mode = Mode.of(sheet.modes(slots))
        self._await(slots, self.decoder.step(int(slots[-1]) + 1, sheet.longest(slots), mode))
        return True

    def _force(self) -> None:
        """Put in the next token of each tool's result."""
        forced = {}
        for job in [job for job in self.running if job is not None and job.forced]:
            while job.forced and job.launched == job.limit and not job.done:  # no room to go on behind the result
                self._accept(job, job.forced.popleft(), None)
            if job.forced and job.launched >= job.force_from and not job.done:
                forced[job.slot] = job.forced[0]
                self._accept(job, job.forced.popleft(), None)
            job.mark()
        self.decoder.force(forced)

    def _restrict(self, jobs: Sequence[Job]) -> None:
        """Tell the decoder what these rows must not choose next, in one copy. A row that can choose nothing is over."""
        allowed = allowed_next(jobs, self.tokenizer, self.vocab)
        for job, row in zip(jobs, allowed):
            if not row.any():
                self._finish(job, "length")
        self.decoder.restrict([job.slot for job in jobs], ~allowed)

    def _await(self, slots: Ints, result: Tensor, columns: Ints | None = None) -> None:
        """Start the copy of a pass's result to the host; `_collect` will look at it."""
        rows = self.sheet.launch(slots)
        self._pending.append(_PendingPass(rows, columns, self.device.fetch(result), self.version))

    def _collect(self, leave: int) -> None:
        """Look at results, oldest first, until only `leave` are pending."""
        while len(self._pending) > leave:
            waited = self._pending.popleft()
            rows, version = waited.rows, waited.version
            for slot in self.sheet.to_read(rows):  # the device works meanwhile
                if (job := self.running[slot]) is not None:
                    job.read()
            result = waited.result().numpy()  # waits for this pass, not for the one behind it
            result = result[:, rows.slots if waited.columns is None else waited.columns]
            ids = result[0].astype(np.int64)
            looked_at, ended = self.sheet.take(rows, ids, result[1], version)
            for number in ended:
                if (job := self.running[rows.slots[number]]) is not None:
                    self._finish(job, "length")
            for number in looked_at:
                job = self.running[rows.slots[number]]
                if job is None or job.done:
                    continue
                if job.discard:
                    job.discard -= 1
                else:
                    told = int(rows.numbers[number]), version, result[2:, number].tolist()
                    self._accept(job, int(ids[number]), float(result[1, number]), *told)
                job.mark()

    # ---- what a token means --------------------------------------------------------------------

    def _accept(
        self,
        job: Job,
        token: int,
        logprob: float | None,
        number: int = 0,
        version: int | None = None,
        tops: Sequence[float] = (),
    ) -> None:
        """The next token of a row: chosen by the model in pass `number`, or forced (no probability)."""
        forced, answer, sampling = logprob is None, job.completion, job.request.sampling
        stops = token in job.stops and not forced
        if not stops or sampling.keep_stop:
            job.add(token, self.version if version is None else version, forced)
            if sampling.logprobs:
                answer.logprobs.append(logprob)
            if sampling.top_logprobs:
                answer.tops.append(ranked(tops, sampling.top_logprobs))
        if stops:
            return self._finish(job, "stop")
        if sampling.stop:
            job.read()
            if job.text.stopped:
                return self._finish(job, "stop")
        if job.matcher is not None and (ending := job.matcher.take(token)):
            return self._finish(job, ending)
        if len(answer.ids) >= job.limit:
            return self._finish(job, "length")
        if token == self.tool_end and not forced and job.tools:
            self._call_tool(job, number)
        return None

    def _call_tool(self, job: Job, number: int) -> None:
        """The model has closed a call in pass `number`: its result comes next, whatever the model thinks."""
        job.read()
        call, job.text.call = job.text.call, ""
        if call:
            job.forced.extend([self.output[0], *self.tokenizer.encode(calculate(call)), self.output[1]])
            job.discard, job.force_from = len(job.forced), number + 2  # pass number + 1 has <|tool_end|> as its input

    def _finish(self, job: Job, reason: Literal["stop", "length", "cancelled"]) -> None:
        job.finish(reason)
        if job.slot >= 0 and self.running[job.slot] is job:
            self.running[job.slot] = None
            self._left.append(job.slot)
            self.reading.leave(job)
            if self.prefixes.held[job.slot] is not None and (launched := job.launched):  # stays, for the next prompts
                answer = self.sheet.ids[job.slot, : min(len(job.completion.ids), launched - 1)]
                self.prefixes.keep(job.slot, np.concatenate((job.tokens, answer)), self._written(job))


# Rows move together when few are left: a step runs all slots up to the highest busy one, so that one long answer in
# the last slot would cost as much as all of them.
#
#     gather()          # before each step
#
# What a row has moves with it, on the device and on the host, and its answer changes no more than with other
# neighbours. What the freed slot kept for later prompts goes the other way.

LEAST = 16  # rows that a step must run: fewer take hardly less time
# Guesses, not timed on a card: steps in a row that half as many rows would do for, since moving takes as long as a few;
PATIENCE = 8
RECORDING = 256  # such steps in all, before a step of another size is recorded, which takes as long as many


class _Gather:
    """Of one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.sparse = engine, 0
        self.wanted: Counter[int] = Counter()  # by rows: steps that so many would have done for

    def __call__(self) -> None:
        self.sparse = self.sparse + 1 if self.worth() else 0
        if self.sparse > PATIENCE:
            self.sparse = 0
            self.engine._collect(0)  # what is under way comes back by slot
            self.engine._dismiss()
            self.move()

    def worth(self) -> bool:
        """Whether a step would have half as many rows. Not while prompts are read or wait for a slot."""
        engine, decoder = self.engine, self.engine.decoder
        if len(engine.running) < LEAST or engine.waiting or engine.reading.jobs:
            return False
        busy = np.flatnonzero(engine.sheet.owner)
        top = int(busy[-1]) + 1 if len(busy) else 0
        few = size(decoder, len(busy))
        if top < LEAST or size(decoder, top) < 2 * few:
            return False
        self.wanted[few] += 1
        if not (decoder.graphs or decoder.compiled) or self.wanted[few] > RECORDING:
            return True
        return any(rows == few for rows, _, _ in decoder._steps)

    def move(self) -> None:
        """The rows of the highest slots to the lowest free ones; nothing may be under way."""
        engine, held = self.engine, self.engine.prefixes.held
        busy = [slot for slot, job in enumerate(engine.running) if job is not None]
        targets = [slot for slot in range(len(busy)) if engine.running[slot] is None]
        sources = busy[len(busy) - len(targets) :]
        if not sources:
            return
        groups, records = [], []
        for source, target in zip(sources, targets):
            length, kept = int(engine.decoder.held[source]), held[target]
            groups.append([Copy(source, target, length, (length - 1) % 2)])
            if kept is not None and len(kept.tokens) >= engine.prefixes.least:
                groups[-1].append(Copy(target, source, len(kept.tokens), (len(kept.tokens) - 1) % 2))
            else:
                kept = None
            records.append((kept, held[source]))
            held[source] = held[target] = None  # nothing of it may be found if a copy fails
        for copies in rounds(groups):
            engine.decoder.copy(copies)
        move_state(engine.decoder, sources, targets)
        engine.sheet.move(np.array(sources), np.array(targets))
        for source, target, record in zip(sources, targets, records):
            held[source], held[target] = record
            job = engine.running[source]
            assert job is not None
            engine.running[target], engine.running[source], job.slot = job, None, target


def size(decoder: Decoder, rows: int) -> int:
    """Rows that a step for so many runs."""
    if decoder.prepared:
        return next(most for most, _ in decoder.prepared if most >= rows)
    return power(rows, 1, decoder.slots) if decoder.graphs or decoder.compiled else rows


@torch.no_grad()
def move_state(decoder: Decoder, sources: Sequence[int], targets: Sequence[int]) -> None:
    """All that the decoder knows of these rows but their cache; the slots that they leave are idle."""
    source, target = decoder.put(sources), decoder.put(targets)
    tables = decoder.seen, decoder.barred, decoder.bias, decoder.counts
    rows = decoder.token, decoder.previous, decoder.length, decoder.override, *decoder.settings
    for tensor in (*rows, *(table for table in tables if table is not None)):
        tensor[target] = tensor[source]
    decoder.target[target] = target
    decoder.held[targets] = decoder.held[sources]
    decoder.leave(sources)


# One request on its way through the engine (engine.py): what it has so far, and what is still to come.


class Job:
    """One request on its way. `allowed`: (V,) bool of its allowed_tokens; `matcher`: of its grammar."""

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer,
        context: int,
        version: int,
        allowed: np.ndarray | None = None,
        matcher: Matcher | None = None,
    ) -> None:
        sampling, special = request.sampling, tokenizer.specials
        self.request, self._answer = request, Completion(version=version)
        self.text = TextStream(tokenizer, sampling.stop)
        self.limit = min(sampling.max_tokens, context - len(request.prompt))  # tokens to generate at most
        self.mode = mode_of(sampling)
        self.stops = frozenset(tokenizer.stops if sampling.stop_tokens is None else sampling.stop_tokens)
        self.allowed, self.matcher = allowed, matcher
        if matcher is not None:
            self.stops |= {special["<|assistant_end|>"]}
        self.tools = sampling.tools and matcher is None
        self.watched = self.stops | {special["<|tool_end|>"]}  # tokens that mean something
        self.plain = not sampling.stop and not sampling.top_logprobs and matcher is None  # all others need no look
        self.slot = -1
        self.sheet: Sheet | None = None  # while it has a slot
        self.tokens = as_tokens(request.prompt)
        self.salt = request.salt
        self.head = head_of(self.tokens, self.salt)
        self.cached = UNDECIDED  # tokens of the prompt that are in its slot
        self._launched = 0  # when it is over
        self.forced: deque[int] = deque()  # tokens of a tool's result still to be put in
        self.force_from = 0  # pass whose input is the first of them
        self.discard = 0  # coming results that forced tokens replace
        self.done = False
        self._fresh: list[Piece] = []
        self._read = 0  # ids that have become text

    def begin(self, cached: int) -> None:
        """Its prompt will be read behind so many tokens that the cache has."""
        self.cached = self._answer.cached_tokens = cached

    def take(self) -> list[Piece]:
        """The text that came since the last call."""
        self.read()
        fresh, self._fresh = self._fresh, []
        return fresh

    def enter(self, sheet: Sheet) -> None:
        """It has a slot."""
        self.sheet, bound = sheet, self.matcher is not None
        sheet.enter(self.slot, len(self.tokens), self.limit, self.mode.bits, self.watched, bound=bound)
        self.mark()

    def mark(self) -> None:
        """Say whether its coming tokens need a look."""
        if self.sheet is not None:
            self.sheet.forced[self.slot] = bool(self.forced)
            self.sheet.plain[self.slot] = self.plain and not self.forced and not self.discard

    @property
    def launched(self) -> int:
        """Passes that will bring a token of this row: the prompt's is the first."""
        return self._launched if self.sheet is None else int(self.sheet.launched[self.slot])

    @property
    def completion(self) -> Completion:
        """The answer, with all tokens that are known."""
        answer, sheet, slot = self._answer, self.sheet, self.slot
        if sheet is not None and (have := len(answer.ids)) < (known := int(sheet.written[slot])):
            answer.ids += sheet.ids[slot, have:known].tolist()
            answer.versions += sheet.versions[slot, have:known].tolist()
            answer.forced += [False] * (known - have)
            if self.request.sampling.logprobs:
                answer.logprobs += sheet.logprobs[slot, have:known].tolist()
        return answer

    def add(self, token: int, version: int, forced: bool) -> None:
        """The next token of the answer."""
        answer, sheet = self.completion, self.sheet
        if sheet is not None:
            sheet.ids[self.slot, len(answer.ids)] = token
            sheet.written[self.slot] = len(answer.ids) + 1
        answer.add(token, version, forced)

    def read(self) -> None:
        """Turn new ids into text; put off, for a batch of hundreds has microseconds per token: see Sheet.to_read."""
        ids = self.completion.ids
        if self._read < len(ids):
            self._fresh += self.text.feed_all(ids[self._read :])
            self._read = len(ids)

    def finish(self, reason: Literal["stop", "length", "cancelled"]) -> None:
        self.read()
        self._fresh += self.text.close()
        self._answer.text, self._answer.finish_reason, self.done = self.text.text, reason, True
        if self.sheet is not None:
            self._launched = self.launched
            self.sheet.leave(self.slot)
            self.sheet = None


def together(jobs: Sequence[Job]) -> Mode:
    """What at least one of the rows needs."""
    return Mode(*(any(column) for column in zip(*{job.mode for job in jobs})))


def allowed_next(jobs: Sequence[Job], tokenizer: Tokenizer, vocab: int) -> np.ndarray:
    """(jobs, V) bool: what each may choose next, by its grammar and its allowed_tokens."""
    if any(job.matcher is not None for job in jobs):
        left = [job.limit - len(job.completion.ids) for job in jobs]
        allowed = grammars(tokenizer).allowed([job.matcher for job in jobs], left)
    else:
        allowed = np.ones((len(jobs), vocab), dtype=np.bool_)
    for row, job in zip(allowed, jobs):
        if job.allowed is not None:
            row &= job.allowed
    return allowed


class _PendingPass(NamedTuple):
    """A pass whose result has not been looked at."""

    rows: Rows
    columns: Ints | None  # of the result; None: the slots
    result: Callable[[], Tensor]  # waits for it: on the host, what Decoder.step returned
    version: int  # of the weights that it ran with


# One answer of an engine as it comes: `for piece in engine.stream(request)`, as `ascendchat chat` does.


class _EngineStream:
    """The generator.Stream of one job. A step of the engine is never cut in the middle: a signal handler that closes
    the stream during one takes effect right behind it."""

    def __init__(self, engine: Engine, job: Job) -> None:
        self._engine, self._job = engine, job
        self._pieces: deque[Piece] = deque()
        self._stepping = self._closed = False

    @property
    def completion(self) -> Completion:
        return self._job.completion

    def __iter__(self) -> _EngineStream:
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
        self._engine.forgotten.append(self._job)  # the garbage collector may come in the middle of a step
