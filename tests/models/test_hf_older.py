"""What transformers 4 and those that are built on it look for in a folder that we write with transformers 5.

Whether they really read it is asked in tests/exports: `make exports`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hf_models
import pytest
import torch

from ascendchat.models.causal_lm import CausalLM
from ascendchat.models.folder import describe, find, read_tokenizer
from ascendchat.models.import_transformers import library
from ascendchat.models.transformers_4 import add_old_names

pytestmark = pytest.mark.usefixtures("one_thread")

PLAIN = {"rope_type": "default", "rope_theta": 1e6}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
BY_LAYER = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
}
FACTORS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
GEMMA = {"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 2e4}
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "theta": ("Qwen3Config", {"rope_parameters": PLAIN}, {"rope_theta": 1e6, "rope_scaling": None}),
    "scaled": (
        "LlamaConfig",
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    ),
    "by layer": ("Gemma3TextConfig", {"rope_parameters": BY_LAYER}, GEMMA),
    "part of a head": (
        "GlmConfig",
        {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.25}},
        {"rope_theta": 1e6, "partial_rotary_factor": 0.25},
    ),
    "names of its own": (
        "GPTNeoXConfig",
        {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}},
        {"rotary_emb_base": 1e6, "rotary_pct": 0.5},
    ),
    "length beside the factors": (
        "Phi3Config",
        {
            "rope_parameters": {"rope_type": "longrope", "rope_theta": 2e4, **FACTORS},
            "original_max_position_embeddings": 64,
        },
        {"rope_theta": 2e4, "rope_scaling": {"type": "longrope", **FACTORS}, "original_max_position_embeddings": 64},
    ),
    "experts": (
        "Qwen3MoeConfig",
        {"rope_parameters": PLAIN, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        {"rope_theta": 1e6, "num_experts": 4},
    ),
}


def model(made: str, more: dict[str, Any]) -> CausalLM:
    transformers = library()
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    known = {**sizes, "num_key_value_heads": 2, "vocab_size": 320, "max_position_embeddings": 256, "pad_token_id": 0}
    if made == "Gemma3Config":
        known = {"text_config": {**known, **more}, "vision_config": VISION}
    else:
        known |= more
    inner = transformers.AutoModelForCausalLM.from_config(getattr(transformers, made)(**known), dtype=torch.float32)
    return CausalLM(inner)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("text")
    inner = hf_models.save(folder)
    found = find(folder)
    assert found is not None
    return read_tokenizer(found, inner.config, inner.generation_config)


def written(made: CausalLM, tokenizer: Any, folder: Path) -> dict[str, Any]:
    describe(made, tokenizer, folder)
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


@pytest.mark.parametrize("case", CASES)
def test_config_has_the_names_of_both_and_says_the_same_in_the_new_ones(
    case: str, tokenizer: Any, tmp_path: Path
) -> None:
    made = model(*CASES[case][:2])
    found = written(made, tokenizer, tmp_path)
    assert {name: found.get(name, "absent") for name in CASES[case][2]} == CASES[case][2]
    assert found["dtype"] == found["torch_dtype"] == "float32"
    again = library().AutoConfig.from_pretrained(tmp_path)
    same = dict(again.rope_parameters)
    same.pop("type", None)
    assert same == made.inner.config.rope_parameters == found["rope_parameters"]


def test_a_part_of_a_multimodal_config_has_them_too(tokenizer: Any, tmp_path: Path) -> None:
    made = model("Gemma3Config", {"rope_parameters": BY_LAYER})
    found = written(made, tokenizer, tmp_path)["text_config"]
    assert {name: found.get(name) for name in GEMMA} == GEMMA
    again = library().AutoConfig.from_pretrained(tmp_path).get_text_config()
    assert again.rope_parameters == made.inner.config.get_text_config().rope_parameters == BY_LAYER


def test_a_rotation_that_old_versions_do_not_have_gets_no_old_name(tmp_path: Path) -> None:
    """Version 5 itself would take the old name for the rotation of every type of layer."""
    if not hasattr(library(), "Gemma4TextConfig"):
        pytest.skip("this transformers has no Gemma 4")
    made = library().Gemma4TextConfig(num_hidden_layers=6)
    made.save_pretrained(tmp_path)
    add_old_names(made, tmp_path / "config.json")
    found = json.loads((tmp_path / "config.json").read_text())
    assert "rope_scaling" not in found
    assert library().AutoConfig.from_pretrained(tmp_path).rope_parameters == made.rope_parameters


def test_the_tokenizer_is_of_a_class_that_both_know_and_names_its_special_tokens_for_both(
    tokenizer: Any, tmp_path: Path
) -> None:
    inner = tokenizer.inner
    inner.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.save(tmp_path)
    found = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert found["tokenizer_class"] in ("PreTrainedTokenizerFast", "Qwen2Tokenizer")
    assert found["additional_special_tokens"] == ["<|im_start|>", "<|im_end|>"]
    assert "extra_special_tokens" not in found
    again = library().AutoTokenizer.from_pretrained(tmp_path)
    assert again.all_special_tokens == inner.all_special_tokens
    text = "<|im_start|>hello 你好<|im_end|>"
    assert again(text).input_ids == inner(text).input_ids
    assert again.chat_template == inner.chat_template
