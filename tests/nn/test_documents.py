"""With --attend document, a packed row gives every document the losses and gradients that it has alone."""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch
from test_gpt import build

from ascendchat.config.train import BenchTrainConfig
from ascendchat.data.loader import MicroBatch
from ascendchat.device import pick
from ascendchat.device.cuda_attention import Flash, flash
from ascendchat.device.npu_attention import NpuFusion
from ascendchat.errors import UserError
from ascendchat.eval.scorer import Example, ModelScorer
from ascendchat.nn.attention import Attention, Eager, Reference, Sdpa, documents
from ascendchat.nn.gpt import GPT, dense
from ascendchat.nn.loss import head_loss, token_nats
from ascendchat.nn.model import Documents
from ascendchat.parallel.collectives import World
from ascendchat.parallel.context import Context
from ascendchat.sizes.shape import Shape
from ascendchat.train.model import build as build_learner

LENGTHS = np.array([40, 1, 2, 85, 100, 28], np.int32)  # two rows of 128; the last stands for padding
SMALL = {"dim": 32}  # two heads
SIZES = [SMALL, {**SMALL, "kv_heads": 1}, {**SMALL, "window_pattern": "SSSL", "seq_len": 512}]  # windows of 128 there
LONG = np.array([300, 2, 210], np.int32)  # one row of 512


def batch_of(model: GPT) -> tuple[torch.Tensor, torch.Tensor, np.ndarray]:
    lengths = LENGTHS if model.shape.seq_len == 128 else LONG
    size = (2, int(lengths.sum()) // model.shape.seq_len, model.shape.seq_len)
    inputs, targets = torch.randint(0, 60, size, generator=torch.Generator().manual_seed(3))
    return inputs, targets, lengths


def documents_of(kernel: Attention, lengths: np.ndarray, inputs: torch.Tensor, masked: bool) -> Documents:
    """As made by `documents`, but for the way, which follows from the sizes there."""
    made = documents(kernel, lengths, inputs, torch.float32)
    return made._replace(bounds=kernel.bounds(lengths, len(inputs), not masked, lambda tensor: tensor))


def nats(model: GPT, kernel: Attention, inputs: torch.Tensor, targets: torch.Tensor, known: Documents | None = None):  # type: ignore[no-untyped-def]
    return token_nats(model(inputs, dense(model, kernel), documents=known), model.head, targets, 60)


def alone(inputs: torch.Tensor, targets: torch.Tensor, lengths: np.ndarray) -> list[tuple[torch.Tensor, ...]]:
    ends = list(accumulate(lengths.tolist()))
    return [(inputs.view(1, -1)[:, a:b], targets.view(1, -1)[:, a:b]) for a, b in zip([0, *ends], ends)]


WAYS = pytest.mark.parametrize(
    ("kernel", "sizes", "masked"),
    [(Reference(), SIZES[0], True), (Eager(), SIZES[1], False), (Sdpa(), SIZES[2], True), (Sdpa(), SIZES[2], False)],
    ids=["reference", "eager, one by one", "sdpa, masked", "sdpa, one by one"],
)


@WAYS
def test_a_packed_row_has_the_nats_of_its_documents_alone_and_the_sum_of_their_gradients(
    kernel: Attention, sizes: dict[str, object], masked: bool
) -> None:
    packed, apart = build(**sizes), build(**sizes)
    packed.checkpoint_activations = not masked
    inputs, targets, lengths = batch_of(packed)
    known, parts, one = (
        documents_of(kernel, lengths, inputs, masked),
        alone(inputs, targets, lengths),
        torch.tensor(1.0),
    )
    with torch.no_grad():
        found = nats(packed, kernel, inputs, targets, known).view(-1)
        expected = [nats(apart, kernel, *part).view(-1) for part in parts]
        whole = nats(apart, kernel, inputs, targets).view(-1)
    torch.testing.assert_close(found, torch.cat(expected), atol=2e-5, rtol=1e-5)
    first = int(lengths[0])
    torch.testing.assert_close(found[:first], whole[:first], atol=2e-5, rtol=1e-5)
    assert (found - whole)[first:][: int(lengths[1])].abs().max() > 1e-3, "over whole rows the second sees the first"
    hidden = packed(inputs, dense(packed, kernel), documents=known)
    head_loss(hidden, packed.head, targets, 60, weight=one).backward()
    for tokens, wanted in parts:
        head_loss(apart(tokens, dense(apart, kernel)), apart.head, wanted, 60, weight=one).backward()
    for (name, a), b in zip(packed.named_parameters(), apart.parameters()):
        size = float(b.grad.norm())
        assert size > 0, name
        assert float((a.grad - b.grad).norm()) < 1e-4 * size, name


@pytest.mark.parametrize("attend", ["row", "document"])
def test_training_keeps_to_the_documents_of_a_batch_if_asked_to(attend: str) -> None:
    """The guess of the token after next, too: of the last token of a document nothing is asked that stands behind the
    next one's first token."""
    said: list[str] = []
    config = BenchTrainConfig(attend=attend)  # type: ignore[arg-type]
    shape = Shape.from_depth(2, vocab=60, seq_len=128, dim=32, head_dim=16)
    train_model = build_learner(config, shape, Context(pick("cpu"), World(), torch.device("cpu"), said.append))
    apart = GPT(shape)
    apart.initialise(0)
    for model in (train_model.model, apart):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)))
    inputs, targets, lengths = batch_of(apart)
    one, mtp_weight = torch.tensor(1.0), torch.tensor(0.5)
    found = train_model.loss(MicroBatch(inputs, targets, lengths, 256), one, mtp_weight)
    found.backward()
    sees = {"document": "its own document only", "row": "the whole row before it"}[attend]
    assert said[-1] == f"a token sees {sees}"
    total, seen = torch.zeros(()), lengths if attend == "document" else np.array([128, 128], np.int32)
    for tokens, wanted in alone(inputs, targets, seen):
        loss = head_loss(apart(tokens, dense(apart, Sdpa())), apart.head, wanted, 60, weight=one, mtp_weight=mtp_weight)
        loss.backward()
        total += loss.detach()
    torch.testing.assert_close(found.detach(), total, atol=1e-2, rtol=1e-5)
    assert float((train_model.model.head.grad - apart.head.grad).norm()) < 1e-5 * float(apart.head.grad.norm())


@pytest.mark.slow
def test_a_compiled_model_is_traced_once_for_all_batches() -> None:
    """As in training: one graph, static shapes. The lengths of the documents change, the shapes of what is passed do
    not."""
    model = build(dim=32)
    model.checkpoint_activations = True
    inputs, _, lengths = batch_of(model)
    traced = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        traced.append(graph)
        return graph.forward

    forward = torch.compile(model, dynamic=False, fullgraph=True, backend=backend)
    attend, rope = dense(model, Sdpa()), model.rope(128, torch.float32, inputs.device)
    for those in (lengths, lengths[::-1].copy(), np.array([128, 128], np.int32)):
        known = documents(Sdpa(), those, inputs, torch.float32, compiled=True)
        found = forward(inputs, attend, rope, documents=known)
        torch.testing.assert_close(found, model(inputs, attend, rope, documents=known), atol=1e-5, rtol=1e-5)
    assert len(traced) == 1
    forward(inputs, attend, rope)
    assert len(traced) == 2, "whole rows are another graph"


def test_documents_begin_with_a_row_and_after_each_border() -> None:
    """A plain CPU goes document by document where rows or documents are long."""
    known = documents(Sdpa(), np.array([2, 3, 1, 4], np.int32), torch.zeros(2, 5).long(), torch.bfloat16, compiled=True)
    assert known.continues_document.dtype == torch.bfloat16
    assert known.continues_document.tolist() == [[0, 1, 0, 1, 1], [0, 0, 1, 1, 1]]
    assert known.bounds.tolist() == [[0, 0, 1, 1, 1], [2, 3, 3, 3, 3]]
    for seq_len, length, per_document in ((128, 32, False), (128, 64, True), (256, 32, True), (2048, 2, False)):
        tokens, lengths = torch.zeros(2, seq_len, dtype=torch.long), np.full(2 * seq_len // length, length, np.int32)
        bounds = documents(Sdpa(), lengths, tokens, torch.float32).bounds
        assert isinstance(bounds, torch.Tensor) != per_document
        assert isinstance(documents(Sdpa(), lengths, tokens, torch.float32, compiled=True).bounds, torch.Tensor)


def test_bounds_for_the_flash_kernel_keep_their_size_until_there_are_more_documents_than_fit() -> None:
    kernel = Flash()
    tokens = torch.zeros(2, 8, dtype=torch.long)

    def bounds(lengths: list[int]) -> list[int]:
        found = documents(kernel, np.array(lengths), tokens, torch.float32).bounds
        assert found.dtype == torch.int32
        return found.tolist()

    assert bounds([3, 5, 8]) == [0, 3, 8, 16, 16, 16, 16, 16, 16], "room for twice as many, a power of two"
    assert bounds([8, 8]) == [0, 8, 16, 16, 16, 16, 16, 16, 16]
    assert len(bounds([1] * 8 + [8])) == 32 + 1
    assert len(bounds([8, 8])) == 32 + 1, "it never shrinks: that would be compiled again"
    whole = Flash().bounds(np.full(16, 2048, np.int32), 16, False, lambda made: made)
    assert len(whole) == 128 + 1, "room for documents as they usually are, before the first text is seen"


@pytest.mark.parametrize("packed", [False, True])
def test_the_operator_of_the_flash_kernel_can_be_traced_with_its_gradient(packed: bool) -> None:
    """What it computes needs CUDA (test_documents_cuda.py); shapes and wiring do not."""
    with torch._subclasses.FakeTensorMode():
        size = (24,) if packed else (2, 12)
        q = torch.empty(*size, 4, 8, dtype=torch.bfloat16, requires_grad=True)
        k, v = (torch.empty(*size, 2, 8, dtype=torch.bfloat16, requires_grad=True) for _ in "kv")
        bounds = torch.empty(9, dtype=torch.int32) if packed else None
        found = flash(q, k, v, bounds, 12, 5, 0.3)
        assert (found.shape, found.dtype) == (q.shape, torch.bfloat16)
        found.float().sum().backward()
        assert [x.grad.shape for x in (q, k, v)] == [q.shape, k.shape, v.shape]


def test_more_documents_than_one_call_of_the_npu_takes_become_several_calls() -> None:
    tokens = torch.zeros(3, 1000, dtype=torch.long)
    lengths = np.array([1] * 1500 + [500, 1000], np.int32)
    first, second = documents(NpuFusion(), lengths, tokens, torch.float32).bounds
    assert first == (list(range(1, 1025)), 1)
    assert second[0][:2] == [1, 2]
    assert second[0][-3:] == [476, 976, 1976]
    assert second[1] == 1000


def test_a_kernel_that_cannot_be_compiled_for_documents_says_how_to_train(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sdpa, "compiles_packed", False)  # as npu_fusion has it, which does not run here
    shape = Shape.from_depth(2, vocab=60, seq_len=128, dim=64, head_dim=16)
    config, device = BenchTrainConfig(attend="document"), pick("cpu", compiled=True)
    with pytest.raises(UserError, match=r"kernel sdpa cannot be compiled for documents.*--no-compile"):
        build_learner(config, shape, Context(device, World(), torch.device("cpu"), lambda text: None))


def test_bits_per_byte_keep_to_documents_where_the_model_does() -> None:
    model, bos = build(), 7
    rows = torch.randint(8, 60, (4, 65), generator=torch.Generator().manual_seed(3)).numpy()
    rows[:, 0] = rows[0, 20] = rows[1, 33] = rows[1, 50] = bos
    keeping, whole = (ModelScorer(model, Sdpa(), torch.device("cpu"), max_tokens=512, bos=b) for b in (bos, None))
    found, other = (
        np.concatenate([each[0].nats for each in scorer.submit([Example([row], [1]) for row in rows])()])
        for scorer in (keeping, whole)
    )
    alone = []
    for row in rows:
        begins = [*np.flatnonzero(row == bos), len(row)]
        for start, stop in pairwise(begins):
            part = row[start : min(stop + 1, len(row))]  # the next bos is guessed from what stands before it
            alone.append(whole.submit([Example([part], [1])])()[0][0].nats)
    np.testing.assert_allclose(found, np.concatenate(alone), atol=1e-4)
    assert np.abs(found - other).max() > 1e-3
