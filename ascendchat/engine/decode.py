"""The two passes of generation on the device: `prefill` reads new prompts, `step` extends every running row by a token.

All state of the running rows (last tokens, lengths, settings, cache) lives on the device, in slots. A step is one
function of that state, from embedding to the sampled token, without a word to the host: so it is recorded as one graph
per (rows, keys, mode) where the chip can replay. Where that is wanted its two halves are compiled: the model per (rows,
keys), and the plain choice of a token per rows. engine.py decides who runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ascendchat.device import Device
from ascendchat.engine.cache import Cache, Marks, Suffixes
from ascendchat.engine.padding import padded_length, stack, to_device
from ascendchat.engine.prefix import Copy
from ascendchat.engine.request import Request, Sampling
from ascendchat.engine.sampling import Mode, Settings, columns, likeliest_tokens, sample, settings_row
from ascendchat.nn.attention import Attention
from ascendchat.nn.gpt import GPT
from ascendchat.nn.logprobs import Float32Readout, Readout
from ascendchat.nn.model import LanguageModel

LEAST_SPAN = 128  # keys that a step reads at least; beyond, powers of two
MAX_RECOMPILES = 64  # one per (rows, keys, mode)


def power(value: int, least: int, most: int) -> int:
    """`least` doubled until it holds the value, never above `most`."""
    size = least
    while size < value:
        size *= 2
    return min(size, most)


StepKey = tuple[int, int, Mode]  # rows, keys that each may see, what sampling needs
PLAIN = Mode(), Mode(random=True)  # sorting and counting are kernels of their own, which a compiler does not better


class _Logits(NamedTuple):
    """What a pass over the rows of a step has found."""

    logits: Tensor  # (B, V) float32; before their bound where they are of decode.py
    token: Tensor  # (B,) that was read
    position: Tensor  # (B,) of it


class Decoder:
    """A model with `slots` rows of up to `context` tokens under way. `graphs`: record steps where the chip can; `kept`:
    the dtype of keys and values in the cache, if it is not the model's."""

    def __init__(
        self,
        model: LanguageModel,
        kernel: Attention,
        device: Device,
        place: torch.device,
        *,
        slots: int,
        context: int,
        compiled: bool = False,
        graphs: bool = True,
        kept: torch.dtype | None = None,
    ) -> None:
        self.model, self.kernel, self.device, self.place = model, kernel, device, place
        self.slots, self.context, self.compiled = slots, context, compiled and device.compiles
        self.graphs = graphs and device.chip.graphs
        self.put = partial(to_device, place=place, pin=device.pin)
        shape = model.shape
        self.vocab, self.scale = shape.vocab, model.scale
        self.readout = Readout()  # a trainer gives its own
        self.cache = Cache(shape, slots, context, model.dtype, place, mixes=model.mixes_neighbours, kept=kept)
        model.rope(context, model.dtype, place)  # what a graph reads must be made before it is recorded
        whole = partial(torch.full, dtype=torch.int64, device=place)
        self.token = whole((slots,), 0)  # the newest token of each row, not yet in the cache
        self.previous = whole((slots,), 0)  # the one before it, which is smeared in
        self.length = whole((slots,), 0)  # tokens in the cache: the position of `token`
        self.held = np.zeros(slots, np.int64)  # the same on the host, for kernels that want it there
        self.none = whole((slots,), -1)
        self.override = whole((slots,), -1)  # a token that replaces `token` in the next step
        self.advance = whole((), 1)  # 0 while a graph is recorded: the step then changes nothing
        self.target = whole((slots,), slots)  # slot that a row writes to: its own, or the one more while it is idle
        idle = settings_row(Sampling(temperature=0.0))
        self.settings = Settings(*(torch.tensor([value] * slots, device=place) for value in idle))
        self.blocks = columns(self.vocab, place)
        # (slots, V), made when first needed. bool: tokens of the row so far, and tokens that it must not choose;
        # float32: what is added to each logit, and how often the model has chosen each token
        self.seen: Tensor | None = None
        self.barred: Tensor | None = None
        self.bias: Tensor | None = None
        self.counts: Tensor | None = None
        self._steps: dict[StepKey, Callable[[], Tensor]] = {}
        self.prepared: list[tuple[int, int]] = []  # rows and keys, the cheapest first; see prepare
        self._models: dict[tuple[int, int], Callable[[], _Logits]] = {}  # compiled, by rows and keys
        self._choices: dict[tuple[int, Mode], Callable[[_Logits], Tensor]] = {}

    # ---- new prompts ---------------------------------------------------------------------------

    @torch.no_grad()
    def prefill(
        self,
        requests: Sequence[Request],
        slots: Sequence[int],
        mode: Mode,
        starts: Sequence[int] = (),
        ends: Sequence[int] = (),
    ) -> Tensor:
        """Read prompts into their slots; the first token of each as `_choose` reports it, (2 or more, R).

        `starts`, `ends`: positions to read from and to, where it is not the whole prompt. The tokens before are in the
        slot. A row that is not read to its end stays idle, and its result means nothing.
        """
        prompts = [request.prompt for request in requests]
        whole = [len(prompt) for prompt in prompts]
        starts, ends = starts or [0] * len(prompts), ends or whole
        parts = [prompt[start:end] for prompt, start, end in zip(prompts, starts, ends)]
        width = min(padded_length(max(map(len, parts))), self.context)
        tokens, slot = self.put(stack(parts, width)), self.put(slots)
        lengths, counts = self.put(ends), self.put([len(part) for part in parts])
        marks = Marks(*self.put(self.cache.marks(slots, starts, ends, 1 if any(starts) else 0)))
        if any(starts):
            suffixes = Suffixes(slot, self.put(starts), counts, max(starts), width, self.cache.dump)
            before = self.put([prompt[start - 1] if start else 0 for prompt, start in zip(prompts, starts)])
            hidden = self._read_suffixes(tokens, before, suffixes, marks)
        else:
            hidden = self._read_prompts(tokens, slot, lengths, marks)
        rows = torch.arange(len(prompts), device=self.place)
        self._settle(requests, slot)
        if mode.penalised:
            self._remember(slot, prompts)
        if mode.biased or self.bias is not None:  # what the slot's last request had must not stay
            self._weigh(slot, requests)
        chosen, report = self._choose(self.logits(hidden[rows, counts - 1]), slot, lengths - 1, mode)
        over = self.put([end == length for end, length in zip(ends, whole)], dtype=torch.bool)
        self.previous[slot], self.token[slot], self.length[slot] = tokens[rows, counts - 1], chosen, lengths * over
        self.held[list(slots)] = [end if end == length else 0 for end, length in zip(ends, whole)]
        self.target[slot] = torch.where(over, slot, torch.full_like(slot, self.cache.dump))
        self.override[slot] = torch.full_like(chosen, -1)
        return report

    def _read_prompts(self, tokens: Tensor, slot: Tensor, lengths: Tensor, marks: Marks) -> Tensor:
        """Prompts from their beginning on: (R, T) -> (R, T, C)."""
        windows, width = self.cache.places, tokens.size(1)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.cache.put_prompts(layer, slot, k, v, lengths)
            return self.kernel.dense(q, k, v, windows[layer], self.scale)

        def shift(layer: int, qkv: Tensor, share: Tensor) -> Tensor:
            return self.cache.shift_prompts(layer, marks, qkv, share)

        positions = torch.arange(width, device=self.place)
        return self.model.extend(tokens, positions, attend, shift, room=self.context)

    def _read_suffixes(self, tokens: Tensor, before: Tensor, suffixes: Suffixes, marks: Marks) -> Tensor:
        """Prompts behind what their slots hold, of which `before` (R,) is the last token: (R, T) -> (R, T, C)."""
        windows = self.cache.places

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values, lengths = self.cache.put_suffixes(layer, suffixes, k, v)
            return self.kernel.cached(q, keys, values, lengths, windows[layer], self.scale)

        def shift(layer: int, qkv: Tensor, share: Tensor) -> Tensor:
            return self.cache.shift_suffixes(layer, suffixes, marks, qkv, share)

        position = suffixes.positions.clamp(max=self.context - 1)  # padding may stand further
        begins = (suffixes.starts == 0)[:, None]
        return self.model.extend(tokens, position, attend, shift, room=self.context, before=before, begins=begins)

    @torch.no_grad()
    def copy(self, copies: Sequence[Copy]) -> None:
        """From slot to slot, all at once."""
        source, target, lengths, places = zip(*copies)
        moves = [number for number, copy in enumerate(copies) if copy.source != copy.target]
        longest = max((copies[number].length for number in moves), default=0)
        put = self.put
        self.cache.copy(put(source), put(target), put(moves), put(lengths), put(places), longest)

    def _settle(self, requests: Sequence[Request], slot: Tensor) -> None:
        """The settings of the new rows."""
        columns = zip(*(settings_row(request.sampling) for request in requests))
        for tensor, column in zip(self.settings, columns):
            tensor[slot] = self.put(column, dtype=tensor.dtype)

    def _remember(self, slot: Tensor, prompts: Sequence[Sequence[int]]) -> None:
        """Mark the tokens of the prompts as seen."""
        if self.seen is None:
            self.seen = torch.zeros(self.slots, self.vocab, dtype=torch.bool, device=self.place)
        most = max(map(len, prompts))
        known = self.put([[*prompt, *[prompt[0]] * (most - len(prompt))] for prompt in prompts])
        self.seen[slot] = torch.zeros_like(self.seen[slot]).scatter(1, known, True)

    def _weigh(self, slot: Tensor, requests: Sequence[Request]) -> None:
        """The logit biases of the new rows; nothing has been chosen in them."""
        if self.bias is None or self.counts is None:
            self.bias, self.counts = (torch.zeros(self.slots, self.vocab, device=self.place) for _ in range(2))
        biases = [request.sampling.logit_bias for request in requests]
        most = max(1, *map(len, biases))
        padded = [[*row, *[(0, 0.0)] * (most - len(row))] for row in biases]  # (R, most) of token and number
        ids = self.put([[token for token, _ in row] for row in padded])
        numbers = self.put([[number for _, number in row] for row in padded], dtype=torch.float32)
        none = torch.zeros_like(self.bias[slot])
        self.bias[slot], self.counts[slot] = none.scatter_add(1, ids, numbers), none

    @torch.no_grad()
    def restrict(self, slots: Sequence[int], barred: np.ndarray) -> None:
        """What these rows must not choose next, (rows, V) bool: for a new row before its prefill, at the latest before
        the pass that chooses. It stays until the next call for the slot."""
        if self.barred is None:
            self.barred = torch.zeros(self.slots, self.vocab, dtype=torch.bool, device=self.place)
        self.barred[self.put(slots)] = self.put(barred, dtype=torch.bool)

    # ---- the next token of every row -----------------------------------------------------------

    def force(self, tokens: dict[int, int]) -> None:
        """By slot: what the next step reads in place of the token that the row has chosen."""
        if tokens:
            self.override[self.put(list(tokens))] = self.put(list(tokens.values()))

    @torch.no_grad()
    def step(self, rows: int, longest: int, mode: Mode) -> Tensor:
        """Extend slots 0 to rows - 1, of which none will hold more than `longest` tokens; (2 or more, at least rows).

        The result is overwritten by the next step: copy it first. Rows between the busy ones run too, unseen, and
        leave what their slots hold as it is.
        """
        count = power(rows, 1, self.slots) if self.graphs or self.compiled else rows
        span = power(longest, LEAST_SPAN, self.context) if self.kernel.slices else self.context
        fits = ((most, reach) for most, reach in self.prepared if most >= rows and reach >= longest)
        count, span = next(fits, (count, span))
        key = count, span, mode
        if key not in self._steps:
            self._steps[key] = self._record(*key)
        result: Tensor = self._steps[key]()
        self.held[:count] += 1
        return result

    @torch.no_grad()
    def prepare(self, counts: Sequence[int], say: Callable[[str], None]) -> None:
        """Compile for these numbers of rows and all lengths now, which takes minutes. No step has another size from
        then on, so that no request ever waits for the compiler."""
        spans = sorted({power(least, LEAST_SPAN, self.context) for least in (2 * LEAST_SPAN, 1024, self.context)})
        sizes = sorted((count, span) for count in counts for span in spans)
        for number, (count, span) in enumerate(sizes):
            say(f"preparing {number + 1} of {len(sizes)}: {count} row(s), {span} keys")
            for mode in PLAIN:
                self._steps[count, span, mode] = step = self._record(count, span, mode)
                with self._standing():
                    step()
        self.prepared = sizes

    def _record(self, count: int, span: int, mode: Mode) -> Callable[[], Tensor]:
        read, choose = self._model(count, span), self._choice(count, mode)

        def run() -> Tensor:
            return choose(read())

        if not self.graphs:
            return run
        with self._standing():  # recording runs the step several times, and rows are under way
            return self.device.graph(run, updates=partial(self._updates, count) if self.kernel.host_lengths else None)

    @contextmanager
    def _standing(self) -> Iterator[None]:
        """Steps change nothing in here; behind it they do again, also when it ends with an error."""
        self.advance.zero_()
        try:
            yield
        finally:
            self.advance.fill_(1)

    def _lengths(self, count: int, places: int) -> list[int]:
        """Keys that rows 0 to count - 1 see in a layer of `places`: those in the cache and the new one."""
        seen: list[int] = (np.minimum(self.held[:count], min(self.context, places) - 1) + 1).tolist()
        return seen

    def _updates(self, count: int) -> list[dict[str, list[int]]]:
        """What the attention of each layer is told before a graph is replayed."""
        return [{"actual_seq_lengths_kv": self._lengths(count, places)} for places in self.cache.places]

    def _model(self, count: int, span: int) -> Callable[[], _Logits]:
        """The first half of a step: by kernels of our own, else compiled once for all modes where that is wanted."""
        if (fused := fused_step(self)) is not None:
            return lambda: _Logits(*fused.read(count, span))

        def read() -> _Logits:
            return self._read(count, span)

        if not self.compiled:
            return read
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_RECOMPILES)
        # A product with one row is a sum over the weights: tuned as such, it fuses with what stands around it.
        tuned = {"options": {"coordinate_descent_tuning": True}} if count == 1 else {}
        if (count, span) not in self._models:
            self._models[count, span] = self.device.compile(read, dynamic=False, fullgraph=True, **tuned)
        return self._models[count, span]

    def _choice(self, count: int, mode: Mode) -> Callable[[_Logits], Tensor]:
        """The second half."""
        fused, bound = fused_step(self), self.model.softcap
        if mode in PLAIN and fused is not None:
            return lambda known: fused.choose(known, random=mode.random)

        def choose(known: _Logits) -> Tensor:
            if fused is not None:  # logits as they come
                known = known._replace(logits=bound * torch.tanh(known.logits / bound))
            return self._extend(count, mode, known)

        if not self.compiled or mode not in PLAIN:
            return choose
        if (count, mode) not in self._choices:
            self._choices[count, mode] = self.device.compile(choose, dynamic=False, fullgraph=True)
        return self._choices[count, mode]

    def _read(self, count: int, span: int) -> _Logits:
        """Read the newest token of rows 0 to count - 1."""
        model, rows = self.model, self.target[:count]
        override, length = self.override[:count], self.length[:count]
        token = torch.where(override >= 0, override, self.token[:count])
        position = length.clamp(max=self.context - 1)  # a row that is over may run once more, and idle rows do

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.cache.put_tokens(layer, rows, position, k, v)
            places = self.cache.places[layer]
            keys, values = (
                (tensor[:count] if span >= places else tensor[:count, :span]).to(q.dtype)
                for tensor in (self.cache.keys[layer], self.cache.values[layer])
            )
            if self.kernel.host_lengths:
                return self.kernel.one_query(q, keys, values, self._lengths(count, places), self.scale)
            there = position + 1
            if not self.kernel.by_position:
                there = there.clamp(max=places)  # a full ring is seen whole
            return self.kernel.cached(q, keys, values, there, places, self.scale)

        def shift(layer: int, qkv: Tensor, share: Tensor) -> Tensor:
            return self.cache.shift_tokens(layer, rows, position, qkv, share)

        hidden = model.extend(
            token[:, None], position[:, None], attend, shift, room=self.context, before=self.previous[:count]
        )
        return _Logits(self.logits(hidden[:, 0]), token, position)

    def _extend(self, count: int, mode: Mode, known: _Logits) -> Tensor:
        """Choose the next token of these rows, and note it."""
        logits, token, position = known
        override = self.override[:count]
        if mode.penalised and self.seen is not None:
            self.seen[:count].scatter_(1, token[:, None], True)
        if mode.biased and self.counts is not None:
            own = (override < 0) * self.advance  # not what a tool put there, and nothing while a graph is recorded
            self.counts[:count].scatter_add_(1, token[:, None], own[:, None].float())
        chosen, report = self._choose(logits, slice(count), position, mode)
        moves = self.advance > 0
        self.previous[:count] = torch.where(moves, token, self.previous[:count])
        self.token[:count] = torch.where(moves, chosen, self.token[:count])
        self.override[:count] = torch.where(moves, self.none[:count], override)
        self.length[:count] += self.advance
        return report

    def _choose(self, logits: Tensor, which: Tensor | slice, position: Tensor, mode: Mode) -> tuple[Tensor, Tensor]:
        """The next token (B,) of the rows `which`, whose logits are (B, V), and what the host gets of it: (2, B)
        float32, ids and log probabilities; with mode.tops below them the MAX_TOPS likeliest ids and theirs."""
        seen, barred, bias, counts = (
            table[which] if needed and table is not None else None
            for table, needed in (
                (self.seen, mode.penalised),
                (self.barred, mode.restricted),
                (self.bias, mode.biased),
                (self.counts, mode.biased),
            )
        )
        tables, settings = (seen, barred, bias, counts, self.blocks), self.settings.rows(which)
        chosen, logprob = sample(logits, settings, position, mode, *tables, logsumexp=self.readout.logsumexp)
        report = torch.stack((chosen.float(), logprob))  # ids below 2^24 are exact in float32
        if mode.tops:
            ids, logprobs = likeliest_tokens(logits)
            report = torch.cat((report, ids.t().float(), logprobs.t()))
        return chosen, report

    def logits(self, hidden: Tensor) -> Tensor:
        """(B, C) -> (B, V) float32."""
        return self.readout.logits(hidden, self.model.head[: self.vocab], self.model.softcap)

    def leave(self, slots: Sequence[int]) -> None:
        """Rows that are over: they write to the slot more, and are short again, so that idle steps read little."""
        slot = self.put(slots)
        self.held[list(slots)] = 0
        self.length.index_fill_(0, slot, 0)
        self.target.index_fill_(0, slot, self.cache.dump)


# A decoding step by our own kernels, where the chip has them: without torch.compile, and few are launched.
#
# fused = fused_step(decoder)               # None: the model, the chip or the readout wants the general way
# fused.read(rows, longest)                 # the first half of Decoder's step, as Decoder._read; logits not capped
# fused.choose(known, random=True)          # the second, for PLAIN modes, as Decoder._extend


class _Fused(Protocol):
    """The two halves of a step."""

    def read(self, rows: int, longest: int) -> tuple[Tensor, Tensor, Tensor]: ...
    def choose(self, known: tuple[Tensor, Tensor, Tensor], *, random: bool) -> Tensor: ...


def fused_step(decoder: Decoder) -> _Fused | None:
    """Our own model, on a chip with Triton, and logits as they come."""
    kernel, model, cache = decoder.kernel, decoder.model, decoder.cache
    if not (kernel.triton and isinstance(model, GPT)):
        return None
    if type(decoder.readout) not in (Readout, Float32Readout):
        return None
    from ascendchat.engine.gpt_step import Slots, TokenStep
    from ascendchat.engine.sampling_kernels import State, choose

    tensors = cache.keys, cache.values, cache.raw, cache.places
    overlaps = kernel.overlaps
    step = TokenStep(model, *tensors, decoder.context, overlaps=overlaps)
    slots = Slots(decoder.token, decoder.override, decoder.previous, decoder.length, decoder.target)
    state = State(decoder.token, decoder.previous, decoder.override, decoder.length, decoder.advance)

    class Kernels:
        def read(self, rows: int, longest: int) -> tuple[Tensor, Tensor, Tensor]:
            return step(rows, slots, longest)

        def choose(self, known: tuple[Tensor, Tensor, Tensor], *, random: bool) -> Tensor:
            logits, read, _ = known
            told = decoder.settings, decoder.blocks, state
            return choose(logits, read, *told, softcap=model.softcap, random=random, overlaps=overlaps)

    return Kernels()
