"""The model is what its Shape says, causal, windowed, and the same with recomputed activations."""

from __future__ import annotations

import math

import pytest
import torch

from ascendchat.nn.attention import Reference, Sdpa
from ascendchat.nn.gpt import GPT, dense, rope_tables
from ascendchat.nn.loss import head_loss
from ascendchat.plan.shape import Shape


def build(**sizes: object) -> GPT:
    shape = Shape.from_depth(3, **{"vocab": 60, "seq_len": 128, "dim": 64, "head_dim": 16, **sizes})  # type: ignore[arg-type]
    model = GPT(shape)
    model.initialise(0)
    with torch.no_grad():  # the output projections start at zero: give them values, or the layers would do nothing
        for block in model.blocks:
            block.out.normal_(0, 0.1, generator=torch.Generator().manual_seed(1))
            block.down.normal_(0, 0.1, generator=torch.Generator().manual_seed(2))
        model.smear.fill_(0.3)
    return model


def tokens(length: int = 128, rows: int = 2, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 60, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("sizes", [{}, {"kv_heads": 2}, {"kv_heads": 1}, {"value_embeddings": False}, {"vocab": 100}])
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


def test_a_short_window_forgets_what_lies_before_it() -> None:
    shape = {"seq_len": 512, "window_pattern": "S"}
    model = build(**shape)
    assert model.shape.windows() == (128, 128, 512)
    only_short = GPT(Shape.from_dict({**model.shape.to_dict(), "depth": 1, "value_layers": [0]}))
    only_short.initialise(0)
    assert only_short.shape.windows() == (512,), "the last layer always sees the whole row"


@pytest.mark.parametrize("sizes", [{}, {"kv_heads": 2}, {"seq_len": 512, "window_pattern": "SSSL"}])
def test_kernels_give_the_same_model(sizes: dict[str, object]) -> None:
    model = build(**sizes)
    batch = tokens(model.shape.seq_len)
    torch.testing.assert_close(
        model(batch, dense(model, Sdpa())), model(batch, dense(model, Reference())), atol=1e-4, rtol=1e-4
    )


def test_a_new_model_knows_nothing() -> None:
    model = GPT(Shape.from_depth(3, vocab=60, seq_len=128, dim=64, head_dim=16))
    model.initialise(0)
    batch = tokens(129)
    loss = head_loss(model(batch[:, :-1], dense(model, Sdpa())), model.head, batch[:, 1:], 60)
    assert abs(loss.item() - math.log(60)) < 0.05


def test_the_same_seed_gives_the_same_weights_and_another_seed_others() -> None:
    a, b, c = (GPT(Shape.from_depth(2, vocab=60, dim=32, head_dim=16)) for _ in range(3))
    a.initialise(3), b.initialise(3), c.initialise(4)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters()))
    assert not torch.equal(a.blocks[0].qkv, c.blocks[0].qkv)


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
