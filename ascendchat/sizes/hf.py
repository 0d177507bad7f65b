"""Sizes of an existing model from its Hugging Face config.json: Llama, Mistral, Qwen2, Qwen3 and their MoE kin.

    ascendchat plan --model Qwen2.5-1.5B --chip Ascend910B3 --lora-rank 16

Only the JSON file is read: no transformers, no torch, no weights.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascendchat.chips import KINDS, Chip
from ascendchat.errors import UserError, nearest
from ascendchat.sizes.memory import FP32, HEAD_CHUNK_BYTES, compute_bytes, kernel_buffers, outside

FINETUNE_ROWS = 64  # rows per step when an existing model is fine-tuned and no total is given


# Bytes of a weight of 4 bits: half of one, a byte of scale for 64 weights, and for 256 such scales one in fp32.
PACKED_BYTES = 1 / 2 + 1 / 64 + FP32 / (64 * 256)


@dataclass(frozen=True)
class _Family:
    """Features of a model type that its config.json does not name."""

    qkv_bias: bool = False
    qk_norm: bool = False
    windows: bool = False  # `sliding_window` applies without a second switch


FAMILIES = {
    "llama": _Family(),
    "mistral": _Family(windows=True),
    "mixtral": _Family(windows=True),
    "qwen2": _Family(qkv_bias=True),
    "qwen2_moe": _Family(qkv_bias=True),
    "qwen3": _Family(qk_norm=True),
    "qwen3_moe": _Family(qk_norm=True),
}


@dataclass(frozen=True)
class HFModel:
    """A decoder of the Llama kind: gated MLP, RMSNorm with weights, optional experts. Names as in Shape."""

    model_type: str
    depth: int
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_dim: int  # of a dense layer
    vocab: int
    seq_len: int
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    window: int  # tokens seen by a windowed layer; 0: all layers see everything
    full_layers: int  # layers without a window
    sparse_layers: int  # layers with experts
    experts: int
    active_experts: int
    expert_dim: int
    shared_dim: int  # width of the expert that every token uses; 0: none

    @property
    def padded_vocab(self) -> int:
        return self.vocab

    @property
    def q_dim(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        return self.kv_heads * self.head_dim

    def _mlp(self, width: int) -> int:
        return 3 * self.dim * width + (2 * width + self.dim if self.mlp_bias else 0)

    def parameters(self) -> dict[str, int]:
        """Parameters by part."""
        attention = self.dim * (2 * self.q_dim + 2 * self.kv_dim)
        attention += (self.q_dim + 2 * self.kv_dim) * self.qkv_bias + self.dim * self.output_bias
        shared = self._mlp(self.shared_dim) + self.dim if self.shared_dim else 0  # its gate is one row
        sparse = self.sparse_layers
        return {
            "embedding": self.vocab * self.dim,
            "attention": self.depth * attention,
            "mlp": (self.depth - sparse) * self._mlp(self.mlp_dim),
            "experts": sparse * (self.experts * self._mlp(self.expert_dim) + shared),
            "routers": sparse * self.experts * self.dim,
            "norms": (2 * self.depth + 1) * self.dim + self.depth * 2 * self.head_dim * self.qk_norm,
            "head": 0 if self.tied else self.vocab * self.dim,
        }

    @property
    def total_parameters(self) -> int:
        return sum(self.parameters().values())

    def read_parameters(self, sequences: int) -> int:
        """Weights that a decoding step of `sequences` tokens reads: all but the embedding rows and unused experts."""
        part = self.parameters()
        read = self.total_parameters - (0 if self.tied else part["embedding"])
        if self.experts:
            unused = (1 - self.active_experts / self.experts) ** sequences  # chance that an expert is not drawn
            read -= int(self.sparse_layers * self.experts * self._mlp(self.expert_dim) * unused)
        return read

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses, its embedding row's table included."""
        return self.read_parameters(1) + (0 if self.tied else self.parameters()["embedding"])

    @property
    def matmul_parameters(self) -> int:
        return self.read_parameters(1)

    def windows(self, context: int | None = None) -> tuple[int, ...]:
        """Tokens that each layer sees."""
        length = context or self.seq_len
        short = min(self.window or length, length)
        return (length,) * self.full_layers + (short,) * (self.depth - self.full_layers)

    @property
    def train_flops_per_token(self) -> int:
        return 6 * self.matmul_parameters + 12 * self.q_dim * sum(self.windows())

    def finetuning_flops_per_token(self, lora_rank: int) -> int:
        """Frozen weights have no gradients of their own: a third less of each of their products."""
        if not lora_rank:
            return self.train_flops_per_token
        return self.train_flops_per_token - 2 * self.matmul_parameters + 6 * self.lora_parameters(lora_rank)

    def decode_flops_per_token(self, context: int) -> int:
        return 2 * self.matmul_parameters + 4 * self.q_dim * sum(self.windows(context))

    def kv_elements(self, context: int) -> int:
        return 2 * self.kv_dim * sum(self.windows(context))

    def slot_elements(self, context: int) -> int:
        return self.kv_elements(context)

    def lora_parameters(self, rank: int) -> int:
        """Adapters on every linear layer of attention and MLP; of a model with experts on those of attention
        (models/lora.py)."""
        attention = 2 * (self.dim + self.q_dim) + 2 * (self.dim + self.kv_dim)
        dense = 0 if self.experts else self.depth * 3 * (self.dim + self.mlp_dim)
        return rank * (self.depth * attention + dense)

    @property
    def packed_parameters(self) -> int:
        """Weights that models/quantize.py packs: matrices of attention and dense MLP. Experts count as they are: newer
        versions of transformers have all of a layer in one tensor, which is no linear layer."""
        attention = self.dim * (2 * self.q_dim + 2 * self.kv_dim)
        return self.depth * attention + (self.depth - self.sparse_layers) * 3 * self.dim * self.mlp_dim


def check_bits(lora: bool, shard: int) -> None:
    """Refuse --bits beside settings that it excludes."""
    if not lora:
        raise UserError(
            "--bits 4 holds the frozen base of adapters; add --lora (of plan: --lora-rank 16), or leave --bits out"
        )
    if shard:
        raise UserError("--shard cuts weights, and those of --bits 4 are packed; leave one of the two out")


def check_bits_on(chip: Chip) -> None:
    """Refuse --bits on devices without bitsandbytes, before anything is read."""
    kind = KINDS[chip.device_type]
    if not kind.bitsandbytes:
        raise UserError(
            f"--bits 4 is done by bitsandbytes, which is used on CUDA and CPU and not on {kind.title}; leave it out: "
            "LoRA keeps the base in the dtype of the run, and --shard N shares it out over several devices"
        )


def packing_saves(chip: Chip) -> bool:
    """True if --bits may help where something does not fit. Not on a CPU, into whose memory the whole model is
    read before it is packed."""
    return KINDS[chip.device_type].bitsandbytes and chip.devices_per_node > 1


def read_config(path: str, seq_len: int) -> HFModel:
    """The model described by a config.json (or by the folder that holds one)."""
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--hf-config: cannot read {file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"--hf-config: {file} is not JSON ({error})") from None
    if not isinstance(values, dict) or "model_type" not in values:
        raise UserError(f"--hf-config: {file} names no model_type; give the config.json of a model")
    return from_config(values, seq_len)


def from_config(values: dict[str, Any], seq_len: int) -> HFModel:
    """Understand the fields of a config.json; a model type or a field we do not know is an error, never a guess."""
    kind = values["model_type"]
    family = FAMILIES.get(kind)
    if family is None:
        raise UserError(f"--hf-config: model type {kind!r} is not one we can count; {nearest(kind, list(FAMILIES))}")
    needed = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
    missing = [name for name in needed if not isinstance(values.get(name), int)]
    if missing:
        raise UserError(f"--hf-config: {missing[0]} is missing; give the config.json of a whole model")
    depth, dim, heads = values["num_hidden_layers"], values["hidden_size"], values["num_attention_heads"]
    experts = values.get("num_experts") or values.get("num_local_experts") or 0
    windowed = bool(values.get("sliding_window")) and (family.windows or bool(values.get("use_sliding_window")))
    full = values.get("max_window_layers", 0) if windowed and not family.windows else 0
    if windowed and "layer_types" in values:
        full = sum(kind == "full_attention" for kind in values["layer_types"])
    dense = {i for i in range(depth) if (i + 1) % values.get("decoder_sparse_step", 1)}
    dense |= set(values.get("mlp_only_layers") or ())
    bias = bool(values.get("attention_bias", False))
    return HFModel(
        model_type=kind,
        depth=depth,
        dim=dim,
        heads=heads,
        kv_heads=values.get("num_key_value_heads") or heads,
        head_dim=values.get("head_dim") or dim // heads,
        mlp_dim=values["intermediate_size"],
        vocab=values["vocab_size"],
        seq_len=seq_len,
        tied=bool(values.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias or bias,
        output_bias=bias and not family.qkv_bias,
        mlp_bias=bool(values.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        window=values["sliding_window"] if windowed else 0,
        full_layers=min(full, depth) if windowed else depth,
        sparse_layers=depth - len(dense) if experts else 0,
        experts=experts,
        active_experts=values.get("num_experts_per_tok") or 0,
        expert_dim=values.get("moe_intermediate_size") or (values["intermediate_size"] if experts else 0),
        shared_dim=values.get("shared_expert_intermediate_size") or 0,
    )


def finetuning_activations(model: HFModel, chip: Chip, rows: int, checkpointing: bool) -> int:
    """Activations as memory.activations counts them; a gated MLP keeps gate, its activation, the other half and their
    product, and a norm with weights keeps its input in fp32."""
    tokens, size, traits = rows * model.seq_len, compute_bytes(chip), KINDS[chip.device_type].memory
    dense = (model.depth - model.sparse_layers) * 4 * model.mlp_dim
    sparse = model.sparse_layers * (
        4 * (model.active_experts * model.expert_dim + model.shared_dim) + 2 * model.active_experts * model.dim
    )
    layers = (model.depth * (4 * model.dim + 3 * model.q_dim + 3 * model.kv_dim) + dense + sparse) * size
    layers += model.depth * 2 * model.dim * FP32
    if chip.fused_attention or traits.always_fused:
        layers += model.depth * traits.softmax * model.heads
    else:
        layers += 2 * size * model.heads * sum(model.windows())
    if checkpointing:
        layers = model.depth * model.dim * size + layers // model.depth
    return tokens * (layers + 4 * model.dim * size)


def adapter_activations(model: HFModel, chip: Chip, rows: int, lora_rank: int) -> int:
    """Activations between the two matrices of each of a layer's seven adapters, kept for the backward pass."""
    return rows * model.seq_len * model.depth * 7 * lora_rank * compute_bytes(chip)


def shared_out(model: HFModel, size: int, adapters: int, shard: int, offload: bool) -> dict[str, int]:
    """Weights, gradients and moments of one device of `shard` that hold a copy together. What learns is kept in fp32,
    what is frozen in the compute dtype; two layers are whole at a time, with the gradient of one, and so is what stands
    around the layers: embedding and head."""
    part = model.parameters()
    around = part["embedding"] + part["head"]
    layer = (model.total_parameters - around) // model.depth
    frozen, trained = (model.total_parameters, adapters) if adapters else (0, model.total_parameters)
    grown = 0 if adapters else around + layer  # gradients of frozen weights are never made
    host = 0 if offload else 1
    return {
        "weights": (around + 2 * layer) * size + host * -(-frozen // shard) * size,
        "masters": host * -(-trained // shard) * FP32,
        "gradients": grown * FP32 + host * -(-trained // shard) * FP32,
        "optimizer": host * -(-trained // shard) * 2 * FP32,
    }


def finetuning(
    model: HFModel,
    chip: Chip,
    devices: int,
    rows: int,
    checkpointing: bool = False,
    lora_rank: int = 0,
    *,
    bits: int | None = None,
    shard: int = 0,
    offload: bool = False,
) -> dict[str, int]:
    """Bytes by part on one device, as nn/optim.py keeps them: all weights in the compute dtype, and of those that learn
    (all, or adapters) the gradients in fp32 on every device; fp32 masters, two AdamW moments and the reduced gradient
    are shared out over the devices. `bits`: the linear layers of the base are packed, and unpacked one at a time.
    `shard`: that many devices hold one copy of the weights, as nn/sharded.py keeps it; with `offload` the shares are on
    the host."""
    size = compute_bytes(chip)
    adapters = model.lora_parameters(lora_rank) if lora_rank else 0
    trained = adapters or model.total_parameters
    own = -(-trained // devices)
    tokens = min(rows * model.seq_len, HEAD_CHUNK_BYTES[size] // (size * model.vocab))
    parts = {
        "weights": (model.total_parameters + adapters) * size,
        "masters": 0 if size == FP32 else own * FP32,
        "gradients": trained * FP32 + (own * FP32 if devices > 1 else 0),
        "optimizer": own * 2 * FP32,
    }
    packed = model.packed_parameters if bits else 0
    parts["weights"] -= packed * size - int(packed * PACKED_BYTES)
    if shard:
        parts = shared_out(model, size, adapters, shard, offload)
    return {
        **parts,
        "activations": finetuning_activations(model, chip, rows, checkpointing)
        + adapter_activations(model, chip, rows, lora_rank),
        "logits": tokens * model.vocab * (2 * size + FP32),
        "workspace": model.dim * max(model.mlp_dim, model.q_dim) * size if bits else 0,
        "kernel_buffers": kernel_buffers(chip, rows * model.seq_len, model.q_dim + 2 * model.kv_dim),
        **outside(chip),
    }
