"""The model on the simulated NPU: the fused kernels run, few launches, and the losses are those of the CPU."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_training import losses, train_model

import cannsim
from ascendchat import cli
from ascendchat.device import Device, pick
from ascendchat.device.npu_attention import NpuFusion
from ascendchat.nn.attention import Reference, choose, documents, kernels
from ascendchat.nn.gpt import GPT, dense
from ascendchat.nn.loss import head_loss
from ascendchat.nn.optim import MuonAdamW, groups
from ascendchat.sizes.schedule import rates
from ascendchat.sizes.shape import Shape

MAX_FORWARD_BACKWARD, MAX_OPTIMIZER = 700, 100  # launches of 12 layers
PRODUCTS = ("Matmul", "Mm", "Addmm", "Baddbmm", "FlashAttention")  # in the names of what the cube unit does


@pytest.mark.parametrize(
    ("steps", "sizes"),
    [(15, {"seq_len": 64}), (10, {"kv_heads": 2, "window_pattern": "S", "seq_len": 256})],
    ids=["full", "grouped-window"],
)
def test_steps_have_the_losses_of_the_cpu(device: Device, steps: int, sizes: dict[str, Any]) -> None:
    shape = Shape.from_depth(3, vocab=120, dim=64, head_dim=16, **sizes)
    kernel, _ = choose("npu", torch.float32, shape.head_dim)
    cannsim.reset()
    found = losses(shape, torch.device("npu:0"), kernel, device.operators(), steps)
    counts = cannsim.launches()
    assert counts["aclnnFlashAttentionScore"] == counts["aclnnFlashAttentionScoreGrad"] == 3 * steps
    assert counts["aclnnRmsNormGrad"] > 0
    expected = losses(shape, torch.device("cpu"), Reference(), None, steps)
    assert found == pytest.approx(expected, abs=5e-4)
    assert found[-1] < found[0] - 0.01 * steps / 10, "it learns, so the updates are compared too"


def test_the_mean_of_the_last_weights_is_that_of_the_cpu_and_lies_on_the_host(device: Device) -> None:
    shape = Shape.from_depth(2, vocab=60, seq_len=16, dim=32, head_dim=16)
    found = []
    for place in ("npu:0", "cpu"):
        model = GPT(shape)
        model.initialise(0)
        optimizer = MuonAdamW(groups(model.to(place), rates(shape.dim, 4096)), compute_dtype=torch.float32)
        for count in (1, 2, 3):
            for bucket in optimizer.buckets:
                bucket.weight.add_(count / 8)
            optimizer.average(count, last=count == 3)
        assert {bucket.state["mean"].device.type for bucket in optimizer.buckets} == {"cpu"}
        found.append(torch.cat([parameter.detach().cpu().flatten() for parameter in model.parameters()]))
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_a_step_of_twelve_layers_keeps_to_its_launch_budget(device: Device) -> None:
    shape = Shape.from_depth(12, vocab=256, seq_len=64, dim=128, head_dim=64)
    place = torch.device("npu:0")
    model, optimizer = train_model(shape, place, torch.bfloat16, device.operators())
    kernel, reason = choose("npu", torch.bfloat16, 64)
    assert reason == "attention: npu_fusion"
    attend, rope = dense(model, kernel), model.rope(64, torch.bfloat16, place)
    tokens = torch.randint(0, 256, (2, 65)).to(place)
    weight = torch.tensor(1 / 128, device=place)

    def forward_backward() -> None:
        hidden = model(tokens[:, :-1], attend, rope)
        head_loss(hidden, model.head, tokens[:, 1:], shape.vocab, weight=weight, mtp_weight=weight).backward()

    def launched(run: object) -> int:
        torch.npu.synchronize()
        cannsim.reset()
        run()  # type: ignore[operator]
        torch.npu.synchronize()
        return sum(n for name, n in cannsim.launches().items() if name.startswith("aclnn"))

    step = lambda: optimizer.step(lr_scale=1.0, momentum=0.9, matrix_decay=0.1)  # noqa: E731
    forward_backward(), step()
    assert launched(forward_backward) <= MAX_FORWARD_BACKWARD
    assert cannsim.launches()["aclnnFlashAttentionScore"] == 12
    assert not cannsim.aicpu()
    assert launched(step) <= MAX_OPTIMIZER
    assert not cannsim.aicpu()


def vector_bytes(depth: int, rows: int) -> int:
    """Of one forward and backward pass of a model of width 64, but for its products."""
    shape = Shape.from_depth(depth, vocab=64, seq_len=32, dim=64, head_dim=32)
    model, _ = train_model(shape, torch.device("npu:0"), torch.bfloat16, pick("npu").operators())
    tokens, attend = torch.randint(0, 64, (rows, 32)).npu(), dense(model, kernels("npu")["npu_fusion"])
    model.rope(32, torch.bfloat16, tokens.device)
    cannsim.reset()
    model(tokens, attend).sum().backward()
    moved = {name: size for name, (_, size) in cannsim.counters().items() if name.startswith("aclnn")}
    return sum(size for name, size in moved.items() if not any(part in name for part in PRODUCTS))


def test_a_layer_moves_few_bytes_per_channel_of_a_token(device: Device) -> None:
    """310 before they were counted, and twice as many layers and tokens tell them from all others."""
    of_tokens = [vector_bytes(depth, 4) - vector_bytes(depth, 2) for depth in (4, 2)]
    assert (of_tokens[0] - of_tokens[1]) / (2 * 32 * 2 * 64) <= 250


@pytest.mark.parametrize(
    ("dtype", "packed"), [(torch.float32, True), (torch.bfloat16, False)], ids=["float32-documents", "bfloat16-rows"]
)
def test_gradients_are_added_up_as_by_autograd(device: Device, dtype: torch.dtype, packed: bool) -> None:
    """Two micro-batches, in the totals of the optimizer; every kind of layer, and heads that share keys."""
    shape = Shape.from_depth(2, vocab=60, seq_len=24, dim=64, head_dim=16, kv_heads=2)
    generator = torch.Generator().manual_seed(1)
    batches = torch.randint(0, 60, (2, 2, 25), generator=generator)
    totals = []
    for place, ops, kernel in ((torch.device("npu:0"), device.operators(), NpuFusion()), ("cpu", None, Reference())):
        model, optimizer = train_model(shape, place, dtype, ops)  # type: ignore[arg-type]
        with torch.no_grad():  # they start at zero, where half of the gradients are none
            for i, parameter in enumerate(
                p for n, p in model.named_parameters() if n.endswith(("out", "down", "shift"))
            ):
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)) * 0.1)
            model.smear.fill_(0.3)
        for batch in batches.to(place):
            lengths = np.array([7, 17, 24], np.int32)
            known = documents(kernel, lengths, batch[:, :-1], dtype) if packed else None
            hidden = model(batch[:, :-1], dense(model, kernel), documents=known)
            head_loss(hidden, model.head, batch[:, 1:], shape.vocab).backward()
        totals.append({b.group.name: b.grad.cpu() for b in optimizer.buckets})
    for name, expected in totals[1].items():
        error = (totals[0][name] - expected).norm() / expected.norm()
        assert error < (2e-5 if dtype == torch.float32 else 0.1), (name, float(error))


def test_a_count_of_operators_is_that_of_the_launches(
    device: Device, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`bench train` counts what torch is asked for, on any device; here it can be compared."""
    monkeypatch.setenv("ASCENDCHAT_HOME", str(tmp_path))
    sizes = "--depth 2 --dim 64 --head-dim 32 --vocab-size 300 --max-seq-len 32 --device-batch-size 2"
    command = f"bench train --device-type npu {sizes} --total-batch-size 128 --steps 1"
    assert cli.main(command.split()) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    shape = Shape.from_depth(2, vocab=300, seq_len=32, dim=64, head_dim=32)
    model, optimizer = train_model(shape, torch.device("npu:0"), torch.bfloat16, device.operators())
    tokens, weight = torch.randint(0, 300, (2, 33)).npu(), torch.tensor(1 / 64).npu()
    attend = dense(model, kernels("npu")["npu_fusion"])
    for _ in range(2):
        cannsim.reset()
        hidden = model(tokens[:, :-1], attend)
        head_loss(hidden, model.head, tokens[:, 1:], shape.vocab, weight=weight, mtp_weight=weight).backward()
        micro_batch = sum(cannsim.launches().values())
        cannsim.reset()
        optimizer.step(lr_scale=1.0, momentum=0.9, matrix_decay=0.1)
    assert found["launches_micro_batch"] == pytest.approx(micro_batch, rel=0.05)
    assert found["launches_optimizer"] == pytest.approx(sum(cannsim.launches().values()), rel=0.15)
    chip = device.chip
    multiplying = 128 * shape.train_flops_per_token / chip.peak  # type: ignore[operator]
    seconds = multiplying + found["vector_gb"] * 1e9 / chip.bandwidth
    assert found["roofline_tokens_per_second"] == pytest.approx(128 / seconds, rel=0.01)
    assert found["roofline_mfu"] == pytest.approx(multiplying / seconds, abs=0.001)


def test_a_model_can_be_copied(device: Device) -> None:
    """As `rl --kl` does, for the model that it starts from."""
    shape = Shape.from_depth(2, vocab=120, seq_len=16, dim=32, head_dim=16)
    model = GPT(shape, device.operators())
    model.initialise(0)
    model = model.to_compute(torch.float32).to("npu:0")
    row, attend = torch.arange(16, device="npu")[None], dense(model, Reference())
    before = model(row, attend)
    copied = deepcopy(model)
    with torch.no_grad():
        model.embed.weight.zero_()
    assert torch.equal(copied(row, attend), before)
    assert not torch.equal(model(row, attend), before)


def test_the_eager_head_loss_moves_few_bytes_per_logit(device: Device) -> None:
    """Without a compiler each operation is a pass over the logits, in float32: 104 bytes before they were counted, 56
    of them now."""
    rows, width, vocab = 128, 16, 2048
    hidden, head = (torch.randn(n, width).bfloat16().npu().requires_grad_() for n in (rows, vocab))
    targets, weight = torch.randint(0, vocab, (1, rows)).npu(), torch.tensor(1 / rows, device="npu")
    cannsim.reset()
    head_loss(hidden[None], head, targets, vocab, weight=weight).backward()
    moved = {name: size for name, (_, size) in cannsim.counters().items() if name.startswith("aclnn")}
    vector = sum(size for name, size in moved.items() if not any(part in name for part in PRODUCTS))
    assert vector <= 60 * rows * vocab


@pytest.mark.parametrize(("window", "kv_heads"), [(5, 4), (64, 2), (300, 2)])
def test_the_fused_kernel_equals_the_reference(device: Device, window: int, kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    host = [torch.randn(2, 100, heads, 16, generator=generator) for heads in (4, kv_heads, kv_heads)]
    found = kernels("npu")["npu_fusion"].dense(*(x.npu() for x in host), window, 0.4)
    torch.testing.assert_close(found.cpu(), Reference().dense(*host, window, 0.4), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("most", "window"), [(1024, 3), (2, 64)], ids=["one call", "two calls"])
def test_packed_documents_do_not_see_each_other(
    device: Device, monkeypatch: pytest.MonkeyPatch, window: int, most: int
) -> None:
    kernel, generator = NpuFusion(), torch.Generator().manual_seed(0)
    monkeypatch.setattr("ascendchat.device.npu_attention.MAX_SEQUENCES", most)
    here = [torch.randn(2, 20, heads, 16, generator=generator).requires_grad_() for heads in (4, 2, 2)]
    there = [x.detach().npu().requires_grad_() for x in here]
    lengths = np.array([7, 1, 12, 20], np.int32)
    cannsim.reset()
    bounds = documents(kernel, lengths, torch.zeros(2, 20).npu(), torch.float32).bounds
    found = kernel.packed(*there, bounds, window, 0.4)
    expected = Reference().packed(*here, tuple(lengths.tolist()), window, 0.4)
    torch.testing.assert_close(found.cpu(), expected, atol=1e-5, rtol=1e-4)
    assert cannsim.launches()["aclnnFlashAttentionVarLenScore"] == (1 if most == 1024 else 2)
    found.square().sum().backward(), expected.square().sum().backward()
    for a, b in zip(there, here):
        torch.testing.assert_close(a.grad.cpu(), b.grad, atol=1e-4, rtol=1e-3)


def test_a_packed_batch_has_the_loss_and_gradients_of_its_documents_alone(device: Device) -> None:
    shape = Shape.from_depth(3, vocab=60, seq_len=256, dim=64, head_dim=16, window_pattern="SSL")
    place, kernel = torch.device("npu:0"), choose("npu", torch.float32, 16)[0]
    packed, apart = GPT(shape, device.operators()), GPT(shape)
    for model in (packed, apart):
        model.initialise(0)
        with torch.no_grad():
            for parameter in model.parameters():  # many begin as 0, where a wrong gradient would not show
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    packed.to(place)
    tokens, targets = torch.randint(0, 60, (2, 2, shape.seq_len), generator=torch.Generator().manual_seed(1))
    lengths = [70, 1, 2, shape.seq_len - 73, shape.seq_len]
    known = documents(kernel, np.array(lengths), tokens.npu(), torch.float32)
    one = torch.tensor(1.0)
    cannsim.reset()
    hidden = packed(tokens.npu(), dense(packed, kernel), documents=known)
    found = head_loss(hidden, packed.head, targets.npu(), 60, weight=one.npu())
    found.backward()
    counts = cannsim.launches()
    assert counts["aclnnFlashAttentionVarLenScore"] == counts["aclnnFlashAttentionUnpaddingScoreGrad"] == 3
    expected = torch.zeros(())
    for part, wanted in zip(tokens.view(-1).split(lengths), targets.view(-1).split(lengths)):
        hidden = apart(part[None], dense(apart, Reference()))
        expected = expected + head_loss(hidden, apart.head, wanted[None], 60, weight=one)
    expected.backward()
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    for (name, a), b in zip(packed.named_parameters(), apart.parameters()):
        assert float((a.grad.cpu() - b.grad).norm()) < 1e-3 * float(b.grad.norm()), name


@pytest.mark.parametrize("queries", [1, 3])
def test_decoding_behind_a_cache_equals_the_reference(device: Device, queries: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, n, h, 16, generator=generator).half() for n, h in ((queries, 4), (20, 2), (20, 2)))
    lengths = torch.tensor([20, 9, 4])
    cannsim.reset()
    found = kernels("npu")["npu_fusion"].cached(q.npu(), k.npu(), v.npu(), lengths.npu(), 6, 0.4)
    expected = Reference().cached(q, k, v, lengths, 6, 0.4)
    torch.testing.assert_close(found.cpu().float(), expected.float(), atol=3e-3, rtol=1e-2)
    assert any("FusedInferAttentionScore" in name for name in cannsim.launches())
