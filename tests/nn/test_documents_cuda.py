"""Documents in packed rows on CUDA: the variable-length flash kernel equals the definition, eager and compiled.

pytest tests/nn/test_documents_cuda.py           # skipped without a CUDA device of compute capability 8.0 or more
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

from ascendchat.device import pick
from ascendchat.device.cuda_attention import Flash
from ascendchat.nn.attention import Reference, documents
from ascendchat.nn.gpt import GPT, PlainOps, dense
from ascendchat.nn.loss import head_loss
from ascendchat.sizes.shape import Shape

if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0):
    pytest.skip("no CUDA device with flash attention", allow_module_level=True)
PLACE = torch.device("cuda")
LENGTHS = np.array([300, 1, 2, 209, 512, 500, 12], np.int32)  # three rows of 512
OTHERS = np.array([512, 100, 412, 7, 5, 400, 100], np.int32)


def error(found: Tensor, wanted: Tensor) -> float:
    size = wanted.detach().double().norm().clamp_min(1.0)  # of a window of 1 the gradients of q and k are 0
    return float((found.detach().double() - wanted.detach().double()).norm() / size)


@pytest.mark.parametrize(
    ("window", "heads", "kv_heads", "dim"), [(1, 4, 4, 64), (7, 6, 1, 32), (128, 4, 2, 128), (512, 4, 2, 128)]
)
def test_flash_equals_the_reference_and_its_gradients(window: int, heads: int, kv_heads: int, dim: int) -> None:
    """Over documents and over whole rows."""
    kernel, plain, generator = Flash(), Reference(), torch.Generator().manual_seed(0)
    sizes = [(3, 512, count, dim) for count in (heads, kv_heads, kv_heads)]
    there = [torch.randn(size, generator=generator).bfloat16().to(PLACE).requires_grad_() for size in sizes]
    exact = [x.detach().float().requires_grad_() for x in there]
    tokens = torch.zeros(3, 512, dtype=torch.long, device=PLACE)
    packed = documents(kernel, LENGTHS, tokens, torch.bfloat16).bounds
    assert len(packed) > len(LENGTHS) + 1, "documents without tokens fill it up"
    number = documents(plain, LENGTHS, tokens, torch.float32).bounds
    grad = torch.randn(3, 512, heads, dim, generator=generator).bfloat16().to(PLACE)
    pairs = [
        (kernel.packed(*there, packed, window, 0.2), plain.packed(*exact, number, window, 0.2)),
        (kernel.dense(*there, window, 0.2), plain.dense(*exact, window, 0.2)),
    ]
    for found, wanted in pairs:
        assert error(found, wanted) < 0.01
        mine, theirs = torch.autograd.grad(found, there, grad), torch.autograd.grad(wanted, exact, grad.float())
        assert max(error(one, other) for one, other in zip(mine, theirs, strict=True)) < 0.02


def model_of(dtype: torch.dtype, *, fused: bool, checkpointed: bool = False) -> GPT:
    heads = None
    if fused:
        from ascendchat.nn.triton_training import heads
    shape = Shape.from_depth(4, vocab=60, seq_len=512, dim=128, head_dim=32, window_pattern="SSSL")
    model = GPT(shape, PlainOps(heads), checkpoint_activations=checkpointed)
    model.initialise(0)
    with torch.no_grad():
        for parameter in model.parameters():  # many begin as 0, where a wrong gradient would not show
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    return model.to_compute(dtype).to(PLACE)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "checkpointed"])
def test_a_packed_batch_has_the_loss_and_gradients_of_the_reference(compiled: bool, checkpointed: bool) -> None:
    tokens, targets = torch.randint(0, 60, (2, 3, 512), generator=torch.Generator().manual_seed(1)).to(PLACE)
    exact, kernel = model_of(torch.float32, fused=False), Flash()
    model = model_of(torch.bfloat16, fused=compiled, checkpointed=checkpointed)
    torch.compiler.reset()
    traced = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    forward = torch.compile(model, dynamic=False, fullgraph=True, backend=traced) if compiled else model
    attend, rope = dense(model, kernel), model.rope(512, torch.bfloat16, PLACE)
    for lengths in (LENGTHS, OTHERS):
        for made in (exact, model):
            made.zero_grad()
        known = documents(kernel, lengths, tokens, torch.bfloat16, compiled=compiled, pin=True)
        loss = head_loss(forward(tokens, attend, rope, documents=known), model.head, targets, 60)
        loss.backward()
        number = documents(Reference(), lengths, tokens, torch.float32)
        wanted = head_loss(exact(tokens, dense(exact, Reference()), documents=number), exact.head, targets, 60)
        wanted.backward()
        assert float(loss) == pytest.approx(float(wanted), rel=5e-3)
        for (name, one), other in zip(model.named_parameters(), exact.parameters()):
            assert error(one.grad, other.grad) < 0.1, name
    if compiled:
        assert traced.frame_count == 1
        known = documents(kernel, np.full(96, 16, np.int32), tokens, torch.bfloat16, compiled=True)
        forward(tokens, attend, rope, documents=known)
        assert traced.frame_count == 2, "more documents than ever: compiled once more"


def test_bounds_are_made_without_waiting_for_the_device() -> None:
    precision = torch.get_float32_matmul_precision()  # which `pick` changes
    device = pick("cuda")
    tokens = torch.zeros(3, 512, dtype=torch.long, device=PLACE)
    torch.cuda.set_sync_debug_mode("error")
    try:
        documents(Flash(), LENGTHS, tokens, torch.bfloat16, compiled=True, pin=device.pin)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.set_float32_matmul_precision(precision)
