"""Small random Hugging Face models with a tokenizer and a chat template, made here by transformers itself."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ascendchat.data.tokenizer.bpe import PATTERN, learn
from ascendchat.data.tokenizer.tokenizer import Tokenizer
from ascendchat.models.folder import LoadedModel, find
from ascendchat.models.import_transformers import library

KINDS = "qwen2", "qwen3", "llama", "mistral"
CONFIGS = {
    **{"qwen2": "Qwen2Config", "qwen3": "Qwen3Config", "llama": "LlamaConfig", "mistral": "MistralConfig"},
    **{"qwen2_moe": "Qwen2MoeConfig", "qwen3_moe": "Qwen3MoeConfig", "mixtral": "MixtralConfig"},
    **{"deepseek_v2": "DeepseekV2Config", "deepseek_v3": "DeepseekV3Config", "gpt2": "GPT2Config"},
    **{"gemma4_text": "Gemma4TextConfig"},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {  # DeepSeek's attention, whose values are narrower than its queries
    **{"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 8, "first_k_dense_replace": 1},
    **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1},
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1},
}
OWN_SIZES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 12, "head_dim": 16},
    "qwen2": {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 1},  # every other layer
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {**EXPERTS, "head_dim": 16},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": {**LATENT, "topk_method": "greedy"},
    "deepseek_v3": LATENT,
    "gemma4_text": {"vocab_size_per_layer_input": 320, "hidden_size_per_layer_input": 0, "sliding_window": 12},
}
SPECIALS = "<|bos|>", "<|pad|>", "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = "What is seventeen plus twenty-five? The answer is forty-two. 你好，世界。 <<17+25=42>> user assistant system\n"


@cache
def texts() -> Tokenizer:
    return Tokenizer(learn([TEXT] * 4, 300, PATTERN), PATTERN, SPECIALS)


def config(kind: str, **sizes: Any) -> Any:
    """Sizes that leave nothing out: grouped queries, a head width of its own, weights that are tied or not."""
    transformers = library()
    made = CONFIGS[kind]
    known: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": texts().vocab_size + 5,
        "max_position_embeddings": 256,
        "tie_word_embeddings": kind == "qwen2",
        "eos_token_id": texts().specials["<|im_end|>"],
        "bos_token_id": texts().specials["<|bos|>"],
        "pad_token_id": texts().specials["<|pad|>"],
        "initializer_range": 0.3,
    }
    return getattr(transformers, made)(**{**known, **OWN_SIZES.get(kind, {}), **sizes})


def network(kind: str, seed: int = 0, **sizes: Any) -> Any:
    """transformers' own model."""
    torch.manual_seed(seed)
    made = library().AutoModelForCausalLM.from_config(config(kind, **sizes), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.dim() == 1:  # norms and biases that do something
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif "lm_head" in name:
                parameter.mul_(2.0)
    return made


def save(folder: Path, kind: str = "qwen2", template: str | None = CHATML, **sizes: Any) -> Any:
    """Write a whole model folder; transformers' model of it."""
    made = network(kind, **sizes)
    made.save_pretrained(folder)
    texts().save(folder)
    for name in ("bpe.json", "manifest.json"):
        (folder / name).unlink()
    tokenizer = library().PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<|bos|>", eos_token="<|im_end|>", pad_token="<|pad|>"
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return made


def save_with_sums(folder: Path, **sizes: Any) -> Path:
    """A tiny Qwen2 to train, sums to learn, and pairs of a right and a wrong answer: `tiny`, `sums`, `pairs.jsonl`."""
    save(folder / "tiny", "qwen2", initializer_range=0.1, **sizes)
    rng = random.Random(0)
    sums = [(rng.randint(1, 99), rng.randint(1, 99)) for _ in range(60)]
    rows = [{"instruction": f"What is {a} plus {b}?", "output": f"The answer is {a + b}."} for a, b in sums]
    pairs = [{"prompt": r["instruction"], "chosen": r["output"], "rejected": "I do not know."} for r in rows]
    for name, lines in (("sums", rows), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return folder


def opened(folder: Path, seq_len: int | None = None) -> LoadedModel:
    found = find(folder)
    assert found is not None
    return found.load(torch.float32, seq_len)
