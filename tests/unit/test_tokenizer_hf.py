"""tokenizer.json gives the ids of our tokenizer in `tokenizers` and `transformers`, and the template our rendering."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rustbpe
import tokenizers

from ascendchat.data.chat import render, render_prompt
from ascendchat.data.tokenizer import SPECIALS, Tokenizer
from ascendchat.data.tokenizer.learn import merges_of
from ascendchat.data.tokenizer.pattern import PATTERN

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

    def anything() -> str:
        return "".join(chr(draw.choice([draw.randrange(0xD800), draw.randrange(0xE000, 0x110000)])) for _ in range(5))

    def broken() -> str:
        raw = bytearray((CHINESE + EMOJI).encode())
        start = draw.randrange(len(raw) - 9)
        cut = raw[start : start + draw.randrange(1, 9)] + draw.randbytes(draw.randrange(4))
        return bytes(cut).decode("utf-8", "replace")

    def piece(text: str) -> Callable[[], str]:
        def cut() -> str:
            start = draw.randrange(len(text))
            return text[start : start + draw.randrange(1, 16)]

        return cut

    makers = [
        *map(piece, [CODE, CHINESE, ENGLISH, EMOJI, SCRIPTS]),
        anything,
        broken,
        lambda: draw.choice(SPECIALS),
        lambda: piece(draw.choice(SPECIALS))(),
        lambda: draw.choice([" ", "\n", "\t", "\r\n", "　", "a", "0", "的", "'", "’s"]) * draw.randrange(1, 20),
    ]
    return ["".join(draw.choice(makers)() for _ in range(draw.randrange(1, 9))) for _ in range(count)]


def trained() -> rustbpe.Tokenizer:
    trainer = rustbpe.Tokenizer()
    texts = random_strings(4000, seed=1) + [CODE, CHINESE, ENGLISH, EMOJI, SCRIPTS] * 50
    trainer.train_from_iterator(iter(texts), 3000, pattern=PATTERN)
    return trainer


@pytest.fixture(scope="module")
def rust() -> rustbpe.Tokenizer:
    return trained()


@pytest.fixture(scope="module")
def ours(rust: rustbpe.Tokenizer) -> Tokenizer:
    return Tokenizer(merges_of({bytes(token): rank for token, rank in rust.get_mergeable_ranks()}))


@pytest.fixture(scope="module")
def folder(ours: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    ours.save(path)
    return path


@pytest.fixture(scope="module")
def theirs(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def differences(ours: Tokenizer, texts: list[str], other: Callable[[str], list[int]]) -> list[str]:
    return [text for text in texts if ours.encode(text) != other(text)]


def test_ids_equal_those_of_tokenizers_on_ten_thousand_random_strings(
    ours: Tokenizer, theirs: tokenizers.Tokenizer
) -> None:
    theirs.encode_special_tokens = True  # text only: look-alikes are text
    texts = random_strings(10_000)
    assert sum("<|bos|>" in text for text in texts) > 50
    assert sum("\ufffd" in text for text in texts) > 500
    rows = theirs.encode_batch_fast(texts, add_special_tokens=False)
    assert [text for text, row in zip(texts, rows) if ours.encode(text) != row.ids] == []
    assert theirs.decode(ours.encode(CHINESE + EMOJI)) == CHINESE + EMOJI


def test_ids_equal_those_of_the_trainer_on_random_strings(ours: Tokenizer, rust: rustbpe.Tokenizer) -> None:
    """The three engines of regular expressions cut alike: this one is the trainer's."""
    assert differences(ours, random_strings(2000, seed=2), rust.encode) == []


@pytest.mark.parametrize("step", [17, pytest.param(1, marks=pytest.mark.slow)])
def test_every_code_point_of_the_first_planes_is_cut_alike_by_the_engines(
    ours: Tokenizer, theirs: tokenizers.Tokenizer, step: int
) -> None:
    theirs.encode_special_tokens = True
    points = [chr(point) for point in range(0, 0x20000, step) if not 0xD800 <= point < 0xE000]
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


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_the_chat_template_renders_as_data_chat_does(
    ours: Tokenizer, theirs: tokenizers.Tokenizer, folder: Path, messages: list[dict[str, Any]]
) -> None:
    jinja2 = pytest.importorskip("jinja2", reason="jinja2 is not installed")
    theirs.encode_special_tokens = False
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    template = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(config["chat_template"])
    text = template.render(messages=messages, bos_token=config["bos_token"])
    assert theirs.encode(text, add_special_tokens=False).ids == render(ours, messages).ids
    if messages[-1]["role"] == "user":
        text = template.render(messages=messages, bos_token=config["bos_token"], add_generation_prompt=True)
        assert theirs.encode(text, add_special_tokens=False).ids == render_prompt(ours, messages)


@pytest.mark.slow
def test_transformers_loads_the_folder_with_equal_ids(ours: Tokenizer, folder: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install .[hf])")
    loaded = transformers.AutoTokenizer.from_pretrained(str(folder))
    assert len(loaded) == ours.vocab_size
    assert (loaded.bos_token_id, loaded.pad_token_id) == (ours.bos, ours.pad)
    texts = random_strings(10_000, seed=3)
    rows = loaded(texts, add_special_tokens=True, split_special_tokens=True)["input_ids"]
    assert [text for text, ids in zip(texts, rows) if ours.encode(text) != ids] == []
    assert all(loaded.decode(ids) == text for text, ids in zip(texts[:500], rows[:500]))
    for messages in CONVERSATIONS:
        ids = loaded.apply_chat_template(messages, tokenize=True, return_dict=False)
        assert ids == render(ours, messages).ids
