"""Parameter counts of published models from their config.json, and what fine-tuning them needs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from ascendchat.chips import GIB, find
from ascendchat.config.commands import PlanConfig
from ascendchat.errors import UserError
from ascendchat.plan.command import DoesNotFit, make
from ascendchat.sizes.hf import finetuning, from_config, read_config
from ascendchat.sizes.memory import allocated, usable

SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")


def config(kind: str, *sizes: int, **more: Any) -> dict[str, Any]:
    return {"model_type": kind, **dict(zip((*SIZES, "vocab_size"), sizes)), **more}


TIED = {"tie_word_embeddings": True}
QWEN_05B = config("qwen2", 896, 24, 14, 2, 4864, 151936, **TIED, sliding_window=32768, use_sliding_window=False)
QWEN_7B = config("qwen2", 3584, 28, 28, 4, 18944, 152064, tie_word_embeddings=False)
QWEN_14B = config("qwen2", 5120, 48, 40, 8, 13824, 152064, tie_word_embeddings=False)
MIXTRAL = config("mixtral", 4096, 32, 32, 8, 14336, 32000, num_local_experts=8, num_experts_per_tok=2)
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "mlp_only_layers": []}
QWEN3_MOE = config("qwen3_moe", 2048, 48, 32, 4, 6144, 151936, head_dim=128) | EXPERTS
SHARED = {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408}
QWEN_MOE = config("qwen2_moe", 2048, 24, 16, 16, 5632, 151936, shared_expert_intermediate_size=5632) | SHARED


@pytest.mark.parametrize(
    ("values", "published"),
    [
        (QWEN_05B, 494_032_768),
        (QWEN_7B, 7_615_616_512),
        (config("qwen3", 1024, 28, 16, 8, 3072, 151936, head_dim=128, **TIED), 596_049_920),
        (config("llama", 4096, 32, 32, 8, 14336, 128256), 8_030_261_248),
        (config("mistral", 4096, 32, 32, 8, 14336, 32000, sliding_window=4096), 7_241_732_096),
        (MIXTRAL, 46_702_792_704),
        (QWEN3_MOE, 30_532_122_624),
        (QWEN_MOE, 14_315_784_192),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else str(value),
)
def test_parameters_equal_the_published_number(values: dict[str, Any], published: int) -> None:
    assert from_config(values, 2048).total_parameters == published


@pytest.mark.parametrize(("values", "billions"), [(MIXTRAL, 12.88), (QWEN3_MOE, 3.35), (QWEN_MOE, 2.69)])
def test_a_token_uses_only_its_experts(values: dict[str, Any], billions: float) -> None:
    model = from_config(values, 2048)
    assert model.active_parameters / 1e9 == pytest.approx(billions, abs=0.01)
    assert model.read_parameters(1) < model.read_parameters(8) < model.read_parameters(4096) < model.total_parameters


def test_a_window_applies_only_where_the_family_or_a_switch_says_so() -> None:
    values = config("mistral", 4096, 32, 32, 8, 14336, 32000, sliding_window=4096)
    assert from_config(values, 2048).windows(8192) == (4096,) * 32
    assert from_config(QWEN_05B, 2048).windows(65536) == (65536,) * 24
    switched = QWEN_05B | {"use_sliding_window": True, "max_window_layers": 21}
    assert from_config(switched, 2048).windows(65536) == (65536,) * 21 + (32768,) * 3


def test_lora_trains_few_parameters_and_needs_less_memory() -> None:
    model = from_config(QWEN_7B, 2048)
    attention = 2 * (3584 + 3584) + 2 * (3584 + 512)
    assert model.lora_parameters(16) == 16 * 28 * (attention + 3 * (3584 + 18944))
    sparse = config("qwen3_moe", 2048, 48, 32, 4, 6144, 151936, head_dim=128, mlp_only_layers=[0])
    experts = from_config(sparse | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}, 2048)
    assert experts.lora_parameters(16) == 16 * 48 * (2 * (2048 + 4096) + 2 * (2048 + 512))  # on attention alone
    chip = find("Ascend910B3")
    full, lora = finetuning(model, chip, 1, 1), finetuning(model, chip, 1, 1, lora_rank=16)
    assert full["weights"] == 2 * model.total_parameters
    assert full["gradients"] == full["masters"] == 4 * model.total_parameters  # of nn/optim.py, in float32
    assert full["optimizer"] == 8 * model.total_parameters
    assert lora["optimizer"] == 8 * model.lora_parameters(16)
    assert sum(lora.values()) < chip.memory < sum(full.values())
    assert model.finetuning_flops_per_token(0) == model.train_flops_per_token
    assert 0.6 < model.finetuning_flops_per_token(16) / model.train_flops_per_token < 0.75  # no gradients of the base


@pytest.mark.parametrize(("values", "published"), [(QWEN_7B, 28e9), (QWEN_14B, 45e9)], ids=["7B", "14B"])
def test_lora_needs_as_much_memory_as_others_have_measured(values: dict[str, Any], published: float) -> None:
    """ms-swift on one Ascend910B3 of 64 GB: 28 GB for Qwen2-7B, 45 GB for 14B. It recomputes activations but holds the
    logits of all tokens at once: between our two plans."""
    model, chip = from_config(values, 2048), find("Ascend910B3")
    kept, recomputed = (
        allocated(finetuning(model, chip, 1, 1, checkpointing, lora_rank=8)) for checkpointing in (False, True)
    )
    assert 0.6 * published < recomputed < published < kept < 1.6 * published


@pytest.mark.parametrize(
    ("chip", "rank", "checkpointing", "fits"),
    [
        ("Ascend910B3", 0, True, False),  # 56.8 GiB of weights, gradients and state on each of the eight
        ("Ascend910B3", 16, False, True),
        ("Ascend910B4", 16, False, False),
        ("Ascend910B4", 16, True, True),
    ],
)
def test_qwen_7b_on_eight_cards(chip: str, rank: int, checkpointing: bool, fits: bool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    asked = PlanConfig(
        hf_config=str(tmp_path), chip=chip, devices=8, lora_rank=rank, activation_checkpointing=checkpointing
    )
    if not fits:
        with pytest.raises(DoesNotFit, match="--lora-rank 16" if not rank else "--activation-checkpointing"):
            make(asked, find(chip))
        return
    plan = make(asked, find(chip))
    assert plan["memory"]["parts"]["weights"] == 2 * (7_615_616_512 + plan["lora"]["parameters"])
    assert plan["lora"]["parameters"] == 40_370_176
    assert not plan["lora"]["full_fits"]


def test_a_base_in_4_bits_leaves_the_rest_as_it_is() -> None:
    model, chip = from_config(QWEN_7B, 2048), find("RTX 4090")
    lora, bits = (finetuning(model, chip, 1, 1, True, lora_rank=16, bits=bits) for bits in (None, 4))
    packed = 28 * (3584 * (2 * 3584 + 2 * 512) + 3 * 3584 * 18944)  # 6.5 of 7.6 billion: not embedding, head, norms
    assert model.packed_parameters == packed
    assert lora["weights"] - bits["weights"] == pytest.approx(packed * (2 - 0.5159), rel=1e-4)
    assert {name for name in lora if lora[name] != bits[name]} == {"weights", "workspace"}
    assert bits["workspace"] == 2 * 3584 * 18944  # the largest matrix, unpacked
    moe = from_config(QWEN3_MOE, 2048)
    assert moe.packed_parameters == 48 * 2048 * (2 * 32 * 128 + 2 * 4 * 128)  # experts stay


def test_a_refusal_offers_4_bits_where_bitsandbytes_is_used(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    asked = PlanConfig(hf_config=str(tmp_path), lora_rank=16, activation_checkpointing=True)
    for name, remedy in (("T4", "--bits 4"), ("Ascend310P3", None), ("Apple M1", None)):
        chip = dataclasses.replace(find(name), memory=16 * GIB, reserved=0)
        with pytest.raises(DoesNotFit) as refused:
            make(asked, chip)
        assert ("--bits 4" in str(refused.value)) == bool(remedy)
    fitting = make(dataclasses.replace(asked, bits=4), find("T4"))
    assert fitting["lora"]["bits"] == 4
    assert fitting["lora"]["total"] == fitting["memory"]["total"]


def test_generation_with_an_existing_model_reads_its_weights_and_its_narrow_cache(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    asked = PlanConfig(goal="inference", hf_config=str(tmp_path), context=4096)
    served = make(asked, find("Ascend910B3"))
    assert served["kv_bytes_per_token"] == 2 * 28 * 512 * 2
    assert served["roofline_tokens_per_second"]["one_sequence"] == pytest.approx(1.6e12 / 2 / 7.07e9, rel=0.05)


def test_a_file_or_its_folder_can_be_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN_05B))
    assert read_config(str(tmp_path), 512) == read_config(str(tmp_path / "config.json"), 512)
    assert read_config(str(tmp_path), 512).seq_len == 512


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not JSON"),
        ("[]", "names no model_type"),
        ('{"model_type": "lama"}', "did you mean llama"),
        ('{"model_type": "llama", "hidden_size": 8}', "num_hidden_layers is missing"),
    ],
)
def test_a_file_we_cannot_count_is_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(UserError, match=says):
        read_config(str(path), 2048)
    with pytest.raises(UserError, match="cannot read"):
        read_config(str(tmp_path / "absent.json"), 2048)


def test_weights_that_are_shared_out_leave_room() -> None:
    model, chip = from_config(QWEN_7B, 2048), find("Ascend910B4")
    whole, shared = (finetuning(model, chip, 8, 1, True, shard=shard) for shard in (0, 8))
    assert sum(whole.values()) > usable(chip) > sum(shared.values())
    assert shared["optimizer"] == whole["optimizer"]  # shared out in any case
    assert shared["weights"] < whole["weights"] / 4
    offloaded = finetuning(model, chip, 8, 1, True, shard=8, offload=True)
    assert offloaded["optimizer"] == offloaded["masters"] == 0
    lora = finetuning(model, chip, 8, 1, True, lora_rank=16, shard=8)
    assert lora["weights"] < finetuning(model, chip, 8, 1, True, lora_rank=16)["weights"] / 3
    assert lora["gradients"] < 2**25
