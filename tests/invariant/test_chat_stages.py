"""Mid-training and SFT: start from any earlier checkpoint, survive kill -9, and never meet a NaN."""

from __future__ import annotations

import json
import random
import shutil
import signal
from pathlib import Path

import commands
import pytest
from commands import sentence
from safetensors.torch import load_file

from ascendchat.cli import main
from ascendchat.config.finetune import FinetuneConfig
from ascendchat.data.prepare import prepare
from ascendchat.data.tokenizer.tokenizer import train_tokenizer
from ascendchat.runs.run import read_metrics
from ascendchat.train import finetune

STEPS = 6


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny base model, and conversations of which some are far longer than a row."""
    folder = tmp_path_factory.mktemp("chat")
    rng = random.Random(0)
    commands.prepare_texts(folder, commands.sentences(200))
    rows = []
    for number in range(60):
        long = 600 if number % 10 == 0 else 8
        turns = [("user", sentence(rng, long)), ("assistant", sentence(rng, long))]
        rows.append({"messages": [{"role": role, "content": content} for role, content in turns]})
    commands.write_lines(folder / "chats.jsonl", rows)
    sizes = {"depth": 2, "dim": 32, "head-dim": 16, "max-seq-len": 64, "device-batch-size": 4, "total-batch-size": 512}
    flags = [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    finish(folder, ["base", *flags, "--data", str(folder / "words"), "--run", "tiny", "--num-iterations", "4"])
    return folder


QUIET = ["--device-type", "cpu", "--sample-every", "0", "--log-every", "1"]


def finish(home: Path, words: list[str], status: int = 0) -> str:
    return commands.finish(home, [*words, *QUIET], status)


def stage(home: Path, name: str, start_from: str, *more: str) -> list[str]:
    sizes = f"--device-batch-size 4 --total-batch-size 512 --num-iterations {STEPS} --save-every 2 --eval-every 3"
    return [name, "--data", str(home / "chats.jsonl"), "--start", start_from, *sizes.split(), *more]


@pytest.fixture(scope="module")
def sft(home: Path) -> str:
    """What a run says that nothing disturbs; it has the name `whole`."""
    return finish(home, stage(home, "sft", "tiny", "--run", "whole"))


def final(home: Path, run: str, name: str) -> dict[str, bytes]:
    tensors = load_file(home / "runs" / run / name / f"step_{STEPS:06d}" / "model.safetensors")
    return {key: tensor.numpy().tobytes() for key, tensor in tensors.items()}


def test_conversations_longer_than_a_row_are_counted_and_give_no_nan(home: Path, sft: str) -> None:
    """The run is that with which a killed one is compared."""
    assert f"starting from {home / 'runs' / 'tiny' / 'base'}" in sft
    assert " too long " in sft
    assert " 0 too long" not in sft
    rows = read_metrics(home / "runs" / "whole" / "sft")
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == STEPS
    assert all(0 < loss < 10 for loss in losses)
    assert min(losses) < losses[0] - 0.05
    assert all(0 < row["val_loss"] < 10 for row in rows if "val_loss" in row)


def test_data_is_shown_as_the_model_sees_it_and_nothing_is_trained(home: Path) -> None:
    info = {"mine": {"file_name": "chats.jsonl", "formatting": "openai", "columns": {"messages": "messages"}}}
    (home / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")
    words = ["sft", "--start", "tiny", "--run", "shown", "--data", f"mine,{home / 'words'}", "--preview", "2"]
    output = finish(home, [*words, "--dataset-dir", str(home)])
    assert f"--- {home}/mine, row 2: " in output
    assert output.count("<|assistant_end|>]]") >= 1
    assert f"--- {home}/words, row 2: 64 tokens, 63 learnt" in output
    assert not (home / "runs" / "shown").exists()


@pytest.mark.slow
def test_a_killed_stage_ends_with_the_same_weights(home: Path, sft: str) -> None:
    words = stage(home, "sft", "tiny", "--run", "killed")
    status, said = commands.signalled(home, [*words, *QUIET], 5, signal.SIGKILL)
    assert status == -signal.SIGKILL, said
    assert "continuing after step" in finish(home, words)
    assert final(home, "killed", "sft") == final(home, "whole", "sft")


def test_a_start_that_does_not_exist_and_a_foreign_tokenizer_are_refused(home: Path, tmp_path: Path) -> None:
    output = finish(home, stage(home, "sft", "nothing"), status=2)
    assert "no checkpoint to start from" in output
    assert "ascendchat base --run NAME" in output
    train_tokenizer([sentence(random.Random(5), 50)], 280).save(tmp_path / "other")
    output = finish(home, stage(home, "sft", "tiny", "--run", "x", "--tokenizer", str(tmp_path / "other")), status=2)
    assert "was not trained with the tokenizer in" in output
    assert "Traceback" not in output


@pytest.mark.slow
def test_sft_prefers_the_mid_trained_model_of_its_run_and_carries_its_tokenizer_anywhere(
    home: Path, tmp_path: Path
) -> None:
    text = ["--data", str(home / "words"), "--num-iterations", "2"]
    finish(home, stage(home, "mid", "tiny", "--run", "chain", *text))
    shutil.copytree(home / "runs" / "chain", tmp_path / "runs" / "moved")
    shutil.copy(home / "chats.jsonl", tmp_path)
    output = finish(tmp_path, stage(tmp_path, "sft", "moved", "--run", "moved", "--num-iterations", "1"))
    assert f"starting from {tmp_path / 'runs' / 'moved' / 'mid'}" in output
    assert (tmp_path / "runs" / "moved" / "sft" / "tokenizer" / "bpe.json").is_file()


@pytest.mark.slow
def test_a_few_conversations_are_enough(home: Path, tmp_path: Path) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text("\n".join((home / "chats.jsonl").read_text().splitlines()[1:4]), encoding="utf-8")
    output = finish(home, stage(home, "sft", "tiny", "--run", "few", "--data", str(few), "--num-iterations", "1"))
    assert "too small to keep some for validation" in output
    assert "val_loss" in output


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--gradient-accumulation-steps", "7"], "does not fit --total-batch-size 512"),
        (["--gradient-accumulation-steps", "0"], "--gradient-accumulation-steps must be at least 1"),
        (["--keep", "-1"], "--keep must be at least 1"),
        (["--data", "{chats}=0.5,{words}"], "a weight, or none"),
        (["--data", "{chats}=much"], "is not a weight"),
        (["--data", "{chats}=-1"], "must be greater than 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    home: Path, flags: list[str], text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASCENDCHAT_HOME", str(home))
    words = [word.format(chats=home / "chats.jsonl", words=home / "words") for word in flags]
    assert main([*stage(home, "sft", "tiny", "--run", "odd", "--device-type", "cpu"), *words]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.slow
def test_evaluation_questions_in_the_mixture_are_reported_in_the_run(home: Path, tmp_path: Path) -> None:
    chats = [json.loads(line)["messages"] for line in (home / "chats.jsonl").read_text().splitlines()]
    exam = [{"question": ask["content"], "answer": f"{reply['content']} #### 1"} for ask, reply in chats[1:6]]
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "test.jsonl").write_text("\n".join(map(json.dumps, exam)), encoding="utf-8")
    output = finish(
        home, stage(home, "sft", "tiny", "--run", "leaks", "--source", str(tmp_path), "--num-iterations", "1")
    )
    assert "gsm8k: 5 of 5 test questions are in the mixture (chats train 5)\n" in output
    assert output.count("  gsm8k test row") == 3
    assert len((home / "runs" / "leaks" / "sft" / "overlaps.txt").read_text().splitlines()) == 5


@pytest.mark.slow
def test_a_warm_start_goes_on_with_the_moments_and_their_count(home: Path) -> None:
    finish(home, stage(home, "sft", "tiny", "--run", "warm", "--load-optimizer", "--num-iterations", "2"))
    state = json.loads((home / "runs" / "warm" / "sft" / "step_000002" / "state.json").read_text())
    assert state["updates"] == 4 + 2


@pytest.mark.slow
def test_base_trains_on_a_single_text_without_validation(home: Path, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text(sentence(random.Random(1), 3000), encoding="utf-8")
    prepare([str(tmp_path / "book.txt")], home / "tokenizer", tmp_path / "book", workers=1)
    sizes = "--depth 2 --dim 32 --head-dim 16 --max-seq-len 64 --device-batch-size 4 --total-batch-size 512"
    output = finish(
        home, ["base", *sizes.split(), "--data", str(tmp_path / "book"), "--num-iterations", "2", "--run", "book"]
    )
    assert "no validation text" in output
    assert "step 2/2" in output


@pytest.mark.slow
def test_text_alone_is_validated_in_bits_per_byte(home: Path) -> None:
    finish(home, stage(home, "sft", "tiny", "--run", "text", "--data", str(home / "words")))
    rows = read_metrics(home / "runs" / "text" / "sft")
    assert not any("val_loss" in row for row in rows)
    bits = [row["bpb"] for row in rows if "bpb" in row]
    assert bits[0] > bits[-1] > 0
    best = (home / "runs" / "text" / "sft" / "best").read_text().split()
    assert float(best[1]) == min(bits)


@pytest.mark.slow
def test_a_model_of_ours_learns_from_pairs_too(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(1)
    rows = [{"prompt": sentence(rng, 6), "chosen": "red red tree", "rejected": sentence(rng, 5)} for _ in range(60)]
    (home / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    monkeypatch.setenv("ASCENDCHAT_HOME", str(home))
    config = FinetuneConfig(
        start="tiny",
        run="paired",
        data=(str(home / "pairs.jsonl"),),
        num_iterations=8,
        device_batch_size=8,
        total_batch_size=512,
        stage="dpo",
        lr_multiplier=0.9,
        device_type="cpu",
    )
    assert finetune.run(config) == 0
    found = [row for row in read_metrics(home / "runs" / "paired" / "hf") if "loss" in row]
    assert found[0]["loss"] == pytest.approx(0.6931, abs=1e-3)
    assert found[-1]["loss"] < 0.65
    assert found[-1]["accuracy"] > 0.9
