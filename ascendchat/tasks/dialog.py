"""Conversations to learn manners from: SmolTalk and its like, files of your own, and who the assistant is.

Dialog("smoltalk")                                        # a named set of `ascendchat data fetch`
Dialog("talk.jsonl")                                      # a file, or a folder of files: see data/conversations.py
Dialog("identity.json", slots={"name": "Ada", "author": "us"})       # {{name}} and {{author}} are filled in
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Iterable, Mapping
from pathlib import Path

from ascendchat.config import UserError
from ascendchat.data.chat import Conversation
from ascendchat.data.conversations import conversations
from ascendchat.data.fetch import SETS, fetch
from ascendchat.data.fetch.sources import ALSO
from ascendchat.tasks.base import Task
from ascendchat.tasks.files import SPLIT, kind_of

SLOT = re.compile(r"\{\{(\w+)\}\}")


class Stored:
    """Many conversations in one block of memory: as large as their text, where objects would take several times it."""

    def __init__(self, found: Iterable[Conversation]) -> None:
        self.text, self.ends = bytearray(), array("Q")
        for conversation in found:
            self.text += json.dumps(conversation, ensure_ascii=False).encode("utf-8", "surrogatepass")
            self.ends.append(len(self.text))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> Conversation:
        begin = self.ends[index - 1] if index else 0
        found: Conversation = json.loads(self.text[begin : self.ends[index]].decode("utf-8", "surrogatepass"))
        return found


def files_of(where: Path, split: str) -> list[Path]:
    """A file, or those of a folder; where the names tell splits, only the files of this one."""
    if where.is_file():
        return [where]
    every = [p for p in sorted(where.rglob("*")) if p.is_file() and p.name != "manifest.json"]
    tables = [p for p in every if kind_of(p.name.lower()) is not None or p.name.endswith((".tsv", ".tsv.xz"))]

    def of(path: Path, name: str) -> bool:
        return re.search(SPLIT[name], f"/{path.relative_to(where).as_posix().lower()}") is not None

    named = [p for p in tables if any(of(p, name) for name in ("train", "test"))]
    return [p for p in named if of(p, split)] if named else (tables if split == "train" else [])


class Dialog(Task):
    """Conversations from files."""

    def __init__(
        self, where: str, split: str = "train", source: str = "", slots: Mapping[str, str] | None = None
    ) -> None:
        self.split = split or "train"
        path, known = Path(where).expanduser(), ALSO.get(where, where)
        if known in SETS and not path.exists():
            self.name = known
            path = Path(source).expanduser() / known if source else fetch(known)
            if source and not path.exists():
                path = next(iter(sorted(path.parent.glob(f"{known}.*"))), path)
        else:
            self.name = path.name.split(".")[0]
        if not path.exists():
            raise UserError(f"{path} does not exist; give a file, a folder or a name of `ascendchat data fetch`")
        files = files_of(path, self.split)
        if not files:
            raise UserError(f"{path} has no files of the split {self.split!r}")
        self.stored = Stored(talk for file in files for talk in conversations(file, slots=slots))
        if open_slots := sorted(set(SLOT.findall(self.stored.text[: 1 << 20].decode("utf-8", "ignore")))):
            raise UserError(
                f"{self.name} has places to be filled: {', '.join(open_slots)}; give their words in the mixture, "
                f"slots: {{{', '.join(f'{name}: ...' for name in open_slots)}}}"
            )

    def __len__(self) -> int:
        return len(self.stored)

    def example(self, index: int) -> Conversation:
        return self.stored[index]
