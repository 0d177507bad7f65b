"""Generator and trainer agree on every log-probability: within 1e-5, or bit by bit in the batch-invariant mode."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_models import model, tokenizer
from torch import Tensor

from ascendchat.config.rl import RlConfig
from ascendchat.device import pick
from ascendchat.engine.request import Request, Sampling
from ascendchat.errors import UserError
from ascendchat.nn import IGNORE
from ascendchat.nn.attention import choose
from ascendchat.nn.logprobs import SamplingDistribution
from ascendchat.rl.command import engine_of, readout_of
from ascendchat.rl.grpo import PRESETS, Method
from ascendchat.rl.invariant import batch_invariant
from ascendchat.rl.rollout import AnswerGroup, TaskQuestion, TokenRows, pack
from ascendchat.rl.stage import PolicyBatch, PolicyLoss, method_of
from ascendchat.tasks.task import Task
from ascendchat.train.model import TrainModel

CPU = pick("cpu")
NO_TASK: Task = None  # type: ignore[assignment]


def learner_of(seed: int, exact: bool, **sizes: Any) -> TrainModel:
    """A random model, in rows of 128 tokens."""
    made = model(seed, **{"seq_len": 128, **sizes})
    kernel, _ = choose("cpu", torch.float32, made.shape.head_dim)
    train_model = TrainModel(made, kernel, CPU, torch.device("cpu"), by_document=True)
    return batch_invariant(train_model) if exact else train_model


def answered(policy: PolicyLoss, seed: int, count: int = 12, slots: int = 5, prompt: int = 60) -> TokenRows:
    """Answers of the engine to prompts of up to `prompt` tokens, packed as for training; some tokens are forced."""
    chance, train_model, drawn = random.Random(seed), policy.train_model, policy.drawn
    engine = engine_of(train_model, tokenizer(), slots, drawn.readout)
    how = {"logprobs": True, "keep_stop": True, "processed_logprobs": drawn.temperature != 1 or drawn.top_k > 0}
    groups = []
    requests = [
        Request(
            [chance.randrange(256) for _ in range(chance.randint(1, prompt))],
            Sampling(chance.randint(1, 40), drawn.temperature, drawn.top_k, seed=number, **how),
        )
        for number in range(count)
    ]
    for request, answer in zip(requests, engine.generate(requests)):
        answer.forced = [chance.random() < 0.1 for _ in answer.ids]
        group = AnswerGroup(TaskQuestion(0, NO_TASK, 0, request.prompt), [answer], [0.0])
        group.advantages = [chance.uniform(-1, 1)]
        groups.append(group)
    return pack(groups, lambda answer: 1.0 / count, train_model.model.shape.seq_len, 0)


def uploaded(rows: TokenRows) -> PolicyBatch:
    *numbers, _ = (torch.from_numpy(column) for column in rows.columns)  # no proximal: this is the first update
    return PolicyBatch(*numbers, rows.lengths)


def policy_of(
    train_model: TrainModel, method: Method, temperature: float = 1.0, top_k: int = 0, **more: Any
) -> PolicyLoss:
    drawn = SamplingDistribution(train_model.model.shape.vocab, temperature, top_k, readout=readout_of(train_model))
    return PolicyLoss(train_model, method, drawn, **more)


@pytest.fixture(scope="module")
def answers() -> PolicyBatch:
    """What the model of seed 1 has answered."""
    return uploaded(answered(policy_of(learner_of(1, False), Method()), 1))


@pytest.fixture
def batch(answers: PolicyBatch) -> PolicyBatch:
    """The same, to be changed by one test."""
    return replace(answers, advantage=answers.advantage.clone(), behaviour=answers.behaviour.clone())


def gap(policy: PolicyLoss, batch: PolicyBatch) -> Tensor:
    """Between trainer and generator, of every token that the model chose."""
    apart = (policy.logprobs(batch) - batch.behaviour).abs()[batch.targets != IGNORE]
    assert len(apart) > 100, "too few tokens to see anything"
    return apart


@pytest.mark.parametrize(
    ("sizes", "temperature", "top_k"),
    [({}, 1.0, 0), ({"seq_len": 512}, 0.7, 0), ({"dim": 64, "head_dim": 8, "kv_heads": 2}, 1.0, 7)],
    ids=str,
)
def test_engine_and_trainer_agree_within_1e_5(sizes: dict[str, Any], temperature: float, top_k: int) -> None:
    policy = policy_of(learner_of(3, False, **sizes), Method(), temperature, top_k)
    batch = uploaded(answered(policy, 3, prompt=160 if "seq_len" in sizes else 60))
    assert gap(policy, batch).max() < 1e-5
    if temperature != 1.0:
        raw = replace(policy.drawn, temperature=1.0)
        assert gap(PolicyLoss(policy.train_model, Method(), raw), batch).max() > 0.1, "the test cannot tell them apart"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "temperature", "top_k"),
    [
        ({"dim": 48, "head_dim": 16}, 0.7, 0),
        ({"dim": 64, "head_dim": 8, "kv_heads": 2, "seq_len": 512}, 1.3, 7),  # caches of 128 tokens that are rings
    ],
    ids=str,
)
def test_in_the_batch_invariant_mode_they_are_the_same_bits(
    sizes: dict[str, Any], temperature: float, top_k: int
) -> None:
    """Other neighbours, other slots, other places in a row, rings that have turned: not one bit."""
    policy = policy_of(learner_of(1, True, **sizes), Method(), temperature, top_k, exact=True)
    batch = uploaded(answered(policy, 1, count=8, slots=3, prompt=160 if "seq_len" in sizes else 60))
    apart = gap(policy, batch)
    assert apart.max() == 0.0
    loss, metrics = policy(batch, tokens=len(apart))
    assert metrics["logprob_gap"] == metrics["mismatch_kl"] == 0.0
    assert policy.largest_ratio() == 1.0
    loss.backward()  # type: ignore[no-untyped-call]
    batch.behaviour[batch.targets != IGNORE] += 1e-6
    with pytest.raises(UserError, match="--batch-invariant: generator and trainer differ by"):
        policy(batch, tokens=len(apart))


def test_the_batch_invariant_mode_computes_the_same_loss_and_gradients(batch: PolicyBatch) -> None:
    usual, exact = (policy_of(learner_of(1, exact), PRESETS["default"]) for exact in (False, True))
    tokens = float((batch.targets != IGNORE).sum())
    losses = [policy(batch, tokens).value for policy in (usual, exact)]
    torch.testing.assert_close(*losses, atol=1e-6, rtol=1e-5)
    for loss in losses:
        loss.backward()  # type: ignore[no-untyped-call]
    pairs = zip(usual.train_model.model.named_parameters(), exact.train_model.model.parameters())
    for (name, mine), theirs in pairs:
        assert mine.grad is not None, name
        assert theirs.grad is not None, name
        assert (mine.grad - theirs.grad).norm() <= 1e-4 * mine.grad.norm() + 1e-8, name


def test_the_batch_invariant_mode_is_refused_where_it_does_not_hold() -> None:
    train_model = learner_of(0, False)
    train_model.by_document = False
    with pytest.raises(UserError, match="--attend document"):
        batch_invariant(train_model)
    half = learner_of(0, False)
    half.device = pick("cpu")
    half.device.dtype = torch.bfloat16  # type: ignore[misc]
    with pytest.raises(UserError, match="--batch-invariant: it is for float32 on a CPU, this is bfloat16"):
        batch_invariant(half)


def moved(policy: PolicyLoss, size: float = 0.01) -> None:
    """The weights after an update."""
    chance = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.train_model.model.parameters():
            parameter += size * parameter.std(correction=0) * torch.randn(parameter.shape, generator=chance)


@pytest.mark.parametrize(("preset", "clip"), [("default", 0.02), ("gspo", 0.004)])
def test_with_the_proximal_policy_known_the_ratio_is_the_true_one(preset: str, clip: float, batch: PolicyBatch) -> None:
    policy = policy_of(learner_of(1, False), replace(PRESETS[preset], clip_low=clip, clip_high=clip))
    scored = batch.targets != IGNORE
    before = policy.logprobs(batch)
    batch = replace(batch, proximal=before)
    first = policy(batch, tokens=float(scored.sum()))
    assert first.metrics["clip_fraction"] == 0.0
    moved(policy)
    second = policy(batch, tokens=float(scored.sum()))
    now, a = policy.logprobs(batch), batch.advantage
    ratio = (now - before).exp()
    owner = torch.arange(len(batch.lengths)).repeat_interleave(torch.from_numpy(batch.lengths).long()).view(a.shape)
    if preset == "gspo":
        for number in range(len(batch.lengths)):
            own = scored & (owner == number)
            ratio[own] = (now - before)[own].mean().exp() if own.any() else 1.0
    clipped = ((a > 0) & (ratio > 1 + clip) | (a < 0) & (ratio < 1 - clip)) & scored
    assert 0 < clipped.sum() < scored.sum(), "the test shows nothing"
    assert second.metrics["clip_fraction"].item() == pytest.approx((clipped.sum() / scored.sum()).item(), abs=1e-6)
    gain = torch.minimum(ratio * a, ratio.clamp(1 - clip, 1 + clip) * a)
    wanted = -(batch.weight * gain)[scored].sum()
    assert second.value.item() == pytest.approx(wanted.item(), rel=1e-3)
    assert second.metrics["logprob_gap"] < 1e-5, "the generator agrees with the proximal policy"
    unknown = policy(replace(batch, proximal=None), tokens=float(scored.sum()))
    assert unknown.metrics["clip_fraction"] == 0.0


def test_the_metrics_are_means_over_the_tokens_that_are_learnt_from(batch: PolicyBatch) -> None:
    policy = policy_of(learner_of(1, False), PRESETS["drgrpo"])
    scored = batch.targets != IGNORE
    batch.behaviour[scored] -= 0.25
    batch.behaviour[tuple(scored.nonzero()[3])] -= 3.0
    count = int(scored.sum())
    metrics = policy(batch, tokens=float(count)).metrics
    assert metrics["logprob_gap"].item() == pytest.approx(0.25 + 3.0 / count, abs=1e-4)
    assert policy.largest_ratio() == pytest.approx(torch.tensor(3.25).exp().item(), rel=1e-4)
    assert policy.largest_ratio() == 0.0, "nothing since"
    assert metrics["masked_fraction"] == 0.0, "no correction here"
    masked = policy_of(policy.train_model, PRESETS["default"])
    assert masked(batch, tokens=float(count)).metrics["masked_fraction"].item() == pytest.approx(1 / count)
    train_model = policy.train_model
    hidden = train_model.hidden(batch.inputs, train_model.documents(batch.inputs, batch.lengths)).detach().flatten(0, 1)
    shares = policy.drawn.read(hidden, train_model.model.head, batch.targets.flatten()).scaled.double().softmax(-1)
    entropy = -(shares * shares.log()).sum(-1)[scored.flatten()].mean()
    assert metrics["entropy"].item() == pytest.approx(entropy.item(), rel=1e-4)


def test_the_kl_is_to_the_weights_of_the_beginning(batch: PolicyBatch) -> None:
    train_model, start = learner_of(1, False), learner_of(1, False)
    policy = policy_of(train_model, Method(kl=0.5), reference=start)
    tokens = float((batch.targets != IGNORE).sum())
    batch.advantage.zero_()
    loss, metrics = policy(batch, tokens)
    assert metrics["kl"].item() == pytest.approx(0.0, abs=1e-6)
    assert loss.item() == pytest.approx(0.0, abs=1e-6)
    moved(policy, 0.05)
    first = policy(batch, tokens)
    assert first.metrics["kl"] > 1e-3
    first.value.backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is None for parameter in start.model.parameters())
    with torch.no_grad():
        for parameter in train_model.model.parameters():
            parameter -= 1e-3 * parameter.grad  # type: ignore[operator]
    assert policy(batch, tokens).metrics["kl"] < first.metrics["kl"]


def test_flags_win_over_the_preset() -> None:
    assert method_of(RlConfig(preset="gspo")) == PRESETS["gspo"]
    asked = RlConfig(preset="grpo", clip_low=0.1, clip_high=0.3, correction="truncate", kl=0.01)
    method = method_of(asked)
    assert (method.clip_low, method.clip_high, method.correction, method.kl) == (0.1, 0.3, "truncate", 0.01)
    assert method.mean == "sequence"
