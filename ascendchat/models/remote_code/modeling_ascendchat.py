"""A model that was trained by ascendchat, in plain torch for transformers:

    model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

A decoder with rotary positions, RMS norm without weights, ReLU² and a cap on the logits. Besides: queries, keys and
values take a learned share of the previous token's; value embeddings, gated; a weight per layer on the residual stream
and on the first embedding; the previous token's embedding smeared in; the middle of the network backed out at the end.

The cache keeps for every token and layer the queries, keys and values before the share of the previous token is added
(in the place of keys), and what the value embedding adds (in the place of values); in the first layer also the
embedding before the smear. So every kind of cache that can cut, repeat and reorder rows serves.
Shapes: B rows, T new tokens, N all tokens, C width, H query heads, K key-value heads, D channels per head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_ascendchat import AscendchatConfig


def rotated(x: Tensor, base: float) -> Tensor:
    """(B, N, heads, D), turned by the position of each token."""
    size = x.size(-1)
    frequency = base ** -(torch.arange(0, size, 2, dtype=torch.float32) / size)
    angle = torch.outer(torch.arange(x.size(1), dtype=torch.float32), frequency)[:, None, :]
    cos, sin = (table.to(x.device, x.dtype) for table in (angle.cos(), angle.sin()))
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def previous(x: Tensor, follows: Tensor | None) -> Tensor:
    """Along dim 1: what stands before each token; nothing before the first one, and nothing of padding."""
    before = F.pad(x[:, :-1], (0, 0, 1, 0))
    return before if follows is None else before * follows.unsqueeze(-1).to(x.dtype)


class Block(nn.Module):
    """Attention and MLP of one layer."""

    def __init__(self, config: AscendchatConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        heads, groups, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.qkv = nn.Parameter(torch.empty(heads // groups + 2, groups * size, config.hidden_size))
        self.shift = nn.Parameter(torch.empty((heads + 2 * groups) * size))
        self.out = nn.Parameter(torch.empty(config.hidden_size, heads * size))
        self.up = nn.Parameter(torch.empty(config.intermediate_size, config.hidden_size))
        self.down = nn.Parameter(torch.empty(config.intermediate_size, config.hidden_size))
        if layer in config.value_layers:
            self.gate = nn.Parameter(torch.empty(groups, config.value_gate_channels))

    def norm(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.size(-1),), eps=self.config.rms_norm_eps)

    def forward(
        self, x: Tensor, value: Tensor | None, embedding: Tensor, cache: Any, follows: Tensor | None, seen: Tensor
    ) -> Tensor:
        x = x + self.attention(self.norm(x), value, embedding, cache, follows, seen)
        return x + F.relu(F.linear(self.norm(x), self.up)).square() @ self.down

    def attention(
        self, x: Tensor, value: Tensor | None, embedding: Tensor, cache: Any, follows: Tensor | None, seen: Tensor
    ) -> Tensor:
        config, new = self.config, x.size(1)
        heads, groups, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        raw = F.linear(x, self.qkv.flatten(0, 1))  # (B, T, (H + 2K) D)
        added = x.new_zeros(*x.shape[:2], 0)
        if value is not None:
            gate = torch.sigmoid(F.linear(x[..., : self.gate.size(1)], self.gate)) * config.value_gate_range
            added = (gate.unsqueeze(-1) * value.unflatten(-1, (groups, size))).flatten(-2)
        if cache is not None:
            kept = added if self.layer else torch.cat((added, embedding), dim=-1)
            raw, kept = (part[:, 0] for part in cache.update(raw[:, None], kept[:, None], self.layer))
            added = kept[..., : added.size(-1)]
        mixed = torch.addcmul(raw, previous(raw, follows), self.shift.to(raw.dtype))
        q, k, v = mixed.unflatten(-1, (-1, size)).split((heads, groups, groups), dim=-2)  # (B, N, heads, D)
        q, k = (rotated(self.norm(part), config.rope_base) for part in (q, k))
        if value is not None:
            v = v + added.unflatten(-1, (groups, size))
        q, k, v = (part.transpose(1, 2) for part in (q[:, -new:], k, v))
        k, v = (part.repeat_interleave(heads // groups, dim=1) for part in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=config.attention_scale)
        return F.linear(y.transpose(1, 2).flatten(-2), self.out)


class AscendchatForCausalLM(PreTrainedModel, GenerationMixin):
    """Token ids in, logits out."""

    config_class = AscendchatConfig
    main_input_name = "input_ids"
    _no_split_modules = ["Block"]  # noqa: RUF012 (transformers wants a list)

    def __init__(self, config: AscendchatConfig) -> None:
        super().__init__(config)
        rows, depth = config.padded_vocab_size, config.num_hidden_layers
        self.embed = nn.Embedding(rows, config.hidden_size)
        width = config.num_key_value_heads * config.head_dim
        self.values = nn.ModuleDict({str(layer): nn.Embedding(rows, width) for layer in config.value_layers})
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(depth))
        self.head = nn.Parameter(torch.empty(rows, config.hidden_size))
        self.smear_gate = nn.Parameter(torch.empty(1, config.smear_gate_channels))
        self.residual = nn.Parameter(torch.empty(depth))
        self.first = nn.Parameter(torch.empty(depth))
        self.smear = nn.Parameter(torch.empty(1))
        self.backout = nn.Parameter(torch.empty(1))
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def set_input_embeddings(self, value: Any) -> None:
        self.embed = value

    def norm(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.size(-1),), eps=self.config.rms_norm_eps)

    def seen(self, new: int, attention_mask: Tensor | None, device: torch.device) -> dict[int, Tensor]:
        """Attention masks of the new tokens, for each different window: (B or 1, 1, T, N) bool."""
        total = new if attention_mask is None else attention_mask.size(1)
        distance = torch.arange(total - new, total, device=device)[:, None] - torch.arange(total, device=device)
        masks = {}
        for window in set(self.config.windows):
            mask = (distance >= 0) & (distance < window) if window else distance >= 0
            if attention_mask is not None:
                mask = (mask & attention_mask[:, None, :].bool()) | (distance == 0)  # padding sees itself: no NaN
            masks[window] = mask[:, None] if mask.dim() == 3 else mask[None, None]
        return masks

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **ignored: Any,
    ) -> CausalLMOutputWithPast:
        config = self.config
        if past_key_values is None and (config.use_cache if use_cache is None else use_cache):
            past_key_values = DynamicCache()
        past = past_key_values.get_seq_length() if past_key_values is not None else 0
        if attention_mask is None and past:
            attention_mask = input_ids.new_ones(input_ids.size(0), past + input_ids.size(1))
        follows = None if attention_mask is None else F.pad(attention_mask[:, :-1], (1, 0))

        embedding = self.norm(self.embed(input_ids))
        before = embedding
        if past:
            last = past_key_values.layers[0].values[:, 0, -1:, -config.hidden_size :]
            before = torch.cat((last.to(embedding.device), embedding), dim=1)
        new = input_ids.size(1)
        mixed = previous(before, None if follows is None else follows[:, -before.size(1) :])[:, -new:]
        gate = torch.sigmoid(F.linear(embedding[..., : self.smear_gate.size(1)], self.smear_gate))
        x = torch.addcmul(embedding, self.smear.to(embedding.dtype) * gate, mixed)

        masks = self.seen(new, attention_mask, x.device)
        first, middle = x, x
        for layer, block in enumerate(self.blocks):
            x = torch.addcmul(x * self.residual[layer].to(x.dtype), first, self.first[layer].to(x.dtype))
            value = self.values[str(layer)](input_ids) if str(layer) in self.values else None
            x = block(x, value, embedding, past_key_values, follows, masks[config.windows[layer]])
            if layer == config.num_hidden_layers // 2:
                middle = x
        backout = self.backout.to(x.dtype)
        if len(self.blocks) <= 2:  # the middle is the end: only rounding would move this weight
            backout = backout.detach()
        x = self.norm(x - backout * middle)
        kept = x[:, -logits_to_keep:] if isinstance(logits_to_keep, int) else x[:, logits_to_keep]
        cap = config.logit_cap
        logits = cap * torch.tanh(F.linear(kept, self.head[: config.vocab_size]).float() / cap)
        loss: Any = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)


__all__ = ["AscendchatForCausalLM"]
