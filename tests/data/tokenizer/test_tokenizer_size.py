"""How many ids `ascendchat tokenizer train` learns: a rule on the bytes of the text, or what was asked for."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from ascendchat.config import parse
from ascendchat.config.data import TokenizerTrainConfig
from ascendchat.data.tokenizer import commands
from ascendchat.data.tokenizer.commands import choose_size, count_bytes, train_command, training_texts
from ascendchat.data.tokenizer.tokenizer import Tokenizer, vocab_for
from ascendchat.errors import UserError

OUT = Path("nowhere")  # nothing lies in the folder to write
BORDER = 2**21  # bytes from which 2,048 ids are nearer than 1,024


def test_the_vocabulary_steps_up_where_the_next_power_of_two_is_nearer() -> None:
    for ids, sizes in {
        1024: (0, 1, 2**21 - 1),
        2048: (2**21, 2**23 - 1),
        4096: (2**23, 16_500_000, 2**25 - 1),
        8192: (2**25, 2**27 - 1),
        16384: (2**27, 2**29 - 1),
        32768: (2**29, 10**15),
    }.items():
        assert [vocab_for(size) for size in sizes] == [ids] * len(sizes)


def test_counting_counts_bytes_and_stops_when_the_largest_vocabulary_is_certain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def endless() -> Iterator[str]:
        yield from ["中" * 2**13] * 22  # 24 KiB each: 2**19 bytes lie in the last
        pytest.fail("reads on")

    assert (commands.MAX_COUNTED_BYTES, vocab_for(2**29), vocab_for(2**29 - 1)) == (2**29, 32768, 16384)
    monkeypatch.setattr(commands, "MAX_COUNTED_BYTES", 2**19)
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
    """Just so much text that 2,048 ids are learnt from it."""
    return write(tmp_path_factory.mktemp("text") / "en.jsonl", words(BORDER, "abcdefghijklmnopqrst"))


def config_of(*argv: str) -> TokenizerTrainConfig:
    return parse(TokenizerTrainConfig, list(argv))


def test_without_a_size_the_command_follows_the_text_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, text = tmp_path / "out", write(tmp_path / "en.jsonl", words(95_000, "abcdefghijklmnopqrst"))
    assert train_command(config_of(str(text), "--out", str(out))) == 0
    assert f"{out}: 1024 ids for 0.1 MB of text, 10 documents, 0.1 million characters" in capsys.readouterr().out
    assert Tokenizer.load(out).vocab_size == 1024
    mend = json.loads((out / "manifest.json").read_text(encoding="utf-8"))["mend"]
    assert "--vocab-size 1024" in mend  # the same folder again, also when the rule has changed


def test_a_size_that_was_given_wins_and_nothing_is_counted(
    english: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [str(english), "--max-chars", "30000", "--out", str(tmp_path / "out")]
    assert train_command(config_of(*argv, "--vocab-size", "300")) == 0
    assert "300 ids from 3 documents" in capsys.readouterr().out
    missing = "no-such-file.jsonl"
    assert choose_size(config_of(missing, "--vocab-size", "32768"), [missing], OUT)[0] == 32768
    with pytest.raises(UserError, match="--vocab-size 200 is too small"):
        train_command(config_of(*argv, "--vocab-size", "200"))


def test_only_the_text_that_trains_is_counted(english: Path, tmp_path: Path) -> None:
    for limit, ids in ((BORDER, 2048), (BORDER - 1, 1024)):
        assert choose_size(config_of("--max-chars", str(limit)), [str(english)], OUT)[0] == ids
    sources = [str(english), str(write(tmp_path / "little.jsonl", words(20_000, "uvwxyz")))]
    assert choose_size(config_of(), sources, OUT)[0] == 2048
    mix = config_of("--mix", "1,1")
    assert choose_size(mix, sources, OUT) == (1024, "for 0.1 MB of text,")
    assert count_bytes(training_texts(sources, mix.mix, None, OUT)) == 50_000  # the little one ends it
    for embedded in ([], ["toyworld"]):
        assert choose_size(config_of(), embedded, OUT) == (32768, "from")


def test_sources_without_text_and_pipes_that_can_be_read_only_once_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    os.mkfifo(tmp_path / "pipe.jsonl")
    for name, says in (("empty.txt", "the sources hold no text"), ("pipe.jsonl", r"is a pipe.*give --vocab-size N")):
        with pytest.raises(UserError, match=says):
            train_command(config_of(str(tmp_path / name), "--out", str(tmp_path / "out")))


def test_the_own_output_below_a_source_is_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "a.jsonl", words(50_000, "abcdefgh"))
    for _ in range(2):
        assert train_command(config_of(str(tmp_path), "--vocab-size", "300", "--out", str(tmp_path / "tok"))) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.split()[4:6] == second.split()[4:6] == ["5", "documents,"]
