"""Sampling maths against plain references, one row at a time, in Python."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ascendchat.engine.request import MAX_TOPS, Grammar, Sampling
from ascendchat.engine.sampling import (
    Draw,
    Mode,
    SamplingSettings,
    Tables,
    columns,
    keep,
    likeliest,
    likeliest_tokens,
    mode_of,
    penalise,
    ranked,
    sample,
    seed_keys,
    uniform,
)


def rows(count: int, **values: float) -> SamplingSettings:
    usual = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "penalty": 1.0, "seed": 0}
    usual = {**usual, "presence": 0.0, "frequency": 0.0, "processed": False, **values}
    types = {"top_k": torch.int64, "processed": torch.bool}
    usual["seed"] = seed_keys(int(usual["seed"]))  # type: ignore[assignment]
    made = {name: torch.tensor([value] * count, dtype=types.get(name, torch.float32)) for name, value in usual.items()}
    return SamplingSettings(**made)


def keys(seeds: Iterable[int]) -> torch.Tensor:
    return torch.tensor([seed_keys(seed) for seed in seeds])


def plain_keep(logits: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """Top-k, then top-p of what is left, then min-p; written out."""
    order = sorted(range(len(logits)), key=lambda i: -logits[i])
    order = order[:top_k] if top_k else order
    weights = [math.exp(logits[i] - logits[order[0]]) for i in order]
    shares = [weight / sum(weights) for weight in weights]
    kept, total = [], 0.0
    for index, share in zip(order, shares):
        if kept and ((top_p < 1 and total >= top_p) or share < min_p * shares[0]):
            break
        kept.append(index)
        total += share
    return set(kept)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(-400, 400), min_size=2, max_size=12, unique=True),
    st.integers(0, 14),
    st.sampled_from([0.05, 0.3, 0.77, 0.95, 1.0]),
    st.sampled_from([0.0, 0.02, 0.3, 1.0]),
)
def test_filters_keep_what_the_plain_reference_keeps(numbers: list[int], k: int, p: float, m: float) -> None:
    logits = [number / 53 for number in numbers]
    found = keep(torch.tensor([logits]), torch.tensor([k]), torch.tensor([p]), torch.tensor([m]))[0]
    assert set(found.nonzero().flatten().tolist()) == plain_keep(logits, k, p, m)


def test_ties_at_the_border_stay_and_so_do_the_unlikeliest_where_nothing_is_filtered() -> None:
    """Of the second row the likeliest token has all of the probability that float32 can tell."""
    logits = torch.tensor([[1.0, 1.0, 0.0], [0.0, -40.0, -50.0]])
    found = keep(logits, torch.tensor([1, 0]), torch.ones(2), torch.zeros(2))
    assert found.tolist() == [[True, True, False], [True, True, True]]


@pytest.mark.parametrize(
    ("sampling", "mode"),
    [
        (Sampling(temperature=0.0), Mode()),
        (Sampling(temperature=0.0, top_k=5), Mode()),
        (Sampling(temperature=0.0, processed_logprobs=True), Mode()),
        (Sampling(), Mode(Draw.RANDOM)),
        (Sampling(processed_logprobs=True), Mode(Draw.PROCESSED)),
        (Sampling(top_k=5, processed_logprobs=True), Mode(Draw.FILTERED)),
        (Sampling(top_p=0.5), Mode(Draw.FILTERED)),
        (Sampling(min_p=0.1), Mode(Draw.FILTERED)),
        (Sampling(min_p=0.1, repetition_penalty=1.1), Mode(Draw.FILTERED, True)),
        (Sampling(presence_penalty=-0.1), Mode(Draw.RANDOM, True)),
        (Sampling(temperature=0.0, allowed_tokens=(0,)), Mode(tables=True)),
        (Sampling(temperature=0.0, top_logprobs=1), Mode(tables=True)),
        (Sampling(temperature=0.0, grammar=Grammar("json")), Mode(tables=True)),
        (Sampling(temperature=0.0, grammar=Grammar("json"), processed_logprobs=True), Mode(Draw.PROCESSED, True)),
        (Sampling(temperature=0.0, logit_bias=((0, 1.0),)), Mode(tables=True)),
        (Sampling(temperature=0.0, frequency_penalty=0.1), Mode(tables=True)),
    ],
)
def test_a_step_does_what_one_of_its_rows_needs_and_no_more(sampling: Sampling, mode: Mode) -> None:
    assert mode_of(sampling) == mode
    assert Mode.union([mode, Mode()]) == mode
    assert Mode.union([mode, Mode(Draw.FILTERED, True)]) == Mode(Draw.FILTERED, True)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("filters", [{}, {"top_k": 7}, {"top_p": 0.8, "min_p": 0.02}], ids=str)
def test_a_row_gets_the_same_bits_in_every_mode_that_is_large_enough_for_it(
    temperature: float, filters: dict[str, float]
) -> None:
    """Beside rows with penalties, biases and masks it runs as they need it, and its own history is of no account."""
    draw = torch.Generator().manual_seed(5)
    logits, position = torch.randn(40, 300, generator=draw) * 5, torch.arange(40)
    sampling = Sampling(temperature=temperature, **filters)  # type: ignore[arg-type]
    settings = rows(40, temperature=temperature, **filters)
    tables = Tables.zeros(40, 300, torch.device("cpu"))
    tables = tables._replace(seen=torch.rand(40, 300, generator=draw) < 0.5, counts=tables.counts + 2)
    chosen, logprob = sample(logits, settings, position, mode_of(sampling))
    for mode in (Mode(draw, flag) for draw in Draw for flag in (False, True)):
        if Mode.union([mode, mode_of(sampling)]) == mode:
            again = sample(logits, settings, position, mode, tables)
            assert torch.equal(again[0], chosen)
            assert torch.equal(again[1], logprob)


def test_a_penalty_moves_seen_tokens_down_whatever_their_sign() -> None:
    logits, seen = torch.tensor([[2.0, -2.0, 1.0]]), torch.tensor([[True, True, False]])
    assert penalise(logits, seen, torch.tensor([2.0])).tolist() == [[1.0, -4.0, 1.0]]


def test_bias_and_penalties_move_the_choice_and_not_the_probability() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0]]).repeat(4, 1)
    bias = torch.tensor([[0.0, 0, 0], [-100, 0, 0], [0, 0, 100], [0, 0, 0]])
    counts = torch.tensor([[0.0, 0, 0], [0, 0, 0], [0, 0, 0], [1, 1, 0]])
    given = rows(4, temperature=0.0, presence=2.0, frequency=0.5)
    tables = Tables.zeros(4, 3, logits.device)._replace(bias=bias, counts=counts)
    chosen, logprob = sample(logits, given, torch.arange(4), Mode(tables=True), tables)
    assert chosen.tolist() == [0, 1, 2, 2]
    torch.testing.assert_close(logprob, logits.log_softmax(-1)[torch.arange(4), chosen])


@pytest.mark.parametrize("vocab", [3, MAX_TOPS, 100])
def test_the_likeliest_tokens_are_those_of_a_plain_sort(vocab: int) -> None:
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(vocab), dtype=torch.float64) * 4
    ids, logprobs = likeliest_tokens(logits.float())
    for row, report in zip(logits.tolist(), torch.cat((ids.float(), logprobs), dim=1).tolist()):
        total = math.log(sum(math.exp(value) for value in row))
        expected = sorted(((i, value - total) for i, value in enumerate(row)), key=lambda pair: -pair[1])
        for count in (1, 3, MAX_TOPS):
            found = ranked(report, count)
            assert [token for token, _ in found] == [token for token, _ in expected[:count]]
            assert [value for _, value in found] == pytest.approx([value for _, value in expected[:count]], abs=1e-5)


def test_equally_likely_tokens_are_reported_in_the_order_of_their_ids() -> None:
    assert ranked([7.0, 2.0, 5.0, 9.0, -1.0, -1.0, -0.5, -1.0], 3) == [(5, -0.5), (2, -1.0), (7, -1.0)]


def test_noise_is_uniform_and_does_not_depend_on_other_rows() -> None:
    seeds, places, blocks = keys(range(64)), torch.arange(64) * 3, columns(1000)
    noise = uniform(seeds, places, blocks)
    assert torch.equal(noise[5:6], uniform(seeds[5:6], places[5:6], blocks))
    assert noise.min() > 0
    assert noise.max() < 1
    counts = torch.histc(noise, bins=50, min=0, max=1)
    chi_squared = ((counts - 1280) ** 2 / 1280).sum().item()
    assert chi_squared < 90, "49 degrees of freedom: above 90 once in 3,000 fair draws"


@pytest.mark.parametrize("barred", [(), (1, 4)], ids=["all", "barred"])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3, "top_p": 0.99, "min_p": 0.01}], ids=["plain", "filtered"])
def test_draws_follow_the_softmax_of_what_may_be_chosen(filters: dict[str, float], barred: tuple[int, ...]) -> None:
    logits, count, heat = torch.tensor([2.0, 1.5, 0.0, -1.0, -3.0]), 20_000, 0.7
    never = torch.zeros(5, dtype=torch.bool).index_fill(0, torch.tensor(barred, dtype=torch.int64), True)
    mode = Mode(Draw.FILTERED if filters else Draw.RANDOM, bool(barred))
    tables = Tables.zeros(count, 5, logits.device)._replace(barred=never.expand(count, 5))
    given = rows(count, temperature=heat, **filters)
    chosen, _ = sample(logits.expand(count, 5), given, torch.arange(count), mode, tables)
    left = logits.masked_fill(never, float("-inf"))
    expected = (left / heat).softmax(-1)
    if filters:
        expected = (left / heat).masked_fill(left < left.topk(3).values[-1], float("-inf")).softmax(-1)
    torch.testing.assert_close(torch.bincount(chosen, minlength=5) / count, expected, atol=0.012, rtol=0)


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-38, 1e-300])
@pytest.mark.parametrize("mode", [Mode(Draw.RANDOM), Mode(Draw.FILTERED)])
def test_a_temperature_of_nearly_zero_takes_the_likeliest(mode: Mode, temperature: float) -> None:
    logits = torch.randn(8, 30, generator=torch.Generator().manual_seed(0)) * 15
    chosen, logprob = sample(logits, rows(8, temperature=temperature, top_k=5), torch.arange(8), mode)
    assert torch.equal(chosen, logits.argmax(-1))
    torch.testing.assert_close(logprob, logits.log_softmax(-1).max(-1).values)


@pytest.mark.parametrize("vocab", [1, 2, 300])
def test_the_maximum_of_integers_is_the_argmax(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    scores = torch.randn(50, vocab, generator=generator) * 10
    scores[10:20] = scores[10:20].round()  # equals: the first one
    scores[20] = -3.5
    scores[21, : vocab // 2] = float("-inf")
    scores[22:30] = -scores[22:30].abs()
    assert likeliest(scores).tolist() == scores.argmax(dim=-1).tolist()


def test_noise_has_no_pattern_within_rows_across_rows_or_in_its_last_bits() -> None:
    """Chi-squared of pairs in 32 x 32 cells, as standard deviations: 5 is once in millions of fair draws."""
    blocks, cells = columns(4096), 32

    def deviations(a: torch.Tensor, b: torch.Tensor) -> float:
        cell = torch.floor(a * cells) * cells + torch.floor(b * cells)
        counts, expected = torch.bincount(cell.flatten().long(), minlength=cells**2).double(), a.numel() / cells**2
        return float((((counts - expected) ** 2 / expected).sum() - cells**2) / math.sqrt(2 * cells**2))

    one = keys([7]).expand(200, -1)
    for noise in (
        uniform(one, torch.arange(200), blocks),
        uniform(one, torch.arange(200) * 2048, blocks),
        uniform(keys(range(200)), torch.zeros(200, dtype=torch.int64), blocks),
    ):
        last = torch.frac(noise * 2.0**13)
        for pair in ((noise[1:], noise[:-1]), (noise[:, 1:], noise[:, :-1]), (noise, last), (last[1:], last[:-1])):
            assert abs(deviations(*pair)) < 5
        rows = noise - 0.5
        alike = torch.corrcoef(rows) - torch.eye(200)
        assert float(alike.abs().max()) < 6 / math.sqrt(4096), "no two rows have anything in common"


def test_noise_is_exact_so_every_device_has_the_same() -> None:
    """In float64, where nothing is rounded, the numbers are the same."""
    seeds = [0, 1, -1, 2**32, 2**32 + 1, 2**64, -(2**40)]
    assert len({seed_keys(seed) for seed in seeds}) == len(seeds), "of any size and sign"
    given = keys([3, -3, 2**70]), torch.tensor([0, 4097, 1_000_000]), columns(70_000)
    found = uniform(*given)
    assert torch.equal(found.double(), uniform(given[0].double(), given[1], given[2].double()))
    assert torch.equal(torch.frac(found * 2.0**23), torch.full_like(found, 0.5))
    assert [int(number * 2**24) for number in found[:, 7]] == [7852559, 9701623, 12228453]


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 0},
        {"temperature": -1.0},
        {"temperature": math.inf},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"repetition_penalty": 0.0},
        {"stop": ("a", "")},
        {"logit_bias": ((3, 100.5),)},
        {"logit_bias": ((3, math.nan),)},
        {"logit_bias": ((3, 1.0), (3, 2.0))},
        {"presence_penalty": 2.1},
        {"presence_penalty": math.nan},
        {"frequency_penalty": -2.1},
        {"top_logprobs": -1},
        {"top_logprobs": 21},
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        Sampling(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "text"), [("yaml", "a"), ("lark", ""), ("regex", ""), ("json_schema", "")])
def test_grammars_that_make_no_sense_are_refused(kind: str, text: str) -> None:
    with pytest.raises(ValueError, match="grammar"):
        Grammar(kind, text)  # type: ignore[arg-type]


def test_processed_log_probabilities_are_those_of_the_draw() -> None:
    """Row by row: one reports the model's own, the others what is left after temperature, top-k and barred tokens."""
    logits = torch.tensor([[2.0, 1.0, 0.5, -1.0]]).expand(600, 4)
    position, barred = torch.arange(600), torch.tensor([[False, False, True, False]]).expand(600, 4)
    settings = rows(600, temperature=0.7, top_k=2)._replace(processed=position % 2 == 0)
    tables = Tables.zeros(600, 4, logits.device)._replace(barred=barred)
    chosen, logprob = sample(logits, settings, position, Mode(Draw.FILTERED, True), tables)
    drawn = torch.log_softmax(torch.tensor([2.0, 1.0]) / 0.7, 0)
    own = torch.log_softmax(logits[0], 0)
    assert set(chosen.tolist()) == {0, 1}
    torch.testing.assert_close(logprob[::2], drawn[chosen[::2]])
    torch.testing.assert_close(logprob[1::2], own[chosen[1::2]])
    share = (chosen == 0).float().mean().item()
    assert share == pytest.approx(drawn[0].exp().item(), abs=0.06), "it is what tokens are drawn by"
    own_only = settings._replace(processed=torch.zeros(600, dtype=torch.bool))
    assert sample(logits, own_only, position, Mode(Draw.FILTERED, True), tables)[0].equal(chosen)


def test_a_greedy_row_reports_the_scores_that_it_chooses_by() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.5, -1.0]])
    settings = rows(1, temperature=0.0)._replace(processed=torch.ones(1, dtype=torch.bool))
    _, logprob = sample(
        logits, settings, torch.zeros(1, dtype=torch.int64), Mode(Draw.PROCESSED), Tables.zeros(1, 4, logits.device)
    )
    torch.testing.assert_close(logprob, torch.log_softmax(logits, -1)[:, 0])
