"""Learning from pairs: packed and chunked as by the definition, exactly resumed, the same on several ranks."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import hf_models
import pytest
import torch
import warm_process
from preference_runs import STEPS, config_of, train, write_pairs

from ascendchat.data.chat.pairs import PairLoader
from ascendchat.errors import UserError
from ascendchat.nn.preference import Pairs, preference
from ascendchat.processes import free_port
from ascendchat.runs.run import checkpoints, read_metrics
from ascendchat.tasks.pair_mixture import open_pair_mixture
from ascendchat.train.finetune import run as finetune_run
from ascendchat.train.preference import PreferenceStage, batch_and_steps, method_of, weights_of
from ascendchat.train.run import training_context
from ascendchat.train.start import initial_model

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Qwen2 and 60 pairs."""
    folder = tmp_path_factory.mktemp("pairs")
    hf_models.save(folder / "tiny", "qwen2", initializer_range=0.1, num_hidden_layers=2)
    write_pairs(folder / "pairs.jsonl")
    return folder


@pytest.fixture(scope="module")
def whole(place: Path) -> Path:
    """A run of DPO that was left alone, in a process of its own: what other tests have set does not matter there."""
    assert ran(place, "whole", how=subprocess.Popen).returncode == 0
    return place / "runs" / "whole" / "hf"


def ran(
    place: Path, run: str, *words: str, how: Any = warm_process.TheirsPopen, **variables: str
) -> subprocess.CompletedProcess[str]:
    """A run of DPO in a process of its own."""
    script = Path(__file__).with_name("preference_runs.py")
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1", **variables}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    command = [sys.executable, str(script), str(place), run, "dpo", *words]
    return warm_process.run(command, how=how, env=environment, timeout=600, capture_output=True, text=True)


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return [row for row in read_metrics(folder) if "loss" in row]


@pytest.mark.parametrize("method", ["dpo", "orpo", "simpo"])
def test_a_packed_step_has_the_loss_and_the_gradients_of_its_pairs_one_by_one(place: Path, method: str) -> None:
    """By transformers alone, all logits at once, each sequence by itself; the reference is another model."""
    config = config_of(place, "x", method, attend="document", pref_ftx=0.1)
    theirs = hf_models.network("qwen2", initializer_range=0.1, num_hidden_layers=2)
    with training_context(config) as here:
        begin = initial_model(config, here, "rl")
        model = begin.train_model.model
        mixture = open_pair_mixture(config.data, begin.tokenizer, 96, say=lambda line: None)
        split, steps = batch_and_steps(config, model.shape, here.device, mixture)
        stage = PreferenceStage(method, begin.train_model, split, steps, mixture, begin.tokenizer, config, begin.source)
        total = sum(rows.pairs for rows in mixture.every)
        if method == "dpo":
            stage.reference = stage.reference_table() + torch.randn(
                total, 2, generator=torch.Generator().manual_seed(1)
            )
        batches = list(stage.micro_batches(1))
        found = [stage.forward_backward(batch, scale=2.0) for batch in batches]
        numbers = [n for batch in split_batches(stage, 1) for n in batch.number]
    assert len(batches) > 1
    assert any(len(batch.chosen) > 1 for batch in batches), "nothing is packed"
    rows, sums, tokens = mixture.sources[0][0], [], []
    for number in numbers:
        for ids, mask in rows.pair(number):
            row = torch.tensor([ids])
            logprobs = torch.log_softmax(theirs(row).logits[0, :-1].double(), -1)
            learnt = torch.tensor(mask[1:]) == 1
            sums.append(logprobs.gather(-1, row[0, 1:, None]).squeeze(-1)[learnt].sum())
            tokens.append(float(learnt.sum()))
    chosen, rejected = torch.stack(sums).view(-1, 2).unbind(1)
    counts = torch.tensor(tokens).view(-1, 2).double()
    known = () if stage.reference is None else stage.reference[numbers].double().unbind(1)
    plain = preference(method, Pairs(chosen, rejected, *counts.unbind(1), *known), weights_of(method, config))
    wanted = plain.loss.mean() * 2.0
    assert sum(loss.value.item() for loss in found) == pytest.approx(wanted.item(), rel=1e-4)
    margin = sum(loss.metrics["margin"].item() for loss in found)
    assert margin == pytest.approx((plain.chosen - plain.rejected).mean().item(), rel=1e-3)
    wanted.backward()
    gradients = dict(theirs.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name].grad, atol=2e-4, rtol=2e-3)


def split_batches(stage: PreferenceStage, step: int) -> list[Any]:
    mine = stage.split.rows * stage.split.accumulation
    return [PairLoader(stage.mixture.sources, mine).batch(step)]


@pytest.mark.slow
def test_dpo_begins_at_the_logarithm_of_two_and_learns_to_prefer(whole: Path) -> None:
    rows = steps_of(whole)
    assert len(rows) == STEPS
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert rows[0]["margin"] == pytest.approx(0.0, abs=1e-5)
    assert rows[-1]["loss"] < 0.6
    assert rows[-1]["accuracy"] > 0.8
    assert rows[-1]["margin"] == pytest.approx(rows[-1]["reward_chosen"] - rows[-1]["reward_rejected"], abs=1e-5)
    held = [row for row in read_metrics(whole) if "val_loss" in row]
    assert [row["step"] for row in held] == [4, 8]
    assert held[-1]["val_accuracy"] == 1.0
    assert held[-1]["val_loss"] < held[0]["val_loss"] < math.log(2)
    assert (whole / "best").read_text().startswith("step_000008")
    assert (whole / "huggingface" / "config.json").is_file()
    assert json.loads((whole / "step_000008" / "state.json").read_text())["method"] == "dpo"


@pytest.mark.parametrize("method", ["orpo", "simpo"])
def test_losses_without_a_reference_keep_none(place: Path, method: str) -> None:
    """With the settings of the optimizer that were given."""
    more = {"lr_scheduler_type": "constant", "max_grad_norm": 0.25, "warmup_steps": 2, "num_iterations": 4}
    assert train(place, method, method, **more) == 0
    folder = place / "runs" / method / "hf"
    rows = steps_of(folder)
    assert [row["lr_scale"] for row in rows] == [0.5, 1.0, 1.0, 1.0]
    assert [row["clip"] for row in rows] == [0.25] * 4
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert rows[-1]["margin"] > rows[0]["margin"]
    assert not list(folder.glob("reference*"))


@pytest.mark.slow
def test_the_reference_is_read_again_and_a_damaged_one_made_anew(
    place: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = whole / "reference.safetensors"
    kept = path.read_bytes()
    assert train(place, "whole", "dpo") == 0
    assert f"read from {path}" in capsys.readouterr().out
    path.write_bytes(kept[:-5] + b"wrong")
    (whole / "step_000008").rename(whole / "gone")
    assert "computed once" in ran(place, "whole").stdout
    assert path.read_bytes() == kept, "by the weights that the run began with, not by those of the checkpoint"
    same = [(whole / step / "model.safetensors").read_bytes() for step in ("gone", "step_000008")]
    assert same[0] == same[1], "and the run goes on exactly as before"


@pytest.mark.slow
def test_the_reference_of_a_model_with_another_config_is_another_one(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "tiny"
    shutil.copytree(place / "tiny", model)
    more = {"num_iterations": 1, "start": str(model), "resume": "never"}
    found = []
    for eps in (1e-6, 1e-2):
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "rms_norm_eps": eps}))
        os.environ["ASCENDCHAT_HOME"] = str(place)
        assert finetune_run(replace(config_of(place, "config", "dpo"), **more)) == 0
        found.append("computed once" in capsys.readouterr().out)
    assert found == [True, True]


@pytest.mark.slow
def test_a_run_that_is_killed_ends_in_the_same_bytes(place: Path, whole: Path) -> None:
    assert ran(place, "killed", "5").returncode == -signal.SIGKILL
    folder = place / "runs" / "killed" / "hf"
    assert checkpoints(folder)[-1] == 3
    assert ran(place, "killed").returncode == 0
    for file in ("step_000008/model.safetensors", "step_000008/optim-0-of-1.safetensors", "reference.safetensors"):
        assert (folder / file).read_bytes() == (whole / file).read_bytes(), file
    names = "step", "loss", "accuracy", "margin", "gradient_norm"
    first, second = ([tuple(row[name] for name in names) for row in steps_of(run)] for run in (whole, folder))
    assert first == second


@pytest.mark.slow
def test_two_ranks_train_like_one_and_a_run_moves_between_them(place: Path, whole: Path) -> None:
    one = steps_of(whole)
    job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with ThreadPoolExecutor(2) as threads:
        ranks = threads.map(lambda n: ran(place, "ranks", RANK=str(n), LOCAL_RANK=str(n), **job), range(2))
    assert [rank.returncode for rank in ranks] == [0, 0]
    two = steps_of(place / "runs" / "ranks" / "hf")
    for name in ("loss", "margin", "accuracy", "gradient_norm"):
        assert [row[name] for row in two] == pytest.approx([row[name] for row in one], rel=2e-3, abs=2e-4), name
    folder = place / "runs" / "ranks" / "hf"
    shutil.rmtree(folder / "step_000008")
    assert train(place, "ranks", "dpo") == 0, "goes on alone from step 6, which two ranks have saved"
    rows = steps_of(folder)
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in one], rel=2e-3, abs=2e-4)


@pytest.mark.slow
def test_adapters_and_all_weights_are_other_runs_and_a_model_is_never_taken_for_another(
    place: Path, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    out = tmp_path / "out"
    more = {"num_iterations": 2, "output_dir": str(out)}
    assert train(place, "small", "orpo", lora=True, **more) == 0
    assert train(place, "small", "orpo", lora=True, **more) == 0, "a finished run has its folder already"
    with pytest.raises(UserError, match="was written with lora"):
        train(place, "small", "orpo", **more)
    with pytest.raises(UserError, match="is not empty"):
        train(place, "small", "orpo", lora=True, resume="never", **more)


def test_pairs_are_shown_and_nothing_is_trained(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(place, "shown", "dpo", preview=1) == 0
    found = capsys.readouterr().out
    assert "pair 1, rejected: " in found
    assert "<|im_start|>assistant\nsystem<|im_end|>" in found, "an earlier turn of the assistant is not learnt"
    assert "<|im_start|>assistant\n[[The answer is seventeen<|im_end|>]]" in found
    assert not (place / "runs" / "shown").exists()


def test_what_makes_no_sense_is_refused_in_one_sentence(place: Path) -> None:
    with pytest.raises(UserError, match="name the pairs to learn from"):
        finetune_run(replace(config_of(place, "x", "dpo"), data=()))
    with pytest.raises(UserError, match="the replies of a pair would see each other"):
        train(place, "x", "dpo", attend="row")
    with pytest.raises(UserError, match="stage simpo and pref_loss orpo differ"):
        train(place, "x", "simpo", pref_loss="orpo")
    assert method_of(config_of(place, "x", "dpo", pref_loss="orpo")) == "orpo"
