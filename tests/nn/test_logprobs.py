"""Policy gradients through the head: equal to the plain formula, in float32 whatever the model's dtype."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from ascendchat.nn import IGNORE
from ascendchat.nn import logprobs as module
from ascendchat.nn.logprobs import Float32LMHead, LMHead, Read, SamplingDistribution, head_logprobs, head_objective
from ascendchat.nn.loss import SOFTCAP

VOCAB = 37


def case(rows: int = 50, size: float = 0.5) -> tuple[torch.Tensor, ...]:
    """Hidden states, a head with three rows more than the vocabulary, targets of which some are not scored."""
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(rows, 16, generator=generator) * size, torch.randn(VOCAB + 3, 16, generator=generator)
    targets = torch.randint(0, VOCAB, (rows,), generator=generator)
    targets[::7] = IGNORE
    return hidden, head, targets


def plain(
    hidden: torch.Tensor, head: torch.Tensor, targets: torch.Tensor, temperature: float = 1.0, top_k: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies, row by row, by the definition."""
    found, entropies = [], []
    for row, target in zip(hidden, targets.clamp(min=0).tolist()):
        logits = SOFTCAP * torch.tanh(head[:VOCAB] @ row / SOFTCAP) / temperature
        order = logits.argsort(descending=True)
        among = sorted({*order[: top_k or VOCAB].tolist(), target})
        found.append(logits[target] - torch.logsumexp(logits[among], 0))
        entropies.append(torch.special.entr(logits[among].detach().softmax(0)).sum())
    return torch.stack(found), torch.stack(entropies)


def clipped_ratio(logprob: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    """PPO's objective: what a token adds depends on its own probability."""
    ratio = (logprob - old).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)


@pytest.mark.parametrize(
    ("chunk", "temperature", "top_k", "skips"),
    [(1, 1.0, 0, True), (7, 0.7, 0, False), (1000, 0.05, 0, True), (7, 1.0, 5, True), (7, 0.7, 1, True)],
)
def test_loss_and_gradients_equal_the_plain_formula(
    chunk: int, temperature: float, top_k: int, skips: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU skips the rows that are not scored, an accelerator reads them, too."""
    monkeypatch.setattr(module, "chunk_rows", lambda hidden, head: chunk)
    if not skips:
        monkeypatch.setattr(module, "scored_rows", lambda targets: (slice(None), targets))
    hidden, head, targets = case()
    generator = torch.Generator().manual_seed(1)
    advantage = torch.randn(50, generator=generator)
    a, b = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    c, d = hidden.double().requires_grad_(), head.double().requires_grad_()
    exact, of_all = plain(c, d, targets, temperature, top_k)
    old = exact.detach() + 0.4 * torch.randn(50, generator=generator)  # many ratios lie beyond the clip
    scored = targets != IGNORE
    old[~scored] = torch.nan  # nobody knows what stands there
    expected = clipped_ratio(exact[scored], old[scored], advantage.double()[scored]).mean()
    (expected * 3.0).backward()
    drawn = SamplingDistribution(VOCAB, temperature, top_k)
    loss, logprobs, entropy = head_objective(a, b, targets, drawn, clipped_ratio, (old.float(), advantage))
    (loss * 3.0).backward()
    torch.testing.assert_close(loss.double(), expected, atol=2e-6 / temperature, rtol=1e-5)
    wanted = torch.where(scored, exact, 0.0).detach()
    torch.testing.assert_close(logprobs.double(), wanted, atol=1e-5, rtol=1e-5)
    if temperature > 0.1:  # else the numbers are large, and so is their rounding
        torch.testing.assert_close(entropy.double(), torch.where(scored, of_all, 0.0), atol=1e-5, rtol=1e-5)
    assert not logprobs.requires_grad
    assert not entropy.requires_grad
    assert torch.equal(head_logprobs(hidden, head, targets, drawn), logprobs)
    torch.testing.assert_close(a.grad.double(), c.grad, atol=2e-6 / temperature, rtol=2e-4)
    torch.testing.assert_close(b.grad.double(), d.grad, atol=2e-6 / temperature, rtol=2e-4)
    assert b.grad[VOCAB:].abs().max() == 0, "tokens that do not exist got a gradient"
    if top_k != 1:
        assert (c.grad[scored].abs().sum(-1) == 0).any(), "no token was clipped: the test shows nothing"


@pytest.mark.parametrize(("which", "temperature"), [("objective", 1.0), ("objective", 0.7), ("logprobs", 0.7)])
def test_a_chunk_is_gone_before_the_next_one(which: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "chunk_rows", lambda hidden, head: 20)
    hidden, head, targets = case()
    hidden.requires_grad_(), head.requires_grad_()
    made: list[weakref.ref[torch.Tensor]] = []
    read, by_logits, reads = SamplingDistribution.read, module.by_logits, []

    def reading(self: SamplingDistribution, *rest: Any) -> Read:
        reads.append(len([ref for ref in made if ref() is not None]))
        found = read(self, *rest)
        made.extend(map(weakref.ref, (found.capped, found.scaled)))
        return found

    def sloping(found: Read, tokens: torch.Tensor, factor: torch.Tensor, *rest: Any) -> torch.Tensor:
        slope = by_logits(found, tokens, factor, *rest)
        made.append(weakref.ref(slope))
        return slope

    monkeypatch.setattr(SamplingDistribution, "read", reading)
    monkeypatch.setattr(module, "by_logits", sloping)
    drawn = SamplingDistribution(VOCAB, temperature)
    if which == "objective":
        head_objective(hidden, head, targets, drawn, lambda logprob: -logprob, ())[0].backward()
    else:
        module.HeadLogprobs.apply(hidden, head, targets, drawn).sum().backward()
    assert reads == [0, 0, 0] * (2 if which == "logprobs" else 1), "memory of an earlier chunk is still held"


def test_a_batch_without_targets_has_loss_zero() -> None:
    hidden, head, targets = case()
    hidden.requires_grad_()
    nothing = torch.full_like(targets, IGNORE)
    loss, logprobs, entropy = head_objective(
        hidden, head, nothing, SamplingDistribution(VOCAB), lambda logprob: -logprob
    )
    loss.backward()
    assert loss.item() == 0.0
    assert hidden.grad.abs().max() == 0.0
    assert logprobs.abs().max() == entropy.abs().max() == 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_product_of_the_head_is_summed_and_kept_in_float32(dtype: torch.dtype) -> None:
    """With 512 channels a product that is rounded to 16 bits differs visibly, one that is summed in 16 bits more so."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 512, generator=generator).to(dtype)
    head = (torch.randn(VOCAB, 512, generator=generator) * 0.3).to(dtype)
    targets = torch.randint(0, VOCAB, (64,), generator=generator)
    exact, _ = plain(hidden.double(), head.double(), targets)
    readout = Float32LMHead(dtype, torch.device("cpu"))
    logits = readout.product(hidden, head)
    assert logits.dtype == torch.float32
    assert (logits.double() - hidden.double() @ head.double().t()).abs().max() < 1e-4  # 0.06 if it were rounded
    apart = {
        name: (head_logprobs(hidden, head, targets, SamplingDistribution(VOCAB, readout=each)).double() - exact)
        .abs()
        .max()
        .item()
        for name, each in (("float32", readout), ("rounded", LMHead()))
    }
    assert apart["float32"] < 1e-4
    assert apart["rounded"] > 50 * apart["float32"], "the test cannot tell them apart"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_a_16_bit_model_are_those_of_the_formula(dtype: torch.dtype) -> None:
    hidden, head, targets = (tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in case(rows=200))
    a, b = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    drawn = SamplingDistribution(VOCAB, readout=Float32LMHead(dtype, torch.device("cpu")))
    head_objective(a, b, targets, drawn, lambda logprob: -logprob, weight=torch.tensor(1.0))[0].backward()
    c, d = hidden.double().requires_grad_(), head.double().requires_grad_()
    (-plain(c, d, targets)[0] * (targets != IGNORE)).sum().backward()
    for mine, exact in ((a.grad, c.grad), (b.grad, d.grad)):
        assert mine.dtype == dtype
        assert (mine.double() - exact).norm() < 0.01 * exact.norm()
