"""The inference engine: continuous batching. Requests enter free slots, all running rows advance by a token per step.

    engine = Engine(model, kernel, tokenizer, device, place, slots=16, context=2048)
    engine.generate([Request(prompt, Sampling(temperature=0.7, seed=1)), ...])     # -> [Completion, ...]
    for piece in engine.stream(Request(prompt)): print(piece.text, end="")
    state = engine.add(request); engine.step()      # or step by step; serve calls its halves, prefill() and decode()

The Generator (request.py) of a model in this process. decode.py is what runs on the device; this file is the host's
side: who is in which slot, what each sampled token means, calculator calls, endings. batch_state.py has what the host
knows of all rows as arrays, grammar.py says what a row with a grammar may choose next.

The host reads results one step late where the device works on its own: while it looks at the tokens of step n, step
n + 1 runs. A row that turns out to be over has then run one step too many, which nobody sees. A row with a grammar
needs its last token before it can choose the next: while there is one, every result is read before the next step.

What a request generates does not depend on its neighbours: its noise is a hash of its seed, the position and the token.
Greedy and seeded answers are equal unless two tokens are equal to within the rounding of a matrix product, whose order
of summation a device may choose by the number of rows.

A prompt that begins as one whose tokens are still in the cache is read behind them (prefix.py). While long prompts are
read, in pieces, the rows that run go on.

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
from ascendchat.engine.batch_state import BatchState, Ints, PassRows
from ascendchat.engine.calculator import calculate
from ascendchat.engine.decode import Decoder
from ascendchat.engine.detokenize import TextStream
from ascendchat.engine.grammar import Matcher, grammars
from ascendchat.engine.prefix import (
    MIN_REUSE,
    MIN_REUSE_ASYNC,
    UNDECIDED,
    Copy,
    PrefillScheduler,
    PrefixCache,
    as_tokens,
    head_of,
    rounds,
)
from ascendchat.engine.request import Completion, Piece, Request, Sampling, Weights
from ascendchat.engine.sampling import Draw, Mode, mode_of, ranked
from ascendchat.nn.attention import Attention
from ascendchat.nn.logprobs import LMHead
from ascendchat.nn.model import LanguageModel

# Prompt tokens that are read between two decoding steps, where the device works on its own and where it does not
PREFILL_TOKENS = {True: 16384, False: 512}
TOGETHER = (
    8  # of `generate`, an eighth of all slots enters together: a pass over few prompts costs as much as over many
)

# Slot compaction. Guesses, not timed on a card: moving takes as long as a few steps, capturing as long as many
MIN_ROWS = 16  # that a step must run: fewer take hardly less time
SPARSE_STEPS = 8  # in a row that half as many rows would do for, before rows move
CAPTURE_AFTER = 256  # such steps in all, before a step of another size is captured

PauseMode = Literal["wait", "abort", "keep"]

__all__ = ["Completion", "Engine", "PauseMode", "Piece", "Request", "RequestState", "Sampling"]


class Engine:
    """Runs requests in `slots` rows of up to `context` tokens. Not for several threads: one thread steps it.

    `graphs`: False where nothing can be captured, as in a trainer's process on NPUs. `version`: of the model's weights.
    `reuse`: False reads every prompt from its beginning; `min_reuse`: tokens in the cache that are worth going on
    behind. `prefill_tokens`: so many tokens of prompts, padding included, are read between two steps of the rows that
    run; longer prompts are cut. `cache_dtype`: dtype of the KV cache, if not the model's; `readout`: see Decoder.
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
        min_reuse: int | None = None,
        prefill_tokens: int | None = None,
        cache_dtype: torch.dtype | None = None,
        readout: LMHead | None = None,
    ) -> None:
        self.tokenizer, self.device, self.context, self.version = tokenizer, device, context, version
        sizes = {"slots": slots, "context": context}
        self.decoder = Decoder(
            model,
            kernel,
            device,
            place,
            **sizes,
            compiled=compiled,
            graphs=graphs,
            cache_dtype=cache_dtype,
            readout=readout,
        )
        self.vocab, special = model.shape.vocab, tokenizer.specials
        self.tool_end, self.output = special["<|tool_end|>"], (special["<|output_start|>"], special["<|output_end|>"])
        self.waiting: deque[RequestState] = deque()
        self.running: list[RequestState | None] = [None] * slots  # by slot
        self.batch = BatchState(slots, context, self.vocab)
        self.lag = 1 if device.pin else 0  # passes that run while the results of earlier ones are looked at
        self.paused: PauseMode | None = None
        self.prefill_tokens = prefill_tokens or PREFILL_TOKENS[device.pin]
        least = min_reuse or (MIN_REUSE_ASYNC if device.pin else MIN_REUSE)
        self.prefix_cache = PrefixCache(slots, self.decoder.cache.places, reuse, self._written_in, least)
        self.scheduler = PrefillScheduler(self.prefix_cache)
        self.forgotten: list[RequestState] = []  # whose streams nobody holds any more
        self.sparse_steps = 0  # in a row
        self.wanted: Counter[int] = Counter()  # by rows: steps that so many would have done for
        self._pending: deque[_PendingPass] = deque()
        self._left: list[int] = []  # slots whose requests are over, which the decoder does not know yet
        self._group = 1  # requests that enter together at least, while others run

    # ---- the Generator -------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Generate all answers, in the order of the requests."""
        if self.paused:
            raise RuntimeError("the engine is paused, and would never answer: resume() it first")
        states = [self._new_state(request) for request in requests]
        self.waiting.extend(states)
        self._group = max(1, len(self.running) // TOGETHER)  # nobody waits for a single one of them
        try:
            for state in states:
                while not state.done:
                    self.step()
        finally:
            self._group = 1
            for state in states:
                self.cancel(state)  # after an error: nobody waits for them any more
            if any(state.completion.finish_reason == "cancelled" for state in states):
                self.prefix_cache.clear()  # a pass that failed may have overwritten what a slot had
        return [state.completion for state in states]

    def stream(self, request: Request) -> _EngineStream:
        """Generate one answer, as it comes: whole characters only, with tool calls and their results."""
        return _EngineStream(self, self.add(request))

    @torch.no_grad()
    def load(self, weights: Weights, version: int, *, interrupt: bool = False, checked: bool = False) -> None:
        """Answer with these weights from now on; see Generator.load. They are copied into the tensors that are there,
        so that captured graphs stay valid. After pause("keep") answers under way go on with them. `checked`: by fits.
        """
        if not checked:
            self.fits(weights)
        while any(self.running) and self.paused != "keep" and not interrupt:
            self._prefill()
            self.decode()
        for name, tensor in self.decoder.model.state_dict().items():
            tensor.copy_(weights[name])
        self.renew(version)

    def fits(self, weights: Weights) -> None:
        """Raise a ValueError for weights that `load` would not take."""
        check_fit(self.decoder.model.state_dict(), weights)

    def pause(self, mode: PauseMode) -> None:
        """Let no waiting request in until resume(). Running ones: "wait", they are finished by further steps, or by
        load(); "abort", they end here, as cancelled; "keep", they stand still with their cache, and after resume() they
        go on with whatever weights are there: Completion.versions then says which token came from which."""
        if mode not in get_args(PauseMode):
            raise ValueError(f"pause by one of {', '.join(get_args(PauseMode))}, not {mode!r}")
        self.paused = mode
        if mode != "wait":
            self._collect(leave=0)
        for state in self.running if mode == "abort" else ():
            if state is not None:
                self.cancel(state)

    def resume(self) -> None:
        """End a pause."""
        self.paused = None

    def renew(self, version: int) -> None:
        """Forget what the old weights wrote: a trainer in this process has changed the model's own tensors."""
        self.prefix_cache.clear()
        self.scheduler.restart()
        self.version = version

    def prepare(self, say: Callable[[str], None] = print) -> None:
        """Compile for one row and for all slots, before any request comes."""
        self.decoder.prepare(sorted({1, len(self.running)}), say)

    # ---- step by step --------------------------------------------------------------------------

    def add(self, request: Request, matcher: Matcher | None = None) -> RequestState:
        """Queue a request; it enters when a slot is free. `matcher`: of its grammar, where it is compiled already."""
        state = self._new_state(request, matcher)
        self.waiting.append(state)
        return state

    def _new_state(self, request: Request, matcher: Matcher | None = None) -> RequestState:
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
        state = RequestState(request, self.tokenizer, self.context, self.version, allowed, matcher)
        if matcher is not None and not allowed_next([state], self.tokenizer, self.vocab).any():
            raise ValueError("allowed_tokens has none with which the grammar can begin")
        return state

    def cancel(self, state: RequestState) -> None:
        """End a request now; nothing happens if it is over."""
        if not state.done:
            if state in self.waiting:
                self.waiting.remove(state)
            self._finish(state, "cancelled")

    def step(self) -> None:
        """Let waiting requests in, read prompts, decode a token of all rows, look at what came back; see pause()."""
        self.prefill()
        self.decode()

    def prefill(self) -> bool:
        """The first half of a step: let waiting requests in and read prompts; whether first tokens have come."""
        if not self.paused:
            self._admit()
        return self.paused != "keep" and self._prefill()

    def decode(self) -> None:
        """The second half: advance all rows by a token; when there is nothing more to start, wait for the rest."""
        if self.paused != "keep":
            self._collect(leave=self.lag if self._launch() else 0)

    def _admit(self) -> None:
        """Give the free slots to those that have waited longest."""
        top = max((slot for slot, other in enumerate(self.running) if other is not None), default=-1)
        free = self.batch.free() if self.waiting else []
        if not free or len(free) < min(self._group, len(self.waiting), len(self.running)):
            return
        while self.waiting and free:
            state = self.waiting.popleft()
            self.scheduler.enter(state, free, top)
            free.remove(state.slot)
            self.running[state.slot], top = state, max(top, state.slot)
            state.enter(self.batch)

    def _written_in(self, slot: int) -> int | None:
        state = self.running[slot]
        return None if state is None or not state.launched else self._written(state)

    def _written(self, state: RequestState) -> int:
        """Positions that a row has written at most: the token of the newest pass is not in the cache yet. A row that
        has all its tokens may run once more before that is seen."""
        return len(state.tokens) + state.launched - 1 + (self.lag if state.launched >= state.limit else 0)

    def _prefill(self) -> bool:
        """Read prompts, in as many passes as the rows that run can wait for; whether first tokens have come."""
        while self.forgotten:
            self.cancel(self.forgotten.pop())
        left, begun = self.prefill_tokens, False
        while self.scheduler.waiting or self.scheduler.copies:  # of a request that ended before it was read, too
            self._dismiss()
            self.scheduler.begin(self.batch.free())
            parts, cost = self.scheduler.next_pass(left, left == self.prefill_tokens)
            for copies in rounds(self.scheduler.copies):
                self.decoder.copy(copies)
            self.scheduler.copies.clear()
            if not parts:
                break
            left -= cost
            states, starts, ends = zip(*parts)
            requests, slots = [state.request for state in states], [state.slot for state in states]
            if masked := [state for state in states if state.masked]:
                self._set_token_masks(masked)
            mode = Mode.union(state.mode for state in states)
            result = self.decoder.prefill(requests, slots, mode, starts, ends)
            whole = [column for column, part in enumerate(parts) if self.scheduler.done(part)]
            for column in whole:
                states[column].completion.version = self.version  # weights may have come while it waited
            if whole:
                self._await(np.array([slots[column] for column in whole]), result, np.array(whole))
                self._collect(leave=self.lag)
                begun = not self.lag
        return begun

    def _dismiss(self) -> None:
        """Tell the decoder who is over, before the next pass."""
        if self._left:
            self.decoder.leave(self._left)
            self._left = []

    def _launch(self) -> bool:
        """Start one decoding step for all rows that need it."""
        batch = self.batch
        self._compact_if_sparse()
        if batch.constrained.any():  # the next token mask needs the last token
            self._collect(leave=0)
        if batch.forced.any():
            self._force()
        slots = batch.runs()
        constrained = [self.running[slot] for slot in slots[batch.constrained[slots]]]
        if states := [state for state in constrained if state is not None]:
            self._set_token_masks(states)
            slots = batch.runs()  # without those that can choose nothing
        if not len(slots):
            return False
        self._dismiss()  # also who ended just now: a step must not write behind what its slot keeps
        longest, draw, tables = batch.needs(slots)
        self._await(slots, self.decoder.step(int(slots[-1]) + 1, longest, Mode(Draw(draw), tables)))
        return True

    def _force(self) -> None:
        """Put in the next token of each tool's result."""
        forced = {}
        for state in [state for state in self.running if state is not None and state.forced]:
            while state.forced and state.launched == state.limit and not state.done:  # no room behind the result
                self._accept(state, state.forced.popleft(), None)
            if state.forced and state.launched >= state.force_from and not state.done:
                forced[state.slot] = state.forced[0]
                self._accept(state, state.forced.popleft(), None)
            state.mark()
        self.decoder.force(forced)

    def _set_token_masks(self, states: Sequence[RequestState]) -> None:
        """Tell the decoder what these rows must not choose next, in one copy. A row that can choose nothing is over."""
        allowed = allowed_next(states, self.tokenizer, self.vocab)
        for state, row in zip(states, allowed):
            if not row.any():
                self._finish(state, "length")
        self.decoder.set_token_masks([state.slot for state in states], ~allowed)

    def _await(self, slots: Ints, result: Tensor, columns: Ints | None = None) -> None:
        """Start the copy of a pass's result to the host; `_collect` will look at it."""
        rows = self.batch.launch(slots)
        self._pending.append(_PendingPass(rows, columns, self.device.fetch(result), self.version))

    def _collect(self, leave: int) -> None:
        """Look at results, oldest first, until only `leave` are pending."""
        while len(self._pending) > leave:
            done = self._pending.popleft()
            rows, version = done.rows, done.version
            for slot in self.batch.to_read(rows):  # the device works meanwhile
                if (state := self.running[slot]) is not None:
                    state.read()
            result = done.result().numpy()  # waits for this pass, not for the one behind it
            result = result[:, rows.slots if done.columns is None else done.columns]
            ids = result[0].astype(np.int64)
            special, ended = self.batch.append(rows, ids, result[1], version)
            for number in ended:
                if (state := self.running[rows.slots[number]]) is not None:
                    self._finish(state, "length")
            for number in special:
                state = self.running[rows.slots[number]]
                if state is None or state.done:
                    continue
                if state.discard:
                    state.discard -= 1
                else:
                    how = int(rows.numbers[number]), version, result[2:, number].tolist()
                    self._accept(state, int(ids[number]), float(result[1, number]), *how)
                state.mark()

    # ---- what a token means --------------------------------------------------------------------

    def _accept(
        self,
        state: RequestState,
        token: int,
        logprob: float | None,
        number: int = 0,
        version: int | None = None,
        tops: Sequence[float] = (),
    ) -> None:
        """Take the next token of a row: chosen by the model in pass `number`, or forced (no log-probability)."""
        forced, answer, sampling = logprob is None, state.completion, state.request.sampling
        stops = token in state.stops and not forced
        if not stops or sampling.keep_stop:
            state.add(token, self.version if version is None else version, forced)
            if sampling.logprobs:
                answer.logprobs.append(logprob)
            if sampling.top_logprobs:
                answer.tops.append(ranked(tops, sampling.top_logprobs))
        if stops:
            return self._finish(state, "stop")
        if sampling.stop:
            state.read()
            if state.text.stopped:
                return self._finish(state, "stop")
        if state.matcher is not None and (ending := state.matcher.take(token)):
            return self._finish(state, ending)
        if len(answer.ids) >= state.limit:
            return self._finish(state, "length")
        if token == self.tool_end and not forced and state.tools:
            self._call_tool(state, number)
        return None

    def _call_tool(self, state: RequestState, number: int) -> None:
        """Run the call that the model has closed in pass `number`: its result comes next, whatever the model thinks."""
        state.read()
        call, state.text.call = state.text.call, ""
        if call:
            state.forced.extend([self.output[0], *self.tokenizer.encode(calculate(call)), self.output[1]])
            state.discard = len(state.forced)
            state.force_from = number + 2  # pass number + 1 has <|tool_end|> as its input

    def _finish(self, state: RequestState, reason: Literal["stop", "length", "cancelled"]) -> None:
        state.finish(reason)
        if state.slot >= 0 and self.running[state.slot] is state:
            self.running[state.slot] = None
            self._left.append(state.slot)
            self.scheduler.leave(state)
            if self.prefix_cache.entries[state.slot] is not None and (launched := state.launched):
                answer = self.batch.ids[state.slot, : min(len(state.completion.ids), launched - 1)]
                self.prefix_cache.keep(state.slot, np.concatenate((state.tokens, answer)), self._written(state))

    # ---- slot compaction -----------------------------------------------------------------------
    # A step runs all slots up to the highest busy one, so that one long answer in the last slot would cost as much as
    # all of them: rows move together when few are left. What a row has moves with it, on the device and on the host,
    # and its answer changes no more than with other neighbours. What the freed slot kept for later prompts goes the
    # other way.

    def _compact_if_sparse(self) -> None:
        """Move rows down before a step, when half as many rows would have done for some steps in a row."""
        self.sparse_steps = self.sparse_steps + 1 if self._is_sparse() else 0
        if self.sparse_steps > SPARSE_STEPS:
            self.sparse_steps = 0
            self._collect(leave=0)  # what is under way comes back by slot
            self._dismiss()
            self._compact()

    def _is_sparse(self) -> bool:
        """True where half as many rows would do for a step. Not while prompts are read or wait for a slot."""
        if len(self.running) < MIN_ROWS or self.waiting or self.scheduler.waiting:
            return False
        busy = np.flatnonzero(self.batch.owner)
        top = int(busy[-1]) + 1 if len(busy) else 0
        few = self.decoder.step_rows(len(busy))
        if top < MIN_ROWS or self.decoder.step_rows(top) < 2 * few:
            return False
        self.wanted[few] += 1
        return self.wanted[few] > CAPTURE_AFTER or self.decoder.has_step(few)

    def _compact(self) -> None:
        """Move the rows of the highest slots to the lowest free ones; nothing may be under way."""
        entries = self.prefix_cache.entries
        busy = [slot for slot, state in enumerate(self.running) if state is not None]
        targets = [slot for slot in range(len(busy)) if self.running[slot] is None]
        sources = busy[len(busy) - len(targets) :]
        if not sources:
            return
        groups, swapped = [], []
        for source, target in zip(sources, targets):
            length, prefix = int(self.decoder.host_length[source]), entries[target]
            groups.append([Copy(source, target, length, (length - 1) % 2)])
            if prefix is not None and len(prefix.tokens) >= self.prefix_cache.least:
                groups[-1].append(Copy(target, source, len(prefix.tokens), (len(prefix.tokens) - 1) % 2))
            else:
                prefix = None
            swapped.append((prefix, entries[source]))
            entries[source] = entries[target] = None  # nothing of it may be found if a copy fails
        for copies in rounds(groups):
            self.decoder.copy(copies)
        self.decoder.move(sources, targets)
        self.batch.move(np.array(sources), np.array(targets))
        for source, target, (prefix, moved) in zip(sources, targets, swapped):
            entries[source], entries[target] = prefix, moved
            state = self.running[source]
            assert state is not None
            self.running[target], self.running[source], state.slot = state, None, target


class RequestState:
    """One request on its way: what it has so far, and what is still to come. `allowed`: (V,) bool of its
    allowed_tokens; `matcher`: of its grammar."""

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
        self.masked = allowed is not None or matcher is not None  # has a token mask
        if matcher is not None:
            self.stops |= {special["<|assistant_end|>"]}
        self.tools = sampling.tools and matcher is None
        self.watched = self.stops | {special["<|tool_end|>"]}  # tokens that mean something
        self.plain = not sampling.stop and not sampling.top_logprobs and matcher is None  # all others need no look
        self.slot = -1
        self.batch: BatchState | None = None  # while it has a slot
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
        """Note that its prompt will be read behind so many tokens that the cache has."""
        self.cached = self._answer.cached_tokens = cached

    def take(self) -> list[Piece]:
        """Take the text that came since the last call."""
        self.read()
        fresh, self._fresh = self._fresh, []
        return fresh

    def enter(self, batch: BatchState) -> None:
        """Enter the batch: it has a slot."""
        self.batch, constrained = batch, self.matcher is not None
        batch.enter(self.slot, len(self.tokens), self.limit, self.mode, self.watched, constrained=constrained)
        self.mark()

    def mark(self) -> None:
        """Tell the batch whether its coming tokens need a look."""
        if self.batch is not None:
            self.batch.forced[self.slot] = bool(self.forced)
            self.batch.plain[self.slot] = self.plain and not self.forced and not self.discard

    @property
    def launched(self) -> int:
        """Passes that will bring a token of this row: the prompt's is the first."""
        return self._launched if self.batch is None else int(self.batch.launched[self.slot])

    @property
    def completion(self) -> Completion:
        """The answer, with all tokens that have come."""
        answer, batch, slot = self._answer, self.batch, self.slot
        if batch is not None and (have := len(answer.ids)) < (written := int(batch.written[slot])):
            answer.ids += batch.ids[slot, have:written].tolist()
            answer.versions += batch.versions[slot, have:written].tolist()
            answer.forced += [False] * (written - have)
            if self.request.sampling.logprobs:
                answer.logprobs += batch.logprobs[slot, have:written].tolist()
        return answer

    def add(self, token: int, version: int, forced: bool) -> None:
        """Add the next token of the answer."""
        answer, batch = self.completion, self.batch
        if batch is not None:
            batch.ids[self.slot, len(answer.ids)] = token
            batch.written[self.slot] = len(answer.ids) + 1
        answer.add(token, version, forced)

    def read(self) -> None:
        """Turn new ids into text; put off: a batch of hundreds has microseconds per token. See BatchState.to_read."""
        ids = self.completion.ids
        if self._read < len(ids):
            self._fresh += self.text.feed_all(ids[self._read :])
            self._read = len(ids)

    def finish(self, reason: Literal["stop", "length", "cancelled"]) -> None:
        self.read()
        self._fresh += self.text.close()
        self._answer.text, self._answer.finish_reason, self.done = self.text.text, reason, True
        if self.batch is not None:
            self._launched = self.launched
            self.batch.leave(self.slot)
            self.batch = None


def allowed_next(states: Sequence[RequestState], tokenizer: Tokenizer, vocab: int) -> np.ndarray:
    """(states, V) bool: what each may choose next, by its grammar and its allowed_tokens."""
    if any(state.matcher is not None for state in states):
        left = [state.limit - len(state.completion.ids) for state in states]
        allowed = grammars(tokenizer).allowed([state.matcher for state in states], left)
    else:
        allowed = np.ones((len(states), vocab), dtype=np.bool_)
    for row, state in zip(allowed, states):
        if state.allowed is not None:
            row &= state.allowed
    return allowed


class _PendingPass(NamedTuple):
    """A pass whose result has not been looked at."""

    rows: PassRows
    columns: Ints | None  # of the result; None: the slots
    result: Callable[[], Tensor]  # waits for it: on the host, what Decoder.step returned
    version: int  # of the weights that it ran with


class _EngineStream:
    """The Stream of one request: `for piece in engine.stream(request)`. A step of the engine is never cut in the
    middle: a signal handler that closes the stream during one takes effect right behind it."""

    def __init__(self, engine: Engine, state: RequestState) -> None:
        self._engine, self._state = engine, state
        self._pieces: deque[Piece] = deque()
        self._stepping = self._closed = False

    @property
    def completion(self) -> Completion:
        return self._state.completion

    def __iter__(self) -> _EngineStream:
        return self

    def __next__(self) -> Piece:
        while not self._pieces and not self._state.done:
            self._stepping = True
            try:
                self._engine.step()
                self._pieces.extend(self._state.take())
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
            self._engine.cancel(self._state)
            self._pieces.extend(self._state.take())

    def __del__(self) -> None:  # forgotten, for instance by a loop that was left: nobody can read on
        self._engine.forgotten.append(self._state)  # the garbage collector may come in the middle of a step
