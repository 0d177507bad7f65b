"""The model is what its Shape says, causal, windowed, and the same with recomputed activations."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ascendchat.chips import find
from ascendchat.nn.attention import Reference, Sdpa
from ascendchat.nn.gpt import GPT, Block, attention_scale, dense, rope_tables, shifted
from ascendchat.nn.loss import head_loss
from ascendchat.sizes.memory import activations
from ascendchat.sizes.shape import Shape


def build(**sizes: object) -> GPT:
    shape = Shape.from_depth(3, **{"vocab": 60, "seq_len": 128, "dim": 64, "head_dim": 16, **sizes})  # type: ignore[arg-type]
    model = GPT(shape)
    model.initialise(0)
    with torch.no_grad():  # the output projections start at zero: give them values, or the layers would do nothing
        for block in model.blocks:
            block.out.normal_(0, 0.1, generator=torch.Generator().manual_seed(1))
            block.down.normal_(0, 0.1, generator=torch.Generator().manual_seed(2))
            block.shift.normal_(0, 0.5, generator=torch.Generator().manual_seed(3))
        model.smear.fill_(0.3)
    return model


def tokens(length: int = 128, rows: int = 2, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 60, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("sizes", [{"kv_heads": 2}, {"value_embeddings": False}, {"vocab": 100}])
def test_parameters_are_counted_by_the_shape(sizes: dict[str, object]) -> None:
    model = build(**sizes)
    assert sum(p.numel() for p in model.parameters()) == model.shape.total_parameters


def test_the_future_does_not_change_the_past() -> None:
    model = build()
    attend = dense(model, Sdpa())
    a, b = tokens(), tokens()
    b[:, 70:] = tokens(seed=1)[:, 70:]
    x, y = model(a, attend), model(b, attend)
    torch.testing.assert_close(x[:, :70], y[:, :70], rtol=0, atol=1e-6)
    assert (x[:, 70:] - y[:, 70:]).abs().max() > 1e-3


def by_hand(block: Block, x: Tensor, cos: Tensor, sin: Tensor, shift: Tensor | None) -> Tensor:
    """One row (T, C) through one block without a value embedding, place by place, query by query."""
    shape, weight = block.shape, block.qkv.flatten(0, 1)
    normed = [F.rms_norm(place, (shape.dim,), eps=1e-6) for place in x]
    raw = [weight @ place for place in normed]  # queries, keys, values, end to end
    heads = []
    for t, own in enumerate(raw):
        mixed = own if shift is None or t == 0 else own + shift * raw[t - 1]
        q, k, v = (part.view(-1, shape.head_dim) for part in mixed.split((shape.q_dim, shape.kv_dim, shape.kv_dim)))
        q, k = (F.rms_norm(part, (shape.head_dim,), eps=1e-6) for part in (q, k))
        q, k = (part * cos[t] + part.roll(shape.head_dim // 2, dims=-1) * sin[t] for part in (q, k))
        heads.append((q, k, v))
    group, places = shape.heads // shape.kv_heads, []
    for t, (q, _, _) in enumerate(heads):
        seen = []
        for h in range(shape.heads):
            keys, values = (torch.stack([heads[s][i][h // group] for s in range(t + 1)]) for i in (1, 2))
            seen.append((keys @ q[h] * attention_scale(shape)).softmax(dim=0) @ values)
        middle = x[t] + block.out @ torch.cat(seen)
        hidden = F.relu(block.up @ F.rms_norm(middle, (shape.dim,), eps=1e-6)).square()
        places.append(middle + hidden @ block.down)
    return torch.stack(places)


@pytest.mark.parametrize(("kv_heads", "share"), [(4, 0.0), (2, 0.5)])
@torch.no_grad()
def test_a_block_mixes_each_token_with_the_one_before(share: float, kv_heads: int) -> None:
    model = build(kv_heads=kv_heads, window_pattern="L")
    block = model.blocks[0]
    block.shift.copy_(share * torch.randn(block.shift.shape, generator=torch.Generator().manual_seed(4)))
    x = torch.randn(2, 7, 64, generator=torch.Generator().manual_seed(5))
    cos, sin = rope_tables(7, 16)
    found = block(x, None, (cos, sin), dense(model, Reference(), 7), shifted)
    plain = torch.stack([by_hand(block, row, cos, sin, None) for row in x])
    expected = torch.stack([by_hand(block, row, cos, sin, block.shift) for row in x]) if share else plain
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[:, 0], plain[:, 0], atol=1e-5, rtol=1e-5)  # before the first there is nothing
    assert share == 0.0 or (found - plain)[:, 1:].abs().amax(dim=(0, 2)).min() > 1e-2


@pytest.mark.parametrize("length", [1, 5])
def test_the_shift_adds_a_share_of_the_place_before_and_so_do_its_gradients(length: int) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, length, 3, 2, generator=generator, dtype=torch.double, requires_grad=True)
    share = torch.randn(3, 2, generator=generator, dtype=torch.double, requires_grad=True)
    found = shifted(0, rows, share)
    assert torch.equal(found[:, 0], rows[:, 0])
    torch.testing.assert_close(found[:, 1:], rows[:, 1:] + share * rows[:, :-1])
    assert torch.autograd.gradcheck(lambda x, s: shifted(0, x, s), (rows, share))


def test_the_gradient_of_the_shift_stays_in_range_under_a_large_loss_scale() -> None:
    rows, share = torch.full((1, 4, 1, 2), 10.0, dtype=torch.half, requires_grad=True), torch.zeros(1, 2)
    share.requires_grad_()
    shifted(0, rows, share).backward(torch.full_like(rows, 30000.0))
    assert share.grad.tolist() == [[900000.0, 900000.0]]


@pytest.mark.parametrize("kv_heads", [4, 1])
def test_the_plan_counts_what_is_kept_for_the_backward_pass(kv_heads: int) -> None:
    model = build(kv_heads=kv_heads, window_pattern="L", dim=128, head_dim=32)
    attend, rope = dense(model, Sdpa()), model.rope(128, torch.float32, torch.device("cpu"))
    known = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *rope)}
    kept: dict[int, Tensor] = {}  # also holds them, so that no address is given twice

    def pack(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden = model(tokens(rows=4), attend, rope)
    assert hidden.requires_grad
    found = sum(tensor.untyped_storage().nbytes() for address, tensor in kept.items() if address not in known)
    assert activations(model.shape, find("cpu"), 4, False) == pytest.approx(found, rel=0.05)


def test_a_new_model_knows_nothing_and_has_the_weights_of_its_seed() -> None:
    shape = Shape.from_depth(3, vocab=60, seq_len=128, dim=64, head_dim=16)
    before = torch.get_rng_state()
    a, b, c = (GPT(shape) for _ in range(3))
    assert torch.equal(torch.get_rng_state(), before), "building it draws no random values"
    a.initialise(3), b.initialise(3), c.initialise(4)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters()))
    assert not torch.equal(a.blocks[0].qkv, c.blocks[0].qkv)
    batch = tokens(129)
    loss = head_loss(a(batch[:, :-1], dense(a, Sdpa())), a.head, batch[:, 1:], 60)
    assert abs(loss.item() - math.log(60)) < 0.05


def test_recomputed_activations_give_the_same_gradients() -> None:
    plain, again = build(), build()
    again.checkpoint_activations = True
    batch = tokens(33)
    for model in (plain, again):
        head_loss(model(batch[:, :-1], dense(model, Sdpa())), model.head, batch[:, 1:], 60).backward()
    for (name, a), b in zip(plain.named_parameters(), again.parameters()):
        torch.testing.assert_close(a.grad, b.grad, atol=1e-6, rtol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


def test_rotation_keeps_the_norm_and_depends_only_on_distance() -> None:
    model = build()
    cos, sin = rope_tables(40, 16)
    x = torch.randn(1, 40, 1, 16, generator=torch.Generator().manual_seed(0))
    turned = model.ops.rotary(x, cos, sin)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    same = x[:, :1].expand_as(x)  # one vector at every position
    turned = model.ops.rotary(same, cos, sin)[0, :, 0]
    products = turned @ turned.t()
    torch.testing.assert_close(products[0, 5], products[20, 25], atol=1e-4, rtol=1e-4)
    assert abs(products[0, 5] - products[0, 0]) > 1e-2


def test_scalars_stay_in_float32_when_the_matrices_do_not() -> None:
    model = build().to_compute(torch.bfloat16)
    assert model.residual.dtype == torch.float32
    assert model.blocks[0].up.dtype == torch.bfloat16
    assert model(tokens(16), dense(model, Reference())).dtype == torch.bfloat16


@pytest.mark.parametrize("depth", [2, 3])
def test_the_weight_of_the_middle_is_learnt_only_where_the_middle_is_not_the_end(depth: int) -> None:
    """Else its gradient would be rounding, which AdamW makes whole steps of: beyond 1 all signs change."""
    model = GPT(Shape.from_depth(depth, vocab=60, seq_len=32, dim=64, head_dim=16))
    model.initialise(0)
    inputs = tokens(length=32)
    head_loss(model(inputs, dense(model, Sdpa())), model.head, inputs, 60).backward()
    assert (model.backout.grad is None) == (depth <= 2)
    assert model.smear.grad is not None
