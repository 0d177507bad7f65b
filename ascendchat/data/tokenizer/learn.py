"""How many ids to learn, and the merges of byte-level BPE: rustbpe, or Hugging Face tokenizers without its wheel.

Used by `ascendchat tokenizer train`.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterable, Mapping

from ascendchat.data.tokenizer.pattern import segments
from ascendchat.data.tokenizer.storage import byte_letters

Merge = tuple[int, int]
LEAST_VOCAB, MOST_VOCAB = 1024, 32768
ENOUGH_BYTES = MOST_VOCAB**2 // 2  # text from which `vocab_for` gives MOST_VOCAB: 2**29


def vocab_for(text_bytes: int) -> int:
    """Ids for so many UTF-8 bytes of text: the power of two nearest to their square root, 1,024 to 32,768.

    Nearest by logarithm; from 2**29 bytes on it is 32,768. Little text cannot train many rows of the tables, and a
    small head makes steps cheaper. Bits per byte at equal compute on 16.5 MB of Wikipedia, 6 layers of width 320:
    4,096 ids 1.5006, 8,192 ids 1.5230, 16,384 ids 1.5663, 32,768 ids 1.6419.
    """
    nearest = 2 ** (text_bytes.bit_length() // 2)  # 2**k for 2**(2k-1) <= text_bytes < 2**(2k+1), without rounding
    return min(max(nearest, LEAST_VOCAB), MOST_VOCAB)


def learn(texts: Iterable[str], size: int, pattern: str) -> list[Merge]:
    """At most `size` - 256 merges, each a pair of ids; merge number k makes id 256 + k."""
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
    """The same by the `tokenizers` library."""
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
    """Tokens with their ranks -> the pair each was merged from: what BPE makes of its bytes just before it existed."""
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
    """Plain BPE: merge the leftmost pair of lowest id until nothing merges. Tokens are short, so squares are fine."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 1:
        merges = [(ids[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ids]
        if not merges:
            break
        _, i = min(merges)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts
