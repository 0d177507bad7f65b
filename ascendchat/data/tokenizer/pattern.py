"""How text is cut into pieces before BPE; no token crosses a cut. Used by `ascendchat tokenizer train`.

One expression, read alike by the engines of rustbpe and tiktoken (Rust's fancy-regex) and of Hugging Face tokenizers
(Oniguruma): no look-behind, no case-folding, no possessive counts, no class arithmetic. Characters are written
literally in their classes.

Chinese has no spaces, so the usual `letters+` makes a piece of every clause, together with the Latin word and the
punctuation in front of it. Here Han characters are a kind of their own, in runs of at most 16. Measured with 32,768
ids on 30 MB each of English and Chinese Wikipedia: bytes per token on 1.5 MB of held-out text each, and processor
seconds of training (one run on a busy machine, good to about a fifth):

    run of Han               English   Chinese   seconds
    like other letters        4.176     4.417     48
    Han alone, no bound       4.188     4.234     35
    1-16                      4.192     4.198     40
    1-8                       4.201     4.088     32
    1-4                       4.222     3.898     30

Short bounds cut words at arbitrary places, so the same word gets different ids at different offsets; 16 is longer than
nearly every clause and still keeps pathological input linear. From 4 up the bound changes the memory of training
little (1.2 to 1.6 GB above): most pieces are new however they are cut. On 163 MB of each language: 4.230 and 4.230.
"""

from __future__ import annotations

import regex

# Radicals, 々, 〇, numerals, extension A, unified, compatibility, and the two planes kept for Han (now and in future).
HAN = "\u2e80-\u2fdf\u3005\u3007\u3021-\u3029\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
# Letters and combining marks of every other script; written as what they are not, which every engine understands.
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
LONGEST_RUN = 2048  # characters
RUNS = [regex.compile(rf"{kind}+") for kind in (r"[\s\x1c-\x1f\x85]", LETTER, r"[^\s\p{L}\p{N}]")]
RUNS_BACKWARDS = [regex.compile(rf"(?r){kind.pattern}") for kind in RUNS]  # the same, read backwards


def segments(text: str) -> list[str]:
    """The text in pieces that together are the text, cut only inside runs of more than LONGEST_RUN characters."""
    pieces, begin, at = [], 0, LONGEST_RUN  # a run that is too long has a character at a multiple of LONGEST_RUN
    while at < len(text):
        first, last = max(
            (_run(text, at, begin, *kind) for kind in zip(RUNS, RUNS_BACKWARDS)), key=lambda run: run[1] - run[0]
        )
        for cut in range(first + LONGEST_RUN, last, LONGEST_RUN):
            pieces.append(text[begin:cut])
            begin = cut
        at = (last // LONGEST_RUN + 1) * LONGEST_RUN if last > at else at + LONGEST_RUN
    return [*pieces, text[begin:]]


def _run(text: str, at: int, begin: int, kind: regex.Pattern[str], before: regex.Pattern[str]) -> tuple[int, int]:
    """First and last character (exclusive) of the run of this kind around a place; (at, at) when there is none."""
    after = kind.match(text, at)
    if after is None:
        return at, at
    ahead = before.match(text, begin, at)
    return ahead.start() if ahead else at, after.end()
