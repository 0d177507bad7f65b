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
