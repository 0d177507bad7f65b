"""`ascendchat finetune`: the same steps as a plain loop of transformers, torch and peft; what a run leaves behind."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hf_models
import numpy as np
import pytest
import torch

from ascendchat.checkpoint import newest
from ascendchat.cli import main
from ascendchat.data.mixture import MixtureLoader
from ascendchat.errors import NotSaved, UserError, home
from ascendchat.nn import IGNORE
from ascendchat.nn.attention import KERNELS, dense
from ascendchat.nn.optim import muon_groups
from ascendchat.runs.run import read_metrics
from ascendchat.sizes.schedule import finetuning_scale
from ascendchat.tasks.chat_mixture import EntryOptions, open_chat_mixture
from ascendchat.train import finetune

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, ROWS, LENGTH = 4, 2, 96
LAYERS = 2
TOKENS = torch.arange(5, 40)[None]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2, sums to learn, and pairs of a right and a wrong answer."""
    return hf_models.save_with_sums(tmp_path_factory.mktemp("finetune"), num_hidden_layers=LAYERS)


def words(place: Path, run: str, *more: str) -> list[str]:
    sizes = f"--max-seq-len {LENGTH} --device-batch-size {ROWS} --steps {STEPS} --learning-rate 0.01 --val-size 0.1"
    pace = "--save-every 2 --eval-every 2 --sample-every 0 --log-every 1 --warmup-steps 2 --device-type cpu"
    named = ["finetune", "--model", str(place / "tiny"), "--data", str(place / "sums.jsonl"), "--run", run]
    return [*named, *sizes.split(), *pace.split(), *more]


def plain_losses(place: Path, model: Any, decay: float) -> list[float]:
    """The same steps without us: conversations one by one, transformers' loss, torch's AdamW and clipping."""
    opened = hf_models.opened(place / "tiny", LENGTH)
    mixture = open_chat_mixture(
        (str(place / "sums.jsonl"),), "sft", opened.tokenizer, LENGTH, say=lambda _: None, options=EntryOptions(0.1)
    )
    batches = MixtureLoader(mixture.sources, ROWS)
    learns = [parameter for parameter in model.parameters() if parameter.requires_grad]
    parts = [[p for p in learns if p.dim() > 1], [p for p in learns if p.dim() <= 1]]
    grouped = [{"params": part, "weight_decay": d} for part, d in zip(parts, (decay, 0.0)) if part]
    optimizer = torch.optim.AdamW(grouped, lr=0.01, betas=(0.9, 0.999), eps=1e-8)
    losses = []
    for step in range(STEPS):
        batch = batches.batch(step)
        inputs, targets = (torch.from_numpy(array).view(-1) for array in (batch.inputs, batch.targets))
        count = int((targets != IGNORE).sum())
        total = torch.zeros(())
        for begin, end in zip(np.cumsum([0, *batch.lengths[:-1]]), np.cumsum(batch.lengths)):
            if (targets[begin:end] != IGNORE).any():
                logits = model(inputs[None, begin:end]).logits[0]
                total = total + torch.nn.functional.cross_entropy(
                    logits, targets[begin:end], ignore_index=IGNORE, reduction="sum"
                )
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(learns, 1.0)
        scale = (step + 1) / 2 if step < 2 else 0.5 * (1 + math.cos(math.pi * (step - 2) / (STEPS - 2)))
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * scale
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total.detach()) / count)
    return losses


def our_losses(run: str) -> list[float]:
    return [row["loss"] for row in read_metrics(home() / "runs" / run / "hf") if "loss" in row]


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    """Of one of our adapters."""
    found: torch.Tensor = model(TOKENS, dense(model, KERNELS["sdpa"])) @ model.head.t()
    return found


@pytest.mark.slow
def test_full_fine_tuning_takes_the_steps_of_a_plain_loop(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words(place, "full", "--weight-decay", "0.1", "--output-dir", str(place / "whole"))) == 0
    said = capsys.readouterr().out
    model = hf_models.library().AutoModelForCausalLM.from_pretrained(place / "tiny", dtype=torch.float32).train()
    assert our_losses("full") == pytest.approx(plain_losses(place, model, 0.1), rel=2e-4)
    trained = hf_models.library().AutoModelForCausalLM.from_pretrained(place / "whole", dtype=torch.float32)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(trained.state_dict()[name], tensor, atol=2e-4, rtol=2e-3, msg=name)
    for written in (place / "whole", home() / "runs" / "full" / "hf" / "huggingface"):  # in the words of version 4 too
        config = json.loads((written / "config.json").read_text())
        assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
        assert config["torch_dtype"] == config["dtype"] == "float32"
    rows = [row["val_loss"] for row in read_metrics(home() / "runs" / "full" / "hf") if "val_loss" in row]
    assert rows[-1] < float(said.split("held-out loss before: ")[1].split()[0])
    saved = newest(home() / "runs" / "full" / "hf")
    assert saved is not None
    assert saved.step == STEPS
    assert (home() / "runs" / "full" / "hf" / "best").is_file()


@pytest.mark.parametrize("fused", [[], ["RMSNorm x 4"]], ids=["plain", "fused"])
def test_a_model_is_in_training_mode_from_the_first_step_and_compiled_unless_it_has_fused_operators(
    fused: list[str], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin(stage: Any, *_: Any, **__: Any) -> int:
        assert all(module.training for module in stage.model.modules()), "activations are recomputed in this mode only"
        assert stage.model.compiles_layers is not bool(fused)
        return 0

    monkeypatch.setattr("ascendchat.models.open.fuse", lambda *_: fused)
    monkeypatch.setattr("ascendchat.train.finetune.train_stage", begin)
    assert main([*words(place, "modes"), "--val-size", "0"]) == 0


def test_samples_that_fail_cost_no_trained_model(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> list[str]:
        raise RuntimeError("no such slice\nat dimension 0")

    monkeypatch.setattr("ascendchat.train.rows.RowStage.sample", fail)
    told = [*words(place, "unseen", "--val-size", "0"), "--steps", "1", "--sample-every", "1"]
    assert main([*told, "--output-dir", str(place / "unseen")]) == 0
    assert "no samples of step 1: RuntimeError: no such slice\n" in capsys.readouterr().out
    assert (place / "unseen" / "model.safetensors").is_file()


@pytest.mark.slow
def test_lora_takes_the_steps_of_a_plain_loop_of_peft_and_goes_back_to_it(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plain LoRA, where the base is in 4 bits: test_qlora.py."""
    import peft

    run, cpu = "dora", ["--device-type", "cpu"]
    assert main(words(place, run, "--lora", "--lora-rank", "4", "--use-dora", "--use-rslora")) == 0
    base = hf_models.library().AutoModelForCausalLM.from_pretrained(place / "tiny", dtype=torch.float32)
    rank = {"r": 4, "lora_alpha": 8, "use_dora": True, "use_rslora": True}
    settings = peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM", **rank)
    torch.manual_seed(0)
    model = peft.get_peft_model(base, settings).train()
    assert our_losses(run) == pytest.approx(plain_losses(place, model, 0.0), rel=2e-4)
    assert main(["export", "--run", run, "--adapter", "--out", str(place / f"{run}-adapter"), *cpu]) == 0
    assert main(["export", "--run", run, "--out", str(place / f"{run}-merged"), *cpu]) == 0
    again = hf_models.library().AutoModelForCausalLM.from_pretrained(place / "tiny", dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(again, place / f"{run}-adapter").eval()
    merged, untouched = (
        hf_models.library().AutoModelForCausalLM.from_pretrained(place / name, dtype=torch.float32).eval()
        for name in (f"{run}-merged", "tiny")
    )
    with torch.no_grad():
        wanted, plain = adapted(TOKENS).logits, base.eval()(TOKENS).logits
        torch.testing.assert_close(merged(TOKENS).logits, wanted, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(wanted, plain, atol=1e-3, rtol=1e-2)  # as trained by the plain loop
        assert (untouched(TOKENS).logits - wanted).abs().max() > 0.1
    torch.testing.assert_close(logits_of(hf_models.opened(place / f"{run}-merged").model), wanted, atol=1e-4, rtol=1e-4)
    capsys.readouterr()
    asked = ["-p", "What is 3 plus 4?", "-t", "0", "--max-tokens", "8", *cpu]
    assert main(["chat", "--run", run, *asked]) == 0
    of_the_run = capsys.readouterr().out
    assert main(["chat", "--model", str(place / f"{run}-merged"), *asked]) == 0
    assert capsys.readouterr().out == of_the_run


@pytest.mark.slow
def test_a_checkpoint_of_lora_holds_adapters_alone_and_knows_its_base(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = place / "copy"
    hf_models.save(copy, "qwen2", initializer_range=0.1)
    named = ["--model", str(copy), "--lora", "--lora-target", "q_proj,v_proj", "--steps", "1", "--lora-dropout", "0.5"]
    assert main([*words(place, "small"), *named]) == 0
    saved = newest(home() / "runs" / "small" / "hf")
    assert saved is not None
    assert {name.split(".")[-3] for name in saved.model()} == {"q_proj", "v_proj"}
    assert all(name.startswith("base_model.model.model.layers.") for name in saved.model())
    model = home() / "runs" / "small" / "hf" / f"step_{saved.step:06d}" / "model.safetensors"
    assert model.stat().st_size < (copy / "model.safetensors").stat().st_size / 2
    chat = ["chat", "--run", "small", "-p", "x", "-t", "0", "--max-tokens", "2", "--device-type", "cpu"]
    assert main(chat) == 0
    hf_models.save(copy, "qwen2", initializer_range=0.2)  # another model of the same name
    capsys.readouterr()
    assert main(chat) == 2
    assert "has changed since: the adapters" in capsys.readouterr().err
    (home() / "runs" / "small" / "hf" / "huggingface" / "base.json").unlink()
    assert main(chat) == 2
    assert "base.json cannot be read" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_with_dropout_goes_on_and_other_adapters_are_another_run(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = "--data", f"{place / 'sums.jsonl'}=1"  # with a weight of its own, which the number of rows does not change
    seed = "--seed", "1000000000000000000"  # the largest that is allowed
    dropping = [*data, *seed, "--lora", "--lora-dropout", "0.2"]
    assert main(words(place, "twice", *dropping)) == 0
    whole = newest(home() / "runs" / "twice" / "hf")
    assert whole is not None
    wanted = whole.model()
    shutil.rmtree(whole.folder)
    capsys.readouterr()
    assert main(words(place, "twice", *dropping)) == 0
    assert "continuing after step 2" in capsys.readouterr().out
    again = newest(home() / "runs" / "twice" / "hf")
    assert again is not None
    assert all(torch.equal(wanted[name], tensor) for name, tensor in again.model().items())
    for other, what in (("--lora --lora-rank 2", "lora"), ("--lora --lora-dropout 0.2 --no-packing", "packing")):
        assert main(words(place, "twice", *data, *seed, *other.split())) == 2
        assert f"was written with {what}" in capsys.readouterr().err


@pytest.mark.slow
def test_an_earlier_fine_tuning_can_be_gone_on_from(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words(place, "first", "--lora"), "--steps", "1"]) == 0
    again = words(place, "second", "--lora", "--steps", "1")
    again[again.index("--model") + 1] = "first"
    assert main(again) == 0
    assert main(["chat", "--run", "second", "-p", "x", "-t", "0", "--max-tokens", "2", "--device-type", "cpu"]) == 0
    exported = ["export", "--run", "second", "--device-type", "cpu", "--out", str(place / "second-out")]
    capsys.readouterr()
    for refused in ([*exported, "--adapter"], [*again, "--output-dir", str(place / "second-out")]):
        assert main(refused) == 2  # peft would look for its base in a folder of ours
        assert "a run of ours, which peft cannot open: leave out" in capsys.readouterr().err
        assert not (place / "second-out").exists()
    assert main(exported) == 0
    sizes = "--prompts-per-step 2 --samples 2 --max-new-tokens 4 --steps 1 --eval-every -1 --max-seq-len 128"
    rl = ["rl", "--start", "second", "--run", "third", "--data", "toy_arithmetic_en", *sizes.split()]
    assert main([*rl, "--device-type", "cpu"]) == 0
    saved = newest(home() / "runs" / "third" / "rl")
    assert saved is not None
    assert "lora" not in saved.state
    assert "model.embed_tokens.weight" in saved.model()


@pytest.mark.parametrize("named", ["./absent", "/absent/model"])
def test_a_model_that_is_not_there_is_said_to_be_absent(named: str, capsys: pytest.CaptureFixture[str]) -> None:
    for more in ([], ["--stage", "dpo"]):
        assert main(["finetune", "--model", named, "--data", "x", "--run", "q", "--device-type", "cpu", *more]) == 2
        assert f"there is no file or folder {named}" in capsys.readouterr().err


def test_rows_that_the_model_cannot_read_become_shorter(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = words(place, "long", "--steps", "1")
    told[told.index("--max-seq-len") + 1] = "2000"
    assert main(told) == 0
    assert "rows of 256 tokens instead of 2000: the model reads no more" in capsys.readouterr().out


@pytest.mark.slow
def test_muon_trains_the_matrices_of_the_layers(place: Path) -> None:
    model = hf_models.opened(place / "tiny").model
    groups = {group.name: group for group in muon_groups(model, 1e-5, 1e-3)}
    stacked = [name for group in groups.values() if group.matrix for name, _ in group.parameters]
    assert len(stacked) == LAYERS * 7
    every = sorted(name for group in groups.values() for name, _ in group.parameters)
    assert every == sorted(name for name, _ in model.named_parameters())
    assert main(words(place, "muon", "--muon", "--matrix-lr", "0.02", "--learning-rate", "0.001")) == 0
    losses = our_losses("muon")
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(("size", "least", "most"), [(0.5, 20, 40), (6.0, 1, 14)])
def test_a_part_of_the_data_is_held_out_and_without_packing_a_row_holds_one_conversation(
    place: Path, size: float, least: int, most: int
) -> None:
    tokenizer = hf_models.opened(place / "tiny").tokenizer

    def mixture(options: EntryOptions, packing: bool) -> Any:
        told = {"say": lambda _: None, "options": options, "packing": packing}
        return open_chat_mixture((str(place / "sums.jsonl"),), "sft", tokenizer, LENGTH, **told)  # type: ignore[arg-type]

    found = mixture(EntryOptions(size), False)
    (held,) = found.validation
    assert least <= len(held.starts) - 1 <= most
    assert found.per_epoch + len(held.starts) - 1 == 60
    some = mixture(EntryOptions(0.0, max_conversations=40), False)
    assert some.per_epoch == 40
    assert not some.validation
    assert mixture(EntryOptions(0.0, max_conversations=40), True).per_epoch <= 20


def test_the_rate_rises_and_falls_as_asked() -> None:
    def scales(form: str, final: float = 0.0) -> list[float]:
        return [finetuning_scale(step, 10, form, 2, final) for step in range(10)]

    assert scales("constant") == [0.5] + [1.0] * 9
    assert scales("linear") == pytest.approx([0.5, 1.0, *[(10 - step) / 8 for step in range(2, 10)]])
    assert scales("cosine")[:3] == [0.5, 1.0, 1.0]
    assert scales("cosine")[6] == pytest.approx(0.5)
    assert scales("linear", 0.5)[9] == pytest.approx(0.125 + 0.875 * 0.5)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--lora", "--lora-target", "q_prj"), "did you mean q_proj"),
        (("--stage", "sft", "--model", "nothing-here"), "no Hugging Face model"),
        (("--lr-multiplier", "2"), "give --learning-rate"),
        (("--output-dir", "{place}"), "is not empty"),
        (("--output-dir", "{place}/sums.jsonl/out"), "cannot be written"),
        (("--data", "{place}/absent.jsonl"), "neither a task nor a file"),
    ],
)
def test_what_cannot_be_trained_is_said_in_one_sentence(
    place: Path, more: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words(place, "never"), *(word.format(place=place) for word in more)]) == 2
    assert says in capsys.readouterr().err


def test_a_validation_set_is_found_where_the_data_is(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = {"file_name": str(place / "sums.jsonl")}
    (tmp_path / "dataset_info.json").write_text(json.dumps({"learnt": entry, "kept": entry}), encoding="utf-8")
    named = ["--data", "learnt", "--validation", "kept", "--dataset-dir", str(tmp_path), "--preview", "1"]
    assert main([*words(place, "listed"), *named]) == 0
    assert f"validation {tmp_path}/kept: 60 conversations" in capsys.readouterr().out


def test_too_large_a_model_is_refused_before_its_weights_are_read_and_one_without_a_chat_template(
    tmp_path: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The weights are no weights at all: who reads them fails otherwise."""
    values = json.loads((place / "tiny" / "config.json").read_text())
    huge = {"hidden_size": 65536, "num_hidden_layers": 200, "intermediate_size": 200000, "vocab_size": 200000}
    (tmp_path / "config.json").write_text(json.dumps(values | huge))
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    asked = words(place, "huge")
    asked[asked.index("--model") + 1] = str(tmp_path)
    assert main(asked) == 2
    assert "or train adapters (finetune --lora)" in capsys.readouterr().err
    hf_models.save(tmp_path / "bare", template=None)
    assert main([*asked, "--model", str(tmp_path / "bare")]) == 2
    assert "has no chat template" in capsys.readouterr().err


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), UserError("/x cannot be written")])
def test_a_trained_model_that_cannot_be_written_out_is_kept_and_said(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def export(*_: object) -> None:
        raise error

    monkeypatch.setattr(finetune, "export", export)
    monkeypatch.setattr(finetune, "trained_weights", lambda *_: {})
    theirs = SimpleNamespace(lora=None, model=None, tokenizer=None)
    here = SimpleNamespace(main=True, device=SimpleNamespace(dtype=None), say=print)
    with pytest.raises(NotSaved, match=f"kept in {tmp_path}, but could not .* run the same command again"):
        finetune.write_model(theirs, tmp_path, tmp_path / "out", here)  # type: ignore[arg-type]
