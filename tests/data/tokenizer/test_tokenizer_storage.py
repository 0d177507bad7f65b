"""The folder of a tokenizer is whole or refused, and the commands that write and read it."""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import random
import re
from pathlib import Path

import pytest

from ascendchat.config import parse
from ascendchat.config.data import TokenizerEvalConfig, TokenizerTrainConfig
from ascendchat.data.tokenizer.commands import eval_command, first_chars, interleave, train_command
from ascendchat.data.tokenizer.tokenizer import Tokenizer, train_tokenizer
from ascendchat.errors import UserError, home

FILES = ["bpe.json", "tokenizer.json", "tokenizer_config.json"]
TEXTS = [f"number {i} is {i * 7} and 第{i}个数字是{i * 7}。\n" for i in range(300)]


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    """A tokenizer of 320 ids."""
    return train_tokenizer(TEXTS, 320)


@pytest.fixture
def folder(trained: Tokenizer, tmp_path: Path) -> Path:
    """Where it is saved."""
    trained.save(tmp_path / "tok")
    return tmp_path / "tok"


def test_a_saved_tokenizer_loads_with_the_same_ids(folder: Path, trained: Tokenizer) -> None:
    loaded = Tokenizer.load(str(folder))
    assert loaded.fingerprint == trained.fingerprint
    assert loaded.encode(TEXTS[7]) == trained.encode(TEXTS[7])
    assert sorted(p.name for p in folder.iterdir()) == sorted([*FILES, "manifest.json"])


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
def test_a_damaged_file_is_named_with_the_remedy(folder: Path, name: str) -> None:
    data, draw = (folder / name).read_bytes(), random.Random(name)
    damaged = [b"[" * 100_000, *(data[:length] for length in (0, 1, len(data) // 2, len(data) - 2))]
    for _ in range(20):
        flipped = bytearray(data)
        flipped[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        damaged.append(bytes(flipped))
    for content in damaged:
        (folder / name).write_bytes(content)
        if name == "manifest.json" and content[:2] != b"[[" and sizes_and_sums(content) == sizes_and_sums(data):
            continue  # a bit of the remedy's text: the files themselves are whole
        with pytest.raises(UserError, match=r"damaged|missing") as caught:
            Tokenizer.load(folder)
        assert str(folder) in str(caught.value)
        if name != "manifest.json":
            assert str(folder / name) in str(caught.value)
            assert "ascendchat tokenizer train" in str(caught.value)
    (folder / name).unlink()
    missing = rf"{name} is damaged: it is missing" if name in FILES else "ascendchat tokenizer train"
    with pytest.raises(UserError, match=missing):
        Tokenizer.load(folder)


def sizes_and_sums(data: bytes) -> object:
    """What a manifest says of the files, if it can be read."""
    try:
        return json.loads(data)["files"]
    except (ValueError, KeyError):
        return None


def test_an_absent_folder_names_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no tokenizer in .*nowhere; train one: ascendchat tokenizer train"):
        Tokenizer.load(tmp_path / "nowhere")


def test_a_file_in_place_of_the_folder_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}')
    for path in (tmp_path / "rows.jsonl", folder / "bpe.json"):
        with pytest.raises(UserError, match=f"{path} is a file; name the folder of a tokenizer, or train one: ascend"):
            Tokenizer.load(path)


def test_merges_changed_together_with_their_manifest_still_fail_their_own_checksum(folder: Path) -> None:
    content = json.loads((folder / "bpe.json").read_text(encoding="utf-8"))
    content["merges"].pop()
    text = json.dumps(content, ensure_ascii=False)
    (folder / "bpe.json").write_text(text, encoding="utf-8")
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    entry = {"bytes": len(text.encode()), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    manifest["files"]["bpe.json"] = entry
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(UserError, match="its own checksum"):
        Tokenizer.load(folder)


def write_sources(tmp_path: Path) -> tuple[Path, Path]:
    english, chinese = tmp_path / "en.jsonl.xz", tmp_path / "zh.jsonl.xz"
    for path, text in ((english, "some words in English {}"), (chinese, "一些中文的句子，第{}句")):
        with lzma.open(path, "wt", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text.format(i)}) + "\n" for i in range(200))
    return english, chinese


def test_the_train_command_writes_a_folder_that_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    english, chinese = write_sources(tmp_path)
    argv = ["--source", f"{english},{chinese}", "--mix", "1,1", "--vocab-size", "300", "--out", str(tmp_path / "out")]
    assert train_command(parse(TokenizerTrainConfig, argv)) == 0
    assert "300 ids from" in capsys.readouterr().out
    assert Tokenizer.load(tmp_path / "out").vocab_size == 300
    mend = json.loads((tmp_path / "out" / "manifest.json").read_text(encoding="utf-8"))["mend"]
    first = Tokenizer.load(tmp_path / "out").fingerprint
    (tmp_path / "out" / "bpe.json").write_bytes(b"")
    with pytest.raises(UserError, match=re.escape(mend)):
        Tokenizer.load(tmp_path / "out")
    train_command(parse(TokenizerTrainConfig, mend.split()[3:]))  # the remedy works
    assert Tokenizer.load(tmp_path / "out").fingerprint == first


def test_without_a_source_the_embedded_corpus_trains_into_the_home_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert train_command(parse(TokenizerTrainConfig, ["--vocab-size", "400", "--max-chars", "50000"])) == 0
    assert "0.1 million characters" in capsys.readouterr().out
    assert Tokenizer.load(home() / "tokenizer").vocab_size == 400


def test_weights_belong_to_the_sources_in_the_order_they_were_written(tmp_path: Path) -> None:
    english, chinese = write_sources(tmp_path)
    for words in (["--source", str(english), str(chinese)], [str(english), str(chinese)]):
        argv = [*words, "--mix", "1,9", "--vocab-size", "300", "--out", str(tmp_path / "out")]
        train_command(parse(TokenizerTrainConfig, argv))
        tokenizer = Tokenizer.load(tmp_path / "out")
        assert len(tokenizer.encode("一些中文的句子")) < len(tokenizer.encode("some words in English"))
    with pytest.raises(UserError, match="1 sources, 2 weights"):
        train_command(parse(TokenizerTrainConfig, [str(english), "--mix", "1,1"]))


def test_the_mix_shares_bytes_by_weight_and_ends_with_the_first_source() -> None:
    texts = list(interleave([iter(["a" * 10] * 1000), iter(["中" * 10] * 30)], [1.0, 3.0]))
    chinese = sum(len(t.encode()) for t in texts if t[0] == "中")
    english = sum(len(t.encode()) for t in texts if t[0] == "a")
    assert chinese == 900
    assert abs(english * 3 - chinese) <= 60


def test_the_limit_counts_characters_and_cuts_the_last_text() -> None:
    assert list(first_chars(["abc", "中文字", "x"], 5)) == ["abc", "中文"]
    assert list(first_chars(["abc", "d"], None)) == ["abc", "d"]


def test_eval_reports_bytes_per_token_beside_others(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    english, chinese = write_sources(tmp_path)
    (tmp_path / "other").mkdir()
    with gzip.open(tmp_path / "other" / "tokenizer.json.gz", "wb") as file:
        file.write((folder / "tokenizer.json").read_bytes())
    argv = [str(english), str(chinese), "--tokenizer", str(folder), "--against", f"same={tmp_path / 'other'}"]
    assert eval_command(parse(TokenizerEvalConfig, [*argv, "--json"])) == 0
    result = json.loads(capsys.readouterr().out)
    tokenizer = Tokenizer.load(folder)
    text = "".join(f"some words in English {i}" for i in range(200))
    tokens = sum(len(tokenizer.encode(f"some words in English {i}")) for i in range(200))
    row = result["sources"][0]
    assert (row["documents"], row["bytes"]) == (200, len(text))
    assert row["bytes_per_token"] == {"ours": pytest.approx(len(text) / tokens), "same": row["bytes_per_token"]["ours"]}
    assert result["vocab_size"] == {"ours": 320, "same": 320}
    assert eval_command(parse(TokenizerEvalConfig, argv)) == 0
    table = capsys.readouterr().out
    assert "same" in table
    assert "(100%)" in table


def test_a_tokenizer_that_cannot_be_read_is_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # a variable that was read at its import
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "tiktoken"))
    for scheme in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.setenv(scheme, "http://127.0.0.1:9")  # nobody there: no machine of the tests reaches a network
    english, _ = write_sources(tmp_path)
    for against, message in (
        ("x=/no/such/file", "there is no file"),
        (f"x={tmp_path}", "holds no tokenizer.json"),
        (f"x={english}", "cannot be read as a tokenizer.json"),
        ("gpt2", "give its file: --against gpt2=PATH"),
    ):
        argv = [str(english), "--tokenizer", str(folder), "--against", against]
        with pytest.raises(UserError, match=message):
            eval_command(parse(TokenizerEvalConfig, argv))
