"""The frozen base of adapters in 4 bits (QLoRA), by bitsandbytes: its only importer.

    ascendchat finetune --model Qwen2.5-7B-Instruct --data talk.jsonl --lora --bits 4

    check_packing(place, dtype)      # before a model is read: bitsandbytes is there and runs on this device
    pack(model, place)               # linear layers but the head become Linear4bit: nf4, double quantization

A packed matrix is a column of bytes with two weights in each, beside scales of 8 bits for 64 weights. It is unpacked
for each product, forward and backward; embeddings, norms, biases and head stay as they are. Nothing of it is saved: a
checkpoint holds the adapters, and `ascendchat export` adds them to the base as it was before.
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

TROUBLE = (RuntimeError, AttributeError, OSError, TypeError, ValueError)  # of its libraries, wherever they are missing


def bits_library() -> ModuleType:
    """bitsandbytes, imported behind transformers: on some CPUs it would ask the network for a kernel."""
    library()
    try:
        import bitsandbytes
    except (ImportError, *TROUBLE) as error:
        raise UserError(
            f"--bits 4 needs bitsandbytes ({first_line(error)}); install it: {install_command('qlora')}, or leave "
            "--bits out: LoRA keeps the base in the dtype of the run"
        ) from None
    return bitsandbytes


def first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:200]


def check_packing(place: torch.device, dtype: torch.dtype) -> None:
    """A small layer goes forward and backward there, or a UserError says why not."""
    version = bits_library().__version__
    plain = nn.Linear(64, 64, bias=False, device="meta")
    plain.weight = nn.Parameter(torch.eye(64, dtype=dtype))
    x = torch.arange(64, dtype=dtype, device=place)[None].requires_grad_()
    try:
        found = packed_layer(plain, place)(x)
        (gradient,) = torch.autograd.grad(found.sum(), x)
        right = torch.equal(found, x) and bool((gradient == 1).all())
    except TROUBLE as error:
        raise UserError(
            f"bitsandbytes {version} does not run on {place} ({first_line(error)}); install another one, or leave "
            "--bits out: LoRA keeps the base in the dtype of the run"
        ) from None
    if not right:
        raise UserError(
            f"bitsandbytes {version} computes something else than it should on {place}; install another one, or leave "
            "--bits out: LoRA keeps the base in the dtype of the run"
        )


def pack(model: CausalLM, place: torch.device) -> str:
    """Pack every linear layer but the head, and put it on its device; what was done, for people."""
    head, before, after = model.inner.get_output_embeddings(), 0, 0
    names = [name for name, m in model.inner.named_modules() if type(m) is nn.Linear and m is not head]
    for name in names:  # one after the other, each in the place of the old one, whose memory is free then
        layer = model.inner.get_submodule(name)
        made = packed_layer(layer, place)
        before, after = before + layer.weight.nbytes, after + packed_bytes(made)
        parent, _, child = name.rpartition(".")
        setattr(model.inner.get_submodule(parent), child, made)
    model.inner.is_loaded_in_4bit = True  # peft takes its own layer for such
    return (
        f"{len(names)} linear layers are held in 4 bits (nf4, bitsandbytes {bits_library().__version__}): "
        f"{bytes_text(after)} instead of {bytes_text(before)}"
    )


def packed_layer(layer: nn.Linear, place: torch.device) -> Any:
    """The same layer with its weight in 4 bits, on its device, frozen. It computes in the dtype that the weight had."""
    parts, dtype = bits_library().nn, layer.weight.dtype
    made = parts.Linear4bit(
        layer.in_features, layer.out_features, layer.bias is not None, compute_dtype=dtype, device="meta"
    )
    weight = parts.Params4bit(layer.weight.data, quant_type="nf4", compress_statistics=True, module=made)
    made.weight = weight.to(place)  # where it is packed
    if layer.bias is not None:
        made.bias = nn.Parameter(layer.bias.data.to(place), requires_grad=False)
    # Where a CPU multiplies bf16, bitsandbytes would pack anew for the first product of a validation, and for that form
    # it has no gradients: training would go on without those of the layers below.
    made.support_avx512bf16_for_cpu = False
    return made


def packed_bytes(layer: Any) -> int:
    """Memory of a packed weight: its bytes, the scales, and the tables of both."""
    state = layer.weight.quant_state
    held: list[Tensor] = [layer.weight, state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code]
    return sum(tensor.nbytes for tensor in held)
