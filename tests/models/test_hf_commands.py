"""`chat`, `eval chat`, `eval base` and `serve` open a Hugging Face folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import core_bundle
import hf_models
import pytest
import torch

from ascendchat.cli import main
from ascendchat.errors import home
from ascendchat.runs.console import inert

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A tiny Qwen2, as transformers made it."""
    folder = tmp_path_factory.mktemp("hf") / "tiny qwen"
    return folder, hf_models.save(folder)


@torch.no_grad()
def reply(theirs: Any, folder: Path, messages: list[dict[str, str]], count: int) -> str:
    """What transformers answers by itself."""
    tokenizer = hf_models.library().AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    row = theirs.generate(prompt, max_new_tokens=count, do_sample=False)
    return str(tokenizer.decode(row[0, prompt.size(1) :], skip_special_tokens=True))


def test_chat_answers_as_transformers_does(model: tuple[Path, Any], capsys: pytest.CaptureFixture[str]) -> None:
    folder, theirs = model
    asked = ["chat", "--model", str(folder), "-p", "What is seventeen plus?", "-t", "0", "--max-tokens", "12"]
    assert main([*asked, "--device-type", "cpu"]) == 0
    wanted = reply(theirs, folder, [{"role": "user", "content": "What is seventeen plus?"}], 12)
    assert capsys.readouterr().out.rstrip("\n") == inert(wanted).rstrip("\n")


def test_eval_chat_examines_it_and_keeps_the_results_under_its_name(
    model: tuple[Path, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["eval", "chat", "--model", str(model[0]), "--tasks", "toy_arithmetic_en,toy_choice_en"]
    asked += ["--max-per-task", "4"]
    assert main([*asked, "--max-new-tokens", "8", "--context", "200", "--device-type", "cpu", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["stage"] == "hf"
    assert all(task["rows"] == 4 for task in found["tasks"].values())
    rows = (home() / "runs" / "tiny-qwen" / "results.jsonl").read_text().splitlines()
    assert {json.loads(row)["stage"] for row in rows} == {"hf"}


def test_eval_base_scores_core_with_it(
    model: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    core_bundle.write_bundle(tmp_path / "core")
    asked = ["eval", "base", "--model", str(model[0]), "--eval", "core", "--bundle", str(tmp_path / "core")]
    assert main([*asked, "--max-per-task", "3", "--device-type", "cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["core"]["examples"] > 0


def test_a_context_beyond_what_the_model_knows_is_refused(
    model: tuple[Path, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["eval", "chat", "--model", str(model[0]), "--tasks", "toy_arithmetic_en", "--context", "5000"]
    assert main([*asked, "--device-type", "cpu"]) == 2
    assert "rows of 256 tokens" in capsys.readouterr().err


def test_stages_of_our_own_models_say_that_they_do_not_train_it(
    model: tuple[Path, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sft", "--start", str(model[0]), "--device-type", "cpu"]) == 2
    assert "`ascendchat sft` does not train; finetune and rl do" in capsys.readouterr().err
