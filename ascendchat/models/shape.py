"""The sizes of a Hugging Face model, with the interface that nn/model.py describes.

shape = HFShape.of(config, total_parameters, seq_len)      # config: transformers' own
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from ascendchat.errors import UserError
from ascendchat.sizes.hf import FAMILIES, HFModel, from_config

DEFAULT_CONTEXT = 4096  # tokens of a row: a cache of the 131,072 that some configs name fits nowhere
# entries of a config.json that do not describe the model
TRANSIENT = "transformers_version", "_name_or_path", "dtype", "torch_dtype", "_attn_implementation"


@dataclass(frozen=True)
class HFShape:
    """Sizes from a config.json. `counted`: the model of sizes/hf.py, for memory and FLOPs."""

    model_type: str
    depth: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    seq_len: int
    longest: int  # positions that the model was made for
    layer_windows: tuple[int, ...]  # tokens of attention in each layer; 0: all
    total_parameters: int
    fingerprint: str  # of the config
    counted: HFModel

    @classmethod
    def of(cls, config: Any, total_parameters: int, seq_len: int | None) -> HFShape:
        text = config.get_text_config()
        if getattr(text, "is_heterogeneous", False):
            raise UserError(
                f"model type {config.model_type!r} has layers that differ in their sizes, which this engine does not "
                "run; choose another model"
            )
        depth, dim, heads = text.num_hidden_layers, text.hidden_size, text.num_attention_heads
        longest = getattr(text, "max_position_embeddings", None) or DEFAULT_CONTEXT
        values = {**text.to_dict(), "hidden_size": dim, "num_hidden_layers": depth, "num_attention_heads": heads}
        values["intermediate_size"] = getattr(text, "intermediate_size", None) or 4 * dim
        values["vocab_size"] = text.vocab_size
        if text.model_type not in FAMILIES:  # counted like the most similar one
            values["model_type"] = "llama"
        length = min(longest, seq_len or DEFAULT_CONTEXT)
        described = {name: value for name, value in config.to_dict().items() if name not in TRANSIENT}
        digest = hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()
        return cls(
            model_type=config.model_type,
            depth=depth,
            dim=dim,
            heads=heads,
            kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or dim // heads,
            vocab=text.vocab_size,
            seq_len=length,
            longest=longest,
            layer_windows=windows_of(text, depth),
            total_parameters=total_parameters,
            fingerprint=digest[:16],
            counted=from_config(values, length),
        )

    def windows(self, seq_len: int | None = None) -> tuple[int, ...]:
        length = seq_len or self.seq_len
        return tuple(min(window or length, length) for window in self.layer_windows)

    @property
    def train_flops_per_token(self) -> int:
        return self.counted.train_flops_per_token

    def to_dict(self) -> dict[str, Any]:
        """The entry `shape` of a checkpoint's state; the config itself lies beside the checkpoints."""
        return {"hf": self.model_type, "config": self.fingerprint, "seq_len": self.seq_len}


def windows_of(config: Any, depth: int) -> tuple[int, ...]:
    """Attention window of each layer in tokens, 0 for all; a layer with another state than keys and values is a
    UserError."""
    window = getattr(config, "sliding_window", None) or 0
    family = FAMILIES.get(config.model_type)
    if family and not family.windows and not getattr(config, "use_sliding_window", False):
        return (0,) * depth  # transformers ignores one in the config.json of a Llama
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"] * depth
    odd = set(kinds) - {"full_attention", "sliding_attention"}
    if odd:
        raise UserError(
            f"model type {config.model_type!r} has layers of kind {sorted(odd)[0]}, which this engine does not have; "
            "models whose layers all attend to keys and values are run"
        )
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
