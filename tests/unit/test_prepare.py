"""Prepared shards hold every document exactly; runs are idempotent, survive kill -9, and end with the same bytes."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from ascendchat import cli
from ascendchat.config import UserError, parse
from ascendchat.config.data import DataPrepareConfig
from ascendchat.data import toyworld
from ascendchat.data.corpus import Corpus, TextRows, open_corpora
from ascendchat.data.mixture import Batches, parse_mixture
from ascendchat.data.prepare import prepare, run
from ascendchat.data.read import read_documents
from ascendchat.data.shards import dtype_for, is_validation
from ascendchat.data.tokenizer import Tokenizer, train_tokenizer
from ascendchat.data.verify import verify_folders
from ascendchat.nn import IGNORE

ROOT = Path(__file__).resolve().parents[2]


def texts(count: int, seed: int = 0) -> list[str]:
    """Different documents in two languages, from a few words to some hundred."""
    draw = random.Random(seed)
    words = ["river", "mountain", "the", "of", "and", "stone", "山", "水", "很大。", "Zürich", "42", "—", "\n"]
    return [f"{seed}-{i} " + " ".join(draw.choices(words, k=draw.randint(1, 300))) for i in range(count)]


def write(path: Path, items: list[str]) -> Path:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in items).encode()
    path.write_bytes(gzip.compress(lines, mtime=0) if path.suffix == ".gz" else lines)
    return path


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(iter(texts(50)), vocab_size=400).save(folder)
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
    first, second = texts(300, 1), texts(200, 2)
    sources = [str(write(tmp_path / "a.jsonl.gz", first)), str(write(tmp_path / "b.jsonl", second))]
    out = tmp_path / "out"
    manifest = prepare(sources, tokenizer, out, val_fraction=0.1, workers=2, part=20_000)
    every = first + second
    expected = {"val": [t for t in every if is_validation(t.encode(), 0.1)]}
    expected["train"] = [t for t in every if t not in expected["val"]]
    assert 25 <= len(expected["val"]) <= 75
    for split, wanted in expected.items():
        assert decoded(out, split, tokenizer) == wanted
        about = manifest["splits"][split]
        assert len(about["parts"]) > 5
        assert about["documents"] == len(wanted)
        assert about["text_bytes"] == sum(len(t.encode()) for t in wanted)
    assert set(manifest["files"]) == set(contents(out)) - {"manifest.json"}
    assert Corpus.open(out).tokenizer == Tokenizer.load(tokenizer).fingerprint


def test_the_validation_split_does_not_depend_on_files_or_order(tokenizer: Path, tmp_path: Path) -> None:
    items = texts(200, 3)
    shuffled = random.Random(0).sample(items, len(items))
    prepare([str(write(tmp_path / "a.jsonl", items))], tokenizer, tmp_path / "1", val_fraction=0.2, workers=1)
    halves = [write(tmp_path / "b.jsonl", shuffled[:70]), write(tmp_path / "c.jsonl", shuffled[70:])]
    prepare([str(h) for h in halves], tokenizer, tmp_path / "2", val_fraction=0.2, workers=1)
    one, two = (decoded(tmp_path / n, "val", tokenizer) for n in "12")
    assert sorted(one) == sorted(two)
    assert one != two


def test_validation_files_take_nothing_from_the_sources(tokenizer: Path, tmp_path: Path) -> None:
    items, held_out = texts(60, 4), texts(20, 5)
    a, v = write(tmp_path / "a.jsonl", items), write(tmp_path / "v.jsonl", held_out)
    flags = ["--tokenizer", str(tokenizer), "--out", str(tmp_path / "out"), "--workers", "1"]
    config = parse(DataPrepareConfig, ["--source", str(a), "--val-source", str(v), *flags])
    assert run(config) == 0
    assert decoded(tmp_path / "out", "train", tokenizer) == items
    assert decoded(tmp_path / "out", "val", tokenizer) == held_out


def test_a_second_run_does_no_work_and_a_new_source_is_the_only_work(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, a = tmp_path / "out", str(write(tmp_path / "a.jsonl", texts(50, 6)))
    prepare([a], tokenizer, out, workers=1)
    before = {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in out.iterdir() if p.is_file()}
    with monkeypatch.context() as patch:
        patch.setattr("ascendchat.data.prepare.ProcessPoolExecutor", None)  # no worker may start
        prepare([a], tokenizer, out, workers=1)
    assert {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in out.iterdir() if p.is_file()} == before
    copied = shutil.copy(a, tmp_path / "moved.jsonl")  # another name and time, the same content
    b = str(write(tmp_path / "b.jsonl", texts(50, 7)))
    manifest = prepare([str(copied), b], tokenizer, out, workers=1)
    assert len(manifest["sources"]) == 2
    kept = {name for name in before if name != "manifest.json"}
    after = {p.name: (p.stat().st_ino, p.stat().st_mtime_ns) for p in out.iterdir() if p.is_file()}
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    prepare([b], tokenizer, out, workers=1)  # shards of a source that is gone are removed
    assert not kept & set(contents(out))


def test_a_damaged_shard_is_named_and_made_again_once_deleted(tokenizer: Path, tmp_path: Path) -> None:
    out, a = tmp_path / "out", str(write(tmp_path / "a.jsonl", texts(80, 8)))
    prepare([a], tokenizer, out, workers=1, part=5_000)
    good = contents(out)
    victim = out / sorted(name for name in good if name.endswith(".tokens"))[2]
    victim.write_bytes(good[victim.name][:-3] + b"\x07" + good[victim.name][-2:])
    assert [(fault.file, fault.what) for fault in verify_folders([out])[0].faults] == [(victim, "checksum differs")]
    victim.unlink()
    prepare([a], tokenizer, out, workers=1, part=5_000)
    assert contents(out) == good


def test_the_bytes_do_not_depend_on_how_the_work_was_shared(tokenizer: Path, tmp_path: Path) -> None:
    sources = [str(write(tmp_path / f"{i}.jsonl", texts(40, 10 + i))) for i in range(4)]
    prepare(sources, tokenizer, tmp_path / "by_file", workers=1, part=4_000)  # 4 files, 1 worker: a file each time
    prepare(sources, tokenizer, tmp_path / "by_part", workers=2, part=4_000)  # 4 files, 2 workers: parts
    assert contents(tmp_path / "by_file") == contents(tmp_path / "by_part")


def test_a_wrong_field_is_reported_by_the_worker_that_reads(tokenizer: Path, tmp_path: Path) -> None:
    sources = [str(write(tmp_path / f"{i}.jsonl", texts(3, i))) for i in range(4)]
    with pytest.raises(UserError, match="no field 'content'"):
        prepare(sources, tokenizer, tmp_path / "out", field="content", workers=1)
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_weights_make_one_corpus_per_source_and_a_mixture(tokenizer: Path, tmp_path: Path) -> None:
    en, zh = write(tmp_path / "en.jsonl", texts(120, 20)), write(tmp_path / "zh.jsonl", texts(30, 21))
    flags = ["--tokenizer", str(tokenizer), "--out", str(tmp_path / "out"), "--workers", "1", "--weights", "1,3"]
    assert run(parse(DataPrepareConfig, ["--source", str(en), str(zh), *flags])) == 0
    names = [str(tmp_path / "out" / name) for name in ("00-en-jsonl", "01-zh-jsonl")]
    assert parse_mixture([tmp_path / "out"]) == list(zip(names, [1.0, 3.0]))
    mixture = open_corpora([tmp_path / "out"])
    assert [weight for _, weight in mixture] == [1.0, 3.0]
    assert mixture[0][0].documents > 100 > mixture[1][0].documents


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


def test_token_types_and_hash_split_have_the_right_edges() -> None:
    assert (dtype_for(65_536), dtype_for(65_537)) == ("uint16", "uint32")
    assert not any(is_validation(str(i).encode(), 0.0) for i in range(1000))
    assert all(is_validation(str(i).encode(), 1.0) for i in range(1000))


SCRIPT = (
    "import sys\nfrom pathlib import Path\nfrom ascendchat.data.prepare import prepare\n"
    "if __name__ == '__main__':\n"
    "    prepare(sys.argv[3:], sys.argv[1], Path(sys.argv[2]), workers=2, part=10_000)\n"
)


def children(pid: int) -> list[int]:
    """Living child processes."""
    tasks = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(word) for word in tasks.read_text().split()] if tasks.exists() else []


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to see the workers")
def test_kill_9_at_any_moment_then_a_rerun_gives_the_same_bytes(tokenizer: Path, tmp_path: Path) -> None:
    script = tmp_path / "go.py"
    script.write_text(SCRIPT)
    sources = [str(write(tmp_path / f"{i}.jsonl", texts(400, 30 + i))) for i in range(2)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def start(out: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(script), str(tokenizer), str(out), *sources]
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)

    began = time.monotonic()
    assert start(tmp_path / "whole").wait() == 0
    duration = time.monotonic() - began
    expected = contents(tmp_path / "whole")
    draw = random.Random(1)
    out, killed = tmp_path / "out", 0
    while killed < 6:
        process = start(out)
        time.sleep(duration * draw.uniform(0.2, 0.95))
        workers = children(process.pid)
        if process.poll() is not None:
            shutil.rmtree(out)  # it was faster this time: begin again
            duration *= 0.8
            continue
        process.send_signal(signal.SIGKILL)
        process.wait()
        killed += 1
        deadline = time.monotonic() + 120
        while any(Path(f"/proc/{pid}").exists() for pid in workers):
            assert time.monotonic() < deadline, "workers outlive their parent"
            time.sleep(0.05)
        for path in out.glob("*.tokens"):  # nothing half-written has a final name
            assert path.read_bytes() == expected[path.name]
        if killed % 3 == 0:
            assert start(out).wait() == 0
            assert contents(out) == expected
            shutil.rmtree(out)


@pytest.mark.slow
def test_every_token_of_real_text_is_used(tokenizer: Path, real_data: Path, tmp_path: Path) -> None:
    source = real_data / "pretrain" / "en" / "wiki_val.jsonl.xz"
    manifest = prepare([str(source)], tokenizer, tmp_path / "out", val_fraction=0.05, workers=2)
    splits = manifest["splits"]
    assert splits["train"]["documents"] + splits["val"]["documents"] == sum(1 for _ in read_documents([source])) == 223
    corpus = Corpus.open(tmp_path / "out")
    rows = TextRows(corpus, 1024, seed=0)
    batches = Batches([(rows, 1.0)], 16)
    counts = np.zeros(corpus.vocab_size, dtype=np.int64)
    used = 0
    for step in range(-(-rows.per_epoch // 16)):
        left = min(16, rows.per_epoch - step * 16)
        batch = batches.batch(step, 0, left)
        real = batch.targets != IGNORE
        used += int(real.sum())
        counts += np.bincount(batch.inputs[real], minlength=corpus.vocab_size)
    assert used == corpus.tokens
    stored = sum(np.bincount(piece, minlength=corpus.vocab_size) for piece in corpus.stream())
    assert (counts == stored).all()


@pytest.mark.slow
def test_the_embedded_corpus_keeps_its_own_splits(tokenizer: Path, tmp_path: Path) -> None:
    flags = ["--tokenizer", str(tokenizer), "--out", str(tmp_path / "out"), "--workers", "1"]
    assert run(parse(DataPrepareConfig, ["toyworld", *flags])) == 0
    assert decoded(tmp_path / "out", "train", tokenizer) == list(toyworld.documents("train"))
    assert decoded(tmp_path / "out", "val", tokenizer) == list(toyworld.documents("validation"))


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


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("manifest.json", '{"files": {}, "set": "gsm8k"}'),
        ("mixture.json", '{"drums": 1}'),
        ("progress/sources.json", '{"a": 1}'),
        ("progress", "a file"),
    ],
)
def test_a_folder_of_something_else_is_refused(tokenizer: Path, tmp_path: Path, name: str, text: str) -> None:
    out, a = tmp_path / "out", str(write(tmp_path / "a.jsonl", texts(20, 30)))
    (out / name).parent.mkdir(parents=True)
    (out / name).write_text(text)
    with pytest.raises(UserError, match=rf"{name} was not written by `ascendchat data prepare`.*--out"):
        run(parse(DataPrepareConfig, [a, "--tokenizer", str(tokenizer), "--out", str(out), "--workers", "1"]))
    assert (out / name).read_text() == text


@pytest.mark.slow
@pytest.mark.parametrize("given", ["folder", "pattern"])
def test_the_own_output_below_a_source_is_not_read(tokenizer: Path, tmp_path: Path, given: str) -> None:
    write(tmp_path / "a.jsonl", texts(20, 31))
    shutil.copytree(tokenizer, tmp_path / "tokenizer")
    source = str(tmp_path if given == "folder" else tmp_path / "**" / "*.json*")
    for extra in ([], [], ["--weights", "1"], ["--weights", "1"]):
        out = tmp_path / ("prepared" if not extra else "mixed")
        argv = [source, "--tokenizer", str(tmp_path / "tokenizer"), "--out", str(out), "--workers", "1", *extra]
        if extra:  # the first output is text of ours no longer
            shutil.rmtree(tmp_path / "prepared", ignore_errors=True)
        assert run(parse(DataPrepareConfig, argv)) == 0
        (corpus,) = [one for one, _ in open_corpora([out])]
        assert json.loads((corpus.folder / "manifest.json").read_text())["sources"][0]["name"] == "a.jsonl"
        assert len(json.loads((corpus.folder / "manifest.json").read_text())["sources"]) == 1


def test_sources_of_one_command_add_up_and_those_left_out_are_named(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = (str(write(tmp_path / f"{name}.jsonl", texts(20, seed))) for name, seed in (("a", 32), ("b", 33)))
    base = ["--tokenizer", str(tokenizer), "--out", str(tmp_path / "out"), "--workers", "1", "--val-fraction", "0"]
    assert run(parse(DataPrepareConfig, [a, "--source", b, *base])) == 0
    assert Corpus.open(tmp_path / "out").documents == 40
    assert "no longer" not in capsys.readouterr().out
    assert run(parse(DataPrepareConfig, [b, *base])) == 0
    assert Corpus.open(tmp_path / "out").documents == 20
    assert "a.jsonl is no longer part of" in capsys.readouterr().out


def test_a_number_of_workers_below_one_is_refused(tokenizer: Path, tmp_path: Path) -> None:
    a = str(write(tmp_path / "a.jsonl", texts(20, 34)))
    with pytest.raises(UserError, match="--workers 0"):
        prepare([a], tokenizer, tmp_path / "out", workers=0)


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
