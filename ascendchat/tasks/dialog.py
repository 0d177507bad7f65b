"""Conversations to fine-tune on: SmolTalk and similar sets, files of the user, and the assistant's identity.

Dialog("smoltalk") # a named set of `ascendchat data fetch` Dialog("talk.jsonl") # a file, or a folder of files:
see data/chat/formats.py Dialog("identity.json") # its {{name}} and {{author}} are filled in: SLOTS
Dialog("data/alpaca_en_demo") # listed by data/dataset_info.json: see data/chat/dataset_info.py
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ascendchat.data import toyworld
from ascendchat.data.chat.dataset_info import ListedDataset, find_listed
from ascendchat.data.chat.formats import conversations
from ascendchat.data.chat.render import Conversation
from ascendchat.data.chat.tables import TABLE_TYPES, RowBudget
from ascendchat.data.fetch import SETS, fetch
from ascendchat.data.fetch.sources import ALIASES
from ascendchat.data.read import JSON_LINES, format_of, row_files
from ascendchat.errors import UserError
from ascendchat.runs.console import inert
from ascendchat.tasks.eval_files import SPLIT
from ascendchat.tasks.task import Task

# Types to read in a folder; arrow, csv and txt files only where none of these is there: they may be copies, or notes.
PREFERRED_TYPES = (".parquet", *JSON_LINES, ".json", ".tsv")
MAX_SHOWN_FILES = 5  # of those that are left out
# Sets, by the name of their file, whose texts have slots, and the words for these: identity.json of LLaMA-Factory.
# Everywhere else {{name}} is text, like the {{user}} of a template and the \frac{{1}}{{2}} of a formula.
SLOTS = {"identity": {"name": toyworld.ASSISTANT_NAME, "author": toyworld.ASSISTANT_NAME}}


class ConversationStore:
    """Many conversations in one block of memory: as large as their text, where objects would take several times as
    much."""

    def __init__(self, conversations: Iterable[Conversation]) -> None:
        self.text, self.ends = bytearray(), array("Q")
        for conversation in conversations:
            self.text += json.dumps(conversation, ensure_ascii=False).encode("utf-8", "surrogatepass")
            self.ends.append(len(self.text))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> Conversation:
        begin = self.ends[index - 1] if index else 0
        conversation: Conversation = json.loads(self.text[begin : self.ends[index]].decode("utf-8", "surrogatepass"))
        return conversation


def split_of(name: str) -> str:
    """The split named by the path of a file in its folder, its own name before the folders; train if none is named."""
    folders, _, file_name = f"/{name.lower()}".rpartition("/")
    splits = (split for part in (f"/{file_name}", f"{folders}/") for split in SPLIT if re.search(SPLIT[split], part))
    return next(splits, "train")


def files_of(where: Path, split: str) -> tuple[list[Path], list[Path]]:
    """(files of this split, files of conversations that are left out), of a file or a folder."""
    if where.is_file():
        return [where], []
    kinds = {p: format_of(p.name)[0] for p in row_files(where) if format_of(p.name)[0] in TABLE_TYPES}
    files = list(kinds)
    groups = ([p for p in files if kinds[p] in group] for group in (PREFERRED_TYPES, (".arrow",), (".csv",), (".txt",)))
    tables = next((group for group in groups if group), [])

    chosen = [p for p in tables if split_of(p.relative_to(where).as_posix()) == split]
    return chosen, [p for p in files if p not in set(chosen)]


def sets_at(path: Path, *, ranking: bool = False) -> list[ListedDataset]:
    """Find the data sets at a path: those of a registry (data/chat/dataset_info.py), else the file or folder itself."""
    listed = find_listed(path, ranking=ranking)
    if listed is None and not path.exists():
        raise UserError(f"{path} does not exist; give a file, a folder or a name of `ascendchat data fetch`")
    return listed or [ListedDataset(path.name.split(".")[0], path, ranking, None, None)]


def tables_of(listed: ListedDataset, split: str, say: Callable[[str], None]) -> Iterator[tuple[Path, RowBudget | None]]:
    """Yield the files of a data set, each with the budget of rows of all together (None: no limit). No file at all
    is an error. Files that are not trained on are named."""
    files, others = files_of(listed.path, split)
    if files and others and split == "train":
        names = ", ".join(path.relative_to(listed.path).as_posix() for path in others[:MAX_SHOWN_FILES])
        more = f" and {len(others) - MAX_SHOWN_FILES} more" if len(others) > MAX_SHOWN_FILES else ""
        say(f"{listed.path.name}: files that are not trained on: {inert(names)}{more}")
    if not files:
        raise UserError(
            f"{listed.path} holds no conversations of the split {split!r}; they are read from "
            f"{' '.join(TABLE_TYPES)} files"
        )
    budget = None if listed.limit is None else RowBudget(listed.limit)
    for number, file in enumerate(files):
        if number == 0 or budget is None or budget.left > 0:
            yield file, budget


class Dialog(Task):
    """Conversations from files."""

    def __init__(self, where: str, split: str = "train", source: str = "") -> None:
        self.split = split or "train"
        path, set_name = Path(where).expanduser(), ALIASES.get(where, where)
        if set_name in SETS and not path.exists():
            self.name = set_name
            path = Path(source).expanduser() / set_name if source else fetch(set_name)
            if source and not path.exists():
                names = [set_name, *(other for other, name in ALIASES.items() if name == set_name)]
                candidates = (candidate for name in names for candidate in sorted(path.parent.glob(f"{name}.*")))
                path = next(candidates, path)
        else:
            self.name = path.name.split(".")[0]
        self.notices: list[str] = []
        self.stored = ConversationStore(talk for listed in sets_at(path) for talk in self._read(listed))
        if self.name not in SLOTS and b"{{name}}" in self.stored.text:
            self.notices.append(f"{self.name}: {{{{name}}}} stays as it is; it is filled in only in identity.json")

    def _read(self, listed: ListedDataset) -> Iterator[Conversation]:
        slots = SLOTS.get(listed.path.name.split(".")[0])
        for file, limit in tables_of(listed, self.split, self.notices.append):
            yield from conversations(file, limit=limit, slots=slots, map_row=listed.map_row, say=self.notices.append)

    def __len__(self) -> int:
        return len(self.stored)

    def example(self, index: int) -> Conversation:
        return self.stored[index]
