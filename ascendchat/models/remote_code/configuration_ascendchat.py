"""Configuration of a model that was trained by ascendchat; transformers reads it with trust_remote_code=True."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PretrainedConfig


class AscendchatConfig(PretrainedConfig):
    """Sizes and constants of a model. `shape`, `stage` and `tokenizer` are for ascendchat itself."""

    model_type = "ascendchat"
    keys_to_ignore_at_inference = ("past_key_values",)

    def __init__(
        self,
        vocab_size: int = 32768,
        padded_vocab_size: int = 32768,  # rows of the tables and of the head
        hidden_size: int = 768,
        intermediate_size: int = 3072,
        num_hidden_layers: int = 12,
        num_attention_heads: int = 6,
        num_key_value_heads: int = 6,
        head_dim: int = 128,
        max_position_embeddings: int = 2048,  # tokens of a row in training
        rope_base: float = 100000.0,
        attention_scale: float = 0.127,  # on the product of queries and keys
        windows: Sequence[int] = (),  # tokens that each layer sees, the own one included; 0: all
        value_layers: Sequence[int] = (),  # layers with a value embedding
        value_gate_channels: int = 12,
        value_gate_range: float = 3.0,
        smear_gate_channels: int = 24,
        logit_cap: float = 15.0,
        rms_norm_eps: float = 1e-6,
        use_cache: bool = True,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.padded_vocab_size = padded_vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        self.max_position_embeddings = max_position_embeddings
        self.rope_base = rope_base
        self.attention_scale = attention_scale
        self.windows = list(windows) or [0] * num_hidden_layers
        self.value_layers = list(value_layers)
        self.value_gate_channels = value_gate_channels
        self.value_gate_range = value_gate_range
        self.smear_gate_channels = smear_gate_channels
        self.logit_cap = logit_cap
        self.rms_norm_eps = rms_norm_eps
        self.use_cache = use_cache
        kwargs.setdefault("tie_word_embeddings", False)
        super().__init__(**kwargs)


__all__ = ["AscendchatConfig"]
