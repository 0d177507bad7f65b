"""The update functions against float64, and the sharded optimizer against the update functions."""

from __future__ import annotations

import math

import pytest
import torch

from ascendchat.nn.attention import Reference
from ascendchat.nn.gpt import GPT, dense
from ascendchat.nn.loss import head_loss
from ascendchat.nn.optim import Group, MuonAdamW, Shard, groups
from ascendchat.nn.updates import (
    EPS,
    adamw_update,
    equalise,
    muon_update,
    muon_update_in_few_launches,
    orthogonalise,
)
from ascendchat.plan.schedule import rates
from ascendchat.plan.shape import Shape

TINY = Shape.from_depth(2, vocab=60, seq_len=16, dim=32, head_dim=16)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("rows", "cols"), [(8, 8), (24, 8), (8, 24)])
def test_orthogonalised_matrices_have_equal_singular_values(rows: int, cols: int) -> None:
    found = orthogonalise(draw(3, rows, cols), torch.float32)
    values = torch.linalg.svdvals(found.double())
    assert values.min() > 0.7
    assert values.max() < 1.3
    norms = found.norm(dim=(-2, -1))
    torch.testing.assert_close(norms, torch.full_like(norms, math.sqrt(min(rows, cols))), rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1.0, 1e-4, 1e-7, 3e-8, 1e-12])
def test_the_direction_of_an_update_does_not_depend_on_the_size_of_the_gradient(
    dtype: torch.dtype, size: float
) -> None:
    """Unscaled gradients are smaller than what 16 bits hold: float16 ends at 6e-8."""
    gradient = draw(1, 96, 48) * draw(1, 96, 1, seed=1).abs() + draw(1, 96, 4, seed=2) @ draw(1, 4, 48, seed=3)
    exact = orthogonalise(gradient.double(), torch.float64).flatten()
    weight, zeros = torch.zeros(1, 96, 48), torch.zeros(1, 96, 48)
    found = orthogonalise(gradient * size, dtype)
    assert found.dtype == torch.float32
    assert torch.cosine_similarity(found.double().flatten(), exact, dim=0) > 0.999
    common = {"lr": 1.0, "momentum": 0.9, "decay": 0.0, "beta2": 0.9}
    muon_update(weight, gradient * size, zeros, torch.zeros(1, 96, 1), torch.ones(1, 1, 1), dtype=dtype, **common)
    plain, zeros = torch.zeros(1, 96, 48), torch.zeros(1, 96, 48)
    muon_update(plain, gradient, zeros, torch.zeros(1, 96, 1), torch.ones(1, 1, 1), dtype=torch.float32, **common)
    assert torch.cosine_similarity(weight.flatten(), plain.flatten(), dim=0) > 0.999


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_gradient_of_zeros_changes_nothing_and_a_row_that_is_nearly_zero_stays_small(dtype: torch.dtype) -> None:
    """At the first step most matrices have no gradient: every layer starts as the identity."""
    weight = draw(2, 8, 24)
    before, zeros = weight.clone(), torch.zeros(2, 8, 24)
    muon_update(
        weight,
        zeros,
        zeros.clone(),
        torch.zeros(2, 8, 1),
        torch.ones(2, 1, 1),
        lr=0.1,
        momentum=0.9,
        decay=0.0,
        beta2=0.9,
        dtype=dtype,
    )
    assert torch.equal(weight, before)
    gradient = draw(1, 8, 24)
    gradient[:, 3] *= 1e-10
    rows = orthogonalise(gradient, dtype)[0].norm(dim=-1)
    assert rows[3] < 0.1 * rows.median()


def test_equalising_keeps_the_norm_and_levels_the_rows() -> None:
    update = draw(2, 6, 10) * torch.tensor([1.0, 1, 1, 1, 1, 20])[:, None]
    second = torch.zeros(2, 6, 1)
    for _ in range(60):  # a running estimate: after a while it is the rows' true size
        found = equalise(update, second, 0.9)
    torch.testing.assert_close(found.norm(dim=(-2, -1)), update.norm(dim=(-2, -1)), rtol=1e-4, atol=0)
    sizes = found.norm(dim=-1)
    torch.testing.assert_close(sizes, sizes.mean(dim=-1, keepdim=True).expand_as(sizes), rtol=1e-3, atol=0)


def test_muon_decays_only_where_decay_agrees_with_the_update() -> None:
    weight, grad = draw(1, 4, 4), draw(1, 4, 4, seed=1)
    zeros = torch.zeros(1, 4, 4)
    common = {"lr": 0.1, "momentum": 0.9, "beta2": 0.9, "dtype": torch.float32}
    plain, decayed = weight.clone(), weight.clone()
    muon_update(plain, grad, zeros.clone(), torch.zeros(1, 4, 1), torch.ones(1, 1, 1), decay=0.0, **common)
    muon_update(decayed, grad, zeros.clone(), torch.zeros(1, 4, 1), torch.ones(1, 1, 1), decay=0.5, **common)
    agrees = (weight - plain) * weight >= 0
    expected = plain - 0.1 * 0.5 * weight * agrees
    torch.testing.assert_close(decayed, expected)
    assert 0 < agrees.sum() < agrees.numel()


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 40, 12), (2, 12, 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
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
    state = torch.zeros(2, 8, 24), torch.zeros(2, 8, 1), torch.ones(2, 1, 1)
    rates = {"lr": 1.0, "momentum": 0.9, "decay": 0.1, "beta2": 0.0}
    muon_update_in_few_launches(weight, gradient, *state, dtype=torch.float32, **rates)  # type: ignore[arg-type]
    assert not weight[0].any()
    plain, state = torch.zeros(2, 8, 24), (torch.zeros(2, 8, 24), torch.zeros(2, 8, 1), torch.ones(2, 1, 1))
    muon_update(plain, gradient, *state, dtype=torch.float32, **rates)  # type: ignore[arg-type]
    rows, same = weight[1].norm(dim=-1), plain[1].norm(dim=-1)
    torch.testing.assert_close(rows, same, rtol=0.05, atol=1e-3)


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


def test_every_parameter_belongs_to_exactly_one_group_with_an_initial_rate() -> None:
    model = GPT(TINY)
    found = [name for group in groups(model, rates(TINY.dim, 4096)) for name, _ in group.parameters]
    assert sorted(found) == sorted(name for name, _ in model.named_parameters())
    assert all(group.initial_lr > 0 for group in groups(model, rates(TINY.dim, 4096)))


def test_the_transposed_matrix_learns_at_the_rate_of_its_true_shape() -> None:
    model = GPT(TINY)
    group = next(g for g in groups(model, rates(TINY.dim, 4096)) if g.name == "matrices_128x32")
    by_name = dict(zip([name for name, _ in group.parameters], group.lr_factors))
    assert by_name["blocks.0.up"] == 2.0  # 128 outputs from 32 inputs
    assert by_name["blocks.0.down"] == 1.0


def test_accumulated_micro_batches_equal_one_batch() -> None:
    one, optimizer = model_and_optimizer()
    loss_of(one, 0).backward()
    whole = [g.clone() for g in optimizer.gradients()]
    two, other = model_and_optimizer()
    tokens = torch.randint(0, 60, (4, 17), generator=torch.Generator().manual_seed(0))
    for part in tokens.split(2):
        hidden = two(part[:, :-1], dense(two, Reference()))
        (head_loss(hidden, two.head, part[:, 1:], TINY.vocab) / 2).backward()
    for a, b in zip(whole, other.gradients()):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-4)


def test_half_precision_parameters_have_float32_gradients_and_weights() -> None:
    model, optimizer = model_and_optimizer(torch.bfloat16)
    before = model.blocks[0].qkv.detach().clone()
    for seed in range(3):
        loss_of(model, seed).backward()
        assert all(p.grad is None for p in model.parameters() if p.dtype == torch.bfloat16)
        optimizer.step(lr_scale=1.0, momentum=0.9, matrix_decay=0.0)
    shards = optimizer.shards()
    assert {t.dtype for t in shards.values()} == {torch.float32}
    exact = shards[Shard("blocks.0.qkv", "weight", 0, before.numel()).key()]
    torch.testing.assert_close(model.blocks[0].qkv.detach().view(-1), exact.bfloat16(), rtol=0, atol=0)
    assert not torch.equal(before, model.blocks[0].qkv)


def test_state_saved_and_loaded_continues_exactly() -> None:
    model, optimizer = model_and_optimizer()
    for seed in range(3):
        loss_of(model, seed).backward()
        optimizer.step(lr_scale=1.0, momentum=0.9, matrix_decay=0.1)
    saved = {key: tensor.clone() for key, tensor in optimizer.shards().items()}
    other, resumed = model_and_optimizer()
    resumed.load(lambda shard: saved[shard.key()], steps_done=3)
    for m, o in ((model, optimizer), (other, resumed)):
        loss_of(m, 9).backward()
        o.step(lr_scale=0.5, momentum=0.95, matrix_decay=0.1)
    for a, b in zip(model.parameters(), other.parameters()):
        assert torch.equal(a, b)


@pytest.mark.parametrize("reserved", [True, False])
def test_the_mean_of_the_last_weights_lies_where_there_is_room_for_it(reserved: bool) -> None:
    model, optimizer = model_and_optimizer()
    optimizer.reserve_mean(True)
    optimizer.reserve_mean(reserved)  # the next smaller batch
    rooms = [bucket.spare for bucket in optimizer.buckets]
    assert all((room is not None) is reserved for room in rooms)
    assert not any("mean" in bucket.state for bucket in optimizer.buckets), "nothing is saved that is not there yet"
    first = [parameter.detach().clone() for parameter in model.parameters()]
    for count in (1, 2):
        for bucket in optimizer.buckets:
            bucket.weight.add_(count - 1)
        optimizer.average(count, last=count == 2)
    assert all((bucket.state["mean"] is room) is reserved for bucket, room in zip(optimizer.buckets, rooms))
    for before, after in zip(first, model.parameters()):
        torch.testing.assert_close(after.detach(), before + 0.5)


@pytest.mark.parametrize("reserved", [True, False])
def test_a_mean_that_was_loaded_moves_to_the_room_that_the_dry_run_found(reserved: bool) -> None:
    _, optimizer = model_and_optimizer()
    optimizer.reserve_mean(not reserved)
    optimizer.average(1, last=False)
    before = [bucket.state["mean"] for bucket in optimizer.buckets]
    kept, names = [mean.clone() for mean in before], list(optimizer.shards())
    optimizer.reserve_mean(reserved)
    for bucket, old, numbers in zip(optimizer.buckets, before, kept):
        assert bucket.state["mean"] is not old, "its memory is free again"
        assert (bucket.state["mean"] is bucket.spare) is reserved
        assert torch.equal(bucket.state["mean"], numbers)
    assert list(optimizer.shards()) == names


def test_a_matrix_is_never_cut_in_two_by_sharding() -> None:
    from ascendchat import dist
    from ascendchat.nn.bucket import Bucket

    weights = [(f"w{i}", torch.nn.Parameter(draw(4, 6, seed=i))) for i in range(5)]
    group = Group("m", weights, 0.1, True, [1.0] * 5)
    buckets = [
        Bucket(
            Group("m", [(n, torch.nn.Parameter(p.detach().clone())) for n, p in weights], 0.1, True, [1.0] * 5),
            dist.Team(r, 3),
        )
        for r in range(3)
    ]
    assert [b.share for b in buckets] == [2 * 24] * 3  # five matrices and one of padding over three ranks
    shards = [shard for b in buckets for shard, _ in b.shards() if shard.kind == "weight"]
    assert [(p.parameter, p.start, p.stop) for p in shards] == [(f"w{i}", 0, 24) for i in range(5)]
    assert group.initial_lr == 0.1


def test_clipping_bounds_the_norm_of_the_whole_gradient_and_the_norm_is_returned() -> None:
    def model() -> tuple[torch.nn.ParameterList, MuonAdamW]:
        generator = torch.Generator().manual_seed(0)
        tensors = torch.nn.ParameterList([torch.randn(6, 4, generator=generator), torch.randn(5, generator=generator)])
        made = [
            Group("a", [("a", tensors[0])], 0.1, matrix=True, lr_factors=[1.0]),
            Group("b", [("b", tensors[1])], 0.1),
        ]
        return tensors, MuonAdamW(made, compute_dtype=torch.float32)

    results = []
    for clip, scale in ((None, 1.0), (0.5, 1.0), (0.5, 64.0), (1e9, 1.0)):
        tensors, optimizer = model()
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
