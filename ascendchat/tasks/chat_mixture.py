"""The mixture of `ascendchat mid` and `ascendchat sft`: `--data NAME=WEIGHT,...` as rows to train and validate on.

    opened = open_chat_mixture(("toyworld=0.7", "wiki=0.3"), "sft", tokenizer, seq_len, seed=0)
    batches = MixtureLoader(opened.sources, rows_per_step)              # data/mixture.py

An entry is `toyworld` (embedded), a file or folder of conversations in any known format, a name that tasks.load knows,
or a prepared corpus of text, whose loss is on every token.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascendchat.config.train import PUBLISHED
from ascendchat.data import toyworld
from ascendchat.data.chat.render import Conversation, Counts, has_reply
from ascendchat.data.chat.rows import ChatRows
from ascendchat.data.corpus import Corpus, TextRows, is_prepared, open_corpora
from ascendchat.data.fetch import folder_of
from ascendchat.data.mixture import WeightedRows, fingerprint, is_held_out, parse_entry, parse_mixture
from ascendchat.data.prepare import TOYWORLD
from ascendchat.data.tokenizer.tokenizer import Tokenizer
from ascendchat.errors import UserError
from ascendchat.tasks.by_name import EVALUATIONS, load
from ascendchat.tasks.contamination import OverlapFinder
from ascendchat.tasks.eval_files import NoFiles

DEFAULT_HELD_OUT = 0.02  # share of an entry's conversations that is held out for validation

Say = Callable[[str], None]
Pack = Callable[[Iterable[Conversation], Counts], ChatRows]


@dataclass(frozen=True)
class EntryOptions:
    """Limits for each entry that has conversations."""

    held_out: float = DEFAULT_HELD_OUT  # for validation: a share, or from 1 on a number of conversations; 0: none
    max_conversations: int | None = None

    def share(self, conversations: int) -> float:
        """Share of so many conversations that is held out."""
        return self.held_out if self.held_out < 1 else min(0.5, self.held_out / max(1, conversations))


@dataclass(frozen=True)
class ChatMixture:
    """An opened mixture: rows to train on, and rows and texts to validate on."""

    sources: list[WeightedRows]  # to train on
    validation: list[ChatRows]  # conversations that are not trained on, one for each entry that has conversations
    texts: list[Corpus]  # the validation splits of the prepared corpora that have one
    overlaps: OverlapFinder | None  # evaluation questions that were found in the conversations

    @property
    def per_epoch(self) -> int:
        """Rows of all entries together."""
        return sum(rows.per_epoch for rows, _ in self.sources)

    @property
    def facts(self) -> list[Any]:
        """Fingerprint and weights, which a resumed run must have in common with the one it continues."""
        return [fingerprint(self.sources), *[weight for _, weight in self.sources]]


def open_chat_mixture(
    data: Sequence[str],
    stage: str,
    tokenizer: Tokenizer,
    seq_len: int,
    *,
    seed: int = 0,
    source: str = "",
    find_overlaps: bool = True,
    say: Say = print,
    options: EntryOptions = EntryOptions(),  # noqa: B008 (it cannot be changed)
    packing: bool = True,
) -> ChatMixture:
    """Read every entry once. `source` is a folder with local copies of data sets and evaluations; evaluation questions
    are searched for only if their sets are in it. Entries without a weight count by their rows. Without `packing` a row
    holds one conversation."""
    entries = parse_mixture(data)
    finder = overlap_finder([name for name, _ in entries], source, say) if find_overlaps else None
    opened = ChatMixture([], [], [], finder)

    def pack(conversations: Iterable[Conversation], counts: Counts) -> ChatRows:
        return ChatRows.build(tokenizer, conversations, seq_len, seed, counts, packing)

    for name, weight in entries:
        rows: TextRows | ChatRows
        if is_prepared(name):
            rows = TextRows(Corpus.open(name), seq_len, seed)
            if rows.corpus.tokenizer != tokenizer.fingerprint:
                raise UserError(f"{name} was prepared with another tokenizer than the model's; prepare it again")
            opened.texts.extend(corpus for corpus, _ in open_corpora([name], "val", needed=False))
        else:
            if name == TOYWORLD:
                rows, validation = open_toyworld(stage, seed, pack, say, options)
            else:
                rows, validation = open_conversations(name, source, finder, pack, say, options)
            if validation is not None:
                opened.validation.append(validation)
        opened.sources.append((rows, float(rows.per_epoch) if weight is None else weight))
    return opened


def open_toyworld(
    stage: str, seed: int, pack: Pack, say: Say, options: EntryOptions
) -> tuple[ChatRows, ChatRows | None]:
    """Open the embedded conversations of a stage (`mid` or `sft`): (rows to train on, rows to validate on)."""
    train = itertools.islice(toyworld.chats("train", kind=stage, seed=seed), options.max_conversations)
    rows = _pack_and_say(TOYWORLD, train, pack, say)
    holds_out = options.held_out > 0
    return rows, pack(toyworld.chats("validation", kind=stage, seed=seed), Counts()) if holds_out else None


def open_conversations(
    name: str, source: str, finder: OverlapFinder | None, pack: Pack, say: Say, options: EntryOptions
) -> tuple[ChatRows, ChatRows | None]:
    """Open a file or a task, reading it once: (rows to train on, rows to validate on)."""
    task, held = load(name, "train", source), list[Conversation]()
    for notice in task.notices:
        say(notice)
    count = min(len(task), options.max_conversations or len(task))
    conversations = itertools.islice(finder.over(task) if finder else task, count)
    if not options.held_out:
        return _pack_and_say(name, conversations, pack, say), None
    train = hold_out(conversations, held, options.share(count))
    begin: list[Conversation] = []  # up to the first with a reply, so that there is something to train on
    for conversation in train:
        begin.append(conversation)
        if has_reply(conversation):
            break
    else:  # the hash chose all that have one for validation
        begin, held = [*begin, *held], []
    rows = _pack_and_say(name, itertools.chain(begin, train), pack, say)
    if not held:
        say(f"{name} is too small to keep some for validation: validated on the first, which is also trained on")
    return rows, pack(held or begin[-1:], Counts())


def _pack_and_say(name: str, conversations: Iterable[Conversation], pack: Pack, say: Say) -> ChatRows:
    counts = Counts()
    rows = pack(conversations, counts)
    say(f"{name}: {counts.line()}; {rows.per_epoch} rows, {rows.filled:.0%} full")
    return rows


def held_out_rows(names: Sequence[str], source: str, tokenizer: Tokenizer, seq_len: int, say: Say) -> list[ChatRows]:
    """Pack files or tasks that only validate, whole, as rows."""
    rows = []
    for name in names:
        task, counts = load(name, source=source), Counts()
        rows.append(ChatRows.build(tokenizer, task, seq_len, 0, counts))
        for line in (*task.notices, f"validation {name}: {counts.line()}"):
            say(line)
    return rows


def hold_out(
    conversations: Iterable[Conversation], held: list[Conversation], share: float = DEFAULT_HELD_OUT
) -> Iterator[Conversation]:
    """Yield the conversations to train on, in one pass over all; those held out for validation go to `held`. One
    without a reply cannot validate: it is yielded, to be counted with the others that are left out."""
    for conversation in conversations:
        content = json.dumps(conversation, sort_keys=True).encode()
        if is_held_out(content, share) and has_reply(conversation):
            held.append(conversation)
        else:
            yield conversation


def overlap_finder(names: Sequence[str], source: str, say: Say = print) -> OverlapFinder | None:
    """Prepare the search for questions of the evaluations in `source`; None if there is nothing to search for or in. An
    evaluation that cannot be read is named."""
    if not source or all(name == TOYWORLD or is_prepared(name) for name in names):
        return None
    evaluations = []
    for name in EVALUATIONS:
        try:
            evaluations.append(load(name, source=source))
        except NoFiles:  # so the model will not be evaluated from there either
            continue
        except UserError as error:
            say(f"questions of {name} are not looked for in the training data: {error}")
    return OverlapFinder(evaluations)


def default_data(stage: str, learnt: Sequence[str], source: str) -> tuple[str, ...]:
    """The mixture where no --data is given: the embedded conversations for a model that learnt only the embedded world
    (`learnt` is the --data it was trained with), else the published ones."""
    if learnt and {Path(parse_entry(entry).name).name for entry in learnt} == {TOYWORLD}:
        return (TOYWORLD,)
    sets = list(dict.fromkeys(PUBLISHED[stage]))
    missing = [name for name in sets if not source and not (folder_of(name) / "manifest.json").is_file()]
    if missing:
        raise UserError(
            f"no --data given: `{stage}` takes {', '.join(sets)}, and {', '.join(missing)} not fetched yet; get them: "
            f"`ascendchat data fetch {' '.join(missing)}`; or name your own: --data FILES"
        )
    return PUBLISHED[stage]
