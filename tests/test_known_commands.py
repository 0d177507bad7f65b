"""What users of existing guides type is accepted word for word."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from ascendchat.cli import COMMANDS
from ascendchat.config import parse
from ascendchat.errors import home
from scripts import nanochat

ROOT = Path(__file__).resolve().parent.parent


def test_scripts_are_the_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []
    monkeypatch.setattr("scripts.nanochat.main", lambda argv: called.append(argv) or 0)
    for script in nanochat.COMMANDS:
        monkeypatch.setattr(sys, "argv", [script, "--flag"])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / "scripts" / f"{script}.py"), run_name="__main__")
        assert ended.value.code == 0
        assert called[-1] == [*nanochat.COMMANDS[script], "--flag"]
    assert {" ".join(words[:-1]) for words in called} == set(
        "tokenizer train,base,mid,sft,rl,eval base,eval chat,chat,serve".split(",")
    )


def model(run: str, stage: str, step: int) -> Path:
    """A checkpoint's folder, without its content."""
    folder = home() / "runs" / run / stage / f"step_{step:06d}"
    folder.mkdir(parents=True)
    (folder.parent / "latest").write_text(folder.name)
    return folder


@pytest.mark.parametrize(
    ("script", "typed", "expected"),
    [
        ("base_train", "--run=dummy --device-type= --num-iterations=-1 --total_batch_size -1 --depth=4", ["--depth=4"]),
        ("base_train", "--model-tag=d4 --run=mine --depth 4", ["--run=d4", "--depth=4"]),
        ("base_train", "--depth=10 --aspect-ratio=70 --head-dim=64", ["--depth=10", "--head-dim=64", "--dim=704"]),
        ("base_train", "--fp8 --depth 4 --save-every=-1", ["--fp8=true", "--depth=4", "--save-every=-1"]),
        ("mid_train", "--init_lr_frac=0.8 --dry_run=0 --dry-run", ["--lr-multiplier=0.8"]),
        ("mid_train", "--step=7", ["--start={home}/runs/new/base/step_000007"]),
        ("chat_sft", "--load-optimizer=1 --num-epochs 2", ["--epochs=2", "--load-optimizer"]),
        ("chat_sft", "--mmlu-epochs=1", ["--data=smoltalk,identity,identity,mmlu,gsm8k,gsm8k,gsm8k,gsm8k"]),
        ("chat_sft", "--source=base --model-tag=old", ["--run=old", "--start={home}/runs/old/base"]),
        ("base_eval", "--eval core,bpb,sample --split-tokens=99", ["--eval-tokens=99", "--eval=core,bpb"]),
        ("base_eval", "--model-tag old --step 7", ["--run=old", "--checkpoint={home}/runs/old/base/step_000007"]),
        (
            "chat_eval",
            "-i sft -a ARC-Easy|SpellingBee|GSM8K -x 5 -n 2 -t 0.5 -k 50",
            ["--max-per-task=5", "--samples=2", "--temperature=0.5", "--stage=sft", "--tasks=arc_easy,gsm8k"],
        ),
        ("chat_cli", "-i sft -g old -p hello", ["--run=old", "--prompt=hello", "--stage=sft"]),
        (
            "chat_web",
            "-n 2 -i sft -g old -t 0.8 -k 20 -m 256 -p 9000 -d bfloat16 --host 0.0.0.0",
            ["--devices=2", "--run=old", "--temperature=0.8", "--top-k=20", "--max-tokens=256", "--port=9000"]
            + ["--host=0.0.0.0", "--stage=sft"],
        ),
        ("tok_train", "--max-chars=1000 --doc-cap=10 text.txt", ["text.txt", "--max-chars=1000"]),
    ],
)
def test_flags_of_nanochat_in_our_words(script: str, typed: str, expected: list[str]) -> None:
    os.utime(model("old", "base", 7).parent / "latest", (1, 1))
    os.utime(home() / "runs" / "old" / "base" / "step_000007", (1, 1))
    model("new", "base", 7)
    assert nanochat.translate(script, typed.split()) == [word.format(home=home()) for word in expected]


@pytest.mark.parametrize(
    ("script", "typed", "said"),
    [
        ("base_train", "--depth", "--depth needs a value"),
        ("base_train", "--aspect-ratio wide", "is not a whole number"),
        ("mid_train", "--step 9", "there is no "),
        ("chat_sft", "--source mid", "there is no "),
    ],
)
def test_what_cannot_be_translated_is_said(
    script: str, typed: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [script, *typed.split()])
    assert nanochat.run(script) == 2
    assert said in capsys.readouterr().err


def test_the_tokenizer_is_trained_on_the_text_that_was_fetched() -> None:
    assert nanochat.translate("tok_train", ["--vocab-size=65536"]) == ["--vocab-size=65536"]
    (home() / "data" / "climbmix").mkdir(parents=True)
    assert nanochat.translate("tok_train", ["--max-chars", "9"]) == ["--max-chars=9", str(home() / "data" / "climbmix")]
    assert nanochat.translate("tok_train", ["own.txt"]) == ["own.txt"]


def test_a_flag_without_a_meaning_gets_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert nanochat.translate("base_train", ["--grad-clip=1.0", "--resume-from-step=-1"]) == []
    assert capsys.readouterr().err == (
        "nanochat: --grad-clip is not used: gradients are not clipped; a spike of the loss stops the run\n"
    )
    monkeypatch.setenv("RANK", "3")
    assert nanochat.translate("base_train", ["--grad-clip=1.0"]) == []
    assert capsys.readouterr().err == ""


SAMPLE = {
    "device-type": "cpu",
    "model-tag": "new",
    "run": "new",
    "window-pattern": "SSSL",
    "source": "base",
    "step": "7",
    "model-step": "7",
    "eval": "core,bpb,sample",
    "task-name": "MMLU",
    "prompt": "hello",
    "fp8": "true",
    "fp8-recipe": "tensorwise",
    "dtype": "bfloat16",
    "max-seq-len": "512",
    "num-samples": "4",
    "num-iterations": "5",
}


@pytest.mark.parametrize("script", nanochat.FLAGS)
def test_every_flag_of_the_table_is_accepted_and_unused_ones_say_so(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model("new", "base", 7)
    module, cls = COMMANDS[" ".join(nanochat.COMMANDS[script])][0].split(":")
    config = getattr(importlib.import_module(f"ascendchat.config.{module}"), cls)
    for name, flag in nanochat.FLAGS[script].items():
        for typed in (f"--{name}", f"--{name.replace('-', '_')}", *([f"-{flag.short}"] if flag.short else [])):
            words = nanochat.translate(script, [typed, SAMPLE.get(name, "1")])
            parse(config, words)
            assert bool(words) != bool(flag.unused), name
            assert (f"--{name} is not used: " in capsys.readouterr().err) == bool(flag.unused)
        for usual in flag.usual:
            assert nanochat.translate(script, [f"--{name}={usual}"]) == []


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_page_lists_the_flags_of_every_script_and_no_others(language: str) -> None:
    page = (ROOT / "docs" / language / "coming-from-nanochat.md").read_text(encoding="utf-8")
    for script, flags in nanochat.FLAGS.items():
        section = re.search(rf"^## scripts\.{script}$(.*?)(?=^## |\Z)", page, flags=re.M | re.S)
        assert section is not None, script
        first = "".join(re.findall(r"^\|([^|]*)\|", section[1], flags=re.M))
        assert sorted(re.findall(r"`--([a-z0-9-]+)`", first)) == sorted(flags)
        assert sorted(re.findall(r"`-([a-z])`", first)) == sorted(flag.short for flag in flags.values() if flag.short)
        unused = {flag for flag, what in flags.items() if what.unused}
        rows = re.findall(r"^\|([^|]*)\|(.*)\|$", section[1], flags=re.M)
        said = {
            f
            for cell, here in rows
            if re.search("not used|不使用", here)
            for f in re.findall(r"`--([a-z0-9-]+)`", cell)
        }
        assert said == unused


def test_a_worker_process_that_imports_a_script_does_not_start_it_again() -> None:
    for path in (ROOT / "scripts").glob("*_*.py"):
        runpy.run_path(str(path), run_name="__mp_main__")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch_npu") is None, reason="torch_npu is not installed here")
def test_an_npu_that_is_not_there_is_one_sentence_and_status_2() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    result = subprocess.run(
        [sys.executable, "-m", "scripts.base_train", "--device-type=npu"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert "set_env.sh" in result.stderr
