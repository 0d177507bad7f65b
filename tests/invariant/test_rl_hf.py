"""`ascendchat rl` from a Hugging Face folder and back to one: a few steps of a tiny Qwen2."""

from __future__ import annotations

import shutil
from pathlib import Path

import hf_models
import pytest
import torch
from rl_runs import COMMON, result, rows_of, run_here
from safetensors.torch import load_file

from ascendchat.nn.attention import KERNELS, dense

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

STEPS = 6
REWARD = '''
def vowels(prompt, completion, **row):
    """Share of the letters that are vowels."""
    letters = [letter for letter in completion.lower() if letter.isalpha()]
    return sum(letter in "aeiou" for letter in letters) / max(1, len(letters))
'''


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Qwen2, functions that judge, and a whole run of it."""
    folder = tmp_path_factory.mktemp("rl-hf")
    (folder / "judges.py").write_text(REWARD, encoding="utf-8")
    hf_models.save(folder / "tiny", "qwen2", initializer_range=0.1)
    run_here(folder, rl("whole"))
    return folder


def rl(run: str, *more: str, steps: int = STEPS) -> list[str]:
    sizes = "--data toy_arithmetic_en --prompts-per-step 4 --samples 8 --max-new-tokens 16 --max-seq-len 128"
    often = COMMON.replace("--lr-multiplier 0.3", "--learning-rate 0.01")
    words = ["rl", "--model", "tiny", "--run", run, "--reward", "judges:vowels", "--steps", str(steps)]
    return [*words, "--save-every", "3", *sizes.split(), *often.split(), *more]


def test_a_qwen_learns_and_goes_back_to_a_folder_that_transformers_loads(home: Path) -> None:
    rows = rows_of(home, "whole")
    assert len(rows) == STEPS
    assert all(row["logprob_gap"] < 1e-4 for row in rows), "engine and trainer disagree"
    assert max(row["reward"] for row in rows[-2:]) > rows[0]["reward"] + 0.05
    run_here(home, ["export", "--run", "whole", "--out", "out", "--device-type", "cpu"])
    transformers = hf_models.library()
    theirs = transformers.AutoModelForCausalLM.from_pretrained(home / "out", dtype=torch.float32)
    assert transformers.AutoTokenizer.from_pretrained(home / "out").chat_template == hf_models.CHATML
    saved = load_file(home / f"runs/whole/rl/step_{STEPS:06d}/model.safetensors")
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, saved[name]), name
    assert not torch.equal(saved["lm_head.weight"], hf_models.opened(home / "tiny").model.head)
    ours, tokens = hf_models.opened(home / "out").model, torch.arange(5, 40)[None]
    with torch.no_grad():
        found = ours(tokens, dense(ours, KERNELS["sdpa"])) @ ours.head.t()
        torch.testing.assert_close(found, theirs(tokens).logits, atol=1e-4, rtol=1e-4)
    asked = "-p plus? -t 0 --max-tokens 8 --device-type cpu"
    run, folder = "chat --run whole --stage rl", "chat --model out"
    assert run_here(home, f"{run} {asked}".split()) == run_here(home, f"{folder} {asked}".split())


def test_a_run_that_is_resumed_ends_in_the_same_bytes(home: Path) -> None:
    before = result(home, "whole", STEPS)
    shutil.rmtree(home / f"runs/whole/rl/step_{STEPS:06d}")
    run_here(home, rl("whole"))
    assert result(home, "whole", STEPS) == before


def test_a_workflow_speaks_by_the_template_of_the_model(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ascendchat.rl.workflow.WORKERS", 1)  # each imports transformers
    run_here(home, rl("turns", "--workflow", "try-again", "--prompts-per-step", "2", steps=1))
    (row,) = rows_of(home, "turns")
    assert row["logprob_gap"] < 1e-4
    assert not row["rejected"]


def test_rates_of_the_other_kind_are_refused(home: Path) -> None:
    said = run_here(home, rl("x", "--matrix-lr", "0.1", steps=1), status=2)
    assert "--learning-rate is that of all" in said
