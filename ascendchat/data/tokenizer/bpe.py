"""Vocabulary size, and the merges of byte-level BPE: rustbpe, or Hugging Face tokenizers where its wheel is missing.

Used by `ascendchat tokenizer train`.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterable, Mapping

import regex

from ascendchat.data.tokenizer.storage import byte_letters

Merge = tuple[int, int]
MIN_VOCAB, MAX_VOCAB = 1024, 32768
MAX_COUNTED_BYTES = MAX_VOCAB**2 // 2  # 2**29: with more text `vocab_for` gives MAX_VOCAB anyhow


def vocab_for(text_bytes: int) -> int:
    """Ids for so many UTF-8 bytes of text: the power of two nearest to their square root, 1,024 to 32,768.

    Nearest by logarithm; from 2**29 bytes on it is 32,768. Little text cannot train many rows of the tables, and a
    small head makes steps cheaper. Bits per byte at equal compute on 16.5 MB of Wikipedia, 6 layers of width 320:
    4,096 ids 1.5006, 8,192 ids 1.5230, 16,384 ids 1.5663, 32,768 ids 1.6419.
    """
    nearest = 2 ** (text_bytes.bit_length() // 2)  # 2**k for 2**(2k-1) <= text_bytes < 2**(2k+1), without rounding
    return min(max(nearest, MIN_VOCAB), MAX_VOCAB)


def learn(texts: Iterable[str], size: int, pattern: str) -> list[Merge]:
    """Learn at most `size` - 256 merges, each a pair of ids; merge number k makes id 256 + k."""
    texts = (piece for text in texts for piece in segments(text))
    try:
        import rustbpe
    except ImportError as error:
        print(
            f"notice: rustbpe cannot be imported ({error}); training with the tokenizers library instead, which is "
            "slower and may choose other merges (to change that: pip install rustbpe)",
            file=sys.stderr,
        )
        return learn_with_tokenizers(texts, size, pattern)
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(iter(texts), size, pattern=pattern)
    return merges_of({bytes(token): rank for token, rank in trainer.get_mergeable_ranks()})


def learn_with_tokenizers(texts: Iterable[str], size: int, pattern: str) -> list[Merge]:
    """Learn the merges with the `tokenizers` library."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    value_of = {letter: value for value, letter in enumerate(byte_letters())}
    ids = {bytes([value]): value for value in range(256)}
    merges: list[Merge] = []
    for pair in json.loads(tokenizer.to_str())["model"]["merges"]:
        left, right = (bytes(value_of[letter] for letter in part) for part in pair)
        if left + right not in ids:
            merges.append((ids[left], ids[right]))
            ids[left + right] = len(ids)
    return merges


def merges_of(ranks: Mapping[bytes, int]) -> list[Merge]:
    """Derive the merges from tokens with ranks: each merges the two parts that BPE made of its bytes just before it
    existed."""
    ids: dict[bytes, int] = {bytes([value]): value for value in range(256)}
    merges: list[Merge] = []
    for token in sorted((t for t in ranks if len(t) > 1), key=ranks.__getitem__):
        cuts = [at for at in range(1, len(token)) if token[:at] in ids and token[at:] in ids]
        if len(cuts) > 1:
            cuts = [len(part) for part in _encode(token, ids)[:-1]]
        if len(cuts) != 1:
            raise RuntimeError(f"the token {token!r} is not the merge of two earlier tokens")
        merges.append((ids[token[: cuts[0]]], ids[token[cuts[0] :]]))
        ids[token] = len(ids)  # numbered again: a rank used twice leaves no hole
    return merges


def _encode(token: bytes, ids: Mapping[bytes, int]) -> list[bytes]:
    """Plain BPE: merge the leftmost pair of lowest id until nothing merges. Tokens are short, so quadratic time is
    fine."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 1:
        merges = [(ids[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ids]
        if not merges:
            break
        _, i = min(merges)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


# The pattern that cuts text into pieces before BPE; no token crosses a cut. Used by `ascendchat tokenizer train`.
#
# One expression, read alike by the engines of rustbpe and tiktoken (Rust's fancy-regex) and of Hugging Face tokenizers
# (Oniguruma): no look-behind, no case-folding, no possessive counts, no class arithmetic. Characters are written
# literally in their classes.
#
# Chinese has no spaces, so the usual `letters+` makes a piece of every clause, together with the Latin word and the
# punctuation in front of it. Here Han characters are a kind of their own, in runs of at most 16. Measured with 32,768
# ids on 30 MB each of English and Chinese Wikipedia: bytes per token on 1.5 MB of held-out text each, and processor
# seconds of training (one run on a busy machine, good to about a fifth):
#
#     run of Han               English   Chinese   seconds
#     like other letters        4.176     4.417     48
#     Han alone, no bound       4.188     4.234     35
#     1-16                      4.192     4.198     40
#     1-8                       4.201     4.088     32
#     1-4                       4.222     3.898     30
#
# Short bounds cut words at arbitrary places, so the same word gets different ids at different offsets; 16 is longer
# than nearly every clause and still keeps pathological input linear. From 4 up the bound changes the memory of training
# little (1.2 to 1.6 GB above): most pieces are new however they are cut. On 163 MB of each language: 4.230 and 4.230.

# Radicals, 々, 〇, numerals, extension A, unified, compatibility, and the two planes kept for Han (now and in future).
HAN = "\u2e80-\u2fdf\u3005\u3007\u3021-\u3029\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
# Letters and combining marks of every other script; written as a negated class, which every engine understands.
LETTER = rf"[^\s\p{{N}}\p{{P}}\p{{S}}\p{{C}}{HAN}]"

PATTERN = "|".join(
    [
        r"['’](?:[sdmtSDMT]|ll|ve|re|LL|VE|RE)",  # contractions, with either apostrophe
        rf"[^\r\n\p{{L}}\p{{N}}]?{LETTER}+",  # a word with the space or sign in front of it
        rf"[{HAN}]{{1,16}}",
        r"\p{N}{1,2}",  # digits in ones and twos: the best bits per byte at this vocabulary size
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",  # punctuation, full-width too, and the line end after it
        r"\s*[\r\n]+",
        r"\s+(?!\S)",  # leaves one space for the word that follows
        r"\s+",
    ]
)

# A run of one kind of characters has no bound in PATTERN. A million blanks overflow the stack of the engine, and the
# time to learn from a word grows with the square of its length, so longer runs are cut here. Text without such a
# run, which is nearly every text, keeps its ids. Past a cut they may differ from those of Hugging Face tokenizers,
# which cut nothing.
MAX_RUN = 2048  # characters
RUNS = [regex.compile(rf"{kind}+") for kind in (r"[\s\x1c-\x1f\x85]", LETTER, r"[^\s\p{L}\p{N}]")]
RUNS_BACKWARDS = [regex.compile(rf"(?r){kind.pattern}") for kind in RUNS]  # the same, read backwards


def segments(text: str) -> list[str]:
    """Split a text into pieces, only inside runs of more than MAX_RUN characters."""
    pieces, begin, at = [], 0, MAX_RUN  # a run that is too long has a character at a multiple of MAX_RUN
    while at < len(text):
        first, last = max(
            (_run(text, at, begin, *kind) for kind in zip(RUNS, RUNS_BACKWARDS)), key=lambda run: run[1] - run[0]
        )
        for cut in range(first + MAX_RUN, last, MAX_RUN):
            pieces.append(text[begin:cut])
            begin = cut
        at = (last // MAX_RUN + 1) * MAX_RUN if last > at else at + MAX_RUN
    return [*pieces, text[begin:]]


def _run(text: str, at: int, begin: int, kind: regex.Pattern[str], before: regex.Pattern[str]) -> tuple[int, int]:
    """First and last character (exclusive) of the run of this kind around a position; (at, at) when there is none."""
    after = kind.match(text, at)
    if after is None:
        return at, at
    start = before.match(text, begin, at)
    return start.start() if start else at, after.end()
