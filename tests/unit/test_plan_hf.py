"""Parameter counts of published models from their config.json, and what fine-tuning them needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ascendchat.chips import find
from ascendchat.config import UserError
from ascendchat.plan.hf import finetuning, from_config, read_config


def config(kind: str, dim: int, layers: int, heads: int, kv: int, mlp: int, vocab: int, **more: Any) -> dict[str, Any]:
    return {
        "model_type": kind,
        "hidden_size": dim,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "intermediate_size": mlp,
        "vocab_size": vocab,
        **more,
    }


TIED = {"tie_word_embeddings": True}
QWEN_05B = config("qwen2", 896, 24, 14, 2, 4864, 151936, **TIED, sliding_window=32768, use_sliding_window=False)
QWEN_7B = config("qwen2", 3584, 28, 28, 4, 18944, 152064, tie_word_embeddings=False)
MIXTRAL = config("mixtral", 4096, 32, 32, 8, 14336, 32000, num_local_experts=8, num_experts_per_tok=2)
QWEN3_MOE = config(
    "qwen3_moe",
    2048,
    48,
    32,
    4,
    6144,
    151936,
    head_dim=128,
    moe_intermediate_size=768,
    num_experts=128,
    num_experts_per_tok=8,
    mlp_only_layers=[],
)
QWEN_MOE = config(
    "qwen2_moe",
    2048,
    24,
    16,
    16,
    5632,
    151936,
    moe_intermediate_size=1408,
    shared_expert_intermediate_size=5632,
    num_experts=60,
    num_experts_per_tok=4,
)


@pytest.mark.parametrize(
    ("values", "published"),
    [
        (QWEN_05B, 494_032_768),
        (config("qwen2", 1536, 28, 12, 2, 8960, 151936, **TIED), 1_543_714_304),
        (QWEN_7B, 7_615_616_512),
        (config("qwen3", 1024, 28, 16, 8, 3072, 151936, head_dim=128, **TIED), 596_049_920),
        (config("llama", 4096, 32, 32, 8, 14336, 128256), 8_030_261_248),
        (config("llama", 2048, 16, 32, 8, 8192, 128256, head_dim=64, **TIED), 1_235_814_400),
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
    chip = find("Ascend910B3")
    full, lora = finetuning(model, chip, 1, 1), finetuning(model, chip, 1, 1, lora_rank=16)
    assert full["weights"] == full["gradients"] == 2 * model.total_parameters
    assert full["optimizer"] == 12 * model.total_parameters
    assert lora["optimizer"] == 8 * model.lora_parameters(16)
    assert sum(lora.values()) < chip.memory < sum(full.values())


def test_full_fine_tuning_shards_its_state_over_the_devices() -> None:
    model, chip = from_config(QWEN_7B, 2048), find("Ascend910B3")
    one, eight = (finetuning(model, chip, n, 1) for n in (1, 8))
    assert eight["optimizer"] * 8 == pytest.approx(one["optimizer"], rel=1e-6)
    assert eight["weights"] == one["weights"]


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
