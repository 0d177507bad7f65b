"""Conversations to learn manners from: SmolTalk and its like, files of your own, and who the assistant is.

Dialog("smoltalk")                                        # a named set of `ascendchat data fetch`
Dialog("talk.jsonl")                                      # a file, or a folder of files: see data/chat/formats.py
Dialog("identity.json")                                   # its {{name}} and {{author}} are filled in: SLOTS
Dialog("data/alpaca_en_demo")                         # what data/dataset_info.json lists: see data/chat/dataset_info.py
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ascendchat.data import toyworld
from ascendchat.data.chat.dataset_info import Listed, find_listed
from ascendchat.data.chat.formats import conversations
from ascendchat.data.chat.tables import TABLE_TYPES, Allowance
from ascendchat.data.chat.template import Conversation
from ascendchat.data.fetch import SETS, fetch
from ascendchat.data.fetch.sources import ALSO
from ascendchat.data.read import LINES, format_of, row_files
from ascendchat.errors import UserError
from ascendchat.runs.console import inert
from ascendchat.tasks.base import Task
from ascendchat.tasks.files import SPLIT

# Of a folder; arrow, csv and txt files are read where none of these is there: they may be copies, or notes.
USUAL = (".parquet", *LINES, ".json", ".tsv")
SHOWN_FILES = 5  # that are left out, by their names
# Sets, by the name of their file, whose texts have places to be filled, and the words: identity.json of LLaMA-Factory.
# Everywhere else {{name}} is text, like the {{user}} of a template and the \frac{{1}}{{2}} of a formula.
SLOTS = {"identity": {"name": toyworld.ASSISTANT_NAME, "author": toyworld.ASSISTANT_NAME}}


class Stored:
    """Many conversations in one block of memory: as large as their text, where objects would take several times it."""

    def __init__(self, given: Iterable[Conversation]) -> None:
        self.text, self.ends = bytearray(), array("Q")
        for conversation in given:
            self.text += json.dumps(conversation, ensure_ascii=False).encode("utf-8", "surrogatepass")
            self.ends.append(len(self.text))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> Conversation:
        begin = self.ends[index - 1] if index else 0
        conversation: Conversation = json.loads(self.text[begin : self.ends[index]].decode("utf-8", "surrogatepass"))
        return conversation


def split_of(name: str) -> str:
    """The split that the path of a file in its folder tells, its own name before the folders; train if nothing does."""
    folders, _, own = f"/{name.lower()}".rpartition("/")
    told = (split for part in (f"/{own}", f"{folders}/") for split in SPLIT if re.search(SPLIT[split], part))
    return next(told, "train")


def files_of(where: Path, split: str) -> tuple[list[Path], list[Path]]:
    """A file, or those of a folder that are of this split; and the files of conversations that are left out."""
    if where.is_file():
        return [where], []
    kinds = {p: format_of(p.name)[0] for p in row_files(where) if format_of(p.name)[0] in TABLE_TYPES}
    every = list(kinds)
    groups = ([p for p in every if kinds[p] in group] for group in (USUAL, (".arrow",), (".csv",), (".txt",)))
    tables = next((group for group in groups if group), [])

    taken = [p for p in tables if split_of(p.relative_to(where).as_posix()) == split]
    return taken, [p for p in every if p not in set(taken)]


def sets_at(path: Path, *, ranking: bool = False) -> list[Listed]:
    """The data sets that a path stands for: those of a registry (data/chat/dataset_info.py), else the file or folder
    itself."""
    listed = find_listed(path, ranking=ranking)
    if listed is None and not path.exists():
        raise UserError(f"{path} does not exist; give a file, a folder or a name of `ascendchat data fetch`")
    return listed or [Listed(path.name.split(".")[0], path, ranking, None, None)]


def tables_of(listed: Listed, split: str, say: Callable[[str], None]) -> Iterator[tuple[Path, Allowance | None]]:
    """The files of a data set, with what may be read of each: `limit` rows of all together; none is an error. Those
    that are not trained on are named."""
    files, others = files_of(listed.path, split)
    if files and others and split == "train":
        names = ", ".join(path.relative_to(listed.path).as_posix() for path in others[:SHOWN_FILES])
        more = f" and {len(others) - SHOWN_FILES} more" if len(others) > SHOWN_FILES else ""
        say(f"{listed.path.name}: files that are not trained on: {inert(names)}{more}")
    if not files:
        raise UserError(
            f"{listed.path} holds no conversations of the split {split!r}; they are read from "
            f"{' '.join(TABLE_TYPES)} files"
        )
    left = None if listed.limit is None else Allowance(listed.limit)
    for number, file in enumerate(files):
        if number == 0 or left is None or left.left > 0:
            yield file, left


class Dialog(Task):
    """Conversations from files."""

    def __init__(self, where: str, split: str = "train", source: str = "") -> None:
        self.split = split or "train"
        path, known = Path(where).expanduser(), ALSO.get(where, where)
        if known in SETS and not path.exists():
            self.name = known
            path = Path(source).expanduser() / known if source else fetch(known)
            if source and not path.exists():
                names = [known, *(other for other, name in ALSO.items() if name == known)]
                beside = (place for name in names for place in sorted(path.parent.glob(f"{name}.*")))
                path = next(beside, path)
        else:
            self.name = path.name.split(".")[0]
        self.notices: list[str] = []
        self.stored = Stored(talk for listed in sets_at(path) for talk in self._read(listed))
        if self.name not in SLOTS and b"{{name}}" in self.stored.text:
            self.notices.append(f"{self.name}: {{{{name}}}} stays as it is; it is filled in only in identity.json")

    def _read(self, listed: Listed) -> Iterator[Conversation]:
        slots = SLOTS.get(listed.path.name.split(".")[0])
        for file, limit in tables_of(listed, self.split, self.notices.append):
            yield from conversations(file, limit=limit, slots=slots, arrange=listed.arrange, say=self.notices.append)

    def __len__(self) -> int:
        return len(self.stored)

    def example(self, index: int) -> Conversation:
        return self.stored[index]
