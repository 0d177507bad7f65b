"""Prepared shards hold every document exactly; runs are idempotent, survive kill -9, and end with the same bytes."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import time
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import warm_process

from ascendchat import cli
from ascendchat.config import parse
from ascendchat.config.data import DataPrepareConfig
from ascendchat.data import toyworld
from ascendchat.data.corpus import Corpus, open_corpora
from ascendchat.data.fetch import fetch
from ascendchat.data.mixture import parse_mixture
from ascendchat.data.prepare import dtype_for, is_validation, prepare, run
from ascendchat.data.tokenizer.commands import training_texts
from ascendchat.data.tokenizer.tokenizer import Tokenizer, train_tokenizer
from ascendchat.data.verify import verify_folders
from ascendchat.errors import UserError


def texts(count: int, seed: int = 0) -> list[str]:
    """Different documents in two languages, from a few words to some hundred."""
    draw = random.Random(seed)
    words = ["river", "mountain", "the", "of", "and", "stone", "山", "水", "很大。", "Zürich", "42", "—", "\n"]
    return [f"{seed}-{i} " + " ".join(draw.choices(words, k=draw.randint(1, 300))) for i in range(count)]


def write(path: Path, items: list[str]) -> Path:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in items).encode()
    path.write_bytes(gzip.compress(lines, mtime=0) if path.suffix == ".gz" else lines)
    return path


@pytest.fixture(autouse=True)
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are forked from this process: those that start anew import numpy and tokenizers, a second each."""
    real = multiprocessing.get_context
    monkeypatch.setattr(multiprocessing, "get_context", lambda way: real("fork" if way == "spawn" else way))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tokenizer of 400 ids."""
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(texts(20), vocab_size=400).save(folder)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Everything a reader sees: name -> bytes."""
    return {p.name: p.read_bytes() for p in sorted(folder.iterdir()) if p.is_file()}


def decoded(folder: Path, split: str, tokenizer: Path) -> list[str]:
    corpus, loaded = Corpus.open(folder, split), Tokenizer.load(tokenizer)
    assert not verify_folders([folder])[0].faults
    found = [d.tolist() for d in np.split(np.concatenate(list(corpus.stream())), np.cumsum(corpus.lengths)[:-1])]
    assert all(document[0] == loaded.bos for document in found)
    return [loaded.decode(document[1:]) for document in found]


def test_shards_hold_every_document_and_the_split_follows_the_hash(tokenizer: Path, tmp_path: Path) -> None:
    first, second = texts(120, 1), texts(80, 2)
    sources = [str(write(tmp_path / "a.jsonl.gz", first)), str(write(tmp_path / "b.jsonl", second))]
    out = tmp_path / "out"
    manifest = prepare(sources, tokenizer, out, val_fraction=0.2, workers=2, part=20_000)
    every = first + second
    expected = {"val": [t for t in every if is_validation(t.encode(), 0.2)]}
    expected["train"] = [t for t in every if t not in expected["val"]]
    assert 20 <= len(expected["val"]) <= 60
    for split, wanted in expected.items():
        assert decoded(out, split, tokenizer) == wanted
        about = manifest["splits"][split]
        assert len(about["parts"]) > 5
        assert about["documents"] == len(wanted)
        assert about["text_bytes"] == sum(len(t.encode()) for t in wanted)
    assert set(manifest["files"]) == set(contents(out)) - {"manifest.json"}
    assert Corpus.open(out).tokenizer == Tokenizer.load(tokenizer).fingerprint
    assert not any(is_validation(t.encode(), 0.0) for t in every)
    assert all(is_validation(t.encode(), 1.0) for t in every)
    assert (dtype_for(65_536), dtype_for(65_537)) == ("uint16", "uint32")


def test_sources_of_one_command_add_up_and_those_left_out_are_named(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    items = {name: texts(20, seed) for seed, name in enumerate("abv")}
    a, b, v = (str(write(tmp_path / f"{name}.jsonl", items[name])) for name in "abv")
    base = ["--tokenizer", str(tokenizer), "--out", str(tmp_path / "out"), "--workers", "1", "--val-source", v]
    assert run(parse(DataPrepareConfig, [a, "--source", b, *base])) == 0
    assert decoded(tmp_path / "out", "train", tokenizer) == [*items["b"], *items["a"]]
    assert decoded(tmp_path / "out", "val", tokenizer) == items["v"], "nothing is taken from the sources"
    assert "no longer" not in capsys.readouterr().out
    assert run(parse(DataPrepareConfig, [b, *base])) == 0
    assert decoded(tmp_path / "out", "train", tokenizer) == items["b"]
    assert "a.jsonl is no longer part of" in capsys.readouterr().out


def test_a_second_run_does_no_work_and_a_new_source_is_the_only_work(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, a = tmp_path / "out", str(write(tmp_path / "a.jsonl", texts(50, 6)))
    prepare([a], tokenizer, out, workers=1)

    def stamps() -> dict[str, tuple[int, int]]:
        return {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in out.iterdir() if p.is_file()}

    before = stamps()
    with monkeypatch.context() as patch:
        patch.setattr("ascendchat.data.prepare.ProcessPoolExecutor", None)  # no worker may start
        prepare([a], tokenizer, out, workers=1)
    assert stamps() == before
    copied = shutil.copy(a, tmp_path / "moved.jsonl")  # another name and time, the same content
    b = str(write(tmp_path / "b.jsonl", texts(50, 7)))
    manifest = prepare([str(copied), b], tokenizer, out, workers=1)
    assert len(manifest["sources"]) == 2
    kept = {name for name in before if name != "manifest.json"}
    assert {name: stamps()[name] for name in kept} == {name: before[name] for name in kept}
    prepare([b], tokenizer, out, workers=1)  # shards of a source that is gone are removed
    assert not kept & set(contents(out))


def test_the_bytes_do_not_depend_on_how_the_work_was_shared_nor_on_a_shard_made_again(
    tokenizer: Path, tmp_path: Path
) -> None:
    sources = [str(write(tmp_path / f"{i}.jsonl", texts(40, 10 + i))) for i in range(4)]
    prepare(sources, tokenizer, tmp_path / "by_file", workers=1, part=4_000)  # 4 files, 1 worker: a file each time
    with pytest.raises(UserError, match="no field 'content'"):  # found by the worker that reads
        prepare(sources, tokenizer, tmp_path / "wrong", field="content", workers=1)
    assert not (tmp_path / "wrong" / "manifest.json").exists()
    prepare(sources, tokenizer, tmp_path / "by_part", workers=2, part=4_000)  # 4 files, 2 workers: parts
    good, out = contents(tmp_path / "by_file"), tmp_path / "by_part"
    assert contents(out) == good
    victim = out / sorted(name for name in good if name.endswith(".tokens"))[2]
    victim.write_bytes(good[victim.name][:-3] + b"\x07" + good[victim.name][-2:])
    assert [(fault.file, fault.what) for fault in verify_folders([out])[0].faults] == [(victim, "checksum differs")]
    victim.unlink()
    prepare(sources, tokenizer, out, workers=1, part=4_000)
    assert contents(out) == good


def test_weights_make_one_corpus_per_source_and_a_mixture(tokenizer: Path, tmp_path: Path) -> None:
    en, zh = write(tmp_path / "en.jsonl", texts(120, 20)), write(tmp_path / "zh.jsonl", texts(30, 21))
    flags = ["--tokenizer", str(tokenizer), "--out", str(tmp_path / "out"), "--workers", "1", "--weights", "1,3"]
    assert run(parse(DataPrepareConfig, ["--source", str(en), str(zh), *flags])) == 0
    names = [str(tmp_path / "out" / name) for name in ("00-en-jsonl", "01-zh-jsonl")]
    assert parse_mixture([tmp_path / "out"]) == list(zip(names, [1.0, 3.0]))
    mixture = open_corpora([tmp_path / "out"])
    assert [weight for _, weight in mixture] == [1.0, 3.0]
    assert mixture[0][0].documents > 100 > mixture[1][0].documents


def test_the_validation_file_of_a_set_is_never_trained_on(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither by `data prepare` nor by `tokenizer train`."""
    hub, items = tmp_path / "hub" / "climbmix", [texts(20, 40), texts(20, 41), texts(20, 42)]
    hub.mkdir(parents=True)
    for name, rows in zip(("shard_00000", "shard_00001", "shard_06542"), items):
        pyarrow.parquet.write_table(pyarrow.table({"text": rows}), hub / f"{name}.parquet")
    folder = fetch("climbmix", source=str(tmp_path / "hub"))
    train, held = items[0] + items[1], items[2]
    out, base = tmp_path / "out", ["--tokenizer", str(tokenizer), "--out", str(tmp_path / "out"), "--workers", "1"]

    def prepared(*words: str) -> tuple[list[str], list[str]]:
        assert run(parse(DataPrepareConfig, [*words, *base])) == 0
        return decoded(out, "train", tokenizer), decoded(out, "val", tokenizer)

    for name in ("climbmix", str(folder), str(folder / "*.parquet")):
        assert prepared(name) == (train, held)
    assert "shard_06542.parquet is for validation only" in capsys.readouterr().out
    learnt, kept = prepared("climbmix", "--val-fraction", "0.2")
    assert set(held) < set(kept)
    assert not set(held) & set(learnt)
    other = texts(5, 43)
    assert prepared("climbmix", "--val-source", str(write(tmp_path / "v.jsonl", other))) == (train, other)
    assert prepared("climbmix", "--val-source", str(folder / "shard_06542.parquet")) == (train, held)
    assert prepared(str(folder / "shard_06542.parquet"), "--val-source", str(tmp_path / "v.jsonl")) == (held, other)
    assert list(training_texts([str(folder)], (), None, out)) == train
    assert list(training_texts([str(folder)], (1.0,), None, out)) == train


def test_empty_and_equal_shards_of_a_folder_are_read_once_and_named(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shards, rows = tmp_path / "shards", texts(3, 44)
    shards.mkdir()
    write(shards / "a.jsonl", rows)
    for name in ("b", "c", "d"):  # as Spark writes parts without rows
        write(shards / f"{name}.jsonl", [])
    shutil.copy(shards / "a.jsonl", shards / "z.jsonl")
    manifest = prepare([str(shards)], tokenizer, tmp_path / "out", workers=1, val_fraction=0.0)
    assert manifest["splits"]["train"]["documents"] == 3
    line = next(line for line in capsys.readouterr().out.splitlines() if "left out" in line)
    assert line == f"left out: {shards}/c.jsonl (the same content as {shards}/b.jsonl) and 2 more"
    prepare([str(shards)], tokenizer, tmp_path / "out", workers=1, val_given=[str(shards / "z.jsonl")])
    assert decoded(tmp_path / "out", "val", tokenizer) == rows, "what validates is not trained on"
    with pytest.raises(UserError, match="has no train documents"):
        decoded(tmp_path / "out", "train", tokenizer)
    prepare([str(shards), str(shards)], tokenizer, tmp_path / "out", workers=1, val_fraction=0.0)
    assert decoded(tmp_path / "out", "train", tokenizer) == rows
    for twice in ([str(shards / "a.jsonl")] * 2, ["toyworld", "toyworld"]):
        with pytest.raises(UserError, match="name it once"):
            prepare(twice, tokenizer, tmp_path / "out", workers=1)


def test_wrong_input_is_explained(tokenizer: Path, tmp_path: Path) -> None:
    a = write(tmp_path / "a.jsonl", texts(3, 1))
    b = shutil.copy(a, tmp_path / "b.jsonl")
    flags = ["--tokenizer", str(tokenizer), "--out", str(tmp_path / "out")]
    for more, words in [
        ([], "name what to prepare"),
        ([str(a), "--weights", "1,2"], "2 weights for 1 sources"),
        ([str(a), "--weights", "-1"], "greater than 0"),
        ([str(a), "--val-fraction", "1.5"], "at least 0 and less than 1"),
        ([str(a), str(b)], "have the same content"),
        ([str(a), "--val-source", str(b)], "have the same content"),
        ([str(tmp_path / "none.jsonl")], "no file or folder"),
    ]:
        with pytest.raises(UserError, match=words):
            run(parse(DataPrepareConfig, [*more, *flags]))
    with pytest.raises(UserError, match="--workers 0: at least one"):
        prepare([str(a)], tokenizer, tmp_path / "out", workers=0)


SCRIPT = (
    "import sys\nfrom pathlib import Path\nfrom ascendchat.data.prepare import prepare\n"
    "if __name__ == '__main__':\n"
    "    prepare(sys.argv[3:], sys.argv[1], Path(sys.argv[2]), workers=2, part=10_000)\n"
)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to see the workers")
def test_kill_9_leaves_whole_shards_and_a_rerun_gives_the_same_bytes(tokenizer: Path, tmp_path: Path) -> None:
    sources = [str(write(tmp_path / f"{i}.jsonl", texts(400, 30 + i))) for i in range(2)]
    prepare(sources, tokenizer, tmp_path / "whole", workers=2, part=10_000)
    expected = contents(tmp_path / "whole")
    script, out = tmp_path / "go.py", tmp_path / "out"
    script.write_text(SCRIPT)
    process = warm_process.Popen([sys.executable, str(script), str(tokenizer), str(out), *sources])
    while len(list(out.glob("*.tokens"))) < 5:
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.001)
    process.send_signal(signal.SIGSTOP)  # so that it does not end before it is killed
    with pytest.raises(UserError, match="another `ascendchat data prepare` is writing into"):
        prepare(sources, tokenizer, out, workers=1, part=10_000)
    workers = warm_process.children(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(workers) >= 2
    deadline = time.monotonic() + 120
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline, "workers outlive their parent"
        time.sleep(0.01)
    done = contents(out)
    assert "manifest.json" not in done
    assert all(done[name] == expected[name] for name in done if not name.startswith(".")), "half-written"
    prepare(sources, tokenizer, out, workers=2, part=10_000)
    assert contents(out) == expected


def test_a_worker_that_is_killed_is_said_and_what_is_done_is_kept(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = [str(write(tmp_path / "a.jsonl", texts(60, 9)))]
    prepare(sources, tokenizer, tmp_path / "whole", workers=1, part=2_000)
    out, owner, replace = tmp_path / "out", os.getpid(), os.replace
    for left in (0, 1, 7, 8):  # files that the worker renames before it dies: between two of a part, and behind it

        def fatal(*names: object, left: int = left, seen: list[object] = []) -> None:  # noqa: B006 (counts in a worker)
            if os.getpid() != owner and len(seen) == left:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += [names] * (os.getpid() != owner)
            replace(*names)  # type: ignore[call-overload]

        monkeypatch.setattr(os, "replace", fatal)
        with pytest.raises(UserError, match=r"a worker was killed.*what is done is kept"):
            prepare(sources, tokenizer, out, workers=1, part=2_000)
    monkeypatch.setattr(os, "replace", replace)
    assert len(list((out / "progress").glob("*-*.json"))) >= 4, "parts that were done are not made again"
    prepare(sources, tokenizer, out, workers=1, part=2_000)
    assert contents(out) == contents(tmp_path / "whole")


def test_the_embedded_corpus_keeps_its_own_splits(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = toyworld.documents
    monkeypatch.setattr(toyworld, "documents", lambda split: islice(real(split), 40))  # of 20,000
    flags = ["--tokenizer", str(tokenizer), "--out", str(tmp_path / "out"), "--workers", "1"]
    assert run(parse(DataPrepareConfig, ["toyworld", *flags])) == 0
    assert decoded(tmp_path / "out", "train", tokenizer) == list(islice(real("train"), 40))
    assert decoded(tmp_path / "out", "val", tokenizer) == list(islice(real("validation"), 40))


def test_files_of_others_in_the_folder_are_left_alone(tokenizer: Path, tmp_path: Path) -> None:
    out, a = tmp_path / "out", str(write(tmp_path / "a.jsonl", texts(20, 30)))
    foreign = ["progress/notes.txt", "progress/draft.tmp", "progress/0123.json", "progress/folder/x", "keep.tokens"]
    for name in (*foreign, "progress/0123456789abcdef.json/x", "train-0123456789abcdef-00000.tokens/x"):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text(name)
    (out / "progress" / "fedcba9876543210.json").write_text("{}")  # our own form: a source that is gone
    (out / "progress" / "lock").write_text("mine")
    prepare([a], tokenizer, out, workers=1)
    assert all((out / name).read_text() == name for name in foreign)
    assert (out / "progress" / "0123456789abcdef.json" / "x").is_file()
    assert not (out / "progress" / "fedcba9876543210.json").exists()
    assert (out / "progress" / "lock").read_text() == "mine"


def test_a_folder_of_something_else_is_refused(tokenizer: Path, tmp_path: Path) -> None:
    a = str(write(tmp_path / "a.jsonl", texts(20, 30)))
    for number, (name, text) in enumerate(
        {
            "manifest.json": '{"files": {}, "set": "gsm8k"}',
            "mixture.json": '{"drums": 1}',
            "progress/sources.json": '{"a": 1}',
            "progress": "a file",
        }.items()
    ):
        out = tmp_path / str(number)
        (out / name).parent.mkdir(parents=True)
        (out / name).write_text(text)
        with pytest.raises(UserError, match=rf"{name} was not written by `ascendchat data prepare`.*--out"):
            run(parse(DataPrepareConfig, [a, "--tokenizer", str(tokenizer), "--out", str(out), "--workers", "1"]))
        assert (out / name).read_text() == text


def test_the_own_output_below_a_source_is_not_read(tokenizer: Path, tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", texts(20, 31))
    shutil.copytree(tokenizer, tmp_path / "tokenizer")
    pattern = str(tmp_path / "**" / "*.json*")
    for source, extra in ((str(tmp_path), []), (pattern, []), (str(tmp_path), ["--weights", "1"])):
        if extra:  # the first output is text of ours no longer
            shutil.rmtree(tmp_path / "prepared")
        out = tmp_path / ("mixed" if extra else "prepared")
        argv = [source, "--tokenizer", str(tmp_path / "tokenizer"), "--out", str(out), "--workers", "1", *extra]
        for _ in range(2):
            assert run(parse(DataPrepareConfig, argv)) == 0
            (corpus,) = [one for one, _ in open_corpora([out])]
            manifest = json.loads((corpus.folder / "manifest.json").read_text())
            assert [about["name"] for about in manifest["sources"]] == ["a.jsonl"]


def test_an_output_that_cannot_be_a_folder_is_refused_before_any_work(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts, taken = tmp_path / "texts", tmp_path / "file"
    texts.mkdir()
    (texts / "a.txt").write_text("some text")
    taken.write_text("mine")
    for out in (taken, taken / "below"):
        for command in (["data", "prepare", "--tokenizer", str(tokenizer)], ["tokenizer", "train"]):
            assert cli.main([*command, str(texts), "--out", str(out)]) == 2
            assert f"{taken} is a file" in capsys.readouterr().err
    for out in (tmp_path / ("long" * 100), Path("/proc/here")):  # mkdir fails, also for root
        for command in (["data", "prepare", "--tokenizer", str(tokenizer)], ["tokenizer", "train"]):
            assert cli.main([*command, str(texts), "--out", str(out)]) == 2
            assert re.search(r" cannot be written: .*; give another --out", capsys.readouterr().err)
    with pytest.raises(UserError, match="a folder of its own"):
        run(DataPrepareConfig(paths=(str(texts),), tokenizer=str(tokenizer), out=str(texts)))
    assert [path.name for path in texts.iterdir()] == ["a.txt"]
    assert taken.read_text() == "mine"
