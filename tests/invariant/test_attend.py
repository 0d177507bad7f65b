"""What a token sees: mid and sft keep to conversations by default, and a run that goes on keeps what it had."""

from __future__ import annotations

import json
import multiprocessing
import shutil
from pathlib import Path

import pytest

from ascendchat.cli import main
from ascendchat.config import load_yaml
from ascendchat.data.prepare import prepare
from ascendchat.data.tokenizer.tokenizer import train_tokenizer

SIZES = "--depth 2 --dim 32 --head-dim 16 --max-seq-len 64".split()
COMMON = "--device-batch-size 4 --total-batch-size 256 --device-type cpu --eval-every -1 --sample-every -1".split()
SEES = {"row": "a token sees the whole row before it", "document": "a token sees its own document only"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with a tiny base model of two steps."""
    folder = tmp_path_factory.mktemp("attend")
    texts = [f"the {a} tree and the {b} bird saw one old dog" for a in "abcdefgh" for b in "stuvwxyz"]
    chats = [[{"role": "user", "content": t}, {"role": "assistant", "content": t[::-1]}] for t in texts]
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    (folder / "chats.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    train_tokenizer(texts, 300).save(folder / "tokenizer")
    forked = multiprocessing.get_context("fork")  # a worker that starts anew imports for a second
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ascendchat.data.prepare.multiprocessing.get_context", lambda way: forked)
        prepare([str(folder / "text.jsonl")], folder / "tokenizer", folder / "words", val_fraction=0.1, workers=1)
        patch.setenv("ASCENDCHAT_HOME", str(folder))
        assert train(folder, "base") == 0
    return folder


@pytest.fixture
def home(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it for one test."""
    folder = Path(shutil.copytree(trained, tmp_path / "home"))
    monkeypatch.setenv("ASCENDCHAT_HOME", str(folder))
    return folder


def train(home: Path, stage: str, *more: str) -> int:
    if stage == "base":
        words = [*SIZES, "--data", str(home / "words"), "--steps", "2"]
    else:
        words = ["--data", str(home / "chats.jsonl"), "--steps", "3", "--save-every", "1"]
    return main([stage, *words, *COMMON, "--run", "r", *more])


def attend_of(home: Path, stage: str) -> object:
    return load_yaml(home / "runs" / "r" / stage / "config.yaml")["attend"]


def weights(home: Path) -> bytes:
    return (home / "runs" / "r" / "sft" / "step_000003" / "model.safetensors").read_bytes()


def goes_on(home: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    """What a run says that had been killed before its last step and goes on."""
    shutil.rmtree(home / "runs" / "r" / "sft" / "step_000003")
    capsys.readouterr()
    assert train(home, "sft", *more) == 0
    said = capsys.readouterr().out
    assert "continuing after step 2" in said
    return said


def test_conversations_see_only_themselves_by_default(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert attend_of(home, "base") == "row"
    assert train(home, "sft") == 0
    assert SEES["document"] in capsys.readouterr().out
    assert attend_of(home, "sft") == "document"


@pytest.mark.parametrize("recorded", [True, pytest.param(False, marks=pytest.mark.slow, id="an older run")])
def test_a_run_that_goes_on_sees_what_it_saw_unless_something_else_is_asked_for(
    home: Path, recorded: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(home, "sft", "--attend", "row") == 0
    assert SEES["row"] in capsys.readouterr().out
    whole, settings = weights(home), home / "runs" / "r" / "sft" / "config.yaml"
    if not recorded:
        lines = settings.read_text().splitlines()
        settings.write_text("\n".join(line for line in lines if not line.startswith("attend:")) + "\n")
    said = goes_on(home, capsys)
    assert SEES["row"] in said
    assert "continuing with --attend" not in said
    assert weights(home) == whole
    assert attend_of(home, "sft") == "row"
    if recorded:
        said = goes_on(home, capsys, "--attend", "document")
        assert SEES["document"] in said
        assert "continuing with --attend document; before, this run had row" in said
