"""The tokenizer itself: text to ids and back, special tokens, bytes per id, both trainers."""

from __future__ import annotations

import builtins
import pickle
import random
import subprocess
import sys
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from ascendchat.data.tokenizer import bpe
from ascendchat.data.tokenizer.bpe import PATTERN, learn_with_tokenizers, merges_of
from ascendchat.data.tokenizer.tokenizer import SPECIALS, Tokenizer, train_tokenizer
from ascendchat.errors import UserError

ENGLISH = "The quick brown fox doesn't jump over 1234 lazy dogs; it's the foxes' day off.\n\n    return x_1 + 2\n"
CHINESE = "北京是中华人民共和国的首都，也是全国的政治中心。他说：“今天天气很好！”2024年有366天。\n"


def corpus() -> list[str]:
    """Small and repetitive: enough for a hundred merges in both languages."""
    draw = random.Random(0)
    words = (ENGLISH + CHINESE).split(" ")
    return [" ".join(draw.choices(words, k=30)) + CHINESE + ENGLISH for _ in range(200)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """400 ids, learnt from both languages."""
    return train_tokenizer(corpus(), 400)


@settings(deadline=None, max_examples=100)
@given(text=st.text(max_size=200))
def test_decoding_gives_back_every_text(tokenizer: Tokenizer, text: str) -> None:
    text = text.encode("utf-8", "ignore").decode()
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_vocabulary_has_the_size_asked_for_and_the_specials_last(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 400
    assert list(tokenizer.specials) == list(SPECIALS)
    assert list(tokenizer.specials.values()) == list(range(400 - len(SPECIALS), 400))
    assert (tokenizer.bos, tokenizer.pad) == (388, 389)
    assert len(set(tokenizer.tokens)) == 388


def test_text_that_looks_like_a_special_token_stays_text(tokenizer: Tokenizer) -> None:
    for name in SPECIALS:
        ids = tokenizer.encode(f"a{name}b{name}")
        assert max(ids) < tokenizer.bos
        assert tokenizer.decode(ids) == f"a{name}b{name}"
        assert tokenizer.decode([tokenizer.specials[name]]) == name


def test_a_batch_gives_the_ids_of_its_texts(tokenizer: Tokenizer) -> None:
    texts = [*corpus()[:20], "", " "]
    assert tokenizer.encode_batch(texts, threads=3) == [tokenizer.encode(text) for text in texts]
    assert tokenizer.encode_batch([]) == []


def test_the_table_of_bytes_counts_every_byte_of_a_text_once(tokenizer: Tokenizer) -> None:
    table = tokenizer.token_bytes()
    assert table.shape == (400,)
    assert np.issubdtype(table.dtype, np.integer)
    assert table[-len(SPECIALS) :].tolist() == [0] * len(SPECIALS)
    text = ENGLISH + CHINESE + "😀 é ǆ 𠀀"  # needs single bytes, which are no UTF-8 on their own
    ids = tokenizer.encode(text)
    assert any(tokenizer.tokens[i] == b"\xf0" for i in ids)
    assert table[ids].sum() == len(text.encode())
    assert [len(tokenizer.decode_bytes([i])) for i in range(388)] == table[:388].tolist()


def test_a_character_cut_in_the_middle_decodes_to_the_replacement_character(tokenizer: Tokenizer) -> None:
    ids = np.array(tokenizer.encode("😀"), dtype=np.uint16)  # also of NumPy
    assert len(ids) == 4
    assert tokenizer.decode(ids[:3]) == "\ufffd"
    assert tokenizer.decode_bytes(ids[:3]) == "😀".encode()[:3]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("I'll go, don’t WE'RE", ["I", "'ll", " go", ",", " don", "’t", " WE", "'RE"]),
        ("12345 67", ["12", "34", "5", " ", "67"]),
        ("Python语言很好", ["Python", "语言很好"]),
        ("他说：“好。”\n走", ["他说", "：“", "好", "。”\n", "走"]),
        ("二〇二四年", ["二〇二四年"]),
        ("  if x:\n\n    y", [" ", " if", " x", ":\n\n", "   ", " y"]),
        ("naïve cafe\u0301 हिन्दी", ["naïve", " cafe\u0301", " हिन्दी"]),
        ("字" * 40, ["字" * 16, "字" * 16, "字" * 8]),
    ],
)
def test_text_is_cut_where_the_pattern_says(text: str, pieces: list[str]) -> None:
    from tokenizers import Regex, pre_tokenizers

    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    assert [piece for piece, _ in split.pre_tokenize_str(text)] == pieces


def test_the_fingerprint_follows_the_merges_and_nothing_else(tokenizer: Tokenizer) -> None:
    assert train_tokenizer(corpus(), 400).fingerprint == tokenizer.fingerprint
    assert train_tokenizer(corpus(), 399).fingerprint != tokenizer.fingerprint
    assert Tokenizer(tokenizer.merges, PATTERN + "|x").fingerprint != tokenizer.fingerprint
    assert len(tokenizer.fingerprint) == 64


def test_a_worker_process_gets_the_same_tokenizer(tokenizer: Tokenizer) -> None:
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.fingerprint == tokenizer.fingerprint
    assert copy.encode(ENGLISH) == tokenizer.encode(ENGLISH)


def test_without_rustbpe_the_other_library_trains_with_a_notice(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "rustbpe":
            raise ImportError("no wheel for this platform")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    other = train_tokenizer(corpus(), 400)
    assert "rustbpe cannot be imported (no wheel for this platform)" in capsys.readouterr().err
    text = corpus()[3] + "😀<|bos|>"
    assert other.vocab_size == 400
    assert other.decode(other.encode(text)) == text
    assert 0.97 < len(other.encode(text)) / len(tokenizer.encode(text)) < 1.03  # the same quality, perhaps other ids


def test_both_trainers_agree_where_no_two_pairs_are_equally_frequent() -> None:
    texts = ["ab" * 40 + " " + "cde" * 31 + " " + "fg" * 17]
    assert learn_with_tokenizers(texts, 259, PATTERN)[:1] == train_tokenizer(texts, 271).merges[:1]


def test_merges_are_found_again_from_ranks_with_a_hole() -> None:
    ranks = {bytes([b]): b for b in range(256)} | {b"ab": 256, b"abc": 258, b"aba": 259, b"ababc": 300}
    assert merges_of(ranks) == [(97, 98), (256, 99), (256, 97), (256, 257)]


def test_a_token_that_is_no_merge_of_two_is_refused() -> None:
    with pytest.raises(RuntimeError, match="not the merge of two"):
        merges_of({bytes([b]): b for b in range(256)} | {b"abc": 256})


def test_a_small_corpus_gives_the_ids_it_can() -> None:
    small = train_tokenizer(["aaab"], 1000)
    assert 268 < small.vocab_size < 275
    assert small.decode(small.encode("aaab x")) == "aaab x"


def test_too_small_a_vocabulary_is_refused_with_the_least_size() -> None:
    with pytest.raises(UserError, match="268 ids are the bytes and the special tokens"):
        train_tokenizer(["text"], 100)
    assert train_tokenizer(["text text"], 268).merges == []


def test_the_module_imports_without_torch() -> None:
    code = "import sys, ascendchat.data.tokenizer.tokenizer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("text", [" ", "\r\n", "abcde", "!", "\u0301", "山"])
def test_a_run_of_a_million_characters_is_encoded_and_learned_from(
    tokenizer: Tokenizer, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = f"山!{(text * 1_000_000)[:1_000_000]}a"
    ids = tokenizer.encode(run)
    assert tokenizer.decode(ids) == run
    assert tokenizer.encode_batch(["x", run, ""], threads=1) == [tokenizer.encode("x"), ids, []]
    learned = train_tokenizer(iter(["hello hello world", run[:100_000]]), 300)
    assert learned.decode(learned.encode(run[:9_000])) == run[:9_000]
    monkeypatch.setitem(sys.modules, "rustbpe", None)  # the other train_model
    assert train_tokenizer(iter(["hello hello world", run[:100_000]]), 300).vocab_size > 268


@given(st.text(alphabet=" \n\ta!\u03017山é\x1c", max_size=120), st.integers(2, 9))
def test_only_runs_that_are_too_long_are_cut(text: str, longest: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bpe, "MAX_RUN", longest)
        found = bpe.segments(text)
    assert "".join(found) == text
    kinds = (r"[\s\x1c-\x1f\x85]", bpe.LETTER, r"[^\s\p{L}\p{N}]")
    runs = [match for kind in kinds for match in regex.finditer(f"{kind}+", text) if len(match[0]) > longest]
    ends = list(accumulate(map(len, found[:-1])))
    assert all(any(run.start() < end < run.end() for run in runs) for end in ends)  # no cut elsewhere
    for run in runs:  # and each is cut so that no piece of it is much longer
        inside = [run.start(), *(end for end in ends if run.start() < end < run.end()), run.end()]
        assert max(b - a for a, b in pairwise(inside)) <= 2 * longest
