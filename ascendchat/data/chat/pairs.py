"""Preference pairs: a prompt, a chosen reply and a rejected one, in every published form.

    for pair in pairs("dpo.jsonl"): ...  # Pair(prompt, chosen, rejected), lists of messages as in data/chat/render.py

`finetune --stage dpo --data FILE` reads through here; `ascendchat sft` takes the chosen reply of such files.
The columns of each row tell its form:

| form                    | columns                                                                                   |
|-------------------------|-------------------------------------------------------------------------------------------|
| LLaMA-Factory, alpaca   | instruction, input; chosen, rejected (texts); system, history                             |
| LLaMA-Factory, sharegpt | conversations; chosen, rejected ({"from", "value"}); system, tools                        |
| LLaMA-Factory, openai   | messages; chosen, rejected ({"role", "content"})                                          |
| TRL                     | prompt, chosen, rejected: texts, or lists of messages with or without the prompt repeated |
| TRL, implicit prompt    | chosen, rejected: lists of messages that begin alike                                      |
| hh-rlhf                 | chosen, rejected: texts of `Human:` and `Assistant:` turns that begin alike               |
| ms-swift                | messages, or query and response; rejected_response or rejected_messages                   |

Rows that cannot be read are counted, named and left out as in formats.py: up to 1 % of a file.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ascendchat.data.chat.render import (
    Conversation,
    Encoder,
    Rendered,
    dropped_reasoning_line,
    exchanges,
    flat,
    has_empty_reply,
    max_that_fits,
    render,
    supported_messages,
    template_of,
)
from ascendchat.data.chat.rows import EPOCHS, ORDER, WINDOW
from ascendchat.data.chat.tables import RowBudget, TableRow, TrackedRow, check_table, read_rows, unused_line
from ascendchat.data.chat.turns import (
    cell_messages,
    history,
    message,
    parse_talk,
    parse_turns,
    question_of,
    speaker_message,
    system_message,
    validated,
    with_system,
)
from ascendchat.data.corpus import shuffled
from ascendchat.data.mixture import Batch, MixtureLoader
from ascendchat.data.read import MAX_BROKEN_SHARE
from ascendchat.errors import UserError
from ascendchat.nn import IGNORE
from ascendchat.runs.console import inert

PROMPTS = "conversations", "prompt", "instruction", "messages", "question", "query", "input"  # the first that a row has
REJECTED = "rejected_response", "rejected_messages"  # as ms-swift calls them
SPOKEN = re.compile(r"\n\n(Human|Assistant):")


class Pair(NamedTuple):
    """A prompt and the two replies, which begin where it ends."""

    prompt: Conversation
    chosen: Conversation
    rejected: Conversation


def parse_pair(row: TableRow) -> Pair:
    """Parse the pair in a row; a ValueError tells what is wrong with it, a UserError that its columns are unknown."""
    if any(name in row for name in REJECTED):
        chosen, rejected = parse_swift(row)
    elif "chosen" in row and "rejected" in row:
        chosen, rejected = talk_of(row, "chosen"), talk_of(row, "rejected")
    else:
        raise UserError(
            f"the columns {inert(', '.join(row)) or '(none)'} hold no pairs; rename them to prompt, chosen and "
            "rejected, or to messages and rejected_response"
        )
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    if shared == len(chosen) == len(rejected):  # equal replies: `pairs` drops and counts them
        shared = before_reply(chosen)
    pair = Pair(*(validated(part) for part in (chosen[:shared], chosen[shared:], rejected[shared:])))
    if not any(message["role"] == "user" for message in pair.prompt):
        raise ValueError("it has no prompt that both replies answer")
    if not all(any(message["role"] == "assistant" for message in reply) for reply in (pair.chosen, pair.rejected)):
        raise ValueError("one of its replies is not of the assistant")
    return pair


def before_reply(talk: Conversation) -> int:
    """Number of messages before the last turn of the assistant."""
    end = len(talk)
    while end and talk[end - 1]["role"] == "assistant":
        end -= 1
    return end


def talk_of(row: TableRow, side: str) -> Conversation:
    """The conversation up to the reply in this column."""
    return with_reply(with_system(row, history(row) + prompt_of(row)), row[side])


def prompt_of(row: TableRow) -> Conversation:
    """The messages before the replies, without the system message."""
    name = next((name for name in PROMPTS if name in row), "")
    if not name:
        return []
    return parse_turns(row[name]) if name == "messages" else cell_messages(question_of(row, name), "user")


def with_reply(head: Conversation, reply: Any) -> Conversation:
    """Append a reply to a prompt. Some sets repeat the prompt in the reply."""
    reply = parse_talk(reply)
    if isinstance(reply, str):
        question = head[-1]["content"] if head else ""
        if isinstance(question, str) and SPOKEN.match(question) and reply.startswith(question):
            return [*head[:-1], *marked_turns(reply)]  # hh-rlhf with its prompt in a column, too
        return [*head, message("assistant", reply)] if head else marked_turns(reply)
    entries = parse_turns([reply] if isinstance(reply, dict) else reply)
    turns_of_prompt = [turn for turn in head if turn["role"] != "system"]
    system = [turn for turn in head if turn["role"] == "system"]
    lead = next((at for at, turn in enumerate(entries) if turn["role"] != "system"), 0)
    if not turns_of_prompt or entries[lead : lead + len(turns_of_prompt)] == turns_of_prompt:
        return [*(system or entries[:lead]), *entries[lead:]]
    if lead < len(entries) and entries[lead]["role"] == turns_of_prompt[-1]["role"] == "user":
        if len(turns_of_prompt) > 1:
            raise ValueError("its reply begins with a user's message that is not that of the prompt")
        return [*(system or entries[:lead]), *entries[lead:]]  # the whole conversation; the prompt is its last question
    return [*head, *entries]


def marked_turns(text: str) -> Conversation:
    """Parse a conversation that is one text with marks, as in hh-rlhf."""
    text = "\n\n" + text.lstrip()
    marks = list(SPOKEN.finditer(text))
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    return [speaker_message(mark[1], text[mark.end() : end].strip()) for mark, end in zip(marks, ends)]


def parse_swift(row: TableRow) -> tuple[Conversation, Conversation]:
    """Both conversations of an ms-swift row, with their prompt: (chosen, rejected)."""
    chosen = (
        with_system(row, parse_turns(row["messages"]))
        if "messages" in row
        else system_message(row) + history(row) + query(row)
    )
    head = chosen[: before_reply(chosen)]
    return chosen, with_reply(head, row["rejected_messages" if row.get("rejected_messages") else "rejected_response"])


def query(row: TableRow) -> Conversation:
    return cell_messages(question_of(row, "query"), "user") + cell_messages(row["response"], "assistant")


def pairs(
    path: str | Path,
    *,
    limit: RowBudget | None = None,
    map_row: Callable[[TableRow], TableRow] | None = None,
    say: Callable[[str], None] = print,
) -> Iterator[Pair]:
    """Yield every pair of a file, in order; `say` gets a line about rows that were left out, and one that names the
    columns that were not used, if there are any. `map_row` gives a row the columns above (dataset_info.py)."""
    path, equal = check_table(path), 0
    unused: dict[str, None] = {}  # in the order in which they were seen

    def read_row(row: TableRow) -> Pair:
        watched = TrackedRow(row)
        pair = parse_pair(map_row(watched) if map_row else watched)
        unused.update(dict.fromkeys(watched.unused()))
        return pair

    for pair in read_rows(path, read_row, limit=limit, say=say):
        if pair.chosen == pair.rejected:
            equal += 1
        else:
            yield pair
    if unused:
        say(unused_line(path.name, unused))
    if equal:
        say(f"{path.name}: {equal} pairs whose replies are the same; left out, for there is nothing to prefer")


# Preference pairs as packed rows: `finetune --stage dpo`.
#
#     rendered = render_pair(tokenizer, pair, seq_len + 1, counts)      # None: there is nothing to learn from it
#     rows = PairRows(all_rendered, seq_len, seed, pad)
#     batches = PairLoader([(rows, 1.0)], bins_per_step)       # as mixture.MixtureLoader; a bin is two rows
#
# Each pair is two sequences: the prompt with the chosen reply, and the prompt with the rejected one. Only the replies
# are scored, not the earlier turns of the assistant. Both sequences of a pair lie in the same bin of two rows of T
# tokens, wherever there is room, since a loss needs both at once; sequences are documents that do not see each other.
# Bins are packed once, the longest pairs first within windows of a shuffled order, and come in a new order every epoch.

PLACEMENTS = (0, 0), (1, 1), (0, 1), (1, 0)  # rows of a bin for the two sequences of a pair
Bin = tuple[list[int], list[int]]  # the sequences in either row: 2 i is the chosen one of pair i, 2 i + 1 the rejected


@dataclass
class PairCounts:
    """Number of pairs that were rendered, cut and left out, and the reasons."""

    whole: int = 0
    cut: int = 0  # too long: earlier exchanges, the beginning of the prompt or the end of a reply went
    lost_tokens: int = 0  # of the cut pairs
    unsupervised: int = 0  # a reply has no token to learn, or both are the same after the cut
    empty: int = 0  # the chosen reply has no word: a model would learn to end at once
    thoughtless: int = 0  # of all these: lost their reasoning, for which the template has no place
    refused: int = 0  # by the model's chat template
    why: str = ""  # its first error

    def line(self) -> str:
        """Format one line for the log."""
        refused = f", {self.refused} refused by the chat template ({self.why})" if self.refused else ""
        empty = f", {self.empty} with an empty chosen reply (left out)" if self.empty else ""
        return (
            f"{self.whole} pairs whole, {self.cut} too long and cut ({self.lost_tokens} tokens lost), "
            f"{self.unsupervised} without a difference{empty}{refused}{dropped_reasoning_line(self.thoughtless)}"
        )

    def check(self) -> None:
        """Raise if the template refused more than a few pairs: it is not made for such data."""
        if self.refused > MAX_BROKEN_SHARE * (self.whole + self.cut + self.unsupervised + self.empty + self.refused):
            raise UserError(f"{self.refused} pairs are refused: {self.why}; mend them, or take them out of --data")


class RenderedPair(NamedTuple):
    """Both sequences of a pair; the masks are 1 on the tokens of the reply."""

    chosen: Rendered
    rejected: Rendered

    @property
    def longest(self) -> int:
        return max(len(self.chosen.ids), len(self.rejected.ids))


def render_reply(tokenizer: Encoder, prompt: Sequence[dict[str, object]], whole: Rendered) -> Rendered:
    """Render a conversation with 0 in its mask for all that the prompt already has, such as earlier turns of the
    assistant."""
    before = render(tokenizer, prompt).ids
    shared = next((at for at, (a, b) in enumerate(zip(before, whole.ids)) if a != b), min(len(before), len(whole.ids)))
    return Rendered(whole.ids, [0] * shared + whole.mask[shared:])


def render_pair(tokenizer: Encoder, pair: Pair, limit: int, counts: PairCounts) -> RenderedPair | None:
    """Render both sequences in at most `limit` tokens, with the same prompt. Too long: the oldest exchanges go
    first, then the system message, then the beginning of the prompt down to half of the room, then the end of the
    replies."""

    def rendered(prompt: list[dict[str, object]]) -> RenderedPair:
        sides = (render_reply(tokenizer, prompt, render(tokenizer, [*prompt, *reply])) for reply in pair[1:])
        return RenderedPair(*sides)

    if has_empty_reply(pair.chosen):
        counts.empty += 1
        return None
    talk = [*pair.prompt, *pair.chosen, *pair.rejected]
    counts.thoughtless += supported_messages(tokenizer, talk) is not talk
    try:
        fitted = whole = rendered(pair.prompt)
        if fitted.longest > limit:
            system, groups = exchanges(pair.prompt)

            def render_last(count: int) -> RenderedPair:
                return rendered([*system, *flat(groups[-count:])])

            count = max_that_fits(len(groups) - 1, lambda count: render_last(count).longest <= limit)
            fitted = render_last(count) if count else rendered(flat(groups[-1:]))
            fitted = shorten_pair(tokenizer, fitted, limit)
    except UserError as error:
        counts.refused += 1
        counts.why = counts.why or str(error)
        return None
    if not all(any(side.mask[1:]) for side in fitted) or fitted.chosen == fitted.rejected:
        counts.unsupervised += 1
        return None
    lost = sum(len(a.ids) - len(b.ids) for a, b in zip(whole, fitted))
    counts.whole, counts.cut = counts.whole + (not lost), counts.cut + bool(lost)
    counts.lost_tokens += lost
    return fitted


def shorten_pair(tokenizer: Encoder, pair: RenderedPair, limit: int) -> RenderedPair:
    """Cut a pair to the end of the prompt and the beginning of the replies, as far as they fit."""
    if pair.longest <= limit:
        return pair
    firsts = [side.mask.index(1) if any(side.mask) else len(side.mask) for side in pair]
    replies = [len(side.ids) - first for side, first in zip(pair, firsts)]
    room = max(limit - max(replies), limit // 2)  # of the prompt
    special = tokenizer.specials
    start = [] if template_of(tokenizer) else [special["<|bos|>"], special["<|user_start|>"]]
    sides = []
    for (ids, mask), first in zip(pair, firsts):
        if first > room:
            beginning = [*start, *ids[first - room + len(start) : first]]
            ids, mask = beginning + ids[first:], [0] * len(beginning) + mask[first:]
        sides.append(Rendered(ids[:limit], mask[:limit]))
    return RenderedPair(*sides)


def pack_pairs(lengths: Sequence[tuple[int, int]], seq_len: int, window: int = WINDOW) -> list[Bin]:
    """Pack pairs into bins: the longest first, each into the fullest bin that still has room for both sequences."""
    bins: list[Bin] = []
    for first in range(0, len(lengths), window):
        members = range(first, min(first + window, len(lengths)))
        room, first_bin = (
            np.zeros((2, len(members)), dtype=np.int64),
            len(bins),
        )  # places left in either row of each bin
        for i in sorted(members, key=lambda i: (-sum(lengths[i]), i)):
            left = room[:, : len(bins) - first_bin]
            fits = [fitting(lengths[i], left, rows) for rows in PLACEMENTS]
            # (bins,) free positions of each bin that fits; the fullest is taken
            free = np.where(np.logical_or.reduce(fits), left.sum(0), 2 * seq_len + 1)
            at = int(free.argmin()) if free.size else 0
            if not free.size or free[at] > 2 * seq_len:
                at = len(bins) - first_bin
                bins.append(([], []))
                room[:, at] = seq_len
                rows = (0, 1)
            else:
                placements = [rows for rows, fit in zip(PLACEMENTS, fits) if fit[at]]
                rows = min(placements, key=lambda rows: int(room[rows[0], at] + room[rows[1], at]))  # the fuller row
            for side in (0, 1):
                bins[first_bin + at][rows[side]].append(2 * i + side)
                room[rows[side], at] -= lengths[i][side]
    return bins


def fitting(lengths: tuple[int, int], left: NDArray[np.int64], rows: tuple[int, int]) -> NDArray[np.bool_]:
    """Mask of the bins, with `left` (2, bins) free positions, in which the sequences of a pair fit in these rows."""
    a, b = rows
    if a == b:
        return left[a] >= sum(lengths)
    return (left[a] >= lengths[0]) & (left[b] >= lengths[1])


@dataclass(frozen=True)
class PairBatch(Batch):
    """Bins of one global batch, on the host: two rows each. P pairs."""

    chosen: NDArray[np.int64]  # (P,) index of its segment in `lengths`
    rejected: NDArray[np.int64]
    tokens: NDArray[np.int64]  # (P, 2) targets of the replies
    number: NDArray[np.int64]  # (P,) of the pair, over all sources of the mixture


class PairRows:
    """The packed pairs of one source; a mixture.RowSource whose rows are bins and whose targets are pairs."""

    def __init__(
        self, pairs: Iterable[RenderedPair], seq_len: int, seed: int, pad: int, *, packing: bool = True
    ) -> None:
        self.seq_len, self.seed, self.pad = seq_len, seed, pad
        self.first = 0  # number of its first pair in a mixture
        ids, mask, starts = array("i"), array("b"), array("q", [0])
        for side in (side for pair in pairs for side in pair):
            if len(side.ids) > seq_len + 1 or not any(side.mask[1:]):
                raise ValueError("a sequence is longer than a row or has nothing to learn: use render_pair")
            ids.extend(side.ids)
            mask.extend(side.mask)
            starts.append(len(ids))
        if len(starts) == 1:
            raise UserError("no pair of two replies was found; look at the file and choose another with --data")
        self.ids, self.mask = np.frombuffer(ids, dtype=np.int32), np.frombuffer(mask, dtype=np.int8)
        self.starts = np.frombuffer(starts, dtype=np.int64)
        self.pairs = (len(starts) - 1) // 2
        order = shuffled(self.pairs, seed, 0, ORDER)
        places = (np.diff(self.starts) - 1).reshape(-1, 2)[order]  # a sequence of n tokens takes n - 1
        lengths = [(int(a), int(b)) for a, b in places]
        packed: list[Bin] = (
            pack_pairs(lengths, seq_len) if packing else [([2 * i], [2 * i + 1]) for i in range(len(lengths))]
        )
        self.bins = [tuple([2 * int(order[s // 2]) + s % 2 for s in row] for row in both) for both in packed]
        self.per_epoch = len(self.bins)
        self._pairs = np.array([(len(a) + len(b)) // 2 for a, b in self.bins])

    def pair(self, number: int) -> RenderedPair:
        """The pair as it was rendered."""
        spans = [slice(self.starts[s], self.starts[s + 1]) for s in (2 * number, 2 * number + 1)]
        return RenderedPair(*(Rendered(self.ids[span].tolist(), self.mask[span].tolist()) for span in spans))

    @property
    def filled(self) -> float:
        """Share of the positions that hold a token and not padding."""
        return (len(self.ids) - 2 * self.pairs) / (2 * self.per_epoch * self.seq_len)

    @property
    def identity(self) -> bytes:
        return hashlib.sha256(self.ids.tobytes() + self.mask.tobytes()).digest()

    def targets(self, start: int, stop: int) -> int:
        """Number of pairs in the bins start .. stop - 1."""
        places = (divmod(number, self.per_epoch) for number in range(start, stop))
        return sum(int(self._pairs[self._order(epoch)[row]]) for epoch, row in places)

    def fill(
        self, number: int, inputs: NDArray[np.int64], targets: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        raise NotImplementedError("a bin is two rows: see `put`")

    def put(self, number: int, inputs: NDArray[np.int64], targets: NDArray[np.int64]) -> list[tuple[int, int]]:
        """Write bin `number` into two arrays (2, T). Returns its segments: (tokens, index of the sequence, or -1 for
        padding)."""
        epoch, row = divmod(number, self.per_epoch)
        inputs[:], targets[:] = self.pad, IGNORE
        segments = []
        for half, sequences in enumerate(self.bins[self._order(epoch)[row]]):
            at = 0
            for which in sequences:
                begin, end = self.starts[which], self.starts[which + 1]
                stop = at + int(end - begin) - 1
                inputs[half, at:stop] = self.ids[begin : end - 1]
                learnt = self.mask[begin + 1 : end]
                targets[half, at:stop] = np.where(learnt, self.ids[begin + 1 : end], IGNORE)
                segments.append((stop - at, which))
                at = stop
            if at < self.seq_len:
                segments.append((self.seq_len - at, -1))
        return segments

    def learnt(self, pair: int) -> tuple[int, int]:
        """Number of targets of either reply."""
        spans = (slice(self.starts[s] + 1, self.starts[s + 1]) for s in (2 * pair, 2 * pair + 1))
        chosen, rejected = (int(self.mask[span].sum()) for span in spans)
        return chosen, rejected

    def _order(self, epoch: int) -> NDArray[np.int64]:
        """The order of the bins in an epoch; the last one used is cached."""
        cached: tuple[int, NDArray[np.int64]] | None = getattr(self, "_kept", None)
        if cached is None or cached[0] != epoch:
            cached = self._kept = (epoch, shuffled(self.per_epoch, self.seed, epoch, EPOCHS))
        return cached[1]


class PairLoader(MixtureLoader):
    """Global batches of bins; `targets(step)` is the number of pairs in a step."""

    def __init__(self, sources: Sequence[tuple[PairRows, float]], bins_per_step: int) -> None:
        super().__init__(sources, bins_per_step)
        self.sources = [rows for rows, _ in sources]

    def batch(self, step: int, start: int = 0, stop: int | None = None) -> PairBatch:
        """Gather bins [start, stop) of the global batch of a step."""
        stop = self.rows_per_step if stop is None else stop
        inputs = np.empty((2 * (stop - start), self.seq_len), dtype=np.int64)
        targets = np.empty_like(inputs)
        lengths: list[int] = []
        sides: tuple[list[int], list[int]] = ([], [])
        tokens, numbers = list[tuple[int, int]](), list[int]()
        for at, number in enumerate(range(step * self.rows_per_step + start, step * self.rows_per_step + stop)):
            which, row = self.locate(number)
            rows, two = self.sources[which], slice(2 * at, 2 * at + 2)
            places: dict[int, int] = {}  # sequence -> segment
            for length, sequence in rows.put(row, inputs[two], targets[two]):
                places[sequence] = len(lengths)
                lengths.append(length)
            for pair in sorted(sequence // 2 for sequence in places if sequence >= 0 and sequence % 2 == 0):
                for side in (0, 1):
                    sides[side].append(places[2 * pair + side])
                tokens.append(rows.learnt(pair))
                numbers.append(rows.first + pair)
        return PairBatch(
            inputs,
            targets,
            np.array(lengths, dtype=np.int32),
            np.array(sides[0], dtype=np.int64),
            np.array(sides[1], dtype=np.int64),
            np.array(tokens, dtype=np.int64),
            np.array(numbers, dtype=np.int64),
        )
