"""The tokenizer: byte-level BPE, trained by rustbpe, encoded by tiktoken, readable by Hugging Face tokenizers.

    ascendchat tokenizer train --source DIR --out DIR      learn a vocabulary
    ascendchat tokenizer eval FILES --against gpt2=PATH    bytes per token, beside other tokenizers

    tokenizer = Tokenizer.load(folder)
    ids = tokenizer.encode("你好, world")                   # plain text; never a special token, whatever it holds
    tokenizer.decode(ids)

Ids: 0-255 are the bytes, then one id per merge in the order they were learned, then the special tokens. bpe.py
splits text and learns merges, storage.py reads and writes the folder.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken

from ascendchat.data.tokenizer import storage
from ascendchat.data.tokenizer.bpe import MAX_RUN, MAX_VOCAB, PATTERN, learn, segments, vocab_for
from ascendchat.errors import UserError

__all__ = ["PATTERN", "SPECIALS", "Tokenizer", "train_tokenizer", "vocab_for"]

SPECIALS = (
    "<|bos|>",
    "<|pad|>",
    "<|system_start|>",
    "<|system_end|>",
    "<|user_start|>",
    "<|user_end|>",
    "<|assistant_start|>",
    "<|assistant_end|>",
    "<|tool_start|>",
    "<|tool_end|>",
    "<|output_start|>",
    "<|output_end|>",
)
BYTES = 256


class Tokenizer:
    """Text <-> ids. Made by `train_tokenizer` or `Tokenizer.load`; models/tokenizer.py gives those of other models this
    interface."""

    stops: tuple[int, ...]  # stop tokens of an answer
    template: Any = (
        None  # how another model writes conversations (models/jinja_template.py); None: as data/chat/render.py does
    )
    calls_tools = True  # has special tokens around tool calls and their results

    def __init__(
        self, merges: Sequence[tuple[int, int]], pattern: str = PATTERN, specials: Sequence[str] = SPECIALS
    ) -> None:
        self.merges = [(int(left), int(right)) for left, right in merges]
        self.pattern = pattern
        self.tokens = [bytes([value]) for value in range(BYTES)]  # bytes of every id but the specials
        for left, right in self.merges:
            self.tokens.append(self.tokens[left] + self.tokens[right])
        self.specials = {name: len(self.tokens) + number for number, name in enumerate(specials)}
        self.bos = self.specials["<|bos|>"]
        self.opening: tuple[int, ...] = (self.bos,)  # before a text that a model is to continue
        self.pad = self.specials.get("<|pad|>", self.bos)  # any id would do: padding is masked
        self.stops = tuple(self.specials[name] for name in ("<|assistant_end|>", "<|bos|>") if name in self.specials)
        self.vocab_size = len(self.tokens) + len(self.specials)
        parts = json.dumps([pattern, self.merges, list(specials)], ensure_ascii=False, separators=(",", ":"))
        self.fingerprint = hashlib.sha256(parts.encode()).hexdigest()
        self._encoding = tiktoken.Encoding(
            f"ascendchat-{self.fingerprint[:12]}",
            pat_str=pattern,
            mergeable_ranks={token: number for number, token in enumerate(self.tokens)},
            special_tokens=self.specials,
            explicit_n_vocab=self.vocab_size,  # two ids with the same bytes would be an error here
        )

    def thinking(self, enable: bool | None) -> Tokenizer:
        """Return the tokenizer whose prompts make answers begin by reasoning, or not. Our own models do not reason:
        self."""
        return self

    def encode(self, text: str) -> list[int]:
        """Encode plain text; what looks like a special token is ordinary text."""
        if len(text) <= MAX_RUN:
            return self._encoding.encode_ordinary(text)
        return [number for piece in segments(text) for number in self._encoding.encode_ordinary(piece)]

    def encode_batch(self, texts: list[str], threads: int = min(8, os.cpu_count() or 1)) -> list[list[int]]:
        """Encode many texts at once, in threads that do not hold Python's lock."""
        pieces = [segments(text) for text in texts]
        rows = iter(self._encoding.encode_ordinary_batch(list(chain.from_iterable(pieces)), num_threads=threads))
        return [list(chain.from_iterable(islice(rows, len(each)))) for each in pieces]

    def byte_id(self, value: int) -> int:
        """Id of a single byte."""
        return value

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Decode to the exact bytes; special tokens are written by their names."""
        return self._encoding.decode_bytes(_as_ints(ids))

    def decode(self, ids: Iterable[int]) -> str:
        """Decode to text; bytes that are no UTF-8 (a character cut in the middle) become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    @functools.cached_property
    def _token_bytes(self) -> np.ndarray:
        table = np.array([len(token) for token in self.tokens] + [0] * len(self.specials), dtype=np.int32)
        table.flags.writeable = False
        return table

    def token_bytes(self) -> np.ndarray:
        """(vocab_size,) bytes of every id, 0 for specials: the measure under bits per byte."""
        return self._token_bytes

    @functools.cached_property
    def longest_token(self) -> int:
        """Bytes of the longest id: a token stands for at most so many characters."""
        return max(map(len, self.tokens))

    def save(self, folder: Path | str, command: str = "") -> None:
        """Write bpe.json, the Hugging Face files and manifest.json, which stores the command that made it."""
        own = {
            "fingerprint": self.fingerprint,
            "vocab_size": self.vocab_size,
            "pattern": self.pattern,
            "specials": list(self.specials),
            "merges": self.merges,
        }
        storage.write_folder(
            Path(folder), own, storage.hf_tokenizer(self.pattern, self.merges, self.tokens, self.specials), command
        )

    @classmethod
    def load(cls, folder: Path | str) -> Tokenizer:
        """Read a folder written by `save`; damage is an error that names the file and the remedy."""
        folder = Path(folder)
        content = storage.read_folder(folder)
        try:
            tokenizer = cls(content["merges"], content["pattern"], content["specials"])
        except (KeyError, TypeError, ValueError, IndexError, AssertionError) as error:
            raise UserError(storage.damaged(folder, storage.OWN, f"its content makes no sense ({error!r})")) from None
        if tokenizer.fingerprint != content.get("fingerprint"):
            raise UserError(storage.damaged(folder, storage.OWN, "its content does not match its own checksum"))
        return tokenizer

    def __reduce__(self) -> tuple[type[Tokenizer], tuple[list[tuple[int, int]], str, tuple[str, ...]]]:
        return Tokenizer, (self.merges, self.pattern, tuple(self.specials))  # to worker processes; never to disk


def _as_ints(ids: Iterable[int]) -> list[int]:
    return [int(number) for number in ids]  # also numpy and torch integers


def train_tokenizer(texts: Iterable[str], vocab_size: int = MAX_VOCAB) -> Tokenizer:
    """Learn a vocabulary of `vocab_size` ids, specials included; fewer when the texts hold no more repeated pairs."""
    minimum = BYTES + len(SPECIALS)
    if vocab_size < minimum:
        raise UserError(f"--vocab-size {vocab_size} is too small; {minimum} ids are the bytes and the special tokens")
    return Tokenizer(learn(texts, vocab_size - len(SPECIALS), PATTERN))
