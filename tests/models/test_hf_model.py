"""A Hugging Face model through our attention: the same numbers as transformers, whole, packed, and in the loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hf_models
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ascendchat.device import pick
from ascendchat.eval.scorer import Example, ModelScorer
from ascendchat.models.causal_lm import CausalLM
from ascendchat.nn import IGNORE
from ascendchat.nn.attention import KERNELS, dense, documents
from ascendchat.nn.logprobs import SamplingDistribution, head_objective
from ascendchat.nn.loss import head_loss, score_without_softcap, token_nats
from ascendchat.train.model import TrainModel

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTHS = [7, 25, 1, 31, 64]  # documents of two rows of 64 tokens
KERNEL = KERNELS["sdpa"]


@pytest.fixture(scope="module", params=hf_models.KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, CausalLM]:
    """A model of transformers, and the same as we open it."""
    folder = tmp_path_factory.mktemp("hf") / request.param
    made = hf_models.save(folder, request.param)
    return made, hf_models.opened(folder).model


def rows(model: CausalLM, count: int = 2, length: int = 64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, model.shape.vocab, (count, length + 1), generator=generator)


@pytest.mark.parametrize("kernel", ["sdpa", "eager", "reference"])
@torch.no_grad()
def test_logits_are_those_of_transformers(pair: tuple[Any, CausalLM], kernel: str) -> None:
    theirs, model = pair
    tokens = rows(model)[:, :-1]
    found = model.cap(model(tokens, dense(model, KERNELS[kernel])) @ model.head.t())
    torch.testing.assert_close(found, theirs(tokens).logits, atol=2e-4, rtol=1e-4)


@torch.no_grad()
def test_a_packed_row_gives_every_token_the_loss_of_its_document_alone(pair: tuple[Any, CausalLM]) -> None:
    theirs, model = pair
    whole = rows(model)
    tokens, targets = whole[:, :-1], whole[:, 1:]
    known = documents(KERNEL, np.array(LENGTHS, np.int32), tokens, torch.float32, restarts=model.restarts)
    hidden = model(tokens, dense(model, KERNEL), documents=known)
    found = token_nats(hidden, model.head, targets, model.shape.vocab, model.cap).flatten()
    at, alone, plain = 0, [], []
    for length in LENGTHS:
        part, wanted = tokens.flatten()[at : at + length][None], targets.flatten()[at : at + length]
        own = model(part, dense(model, KERNEL))
        alone.append(token_nats(own, model.head, wanted[None], model.shape.vocab, model.cap)[0])
        plain.append(F.cross_entropy(theirs(part).logits[0], wanted, reduction="none"))
        at += length
    torch.testing.assert_close(found, torch.cat(alone), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found, torch.cat(plain), atol=2e-5, rtol=2e-5)
    mixed = model(tokens, dense(model, KERNEL))
    across = token_nats(mixed, model.head, targets, model.shape.vocab, model.cap).flatten()
    assert (found - across).abs().max() > 0.1, "documents that see each other would pass too"


def test_the_loss_in_chunks_and_its_gradients_are_the_plain_ones(
    pair: tuple[Any, CausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, model = pair
    whole = rows(model)
    tokens, targets = whole[:, :-1], whole[:, 1:].clone()
    targets[0, :20] = IGNORE
    monkeypatch.setattr("ascendchat.nn.loss.chunk_rows", lambda *_: 17)
    head_loss(
        model(tokens, dense(model, KERNEL)), model.head, targets, model.shape.vocab, scorer=model.score
    ).backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    theirs.zero_grad()
    logits = theirs(tokens).logits
    F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE).backward()
    for name, parameter in theirs.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(found[name], parameter.grad, atol=2e-5, rtol=2e-3, msg=name)


def test_an_objective_has_the_gradient_that_autograd_gives_it(pair: tuple[Any, CausalLM]) -> None:
    _, model = pair
    whole = rows(model)
    tokens, targets = whole[:, :-1], whole[:, 1:]
    advantage = torch.linspace(-1, 1, targets.numel()).view(targets.shape)
    hidden = model(tokens, dense(model, KERNEL)).detach().requires_grad_()
    drawn = SamplingDistribution(model.shape.vocab, softcap=model.softcap)
    head = model.head.detach()
    loss, logprobs, _ = head_objective(hidden, head, targets, drawn, lambda logprob, a: -logprob * a, (advantage,))
    (found,) = torch.autograd.grad(loss, hidden)
    plain = (hidden @ model.head.detach().t()).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    (wanted,) = torch.autograd.grad((-plain * advantage).mean(), hidden)
    torch.testing.assert_close(logprobs, plain.detach(), atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_16_bit_logits_point_the_right_way(dtype: torch.dtype) -> None:
    logits = (torch.randn(6, 40, generator=torch.Generator().manual_seed(0)) * 20).to(dtype)
    targets = torch.tensor([3, 0, IGNORE, 37, 5, 7])
    nats, gradient, factor = score_without_softcap(logits, targets, torch.tensor(1.0), 38)
    exact = logits[:, :38].double().requires_grad_()
    wanted = F.cross_entropy(exact, targets, ignore_index=IGNORE, reduction="none")
    (slope,) = torch.autograd.grad(wanted.sum(), exact)
    torch.testing.assert_close(nats.double(), wanted.detach(), atol=1e-3, rtol=1e-3)
    found = gradient.double() * factor.double()
    torch.testing.assert_close(found[:, :38], slope, atol=1e-2, rtol=1e-2)
    assert not gradient[:, 38:].any()


@torch.no_grad()
def test_rows_with_a_common_beginning_score_as_when_they_run_whole(pair: tuple[Any, CausalLM]) -> None:
    theirs, model = pair
    head = rows(model, 1, 80)[0].tolist()
    ends = [[5, 9, 11], [7], [5, 9, 12, 40]]
    example = Example([[*head, *end] for end in ends], [len(head)] * 3, shared=True)
    scorer = ModelScorer(model, KERNEL, torch.device("cpu"), max_len=128)
    for scored, end in zip(scorer.submit([example])()[0], ends):
        logits = theirs(torch.tensor([[*head, *end]])).logits[0, len(head) - 1 : -1]
        wanted = F.cross_entropy(logits, torch.tensor(end), reduction="none").numpy()
        np.testing.assert_allclose(scored.nats, wanted, atol=2e-4)


def test_the_learner_of_training_takes_it_and_recomputes_activations(pair: tuple[Any, CausalLM]) -> None:
    _, model = pair
    device = pick("cpu", dtype="fp32", compiled=False)
    train_model = TrainModel(model, KERNEL, device, torch.device("cpu"), by_document=True)
    tokens = rows(model)[:, :-1]
    known = train_model.documents(tokens, np.array(LENGTHS, np.int32))
    plain = train_model.hidden(tokens, known)
    plain.square().mean().backward()
    wanted = {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    model.zero_grad()
    model.checkpoint_activations()
    model.train()
    again = train_model.hidden(tokens, known)
    again.square().mean().backward()
    model.inner.gradient_checkpointing_disable()
    model.eval()
    torch.testing.assert_close(again, plain)
    for name, parameter in model.named_parameters():
        if name in wanted:
            torch.testing.assert_close(parameter.grad, wanted[name])
    model.zero_grad()


def test_a_model_called_without_our_adapter_says_so(tmp_path: Path) -> None:
    hf_models.save(tmp_path / "m")
    with pytest.raises(RuntimeError, match=r"through CausalLM"):
        hf_models.opened(tmp_path / "m").model.inner(torch.tensor([[1, 2]]))
