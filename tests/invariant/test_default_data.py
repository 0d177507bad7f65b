"""What `base`, `mid` and `sft` train on when no --data is given."""

from __future__ import annotations

import json
import multiprocessing
from itertools import islice
from pathlib import Path

import pytest

from ascendchat.cli import main
from ascendchat.config import load_yaml
from ascendchat.data import toyworld
from ascendchat.data.prepare import prepare
from ascendchat.data.tokenizer.tokenizer import train_tokenizer

TINY = "--depth 1 --dim 16 --max-seq-len 32 --device-batch-size 2 --total-batch-size 64 --steps 1 --run h".split()
QUIET = "--device-type cpu --eval-every -1 --sample-every -1".split()
STAGE = "--device-batch-size 2 --total-batch-size 64 --steps 1 --run h".split()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new home, and a small part of the embedded corpus: all of it takes seconds to learn from and to prepare."""
    told, read, talks = toyworld.documents, toyworld.texts, toyworld.chats
    monkeypatch.setattr(toyworld, "documents", lambda split: islice(told(split), 60))
    monkeypatch.setattr(toyworld, "texts", lambda: islice(read(), 300))
    monkeypatch.setattr(toyworld, "chats", lambda *given, **more: islice(talks(*given, **more), 50))
    forked = multiprocessing.get_context("fork")  # a worker that starts anew imports for a second
    monkeypatch.setattr("ascendchat.data.prepare.multiprocessing.get_context", lambda way: forked)
    monkeypatch.setenv("ASCENDCHAT_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def words(home: Path, out: str) -> str:
    """A corpus of the user's own, and its tokenizer where it is looked for."""
    texts = [f"the {a} tree under the {b} river sings" for a in "abcdef" for b in "uvwxyz"]
    (home / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    train_tokenizer(texts, 300).save(home / "tokenizer")
    prepare([str(home / "text.jsonl")], home / "tokenizer", home / out, val_fraction=0.1, workers=1)
    return str(home / out)


def data_of(home: Path, stage: str) -> list[str]:
    found: list[str] = load_yaml(home / "runs" / "h" / stage / "config.yaml")["data"]
    return found


def test_a_run_too_long_for_the_embedded_corpus_is_told_how_to_get_text(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags in ([], ["--depth", "12"], ["--depth", "2", "--steps", "100000"], ["--tokens", "1e9"]):
        assert main(["base", "--device-type", "cpu", *flags]) == 2
        said = capsys.readouterr().err
        assert "ascendchat data fetch climbmix --shards" in said
        assert "ascendchat data prepare climbmix" in said
        assert "--data toyworld" in said
        assert not (home / "data").exists()


@pytest.mark.slow
def test_a_tiny_run_takes_the_embedded_corpus_and_its_stages_the_embedded_talk(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["base", *TINY, *QUIET]) == 0
    assert "no --data given: preparing the embedded corpus" in capsys.readouterr().out
    assert data_of(home, "base") == [str(home / "data" / "toyworld")]
    assert main(["mid", *STAGE, *QUIET]) == 0
    assert main(["sft", *STAGE, *QUIET]) == 0
    assert data_of(home, "mid") == data_of(home, "sft") == ["toyworld"]


@pytest.mark.slow
def test_the_embedded_corpus_by_name_is_never_refused(home: Path) -> None:
    own = words(home, "own")  # so the tokenizer is another one than usual
    assert main(["base", *TINY, *QUIET, "--data", f"toyworld=0.25,{own}=0.75", "--target-param-data-ratio", "1e5"]) == 0
    assert data_of(home, "base") == [f"{home / 'data' / 'toyworld'}=0.25", f"{own}=0.75"]
    train_tokenizer(["another tokenizer entirely"] * 9, 290).save(home / "tokenizer")
    assert main(["base", *TINY, *QUIET, "--data", "toyworld", "--resume", "never"]) == 0  # prepared again with it


def test_what_data_prepare_wrote_by_default_is_found(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepared = words(home, "data/prepared")
    assert main(["base", *TINY, *QUIET, "--depth", "5"]) == 0
    assert data_of(home, "base") == [prepared]
    assert f"no --data given: {prepared}" in capsys.readouterr().out


@pytest.mark.slow
def test_a_model_of_other_text_takes_the_published_conversations(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stage = "sft"  # of `mid` test_tasks_mixture.py asks the same
    assert main(["base", *TINY, *QUIET, "--data", words(home, "own")]) == 0
    assert main([stage, *STAGE, *QUIET]) == 2
    assert "`ascendchat data fetch smoltalk mmlu gsm8k identity`" in capsys.readouterr().err
    talk = [{"role": "user", "content": "the a tree"}, {"role": "assistant", "content": "under the b river"}]
    local = home / "sets"
    for name, row in {
        "smoltalk": {"messages": talk},
        "identity": {"messages": talk},
        "gsm8k": {"question": "1 + 1?", "answer": "#### 2"},
        "mmlu": {"question": "the tree", "choices": ["a", "b", "c", "d"], "answer": 1},
    }.items():
        (local / name).mkdir(parents=True)
        (local / name / "train.jsonl").write_text("\n".join([json.dumps(row)] * 8))
    assert main([stage, *STAGE, *QUIET, "--source", str(local)]) == 0
    assert set(data_of(home, stage)) == {"smoltalk", "mmlu", "gsm8k", "identity"}
    assert main([stage, *STAGE, *QUIET, "--data", "toyworld", "--resume", "never"]) == 0
