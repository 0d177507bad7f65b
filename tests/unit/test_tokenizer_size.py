"""How many ids `ascendchat tokenizer train` learns: a rule on the bytes of the text, or what was asked for."""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascendchat.config import UserError, parse
from ascendchat.config.data import TokenizerTrainConfig
from ascendchat.data.tokenizer import Tokenizer, commands, train_command, vocab_for
from ascendchat.data.tokenizer.commands import chosen_size, count_bytes, texts_of

OUT = Path("nowhere")  # nothing lies in the folder to write
BORDER = 2**21  # bytes from which 2,048 ids are nearer than 1,024


@pytest.mark.parametrize(
    ("size", "ids"),
    [
        *((size, 1024) for size in (0, 1, 2**21 - 1)),
        *((size, 2048) for size in (2**21, 2**23 - 1)),
        *((size, 4096) for size in (2**23, 16_500_000, 2**25 - 1)),
        *((size, 8192) for size in (2**25, 2**27 - 1)),
        *((size, 16384) for size in (2**27, 218_000_000, 2**29 - 1)),
        *((size, 32768) for size in (2**29, 2**29 + 1, 10**15)),
    ],
)
def test_the_vocabulary_steps_up_where_the_next_power_of_two_is_nearer(size: int, ids: int) -> None:
    assert vocab_for(size) == ids


@given(size=st.integers(1, 2**40))
def test_the_vocabulary_is_the_power_of_two_nearest_to_the_root_of_the_bytes(size: int) -> None:
    exact = math.log2(math.sqrt(size))
    nearest = min(range(10, 16), key=lambda power: abs(power - exact))
    # Where two are equally near as far as floats can tell, the table above decides.
    assert vocab_for(size) == 2**nearest or abs(exact % 1 - 0.5) < 1e-9


def test_counting_counts_bytes_and_stops_when_the_largest_vocabulary_is_certain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def endless() -> Iterator[str]:
        yield from ["中" * 2**13] * 22  # 24 KiB each: 2**19 bytes lie in the last
        pytest.fail("reads on")

    assert (commands.ENOUGH_BYTES, vocab_for(2**29), vocab_for(2**29 - 1)) == (2**29, 32768, 16384)
    monkeypatch.setattr(commands, "ENOUGH_BYTES", 2**19)
    assert count_bytes(["abc", "中文"]) == 9
    assert 2**19 <= count_bytes(endless()) < 2**19 + 3 * 2**13


def words(count: int, letters: str) -> str:
    """So many characters of text: words of eight, out of two thousand."""
    draw = random.Random(0)
    known = ["".join(draw.choices(letters, k=7)) for _ in range(2000)]
    return " ".join(draw.choices(known, k=count // 8 + 1))[:count]


def write(path: Path, text: str) -> Path:
    size = 10_000  # characters of a document
    lines = (json.dumps({"text": text[at : at + size]}) + "\n" for at in range(0, len(text), size))
    path.write_text("".join(lines), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def english(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("text") / "en.jsonl", words(BORDER, "abcdefghijklmnopqrst"))


def config_of(*argv: str) -> TokenizerTrainConfig:
    return parse(TokenizerTrainConfig, list(argv))


def test_without_a_size_the_command_follows_the_text_and_says_so(
    english: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert train_command(config_of(str(english), "--out", str(out))) == 0
    assert f"{out}: 2048 ids for 2.1 MB of text, 210 documents, 2.1 million characters" in capsys.readouterr().out
    tokenizer = Tokenizer.load(out)
    assert tokenizer.vocab_size == 2048
    mend = json.loads((out / "manifest.json").read_text(encoding="utf-8"))["mend"]
    assert "--vocab-size 2048" in mend  # the same folder again, also when the rule has changed


def test_a_size_that_was_given_wins_and_nothing_is_counted(
    english: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [str(english), "--max-chars", "30000", "--out", str(tmp_path / "out")]
    assert train_command(config_of(*argv, "--vocab-size", "300")) == 0
    assert "300 ids from 3 documents" in capsys.readouterr().out
    missing = "no-such-file.jsonl"
    assert chosen_size(config_of(missing, "--vocab-size", "32768"), [missing], OUT)[0] == 32768
    with pytest.raises(UserError, match="--vocab-size 200 is too small"):
        train_command(config_of(*argv, "--vocab-size", "200"))


@pytest.mark.parametrize(("limit", "ids"), [(BORDER, 2048), (BORDER - 1, 1024)])
def test_only_the_characters_that_train_are_counted(english: Path, limit: int, ids: int) -> None:
    assert chosen_size(config_of("--max-chars", str(limit)), [str(english)], OUT)[0] == ids


def test_the_limit_is_in_characters_and_the_rule_in_bytes(tmp_path: Path) -> None:
    chinese = write(tmp_path / "zh.jsonl", words(BORDER // 2, "".join(map(chr, range(0x4E00, 0x4F00)))))
    size, reason = chosen_size(config_of("--max-chars", str(BORDER // 2)), [str(chinese)], OUT)
    assert (size, reason) == (2048, "for 2.9 MB of text,")  # seven of eight characters have three bytes


def test_a_mixture_counts_as_far_as_it_trains(english: Path, tmp_path: Path) -> None:
    little = write(tmp_path / "little.jsonl", words(20_000, "uvwxyz"))
    sources = [str(english), str(little)]
    assert chosen_size(config_of(), sources, OUT)[0] == 2048
    mix = config_of("--mix", "1,1")
    size, reason = chosen_size(mix, sources, OUT)
    assert (size, reason) == (1024, "for 0.1 MB of text,")
    assert count_bytes(texts_of(sources, mix.mix, None, OUT)) == 50_000  # the little one ends it


@pytest.mark.parametrize("sources", [[], ["toyworld"]], ids=str)
def test_the_embedded_corpus_keeps_the_largest_vocabulary(sources: list[str]) -> None:
    assert chosen_size(config_of(), sources, OUT) == (32768, "from")


def test_a_pipe_needs_a_size_because_it_can_be_read_only_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(UserError, match=r"is a pipe.*give --vocab-size N"):
        train_command(config_of(str(tmp_path / "pipe.jsonl"), "--out", str(tmp_path / "out")))


def test_sources_without_text_are_still_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("", encoding="utf-8")
    with pytest.raises(UserError, match="the sources hold no text"):
        train_command(config_of(str(tmp_path / "empty.txt"), "--out", str(tmp_path / "out")))


def test_the_own_output_below_a_source_is_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "a.jsonl", words(50_000, "abcdefgh"))
    for _ in range(2):
        assert train_command(config_of(str(tmp_path), "--vocab-size", "300", "--out", str(tmp_path / "tok"))) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.split()[4:6] == second.split()[4:6] == ["5", "documents,"]
