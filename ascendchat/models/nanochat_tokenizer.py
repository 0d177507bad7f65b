"""nanochat's tokenizer as ours: `ascendchat import nanochat DIR` reads its tokenizer.pkl here.

    tokenizer = read_tokenizer(Path("nanochat/tokenizer/tokenizer.pkl"))

The file is a pickled tiktoken Encoding, and unpickling can run any program. So the one name that such a file needs
stands for a class of our own that only keeps what it is given, and every other name is refused before it is looked up.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, BinaryIO

from ascendchat.config import UserError
from ascendchat.data.tokenizer.learn import merges_of
from ascendchat.data.tokenizer.tokenizer import Tokenizer

RENAMED = {"<|python_start|>": "<|tool_start|>", "<|python_end|>": "<|tool_end|>"}
NEEDED = ("bos", *(f"{who}_{edge}" for who in ("user", "assistant", "tool", "output") for edge in ("start", "end")))
BROKEN = (pickle.UnpicklingError, EOFError, ValueError, TypeError, KeyError, IndexError, AttributeError, MemoryError)


class Kept:
    """In the place of a tiktoken Encoding: its state, not understood."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _bytes(text: str, encoding: str) -> bytes:
    """How pickles before protocol 3 write bytes."""
    if type(text) is not str or encoding != "latin1":
        raise pickle.UnpicklingError("a call that makes no bytes")
    return text.encode("latin1")


class Reader(pickle.Unpickler):
    """Knows the names that a pickled tiktoken Encoding holds, and no others."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        super().__init__(file)
        self.path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("tiktoken.core", "Encoding"):
            return Kept
        if (module, name) == ("_codecs", "encode"):
            return _bytes
        raise UserError(
            f"{self.path} asks for {module}.{name}, which no tokenizer of nanochat needs: nothing of it was run, and "
            "it is not opened; get the file from where the model was trained"
        )


def read_tokenizer(path: Path) -> Tokenizer:
    """The same ids for every text, nanochat's special tokens under our names."""
    try:
        with open(path, "rb") as file:
            kept = Reader(file, path).load()
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}); name the folder that holds it: --tokenizer FOLDER"
        ) from None
    except BROKEN as error:
        raise UserError(f"{path} is no whole pickle ({error or type(error).__name__}); copy it again") from None
    state = getattr(kept, "state", None)
    if not isinstance(kept, Kept) or not isinstance(state, dict):
        raise UserError(
            f"{path} holds no vocabulary of its own; only tokenizers that nanochat has trained are imported"
        )
    pattern: Any = state.get("pat_str")
    ranks: Any = state.get("mergeable_ranks")
    specials: Any = state.get("special_tokens")
    if type(pattern) is not str or not _table(ranks, bytes) or not _table(specials, str):
        raise UserError(
            f"{path} is no tokenizer of nanochat: pattern, ranks or special tokens are missing; copy it again"
        )
    return _tokenizer(path, pattern, ranks, specials)


def _table(value: Any, kind: type) -> bool:
    return type(value) is dict and bool(value) and all(type(k) is kind and type(n) is int for k, n in value.items())


def _tokenizer(path: Path, pattern: str, ranks: dict[bytes, int], specials: dict[str, int]) -> Tokenizer:
    ordered = sorted(specials, key=specials.__getitem__)
    names = [RENAMED.get(name, name) for name in ordered]
    if missing := [name for name in NEEDED if f"<|{name}|>" not in names]:
        raise UserError(
            f"{path} has no special token <|{missing[0]}|>, so no conversation can be written; name another: "
            "--tokenizer FOLDER"
        )
    try:
        made = Tokenizer(merges_of(ranks), pattern, names)
    except (RuntimeError, ValueError, AssertionError) as error:
        raise UserError(
            f"{path} is no byte-level BPE as nanochat learns it ({error}); name another: --tokenizer FOLDER"
        ) from None
    same = all(ranks.get(token) == number for number, token in enumerate(made.tokens))
    if not same or len(ranks) != len(made.tokens) or list(made.specials.values()) != [specials[n] for n in ordered]:
        raise UserError(
            f"{path} numbers its tokens otherwise than nanochat does (bytes, merges, special tokens); name another: "
            "--tokenizer FOLDER"
        )
    return made
