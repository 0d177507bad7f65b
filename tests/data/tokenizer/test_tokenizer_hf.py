"""tokenizer.json gives the ids of our tokenizer in `tokenizers` and `transformers`, and the template our rendering."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import rustbpe
import tokenizers

from ascendchat.data.chat.render import render, render_prompt
from ascendchat.data.tokenizer.bpe import PATTERN, merges_of
from ascendchat.data.tokenizer.tokenizer import SPECIALS, Tokenizer

CODE = "def f(x):\n\treturn {'a': x**2}  # ok\r\n\r\nif (a != b) { return a->c[0]; }\n<div class=\"x\">&nbsp;</div>"
CHINESE = "中国的首都是北京，人口２１５０万。他说：「你好！」龘靐齉𠀀𪚥，二〇二四年……"
ENGLISH = "It's what they'll do, isn't it? WE'VE “seen” 1,234.50 dollars — naïve café coöperate"
EMOJI = "😀👍🏽👨‍👩‍👧‍👦❤️1️⃣🇨🇳🏴󠁧󠁢󠁥󠁮󠁧󠁿"
SCRIPTS = (
    "हिन्दी ภาษาไทย 한국어 日本語のテキスト العربية עברית Ελληνικά Кириллица e\u0301 \u200b\ufeff\u00a0\u3000\u2028"
)


def random_strings(count: int, seed: int = 0) -> list[str]:
    """Mixtures of scripts, code, spaces, look-alikes of special tokens, broken UTF-8 and any code point."""
    draw = random.Random(seed)

    def some(text: str | bytes, most: int) -> Any:
        start = draw.randrange(len(text))
        return text[start : start + draw.randrange(1, most)]

    makers: list[Callable[[], str]] = [
        *(partial(some, text, 16) for text in (CODE, CHINESE, ENGLISH, EMOJI, SCRIPTS)),
        lambda: "".join(chr(draw.choice([draw.randrange(0xD800), draw.randrange(0xE000, 0x110000)])) for _ in "12345"),
        lambda: (some((CHINESE + EMOJI).encode(), 9) + draw.randbytes(draw.randrange(4))).decode("utf-8", "replace"),
        lambda: draw.choice(SPECIALS),
        lambda: str(some(draw.choice(SPECIALS), 16)),
        lambda: draw.choice([" ", "\n", "\t", "\r\n", "　", "a", "0", "的", "'", "’s"]) * draw.randrange(1, 20),
    ]
    return ["".join(draw.choice(makers)() for _ in range(draw.randrange(1, 9))) for _ in range(count)]


@pytest.fixture(scope="module")
def rust() -> rustbpe.Tokenizer:
    """The trainer, which can encode, too."""
    trainer = rustbpe.Tokenizer()
    texts = random_strings(1000, seed=1) + [CODE, CHINESE, ENGLISH, EMOJI, SCRIPTS] * 50
    trainer.train_from_iterator(iter(texts), 1500, pattern=PATTERN)
    return trainer


@pytest.fixture(scope="module")
def ours(rust: rustbpe.Tokenizer) -> Tokenizer:
    """Our tokenizer of the same merges."""
    return Tokenizer(merges_of({bytes(token): rank for token, rank in rust.get_mergeable_ranks()}))


@pytest.fixture(scope="module")
def folder(ours: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where it is saved."""
    path = tmp_path_factory.mktemp("tokenizer")
    ours.save(path)
    return path


@pytest.fixture(scope="module")
def theirs(folder: Path) -> tokenizers.Tokenizer:
    """That folder, read by the tokenizers library."""
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_ids_equal_those_of_the_trainer_on_random_strings(ours: Tokenizer, rust: rustbpe.Tokenizer) -> None:
    """The three engines of regular expressions cut alike: this one is the trainer's."""
    assert [text for text in random_strings(1000, seed=2) if ours.encode(text) != rust.encode(text)] == []


def test_code_points_of_the_first_planes_are_cut_alike_by_the_engines(
    ours: Tokenizer, theirs: tokenizers.Tokenizer
) -> None:
    theirs.encode_special_tokens = True
    every = [*range(0x3100), *range(0x3100, 0x20000, 7)]  # scripts in blocks; Han and Hangul are all alike
    points = [chr(point) for point in every if not 0xD800 <= point < 0xE000]
    blocks = [points[start : start + 256] for start in range(0, len(points), 256)]
    texts = ["".join(f"{c}a{c}中{c}1{c} " for c in block) for block in blocks]
    rows = theirs.encode_batch_fast(texts, add_special_tokens=False)
    assert [f"U+{ord(t[0]):X}.." for t, row in zip(texts, rows) if ours.encode(t) != row.ids] == []


def test_special_tokens_have_the_same_ids_there(ours: Tokenizer, theirs: tokenizers.Tokenizer) -> None:
    theirs.encode_special_tokens = False
    assert {name: theirs.token_to_id(name) for name in SPECIALS} == ours.specials
    assert theirs.get_vocab_size() == ours.vocab_size
    inside = [ours.bos, *ours.encode("a 好"), ours.specials["<|user_end|>"], *ours.encode(" b")]
    assert theirs.encode("<|bos|>a 好<|user_end|> b", add_special_tokens=False).ids == inside


CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi, 你好\n"}, {"role": "assistant", "content": " Hello "}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "17+25?"},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "It is "},
                {"type": "tool", "text": "17+25"},
                {"type": "output", "text": "42"},
                {"type": "text", "text": "42."},
            ],
        },
        {"role": "user", "content": [{"type": "text", "text": "Thanks"}]},
    ],
    [
        {"role": "user", "content": "2*3"},
        {"role": "assistant", "content": [{"type": "tool", "text": "2*3"}]},
        {"role": "tool", "content": "6"},
        {"role": "assistant", "content": "Six"},
        {"role": "assistant", "content": "and no more"},
    ],
    [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}],
]


@pytest.mark.slow
def test_transformers_loads_the_folder_with_equal_ids(ours: Tokenizer, folder: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install .[hf])")
    loaded = transformers.AutoTokenizer.from_pretrained(str(folder))
    assert len(loaded) == ours.vocab_size
    assert (loaded.bos_token_id, loaded.pad_token_id) == (ours.bos, ours.pad)
    texts = random_strings(2000, seed=3)
    assert sum("<|bos|>" in text for text in texts) > 10
    assert sum("\ufffd" in text for text in texts) > 100
    rows = loaded(texts, add_special_tokens=True, split_special_tokens=True)["input_ids"]
    assert [text for text, ids in zip(texts, rows) if ours.encode(text) != ids] == []
    assert all(loaded.decode(ids) == text for text, ids in zip(texts[:100], rows[:100]))
    for messages in CONVERSATIONS:
        assert loaded.apply_chat_template(messages, return_dict=False) == render(ours, messages).ids
        if messages[-1]["role"] == "user":
            asked = loaded.apply_chat_template(messages, return_dict=False, add_generation_prompt=True)
            assert asked == render_prompt(ours, messages)
