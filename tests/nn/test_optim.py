"""The update functions against float64, and the sharded optimizer against the update functions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ascendchat.checkpoint import Shard
from ascendchat.nn.attention import Reference
from ascendchat.nn.gpt import GPT, dense
from ascendchat.nn.loss import head_loss
from ascendchat.nn.optim import (
    EPS,
    Bucket,
    Group,
    MuonAdamW,
    adamw_update,
    groups,
    muon_groups,
    muon_update,
    muon_update_in_few_launches,
    orthogonalise,
)
from ascendchat.parallel import collectives
from ascendchat.sizes.schedule import rates
from ascendchat.sizes.shape import Shape

TINY = Shape.from_depth(2, vocab=60, seq_len=16, dim=32, head_dim=16)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def muon(weight: torch.Tensor, grad: torch.Tensor, update: Any = muon_update, **rates: Any) -> None:
    """The first step."""
    first, second, factor = torch.zeros_like(weight), torch.zeros(*weight.shape[:2], 1), torch.ones(len(weight), 1, 1)
    common = {"lr": 0.1, "momentum": 0.9, "decay": 0.0, "beta2": 0.9, "dtype": torch.float32}
    update(weight, grad, first, second, factor, **{**common, **rates})


@pytest.mark.parametrize(("rows", "cols"), [(8, 8), (24, 8), (8, 24)])
def test_orthogonalised_matrices_have_equal_singular_values(rows: int, cols: int) -> None:
    found = orthogonalise(draw(3, rows, cols), torch.float32)
    values = torch.linalg.svdvals(found.double())
    assert values.min() > 0.7
    assert values.max() < 1.3
    norms = found.norm(dim=(-2, -1))
    torch.testing.assert_close(norms, torch.full_like(norms, math.sqrt(min(rows, cols))), rtol=1e-4, atol=0)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float16, 1.0), (torch.float16, 3e-8), (torch.bfloat16, 1e-12)])
def test_the_direction_of_an_update_does_not_depend_on_the_size_of_the_gradient(
    dtype: torch.dtype, size: float
) -> None:
    """Unscaled gradients are smaller than what 16 bits hold: float16 ends at 6e-8."""
    gradient = draw(1, 96, 48) * draw(1, 96, 1, seed=1).abs() + draw(1, 96, 4, seed=2) @ draw(1, 4, 48, seed=3)
    exact = orthogonalise(gradient.double(), torch.float64).flatten()
    weight = torch.zeros(1, 96, 48)
    found = orthogonalise(gradient * size, dtype)
    assert found.dtype == torch.float32
    assert torch.cosine_similarity(found.double().flatten(), exact, dim=0) > 0.999
    muon(weight, gradient * size, lr=1.0, dtype=dtype)
    plain = torch.zeros(1, 96, 48)
    muon(plain, gradient, lr=1.0)
    assert torch.cosine_similarity(weight.flatten(), plain.flatten(), dim=0) > 0.999


def test_the_products_of_tall_and_wide_matrices_are_those_of_their_smaller_side() -> None:
    counted = []
    for size in ((2, 64, 8), (2, 8, 64)):
        with FlopCounterMode(display=False) as flops:
            orthogonalise(draw(*size), torch.float32)
        counted.append(flops.get_total_flops())
    assert counted[0] == counted[1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_gradient_of_zeros_changes_nothing_and_a_row_that_is_nearly_zero_stays_small(dtype: torch.dtype) -> None:
    """At the first step most matrices have no gradient: every layer starts as the identity."""
    weight = draw(2, 8, 24)
    before = weight.clone()
    muon(weight, torch.zeros(2, 8, 24), dtype=dtype)
    assert torch.equal(weight, before)
    gradient = draw(1, 8, 24)
    gradient[:, 3] *= 1e-10
    rows = orthogonalise(gradient, dtype)[0].norm(dim=-1)
    assert rows[3] < 0.1 * rows.median()


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((3, 16, 16), torch.float32),
        ((2, 40, 12), torch.float32),
        ((2, 12, 40), torch.float32),
        ((2, 12, 40), torch.bfloat16),
    ],
)
def test_muon_in_few_launches_takes_the_same_steps(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    weight, factor = draw(*shape), torch.linspace(1.0, 2.0, shape[0]).view(-1, 1, 1)
    found, expected = ([weight.clone(), torch.zeros(shape), torch.zeros(*shape[:2], 1)] for _ in range(2))
    for step in range(1, 5):
        grad = draw(*shape, seed=step) * 10.0**-step
        grad[0] = 0.0 if step == 1 else grad[0]  # as in a layer whose output starts at zero
        for update, (w, first, second) in ((muon_update_in_few_launches, found), (muon_update, expected)):
            rates = {"lr": 0.1, "momentum": 0.9, "decay": 0.2, "beta2": 0.9, "dtype": dtype}
            update(w, grad.clone(), first, second, factor, **rates)  # type: ignore[operator]
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.01}
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, **close)
    assert (found[0] - weight).abs().max() > 0.1


def test_muon_in_few_launches_leaves_out_what_has_no_gradient() -> None:
    gradient, weight = draw(2, 8, 24), torch.zeros(2, 8, 24)
    gradient[0], gradient[1, 3] = 0.0, gradient[1, 3] * 1e-10
    plain, rates = torch.zeros(2, 8, 24), {"lr": 1.0, "decay": 0.1, "beta2": 0.0}
    muon(weight, gradient, muon_update_in_few_launches, **rates)
    assert not weight[0].any()
    muon(plain, gradient, **rates)
    rows, same = weight[1].norm(dim=-1), plain[1].norm(dim=-1)
    torch.testing.assert_close(rows, same, rtol=0.05, atol=1e-3)
    torch.testing.assert_close(weight[1, 3], plain[1, 3], rtol=0, atol=1e-3)


@pytest.mark.parametrize("fused", [True, False])
def test_adamw_equals_the_textbook_in_float64(fused: bool) -> None:
    weight = draw(50)
    exact, m, v = weight.double(), torch.zeros(50, dtype=torch.float64), torch.zeros(50, dtype=torch.float64)
    first, second, count = torch.zeros(50), torch.zeros(50), torch.zeros(())
    for step in range(1, 8):
        grad = draw(50, seed=step)
        count += 1
        adamw_update(weight, grad, first, second, count, lr=0.01, betas=(0.8, 0.95), decay=0.1, fused=fused)
        m = 0.8 * m + 0.2 * grad.double()
        v = 0.95 * v + 0.05 * grad.double() ** 2
        exact = exact * (1 - 0.01 * 0.1)
        exact -= 0.01 * (m / (1 - 0.8**step)) / ((v / (1 - 0.95**step)).sqrt() + EPS)
    torch.testing.assert_close(weight.double(), exact, rtol=1e-5, atol=1e-6)


def model_and_optimizer(dtype: torch.dtype = torch.float32) -> tuple[GPT, MuonAdamW]:
    model = GPT(TINY)
    model.initialise(0)
    model.to_compute(dtype)
    return model, MuonAdamW(groups(model, rates(TINY.dim, 4096)), compute_dtype=dtype)


def loss_of(model: GPT, seed: int, rows: int = 4) -> torch.Tensor:
    tokens = torch.randint(0, 60, (rows, 17), generator=torch.Generator().manual_seed(seed))
    return head_loss(model(tokens[:, :-1], dense(model, Reference())), model.head, tokens[:, 1:], TINY.vocab)


def test_every_parameter_belongs_to_exactly_one_group_with_its_rates() -> None:
    model = GPT(TINY)
    made = groups(model, rates(TINY.dim, 4096))
    assert sorted(name for group in made for name, _ in group.parameters) == sorted(
        name for name, _ in model.named_parameters()
    )
    assert all(group.initial_lr > 0 for group in made)
    assert all(0 < beta < 1 for group in made for beta in group.betas)
    assert all(0 <= group.decay < 0.5 for group in made)
    for group in (group for group in made if group.matrix):
        out, into = map(int, group.name.removeprefix("matrices_").split("x"))
        assert {tuple(parameter.shape[-2:]) for _, parameter in group.parameters} == {(out, into)}
        assert len(group.lr_factors) * out * into == sum(parameter.numel() for _, parameter in group.parameters)
    (group,) = (group for group in made if group.name == "matrices_128x32")
    factors = dict(zip([name for name, _ in group.parameters], group.lr_factors))
    assert factors["blocks.0.up"] == 2.0, "128 outputs from 32 inputs"
    assert factors["blocks.0.down"] == 1.0, "stored transposed, it learns at the rate of its true shape"


def test_muon_for_another_model_is_for_the_matrices_of_its_layers_only() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(10, 4), torch.nn.Linear(4, 16), torch.nn.Linear(16, 4))
    model.head = torch.nn.Parameter(torch.zeros(10, 4))
    found = {group.name: group for group in muon_groups(model, lr=0.1, matrix_lr=0.02, decay=0.3)}
    assert {name: [own for own, _ in group.parameters] for name, group in found.items()} == {
        "matrices_16x4": ["1.weight"],
        "matrices_4x16": ["2.weight"],
        "matrices": ["head", "0.weight"],
        "vectors": ["1.bias", "2.bias"],
    }
    assert [(group.lr, group.matrix, group.decay) for group in found.values()] == [
        (0.02, True, 0.0),
        (0.02, True, 0.0),
        (0.1, False, 0.3),
        (0.1, False, 0.0),
    ]
    assert all(0 < beta < 1 for group in found.values() for beta in group.betas)
    assert found["matrices_16x4"].lr_factors == [2.0], "the rate follows the shape: 16 outputs from 4 inputs"
    assert found["matrices_4x16"].lr_factors == [1.0]


def test_half_precision_parameters_have_float32_gradients_and_weights() -> None:
    model, optimizer = model_and_optimizer(torch.bfloat16)
    before = model.blocks[0].qkv.detach().clone()
    for seed in range(3):
        loss_of(model, seed).backward()
        assert all(p.grad is None for p in model.parameters() if p.dtype == torch.bfloat16)
        optimizer.step(lr_scale=1.0, momentum=0.9, matrix_decay=0.0)
        assert not any(gradient.any() for gradient in optimizer.gradients()), "a step forgets them"
    shards = optimizer.shards()
    assert {t.dtype for t in shards.values()} == {torch.float32}
    exact = shards[Shard("blocks.0.qkv", "weight", 0, before.numel()).key()]
    torch.testing.assert_close(model.blocks[0].qkv.detach().view(-1), exact.bfloat16(), rtol=0, atol=0)
    assert not torch.equal(before, model.blocks[0].qkv)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_saved_and_loaded_continues_exactly(dtype: torch.dtype) -> None:
    model, optimizer = model_and_optimizer(dtype)
    for seed in range(3):
        loss_of(model, seed).backward()
        optimizer.step(lr_scale=1.0, momentum=0.9, matrix_decay=0.1)
    saved = {key: tensor.clone() for key, tensor in optimizer.shards().items()}
    other, resumed = model_and_optimizer(dtype)
    resumed.load(lambda shard: saved[shard.key()], steps_done=3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))
    for m, o in ((model, optimizer), (other, resumed)):
        loss_of(m, 9).backward()
        o.step(lr_scale=0.5, momentum=0.95, matrix_decay=0.1)
        assert o.steps_done == 4
        assert all(bucket.group.lr == 0.5 * bucket.group.initial_lr for bucket in o.buckets)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mean_of_the_last_weights_is_saved_once_it_has_begun(dtype: torch.dtype) -> None:
    model, optimizer = model_and_optimizer(dtype)
    assert not any("mean" in bucket.state for bucket in optimizer.buckets), "nothing is saved that is not there yet"
    first, names = [parameter.detach().clone() for parameter in model.parameters()], len(optimizer.shards())
    optimizer.average(1, last=False)
    assert len(optimizer.shards()) > names
    for bucket in optimizer.buckets:
        assert torch.equal(bucket.state["mean"], bucket.weight)
        bucket.weight.add_(1.0)
    optimizer.average(2, last=True)
    for was, parameter in zip(first, model.parameters()):
        torch.testing.assert_close(parameter.detach(), was + 0.5)


def test_a_matrix_is_never_cut_in_two_by_sharding() -> None:
    weights = [draw(4, 6, seed=i) for i in range(5)]
    buckets = [
        Bucket(
            Group("m", [(f"w{i}", torch.nn.Parameter(w.clone())) for i, w in enumerate(weights)], 0.1, True, [1.0] * 5),
            collectives.Team(rank, 3),
        )
        for rank in range(3)
    ]
    assert [b.share for b in buckets] == [2 * 24] * 3  # five matrices and one of padding over three ranks
    shards = [shard for b in buckets for shard, _ in b.shards() if shard.kind == "weight"]
    assert [(p.parameter, p.start, p.stop) for p in shards] == [(f"w{i}", 0, 24) for i in range(5)]


def two_groups() -> tuple[list[torch.nn.Parameter], MuonAdamW]:
    tensors = [torch.nn.Parameter(draw(6, 4)), torch.nn.Parameter(draw(5, seed=1))]
    made = [Group("a", [("a", tensors[0])], 0.1, matrix=True, lr_factors=[1.0]), Group("b", [("b", tensors[1])], 0.1)]
    return tensors, MuonAdamW(made, compute_dtype=torch.float32)


def test_clipping_bounds_the_norm_of_the_whole_gradient_and_the_norm_is_returned() -> None:
    results = []
    for clip, scale in ((None, 1.0), (0.5, 1.0), (0.5, 64.0), (1e9, 1.0)):
        tensors, optimizer = two_groups()
        loss = sum((tensor**3).sum() for tensor in tensors)
        (loss * scale).backward()
        expected = torch.cat([bucket.grad.view(-1) for bucket in optimizer.buckets]).norm() / scale
        norm = optimizer.step(lr_scale=1.0, momentum=0.9, matrix_decay=0.0, loss_scale=scale, clip=clip)
        assert norm.item() == pytest.approx(expected.item(), rel=1e-5)
        first = torch.cat(
            [bucket.state["first"] / (0.1 if bucket.group.matrix else 0.2) for bucket in optimizer.buckets]
        )
        results.append((first.norm().item(), norm.item()))
    assert results[0][0] == pytest.approx(results[0][1], rel=1e-4), "the first moment is the gradient, up to its rate"
    assert results[1][0] == pytest.approx(0.5, rel=1e-4)
    assert results[2][0] == pytest.approx(0.5, rel=1e-4)
    assert results[3][0] == pytest.approx(results[0][0], rel=1e-6)


def test_what_several_teams_have_alike_counts_once_in_the_norm() -> None:
    """Four teams share the matrices out; over all ranks their gradients are there four times."""
    _, optimizer = two_groups()
    matrix, rest = optimizer.buckets
    matrix.copies = collectives.Team(0, 4)
    matrix.own_grad.fill_(2.0)
    rest.own_grad.fill_(3.0)
    assert optimizer._norm().item() == pytest.approx(math.sqrt(24 * 4.0 / 4 + 5 * 9.0))
