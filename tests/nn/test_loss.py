"""Head and cross-entropy: chunked, fused with its gradient, and equal to the plain formula."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ascendchat.nn import IGNORE
from ascendchat.nn import loss as module
from ascendchat.nn.loss import SOFTCAP, head_loss, token_nats


def plain(hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, vocab: int) -> torch.Tensor:
    logits = SOFTCAP * torch.tanh(hidden @ head[:vocab].t() / SOFTCAP)
    return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="none")


def case(rows: int = 50, vocab: int = 37, padded: int = 40, size: float = 1.0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, 16, generator=generator) * size
    head = torch.randn(padded, 16, generator=generator)
    targets = torch.randint(0, vocab, (rows,), generator=generator)
    targets[2::7] = IGNORE  # neither the first row nor the last
    return hidden, head, targets


@pytest.mark.parametrize(("chunk", "size"), [(1, 1.0), (3, 0.01), (1000, 100.0)])
def test_loss_and_gradients_equal_the_plain_formula_in_any_chunking(
    chunk: int, size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "chunk_rows", lambda hidden, head: chunk)
    hidden, head, targets = case(size=size)
    a, b = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    (head_loss(a, b, targets, 37) * 2.5).backward()
    c, d = hidden.double().requires_grad_(), head.double().requires_grad_()
    exact = plain(c, d, targets, 37)
    torch.testing.assert_close(token_nats(hidden, head, targets, 37).double(), exact, atol=1e-5, rtol=1e-5)
    expected = exact.sum() / (targets != IGNORE).sum()
    (expected * 2.5).backward()
    torch.testing.assert_close(head_loss(a, b, targets, 37).double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(a.grad.double(), c.grad, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(b.grad.double(), d.grad, atol=1e-6 * max(1.0, size), rtol=1e-4)
    assert b.grad[37:].abs().max() == 0, "tokens that do not exist got a gradient"


@pytest.mark.parametrize("learns", [True, False])
def test_a_chunk_is_gone_before_the_next_one(learns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "chunk_rows", lambda hidden, head: 20)
    hidden, head, targets = case()
    made: list[weakref.ref[torch.Tensor]] = []

    def scorer(logits: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
        assert not [ref for ref in made if ref() is not None], "memory of an earlier chunk is still held"
        result = module.score(logits, *rest)
        made.extend(map(weakref.ref, (logits, result[1])))
        return result

    head_loss(hidden.requires_grad_(), head.requires_grad_(learns), targets, 37, scorer=scorer).backward()
    assert len(made) == 6


@pytest.mark.parametrize("chunk", [3, 1000])
def test_the_token_after_next_is_in_the_gradient_and_not_in_the_loss(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = 0.4
    monkeypatch.setattr(module, "chunk_rows", lambda hidden, head: chunk)
    hidden, head, targets = case(rows=48)
    hidden, targets = hidden.view(3, 16, -1), targets.view(3, 16)
    targets[1, 5:9] = 4  # next and after next are the same token
    a, b = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    continues_document = torch.ones(3, 16) if chunk == 3 else None  # within documents, or over whole rows
    if continues_document is not None:
        continues_document[:, 0] = continues_document[1, 7] = continues_document[2, 3] = 0
    loss = head_loss(
        a,
        b,
        targets,
        37,
        weight=torch.tensor(0.1),
        mtp_weight=torch.tensor(share),
        continues_document=continues_document,
    )
    loss.backward()
    c, d = hidden.double().requires_grad_(), head.double().requires_grad_()
    expected = plain(c.flatten(0, 1), d, targets.flatten(), 37).sum() * 0.1
    next2_targets = torch.where(
        targets[:, :-1] == IGNORE, IGNORE, targets[:, 1:]
    )  # a place that is not scored has no second
    if continues_document is not None:
        next2_targets = next2_targets.masked_fill(continues_document[:, 1:] == 0, IGNORE)
    extra = plain(c[:, :-1].flatten(0, 1), d, next2_targets.flatten(), 37).sum() * 0.1
    (expected + share * extra).backward()
    torch.testing.assert_close(loss.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(a.grad.double(), c.grad, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(b.grad.double(), d.grad, atol=1e-6, rtol=1e-4)


def test_a_batch_without_any_scored_target_has_loss_zero_and_no_nan() -> None:
    hidden, head, targets = case()
    hidden.requires_grad_()
    loss = head_loss(hidden, head, torch.full_like(targets, IGNORE), 37)
    loss.backward()
    assert loss.item() == 0.0
    assert hidden.grad.abs().max() == 0.0


def test_a_chunk_is_what_fits_and_at_least_a_row() -> None:
    """A sixteenth of 2 GiB of logits where nothing else is known of the dtype."""
    hidden, head = torch.empty(9, 4, dtype=torch.float64), torch.empty(2**14, 4, device="meta")
    assert module.chunk_rows(hidden, head) == 1024
    assert module.chunk_rows(hidden, torch.empty(2**28, 4, device="meta")) == 1


def test_half_precision_logits_give_gradients_close_to_float64() -> None:
    hidden, head, targets = case(rows=200)
    a, b = hidden.bfloat16().requires_grad_(), head.bfloat16().requires_grad_()
    head_loss(a, b, targets, 37).backward()
    c, d = a.detach().double().requires_grad_(), b.detach().double().requires_grad_()
    (plain(c, d, targets, 37).sum() / (targets != IGNORE).sum()).backward()
    assert (a.grad.double() - c.grad).norm() / c.grad.norm() < 0.01
    assert (b.grad.double() - d.grad).norm() / d.grad.norm() < 0.01


@pytest.mark.parametrize("size", [0.001, 0.3])  # an untrained and a trained head
def test_half_precision_gradients_survive_the_small_weight_of_a_token_in_a_large_batch(size: float) -> None:
    """Chips without bf16: the loss scale goes into the weight, before anything is rounded to float16."""
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(64, 32, generator=generator), torch.randn(4096, 32, generator=generator) * size
    targets = torch.randint(0, 4096, (64,), generator=generator)
    found, wanted = [], []
    for dtype, grads, scale in ((torch.float16, found, 2.0**15), (torch.float64, wanted, 1.0)):
        a, b = hidden.to(dtype).requires_grad_(), head.to(dtype).requires_grad_()
        head_loss(a, b, targets, 4096, weight=torch.tensor(scale / 2**19)).backward()
        grads += [a.grad.double() / scale, b.grad.double() / scale]
    for grad, exact in zip(found, wanted):
        assert (grad - exact).norm() < 0.01 * exact.norm()
