"""The frozen base of adapters in 4 bits (QLoRA), by bitsandbytes: its only importer.

    ascendchat finetune --model Qwen2.5-7B-Instruct --data talk.jsonl --lora --bits 4

    check_packing(device, dtype)      # before a model is read: bitsandbytes is installed and runs on this device
    pack(model, device)               # linear layers but the head become Linear4bit: nf4, double quantization

A packed matrix is a column of bytes with two weights each, and an 8-bit scale per 64 weights. It is unpacked for each
product, forward and backward; embeddings, norms, biases and head stay unpacked. Packed weights are not saved: a
checkpoint holds the adapters, and `ascendchat export` adds them to the unpacked base.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ascendchat.errors import UserError
from ascendchat.models.causal_lm import CausalLM
from ascendchat.models.import_transformers import library
from ascendchat.sizes.memory import bytes_text
from ascendchat.version import install_command

BITS_ERRORS = (RuntimeError, AttributeError, OSError, TypeError, ValueError)  # where its native libraries are missing


def bits_library() -> ModuleType:
    """Import bitsandbytes, after transformers is set offline: on some CPUs it would ask the network for a kernel."""
    library()
    try:
        import bitsandbytes
    except (ImportError, *BITS_ERRORS) as error:
        raise UserError(
            f"--bits 4 needs bitsandbytes ({first_line(error)}); install it: {install_command('qlora')}, or leave "
            "--bits out: LoRA keeps the base in the dtype of the run"
        ) from None
    return bitsandbytes


def first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:200]


def check_packing(device: torch.device, dtype: torch.dtype) -> None:
    """Run a small packed layer forward and backward on the device; a UserError if that fails."""
    version = bits_library().__version__
    plain = nn.Linear(64, 64, bias=False, device="meta")
    plain.weight = nn.Parameter(torch.eye(64, dtype=dtype))
    x = torch.arange(64, dtype=dtype, device=device)[None].requires_grad_()
    try:
        y = packed_layer(plain, device)(x)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        right = torch.equal(y, x) and bool((gradient == 1).all())
    except BITS_ERRORS as error:
        raise UserError(
            f"bitsandbytes {version} does not run on {device} ({first_line(error)}); install another one, or leave "
            "--bits out: LoRA keeps the base in the dtype of the run"
        ) from None
    if not right:
        raise UserError(
            f"bitsandbytes {version} computes something else than it should on {device}; install another one, or leave "
            "--bits out: LoRA keeps the base in the dtype of the run"
        )


def pack(model: CausalLM, device: torch.device) -> str:
    """Pack every linear layer but the head, and put it on the device; returns a sentence about it."""
    head, before, after = model.inner.get_output_embeddings(), 0, 0
    names = [name for name, m in model.inner.named_modules() if type(m) is nn.Linear and m is not head]
    for name in names:  # each layer replaces the old one at once, so that memory for both is needed once only
        layer = model.inner.get_submodule(name)
        packed = packed_layer(layer, device)
        before, after = before + layer.weight.nbytes, after + packed_bytes(packed)
        parent, _, child = name.rpartition(".")
        setattr(model.inner.get_submodule(parent), child, packed)
    model.inner.is_loaded_in_4bit = True  # peft then uses its own layer for 4 bits
    return (
        f"{len(names)} linear layers are held in 4 bits (nf4, bitsandbytes {bits_library().__version__}): "
        f"{bytes_text(after)} instead of {bytes_text(before)}"
    )


def packed_layer(layer: nn.Linear, device: torch.device) -> Any:
    """A frozen copy of a layer with its weight in 4 bits, on the device; it computes in the dtype of the weight."""
    parts, dtype = bits_library().nn, layer.weight.dtype
    packed = parts.Linear4bit(
        layer.in_features, layer.out_features, layer.bias is not None, compute_dtype=dtype, device="meta"
    )
    weight = parts.Params4bit(layer.weight.data, quant_type="nf4", compress_statistics=True, module=packed)
    packed.weight = weight.to(device)  # bitsandbytes packs it here
    if layer.bias is not None:
        packed.bias = nn.Parameter(layer.bias.data.to(device), requires_grad=False)
    # On a CPU that multiplies bf16, bitsandbytes would pack again for the first product of a validation, into a form
    # that has no gradients: training would go on without those of the layers below. It has no other switch.
    packed.support_avx512bf16_for_cpu = False
    return packed


def packed_bytes(layer: Any) -> int:
    """Bytes of a packed weight with its scales and the tables of both."""
    state = layer.weight.quant_state
    tensors: list[Tensor] = [
        layer.weight,
        state.absmax,
        state.code,
        state.offset,
        state.state2.absmax,
        state.state2.code,
    ]
    return sum(tensor.nbytes for tensor in tensors)
