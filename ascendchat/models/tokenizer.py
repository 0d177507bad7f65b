"""The tokenizer of a Hugging Face model with the interface of our own (data/tokenizer).

    tokenizer.encode("<|im_end|>")      # plain text, never a special token
    tokenizer.template                  # the model's own chat template (jinja_template.py); None: it has none
    tokenizer.stops                     # tokens that end an answer: of generation_config, and the one that ends a turn

Special tokens of our own models that others do not have (tool calls, their results) get ids behind the vocabulary,
which no model ever writes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from ascendchat.data.surrogates import replace_lone_surrogates
from ascendchat.data.tokenizer.storage import byte_letters
from ascendchat.data.tokenizer.tokenizer import SPECIALS, Tokenizer
from ascendchat.errors import UserError
from ascendchat.models.jinja_template import ChatTemplate
from ascendchat.models.transformers_4 import add_old_tokenizer_names

SPACE = "▁"  # a blank, in vocabularies of SentencePiece
RAW_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class HFTokenizer(Tokenizer):
    """Text <-> ids. `inner`: transformers' tokenizer; `vocab`: rows of the model's head, often more than tokens."""

    calls_tools = False

    def __init__(self, inner: Any, vocab: int, generation: Any = None, config: Any = None) -> None:
        backend = getattr(inner, "backend_tokenizer", None)
        if backend is None:
            raise UserError(
                f"the tokenizer {type(inner).__name__} is not of the fast kind; save it with a tokenizer.json "
                "(save_pretrained of transformers) and open that"
            )
        self.inner, self.json = inner, backend.to_str()
        self._arguments = inner, vocab, generation, config
        self._plain, self._marked = (type(backend).from_str(self.json) for _ in range(2))
        for copy in (self._plain, self._marked):
            copy.no_padding()
            copy.no_truncation()
        self._plain.encode_special_tokens = True  # text that looks like a special token stays text
        self._marked.encode_special_tokens = False
        content = json.loads(self.json)
        added = {token["id"]: token for token in content.get("added_tokens") or ()}
        self.names = {number: token["content"] for number, token in added.items() if token["special"]}
        others = {number: token["content"] for number, token in added.items() if not token["special"]}
        ids = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab, max(ids.values()) + 1)
        self.tokens = _all_bytes(ids, added, _byte_level(content), self.vocab_size)
        ends = [getattr(generation, "eos_token_id", None), inner.eos_token_id, getattr(config, "eos_token_id", None)]
        stops = dict.fromkeys(number for end in ends for number in (end if isinstance(end, list) else [end]))
        self.stops = tuple(number for number in stops if number is not None)
        self.template: ChatTemplate | None = None
        if inner.chat_template:
            self.template = ChatTemplate(inner, self._marked, self.stops, self.names, others)
            self.stops = self.template.stops
        end = self.template.end if self.template else None
        if end is not None and end in others:  # it ends answers, so it is no text of theirs
            self.names[end], self.tokens[end] = others[end], b""
        if not self.stops:
            raise UserError("the tokenizer names no token that ends a text (eos_token); set it in its files")
        first = (inner.bos_token_id, getattr(config, "bos_token_id", None), self.stops[-1])
        self.bos = next(number for number in first if number is not None)
        self.opening = _opening(inner)
        self.pad = inner.pad_token_id if inner.pad_token_id is not None else self.stops[0]
        self.specials = {name: self.vocab_size + number for number, name in enumerate(SPECIALS)}
        self.specials |= {"<|bos|>": self.bos, "<|pad|>": self.pad}
        self.specials["<|assistant_end|>"] = self.stops[0] if end is None else end
        rest = json.dumps([self.vocab_size, inner.chat_template, self.stops], ensure_ascii=False, default=str)
        self.fingerprint = hashlib.sha256((self.json + rest).encode()).hexdigest()

    def thinking(self, enable: bool | None) -> HFTokenizer:
        """A tokenizer whose answers begin by thinking or do not, if the chat template has this option; None: itself."""
        if self.template is None or enable is None:
            return self
        tokenizer = object.__new__(HFTokenizer)
        tokenizer.__dict__ |= self.__dict__ | {"template": self.template.with_options(enable_thinking=enable)}
        return tokenizer

    def encode(self, text: str) -> list[int]:
        return self._plain.encode(replace_lone_surrogates(text), add_special_tokens=False).ids  # type: ignore[no-any-return]

    def encode_batch(self, texts: list[str], threads: int = min(8, os.cpu_count() or 1)) -> list[list[int]]:
        whole = [replace_lone_surrogates(text) for text in texts]
        return [encoding.ids for encoding in self._plain.encode_batch(whole, add_special_tokens=False)]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return b"".join(self.names[i].encode() if i in self.names else self.tokens[i] for i in map(int, ids))

    def written(self, number: int) -> str:
        """The text of a token in its vocabulary, also of a special one."""
        return str(self.inner.convert_ids_to_tokens(number))

    def token_bytes(self) -> np.ndarray:
        return np.array([len(token) for token in self.tokens], dtype=np.int32)

    def byte_id(self, value: int) -> int:
        ids = self._plain.encode(chr(value), add_special_tokens=False).ids
        exact = [number for number in ids if self.tokens[number] == bytes([value])]
        return exact[0] if exact else self.tokens.index(bytes([value]))

    def save(self, folder: Path | str, command: str = "") -> None:
        self.inner.save_pretrained(folder)
        add_old_tokenizer_names(Path(folder) / "tokenizer_config.json")

    def __reduce__(self) -> Any:
        options = self.template.options if self.template else {}
        return _rebuilt, (self._arguments, options)  # for worker processes; never written to disk

    @property
    def for_grammars(self) -> _GrammarTokens:
        """A picklable part for the process that compiles grammars, which does not import transformers."""
        return _GrammarTokens(self.json, self.vocab_size, self.specials)


class _GrammarTokens:
    """The part of a tokenizer that grammars need."""

    def __init__(self, json: str, vocab_size: int, specials: dict[str, int]) -> None:
        self.json, self.vocab_size, self.specials = json, vocab_size, specials


def _rebuilt(arguments: tuple[Any, ...], options: dict[str, Any]) -> HFTokenizer:
    return HFTokenizer(*arguments).thinking(options.get("enable_thinking"))


def _opening(inner: Any) -> tuple[int, ...]:
    """The tokens that the tokenizer puts before a text; most whose turns end by a special token add nothing. A token at
    the end of the text is left out, since the text goes on."""
    bare, whole = (list(inner("a", add_special_tokens=adds)["input_ids"]) for adds in (False, True))
    offsets = range(len(whole) - len(bare) + 1)
    return tuple(whole[: next((at for at in offsets if whole[at : at + len(bare)] == bare), 0)])


def _byte_level(content: dict[str, Any]) -> bool:
    """True if the vocabulary has GPT-2's letters, one per byte; False if it is written as SentencePiece does."""
    return "ByteLevel" in json.dumps([content.get("decoder"), content.get("pre_tokenizer")])


def _all_bytes(ids: dict[str, int], added: dict[int, Any], byte_level: bool, size: int) -> list[bytes]:
    """The bytes of every id; empty for special tokens and for ids without a token."""
    letters = {letter: value for value, letter in enumerate(byte_letters())}
    tokens = [b""] * size
    for text, number in ids.items():
        if number in added:
            tokens[number] = b"" if added[number]["special"] else text.encode()
        elif byte_level:
            tokens[number] = bytes(letters[letter] for letter in text if letter in letters)
        elif raw := RAW_BYTE.fullmatch(text):
            tokens[number] = bytes([int(raw[1], 16)])
        else:
            tokens[number] = text.replace(SPACE, " ").encode()
    return tokens
