"""The two passes of generation on the device: `prefill` reads prompts, `step` decodes one token of every running row.

    report = decoder.prefill(requests, slots, mode)       # (2, R) float32: first tokens and their log-probabilities
    report = decoder.step(rows, longest, mode)            # (2, rows): the next token of slots 0 to rows - 1
    decoder.leave(slots)                                  # these rows are over

All state of the running rows (last tokens, lengths, sampling settings, KV cache) lives on the device, in slots. A step
is one function of that state, from the embedding to the sampled token, and never talks to the host: where the chip can
replay, it is captured as one graph per _StepKey. engine.py decides who runs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ascendchat.device import Device
from ascendchat.engine.cache import KeptTokens, KVCache, Suffixes
from ascendchat.engine.padding import padded_length, stack, to_device, to_device_at_once
from ascendchat.engine.prefix import Copy
from ascendchat.engine.request import Request, Sampling
from ascendchat.engine.sampling import (
    Draw,
    Mode,
    SamplingSettings,
    Tables,
    columns,
    likeliest_tokens,
    sample,
    settings_columns,
    settings_row,
)
from ascendchat.nn.attention import Attention
from ascendchat.nn.gpt import GPT
from ascendchat.nn.logprobs import Float32LMHead, LMHead
from ascendchat.nn.model import LanguageModel

MIN_SPAN = 128  # keys that a step reads at least; beyond, powers of two
MAX_STEPS = 64  # captured graphs, each with memory of its own: that for 512 rows of a vocabulary of 32,768 has 0.2 GB
MAX_RECOMPILES = 2 * MAX_STEPS


def power(value: int, least: int, most: int) -> int:
    """`least` doubled until it holds the value, never above `most`."""
    size = least
    while size < value:
        size *= 2
    return min(size, most)


PLAIN = Mode(), Mode(Draw.RANDOM)  # what Triton and the compiler do; sorting and counting are kernels of their own
Forward = Callable[[int, int], tuple[Tensor, Tensor, Tensor]]  # rows, span -> logits, tokens, positions


class _StepKey(NamedTuple):
    """The shape of a decoding step: each is captured as a graph of its own."""

    rows: int
    span: int  # keys that each row may see
    mode: Mode


class Decoder:
    """A model with `slots` rows of up to `context` tokens. `graphs`: capture steps where the chip can; `cache_dtype`:
    dtype of the KV cache, if it is not the model's; `readout`: how logits are computed, as a trainer computes them."""

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
        cache_dtype: torch.dtype | None = None,
        readout: LMHead | None = None,
    ) -> None:
        self.model, self.kernel, self.device, self.place = model, kernel, device, place
        self.slots, self.context, self.compiled = slots, context, compiled and device.compiles
        self.graphs = graphs and device.chip.graphs
        self.put = partial(to_device, place=place, pin=device.pin)
        self.put_at_once = partial(to_device_at_once, place=place, pin=device.pin)
        shape = model.shape
        self.vocab, self.scale = shape.vocab, model.scale
        self.readout = readout or LMHead()
        self.cache = KVCache(
            shape, slots, context, model.dtype, place, mixes=model.mixes_neighbours, cache_dtype=cache_dtype
        )
        model.rope(context, model.dtype, place)  # what a graph reads must be made before it is captured
        integers = partial(torch.full, dtype=torch.int64, device=place)
        self.token = integers((slots,), 0)  # the newest token of each row, not yet in the cache
        self.previous = integers((slots,), 0)  # the one before it, which is smeared in
        self.length = integers((slots,), 0)  # tokens in the cache: the position of `token`
        self.host_length = np.zeros(slots, np.int64)  # the same on the host, for kernels that want it there
        self.none = integers((slots,), -1)
        self.override = integers((slots,), -1)  # a token that replaces `token` in the next step
        self.advance = integers((), 1)  # 0 while a graph is captured: the step then changes nothing
        self.target = integers((slots,), slots)  # slot that a row writes to: its own, or the spare one while it is idle
        idle = settings_row(Sampling(temperature=0.0))
        self.settings = SamplingSettings(*(torch.tensor([value] * slots, device=place) for value in idle))
        self.tables: Tables | None = None  # made for the first request that needs them
        self.blocks = columns(self.vocab, place)
        self.steps: OrderedDict[_StepKey, Callable[[], Tensor]] = OrderedDict()  # that used last comes last
        self.prepared: list[tuple[int, int]] = []  # rows and keys, the cheapest first; see prepare
        self.kind, self._step = self._choose_step()

    # ---- prefill ---------------------------------------------------------------------------------

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
        starts, ends = starts or [0] * len(prompts), ends or [len(prompt) for prompt in prompts]
        goes_on = any(starts)
        parts = [prompt[start:end] for prompt, start, end in zip(prompts, starts, ends)]
        counts = [len(part) for part in parts]
        ended = [end == len(prompt) for end, prompt in zip(ends, prompts)]
        last = [prompt[start - 1] if start else 0 for prompt, start in zip(prompts, starts)]
        places = self.cache.kept_tokens(slots, starts, ends, 1 if goes_on else 0)
        width = min(padded_length(max(counts)), self.context)
        tokens, slot, start, end, count, whole, before, kept = self.put_at_once(
            stack(parts, width), slots, starts, ends, counts, ended, last, places
        )
        self._enter(requests, slot, mode)
        if goes_on:
            suffixes = Suffixes(slot, start, count, max(starts), width, self.cache.dump)
            hidden = self._read_suffixes(tokens, before, suffixes, KeptTokens(*kept))
        else:
            attend, shift = self.cache.prompt_pass(self.kernel, self.scale, slot, end, KeptTokens(*kept))
            hidden = self.model.extend(
                tokens, torch.arange(width, device=self.place), attend, shift, room=self.context
            )  # (R, T, C)
        rows = torch.arange(len(prompts), device=self.place)
        chosen, report = self._choose(self.logits(hidden[rows, count - 1]), slot, end - 1, mode)
        self.previous[slot], self.token[slot], self.length[slot] = tokens[rows, count - 1], chosen, end * whole
        self.host_length[list(slots)] = [end if end == len(prompt) else 0 for end, prompt in zip(ends, prompts)]
        self.target[slot] = torch.where(whole > 0, slot, torch.full_like(slot, self.cache.dump))
        self.override[slot] = torch.full_like(chosen, -1)
        return report

    def _read_suffixes(self, tokens: Tensor, before: Tensor, suffixes: Suffixes, kept: KeptTokens) -> Tensor:
        """Read prompts behind what their slots hold, of which `before` (R,) is the last token: (R, T) -> (R, T, C)."""
        attend, shift = self.cache.suffix_pass(self.kernel, self.scale, suffixes, kept)
        position = suffixes.positions.clamp(max=self.context - 1)  # padding may stand further
        begins = (suffixes.starts == 0)[:, None]
        return self.model.extend(tokens, position, attend, shift, room=self.context, before=before, begins=begins)

    def _enter(self, requests: Sequence[Request], slot: Tensor, mode: Mode) -> None:
        """Write the sampling settings of new rows, and what they need of the tables."""
        rows = self.put(settings_columns([request.sampling for request in requests]), dtype=torch.float32)  # (R, all)
        widths = [1 if tensor.dim() == 1 else tensor.size(1) for tensor in self.settings]
        for tensor, column in zip(self.settings, rows.split(widths, dim=1)):
            tensor[slot] = column.reshape(len(requests), *tensor.shape[1:]).to(tensor.dtype)
        if not mode.tables:
            return
        tables = self._make_tables()
        if any(request.sampling.repetition_penalty != 1.0 for request in requests):
            longest = max(len(request.prompt) for request in requests)
            padded = [[*prompt, *[prompt[0]] * (longest - len(prompt))] for prompt in (r.prompt for r in requests)]
            tables.seen[slot] = torch.zeros_like(tables.seen[slot]).scatter(1, self.put(padded), True)
        biases = [request.sampling.logit_bias for request in requests]
        most = max(1, *map(len, biases))
        pairs = [[*row, *[(0, 0.0)] * (most - len(row))] for row in biases]  # (R, most) of token and bias
        ids = self.put([[token for token, _ in row] for row in pairs])
        bias = self.put([[bias for _, bias in row] for row in pairs], dtype=torch.float32)
        zeros = torch.zeros_like(tables.bias[slot])
        tables.bias[slot], tables.counts[slot] = zeros.scatter_add(1, ids, bias), zeros

    def _make_tables(self) -> Tables:
        """The tables, made once a request needs them: 10 bytes per slot and token of the vocabulary."""
        if self.tables is None:
            self.tables = Tables.zeros(self.slots, self.vocab, self.place)
        return self.tables

    @torch.no_grad()
    def set_token_masks(self, slots: Sequence[int], barred: np.ndarray) -> None:
        """Set the token masks (rows, V) bool of these rows, True: must not be chosen. For a new row before its prefill,
        later before the pass that chooses. A mask stays until the next one, or until the row leaves."""
        self._make_tables().barred[self.put(slots)] = self.put(barred, dtype=torch.bool)

    # ---- decoding --------------------------------------------------------------------------------

    def force(self, tokens: dict[int, int]) -> None:
        """Replace the token that a row has chosen: by slot, what the next step reads in its place."""
        if tokens:
            self.override[self.put(list(tokens))] = self.put(list(tokens.values()))

    @torch.no_grad()
    def step(self, rows: int, longest: int, mode: Mode) -> Tensor:
        """Decode a token for slots 0 to rows - 1, of which none will hold more than `longest` tokens; (2 or more, at
        least rows) float32: ids, log-probabilities.

        The result is overwritten by the next step: copy it first. Idle rows between the busy ones run too, unseen, and
        leave what their slots hold as it is.
        """
        count = power(rows, 1, self.slots) if self.graphs or self.compiled else rows
        span = power(longest, MIN_SPAN, self.context) if self.kernel.slices else self.context
        if self.prepared:
            fits = ((most, reach) for most, reach in self.prepared if most >= rows and reach >= longest)
            count, span = next(fits, (count, span))
        key = _StepKey(count, span, mode)
        if key not in self.steps:
            self.steps[key] = self._capture(key)
        self.steps.move_to_end(key)
        report: Tensor = self.steps[key]()
        self.host_length[:count] += 1
        return report

    @torch.no_grad()
    def prepare(self, counts: Sequence[int], say: Callable[[str], None]) -> None:
        """Compile for these numbers of rows and all lengths now, which takes minutes. No step has another size from
        then on, so that no request ever waits for the compiler."""
        spans = sorted({power(least, MIN_SPAN, self.context) for least in (2 * MIN_SPAN, 1024, self.context)})
        sizes = sorted((count, span) for count in counts for span in spans)
        for number, (count, span) in enumerate(sizes):
            say(f"preparing {number + 1} of {len(sizes)}: {count} row(s), {span} keys")
            for mode in PLAIN:
                key = _StepKey(count, span, mode)
                self.steps[key] = step = self._capture(key)
                with self._standing():
                    step()
        self.prepared = sizes

    def _capture(self, key: _StepKey) -> Callable[[], Tensor]:
        """Capture a step as a graph where the chip can; of too many, the least recently used one goes."""
        step = partial(self._step, key)
        if not self.graphs:
            return step
        if len(self.steps) >= MAX_STEPS:
            self.device.synchronize()  # it may still run
            self.steps.popitem(last=False)
        with self._standing():  # capturing runs the step several times, and rows are under way
            return self.device.graph(
                step, updates=partial(self._updates, key.rows) if self.kernel.lengths_on_host else None
            )

    def _choose_step(self) -> tuple[str, Callable[[_StepKey], Tensor]]:
        """Choose what a step runs, by name: "triton" for our own model on a chip with Triton, where logits are computed
        as usual; else "torch", or "compiled"."""
        usual = type(self.readout) in (LMHead, Float32LMHead)
        if self.kernel.triton and isinstance(self.model, GPT) and usual:
            return "triton", self._triton_step(self.model, self.kernel)
        if not self.compiled:
            return "torch", self._torch_step(self._forward, self._forward, self._finish)
        limit = torch._dynamo.config.recompile_limit  # one function is compiled again for each number of rows and keys
        torch._dynamo.config.recompile_limit = max(limit, MAX_RECOMPILES)
        compile = partial(self.device.compile, dynamic=False, fullgraph=True)
        # A product with one row is a sum over the weights: tuned as such, it fuses with what stands around it.
        one = compile(self._forward, options={"coordinate_descent_tuning": True})
        return "compiled", self._torch_step(one, compile(self._forward), compile(self._finish))

    def _torch_step(
        self, one_row: Forward, many_rows: Forward, finish: Callable[..., Tensor]
    ) -> Callable[[_StepKey], Tensor]:
        """A step of two functions: model and sampling."""

        def step(key: _StepKey) -> Tensor:
            forward = one_row if key.rows == 1 else many_rows
            ending = finish if key.mode in PLAIN else self._finish
            return ending(key.rows, key.mode, *forward(key.rows, key.span))

        return step

    def _triton_step(self, model: GPT, kernel: Attention) -> Callable[[_StepKey], Tensor]:
        """A step by our own kernels, of which few are launched: gpt_step.py, sampling_kernels.py."""
        from ascendchat.engine.gpt_step import Slots, TokenStep
        from ascendchat.engine.sampling_kernels import State, choose

        cache, softcap, overlaps = self.cache, model.softcap, kernel.overlaps
        forward = TokenStep(model, cache.keys, cache.values, cache.raw, cache.places, self.context, overlaps=overlaps)
        slots = Slots(self.token, self.override, self.previous, self.length, self.target)
        state = State(self.token, self.previous, self.override, self.length, self.advance)

        def step(key: _StepKey) -> Tensor:
            logits, token, position = forward(key.rows, slots, key.span)  # logits without softcap
            if key.mode not in PLAIN:
                return self._finish(key.rows, key.mode, softcap * torch.tanh(logits / softcap), token, position)
            return choose(
                logits,
                token,
                self.settings,
                self.blocks,
                state,
                softcap=softcap,
                random=key.mode.draw == Draw.RANDOM,
                overlaps=overlaps,
            )

        return step

    @contextmanager
    def _standing(self) -> Iterator[None]:
        """Let steps change nothing inside; behind it they do again, also when it ends with an error."""
        self.advance.zero_()
        try:
            yield
        finally:
            self.advance.fill_(1)

    def _lengths(self, count: int, places: int) -> list[int]:
        """Keys that rows 0 to count - 1 see in a layer of `places`: those in the cache and the new one."""
        seen: list[int] = (np.minimum(self.host_length[:count], min(self.context, places) - 1) + 1).tolist()
        return seen

    def _updates(self, count: int) -> list[dict[str, list[int]]]:
        """Arguments on the host of the attention of each layer, before a graph is replayed."""
        return [{"actual_seq_lengths_kv": self._lengths(count, places)} for places in self.cache.places]

    def _forward(self, count: int, span: int) -> tuple[Tensor, Tensor, Tensor]:
        """Run the model over the newest token of rows 0 to count - 1: logits (B, V) float32, and (B,) that token and
        its position."""
        token = torch.where(self.override[:count] >= 0, self.override[:count], self.token[:count])
        position = self.length[:count].clamp(max=self.context - 1)  # a row that is over may run once more; idle rows do
        lengths = partial(self._lengths, count) if self.kernel.lengths_on_host else None
        attend, shift = self.cache.token_pass(self.kernel, self.scale, self.target[:count], position, span, lengths)
        hidden = self.model.extend(
            token[:, None], position[:, None], attend, shift, room=self.context, before=self.previous[:count]
        )
        return self.logits(hidden[:, 0]), token, position

    def _finish(self, count: int, mode: Mode, logits: Tensor, token: Tensor, position: Tensor) -> Tensor:
        """Choose the next token of these rows and write it into their state; see _choose."""
        override = self.override[:count]
        if mode.tables and self.tables is not None:
            self.tables.seen[:count].scatter_(1, token[:, None], True)
            own = (override < 0) * self.advance  # not what a tool put there, and nothing while a graph is captured
            self.tables.counts[:count].scatter_add_(1, token[:, None], own[:, None].float())
        chosen, report = self._choose(logits, slice(count), position, mode)
        moves = self.advance > 0
        self.previous[:count] = torch.where(moves, token, self.previous[:count])
        self.token[:count] = torch.where(moves, chosen, self.token[:count])
        self.override[:count] = torch.where(moves, self.none[:count], override)
        self.length[:count] += self.advance
        return report

    def _choose(self, logits: Tensor, which: Tensor | slice, position: Tensor, mode: Mode) -> tuple[Tensor, Tensor]:
        """Sample the next token (B,) of the rows `which`, whose logits are (B, V), and report it to the host: (2, B)
        float32, ids and log-probabilities; with tables below them the MAX_TOPS likeliest ids and theirs."""
        tables = self.tables.rows(which) if mode.tables and self.tables is not None else None
        settings = self.settings.rows(which)
        chosen, logprob = sample(
            logits, settings, position, mode, tables, blocks=self.blocks, logsumexp=self.readout.logsumexp
        )
        report = torch.stack((chosen.float(), logprob))  # ids below 2^24 are exact in float32
        if mode.tables:
            ids, logprobs = likeliest_tokens(logits)
            report = torch.cat((report, ids.t().float(), logprobs.t()))
        return chosen, report

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits: (B, C) -> (B, V) float32."""
        return self.readout.logits(hidden, self.model.head[: self.vocab], self.model.softcap)

    # ---- slots -----------------------------------------------------------------------------------

    @torch.no_grad()
    def copy(self, copies: Sequence[Copy]) -> None:
        """Copy what the cache has from slot to slot, all at once."""
        source, target, lengths, places = zip(*copies)
        moves = [number for number, copy in enumerate(copies) if copy.source != copy.target]
        longest = max((copies[number].length for number in moves), default=0)
        slots, targets, moved, ends, newest = self.put_at_once(source, target, moves, lengths, places)
        self.cache.copy(slots, targets, moved, ends, newest, longest)

    @torch.no_grad()
    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Move all state of these rows but their cache; the slots that they leave are idle."""
        source, target = self.put_at_once(sources, targets)
        rows = self.token, self.previous, self.length, self.override, *self.settings, *(self.tables or ())
        for tensor in rows:
            tensor[target] = tensor[source]
        self.target[target] = target
        self.host_length[list(targets)] = self.host_length[list(sources)]
        self.leave(sources)

    def leave(self, slots: Sequence[int]) -> None:
        """Rows are over: they write to the spare slot, are short again, so that idle steps read little, and their slots
        have no token mask and no bias."""
        slot = self.put(slots)
        self.host_length[list(slots)] = 0
        self.length.index_fill_(0, slot, 0)
        self.target.index_fill_(0, slot, self.cache.dump)
        if self.tables is not None:
            self.tables.barred[slot] = torch.zeros_like(self.tables.barred[slot])
            self.tables.bias.index_fill_(0, slot, 0.0)

    def step_rows(self, rows: int) -> int:
        """Rows that a step runs which is wanted for so many."""
        if self.prepared:
            return next(most for most, _ in self.prepared if most >= rows)
        return power(rows, 1, self.slots) if self.graphs or self.compiled else rows

    def has_step(self, rows: int) -> bool:
        """True if a step of so many rows needs no new capture."""
        return not (self.graphs or self.compiled) or any(key.rows == rows for key in self.steps)
