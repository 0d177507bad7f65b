"""Adapters on models with experts: which layers have them, and that they can be added to the weights again."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import hf_models
import pytest
import torch

from ascendchat.cli import main
from ascendchat.errors import UserError, home
from ascendchat.models.folder import LoadedModel
from ascendchat.models.lora import LoraSettings, adapter_weights, add_lora, load_adapter, merge, write_adapter
from ascendchat.nn.attention import Reference, dense

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = torch.arange(5, 25)[None]
ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
LATENT = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(TOKENS, dense(model, Reference(), TOKENS.size(1))) @ model.head.t()
    return found


def moved(model: Any) -> dict[str, torch.Tensor]:
    """Its adapters, which now do something."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.inner.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return {name: tensor.clone() for name, tensor in adapter_weights(model).items()}


def assert_same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Up to rounding, which the weights of these models make large."""
    torch.testing.assert_close(found, wanted, atol=float(wanted.abs().max()) * 1e-4, rtol=0.0)


def opened(folder: Path, kind: str) -> LoadedModel:
    if not (folder / "config.json").exists():
        hf_models.save(folder, kind, num_hidden_layers=2)
    return hf_models.opened(folder)


@pytest.mark.parametrize(
    ("kind", "layers"),
    [("qwen3_moe", ATTENTION), ("qwen2_moe", ATTENTION), ("mixtral", ATTENTION), ("deepseek_v3", LATENT)],
)
def test_all_means_neither_router_nor_experts_and_merges_into_the_plain_model(
    kind: str, layers: set[str], tmp_path: Path
) -> None:
    model = opened(tmp_path, kind).model
    before = {name: tensor.shape for name, tensor in model.state_dict().items()}
    assert set(add_lora(model, LoraSettings(rank=2))) == layers
    assert {name.split(".")[-3] for name in adapter_weights(model)} == layers
    plain = logits_of(model)
    moved(model)
    wanted = logits_of(model)
    assert (wanted - plain).abs().max() > 0.1
    merged = merge(model)
    assert {name: tensor.shape for name, tensor in merged.state_dict().items()} == before
    assert_same(logits_of(merged), wanted)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_adapters_that_peft_has_put_on_experts_are_merged_too(kind: str, tmp_path: Path) -> None:
    """As runs of former versions have them."""
    import peft

    model = opened(tmp_path / "base", kind).model
    asked = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    peft.inject_adapter_in_model(asked, model.inner, adapter_name="default")
    weights = moved(model)
    assert any("experts" in name for name in weights)
    write_adapter(model, "base", tmp_path / "adapter", weights)
    wanted = logits_of(model)
    plain = opened(tmp_path / "base", kind).model
    before = plain.state_dict().keys()
    again = load_adapter(plain, tmp_path / "adapter", weights)
    torch.testing.assert_close(logits_of(again), wanted)
    merged = merge(again)
    assert merged.train().state_dict().keys() == before
    assert_same(logits_of(merged), wanted)


@pytest.mark.parametrize("target", ["gate_proj", "shared_expert_gate"])
def test_a_layer_whose_name_stands_for_experts_is_refused(target: str, tmp_path: Path) -> None:
    model = opened(tmp_path, "qwen2_moe").model
    with pytest.raises(UserError, match=r"experts and their routers have no adapters here; name other layers: k_proj,"):
        add_lora(model, LoraSettings(targets=(target,)))


@pytest.mark.slow
def test_a_run_with_experts_is_trained_exported_and_talked_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = hf_models.save_with_sums(tmp_path)
    shutil.rmtree(place / "tiny")
    hf_models.save(place / "tiny", "qwen3_moe", num_hidden_layers=2)
    sizes = "--lora --steps 1 --max-seq-len 64 --device-batch-size 1 --eval-every -1 --sample-every 0 --val-size 0"
    asked = ["finetune", "--model", str(place / "tiny"), "--data", str(place / "sums.jsonl"), "--run", "moe"]
    cpu = ["--device-type", "cpu"]
    assert main([*asked, *sizes.split(), "--output-dir", str(place / "adapter"), *cpu]) == 0
    said = capsys.readouterr().out
    assert "adapters on k_proj, o_proj, q_proj, v_proj; experts and routers stay as they are" in said
    assert (home() / "runs" / "moe" / "hf" / "latest").exists()
    assert main(["export", "--run", "moe", "--out", str(place / "merged"), *cpu]) == 0
    talk = ["-p", "What is 3 plus 4?", "-t", "0", "--max-tokens", "4", *cpu]
    assert main(["chat", "--run", "moe", *talk]) == 0
    assert main(["chat", "--model", str(place / "merged"), *talk]) == 0
