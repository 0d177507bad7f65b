"""The kernels of engine/gpt_step.py equal a plain decoding step of the same model, in logits and in what the cache
holds.

They need Triton, and a CUDA device or its interpreter: TRITON_INTERPRET=1 pytest tests/engine/test_gpt_step.py
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from ascendchat.device import pick
from ascendchat.engine.cache import EIGHT_BITS
from ascendchat.engine.decode import Decoder
from ascendchat.engine.request import Request, Sampling
from ascendchat.engine.sampling import Draw, Mode, SamplingSettings, columns, sample, settings_row
from ascendchat.nn.attention import Reference
from ascendchat.nn.gpt import GPT
from ascendchat.sizes.shape import Shape

pytest.importorskip("triton", reason="Triton is not installed: it comes with a CUDA build of torch")

CUDA = torch.cuda.is_available()
if not CUDA and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no CUDA device, and TRITON_INTERPRET is not 1", allow_module_level=True)
PLACE = torch.device("cuda" if CUDA else "cpu")
OVERLAPS = [False, True] if CUDA and torch.cuda.get_device_capability() >= (9, 0) else [False]
CONTEXT = 640


def decoder(shape: Shape, dtype: torch.dtype, prompts: list[int], cache_dtype: torch.dtype | None = None) -> Decoder:
    """Rows that have read prompts of these lengths."""
    torch.manual_seed(0)
    model = GPT(shape)
    for parameter in model.parameters():  # none of the weights that begin as zero
        torch.nn.init.normal_(parameter, std=0.2 if parameter.dim() > 1 else 0.5)
    model = model.requires_grad_(False).to_compute(dtype).to(PLACE)
    device = pick(PLACE.type, compiled=False)
    torch.set_float32_matmul_precision("highest")  # `pick` allows tf32 where it chooses bfloat16
    made = Decoder(model, Reference(), device, PLACE, slots=5, context=CONTEXT, graphs=False, cache_dtype=cache_dtype)
    requests = [Request(torch.randint(0, shape.vocab, (n,)).tolist(), Sampling(temperature=0.0)) for n in prompts]
    made.prefill(requests, list(range(len(prompts))), Mode())
    return made


SHAPES = {
    "plain": Shape.from_depth(3, dim=64, head_dim=16, vocab=300, seq_len=CONTEXT),
    "windows": Shape.from_depth(4, dim=48, head_dim=16, vocab=270, seq_len=CONTEXT, window_pattern="SL"),
    "grouped": Shape.from_depth(2, dim=96, head_dim=24, kv_heads=2, vocab=261, seq_len=CONTEXT),
    "wide heads": Shape.from_depth(2, dim=128, head_dim=64, vocab=261, seq_len=CONTEXT),
    "no values": Shape.from_depth(2, dim=64, head_dim=32, vocab=300, seq_len=CONTEXT, value_embeddings=False),
}


TIERS = {"few": {"FEW": 5}, "some": {"FEW": 0}, "many": {"FEW": 0, "SOME": 0}}
TIERS["library"] = {**TIERS["many"], "LIBRARY": 0}
TIERS["some, parts"] = {**TIERS["some"], "LONG": 0}


@pytest.mark.parametrize("overlaps", OVERLAPS, ids=lambda overlaps: "overlapping" if overlaps else "in turn")
@pytest.mark.parametrize("cache_dtype", [None, EIGHT_BITS], ids=["whole", "8 bits"])
@pytest.mark.parametrize(
    ("tier", "prompts"),
    [
        ("few", [1]),
        ("few", [3, 37, 129]),
        ("some", [639]),
        ("some", [639, 1, 250, 160]),
        ("some, parts", [639, 1, 250, 160]),
        ("many", [5, 639, 70, 1, 170]),
        ("library", [5, 639, 70, 1, 170]),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", list(SHAPES.values()), ids=list(SHAPES))
def test_a_step_equals_the_plain_one(
    shape: Shape,
    tier: str,
    prompts: list[int],
    cache_dtype: torch.dtype | None,
    overlaps: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many rows there are, by the kernels of all sizes."""
    from ascendchat.engine import gpt_step
    from ascendchat.engine.gpt_step import Slots, TokenStep

    for name, value in TIERS[tier].items():
        monkeypatch.setattr(gpt_step, name, value)
    if cache_dtype and not (CUDA and torch.cuda.get_device_capability() >= (8, 9)):
        pytest.skip("no numbers of 8 bits here; Triton's interpreter drops the carry when it rounds to them")
    found, wanted = (decoder(shape, torch.float32, prompts, cache_dtype) for _ in range(2))
    rows = len(prompts)
    found.override[0] = wanted.override[0] = 7
    cache = found.cache
    step = TokenStep(found.model, cache.keys, cache.values, cache.raw, cache.places, CONTEXT, overlaps=overlaps)
    with torch.no_grad():
        slots = Slots(found.token, found.override, found.previous, found.length, found.target)
        logits, tokens, positions = step(rows, slots, CONTEXT)
        exact, token, position = wanted._forward(rows, 640)
    assert torch.equal(tokens, token)
    assert torch.equal(positions, position)
    bound = found.model.softcap
    # What lies between two numbers of 8 bits may become either.
    near = {"atol": 0.05, "rtol": 0.05} if cache_dtype else {"atol": 2e-4, "rtol": 1e-4}
    torch.testing.assert_close(bound * torch.tanh(logits / bound), exact, **near)
    held = wanted.cache
    both = zip((*cache.keys, *cache.values, *cache.raw), (*held.keys, *held.values, *held.raw), strict=True)
    for one, other in both:  # the last slot takes what nobody wants, in no order
        if one.dtype == EIGHT_BITS:
            assert (one[:-1].float() != other[:-1].float()).sum() <= 0.02 * rows * one[0, 0].numel()
        else:
            torch.testing.assert_close(one[:-1], other[:-1], **near)


@pytest.mark.parametrize(
    ("shape", "cache_dtype", "ahead"),
    [("plain", EIGHT_BITS, 32), ("grouped", EIGHT_BITS, 0), ("grouped", None, 32)],
    ids=["16 bytes", "24 bytes", "96 bytes"],
)
def test_keys_are_fetched_ahead_in_multiples_of_16_bytes(
    shape: str, cache_dtype: torch.dtype | None, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads of 24 channels in 8 bits are none, and the chip stops at such an instruction."""
    from ascendchat.engine import gpt_step

    class Told(Exception):
        pass

    class Attend:
        def __getitem__(self, grid: object) -> Any:
            return self

        def __call__(self, *tensors: object, ahead: int, **told: object) -> None:
            raise Told(ahead)

    monkeypatch.setattr(gpt_step, "FEW_TILES", gpt_step.FEW_TILES._replace(ahead=32))
    monkeypatch.setattr(gpt_step.kernels, "attend", Attend())
    made = decoder(SHAPES[shape], torch.float32, [3], cache_dtype)
    cache = made.cache
    step = gpt_step.TokenStep(made.model, cache.keys, cache.values, cache.raw, cache.places, CONTEXT)
    with pytest.raises(Told) as told:
        step(1, gpt_step.Slots(made.token, made.override, made.previous, made.length, made.target), CONTEXT)
    assert told.value.args == (ahead,)


@pytest.mark.parametrize("overlaps", OVERLAPS, ids=lambda overlaps: "overlapping" if overlaps else "in turn")
@pytest.mark.parametrize("random", [False, True], ids=["greedy", "random"])
def test_the_choice_equals_the_plain_one(random: bool, overlaps: bool) -> None:
    """Rows with and without noise, seeds and positions of any size; equal logits, of which the first is taken. With
    seed 10 at position 360 the noise of what lies behind the last token is not a number."""
    from ascendchat.engine.sampling_kernels import State, choose

    vocab, rows = 2500, 7
    torch.manual_seed(1)
    logits = torch.randn(rows, vocab, device=PLACE) * 3
    logits[0, 40] = logits[0, 1700] = logits.max() + 1  # a tie
    heat = [0.0, 0.0, 1.0, 0.7, 2.0, 0.01, 1.0] if random else [0.0] * rows
    seeds = [*(7**n for n in range(rows - 1)), 10]
    lines = [settings_row(Sampling(temperature=t, seed=seed)) for t, seed in zip(heat, seeds)]
    settings = SamplingSettings(*(torch.tensor(column, device=PLACE) for column in zip(*lines)))
    position = torch.tensor([0, 5, 1, 2047, 40000, 17, 360], device=PLACE)
    blocks = columns(vocab, PLACE)
    token, previous, override = (torch.arange(rows, device=PLACE) + n for n in (10, 20, 30))
    state = State(token, previous, override, position.clone(), torch.ones((), dtype=torch.int64, device=PLACE))
    read = torch.arange(rows, device=PLACE) + 100
    report = choose(logits, read, settings, blocks, state, softcap=15.0, random=random, overlaps=overlaps)
    chosen, logprob = sample(
        15.0 * torch.tanh(logits / 15.0),
        settings,
        position,
        Mode(Draw.RANDOM if random else Draw.GREEDY),
        blocks=blocks,
    )
    assert report[0].long().tolist() == chosen.tolist()
    torch.testing.assert_close(report[1], logprob, atol=1e-5, rtol=1e-5)
    assert torch.equal(state.token, chosen)
    assert torch.equal(state.previous, read)
    assert (state.override == -1).all()
    assert torch.equal(state.length, position + 1)


def test_of_logits_that_are_not_numbers_a_token_is_chosen_that_exists() -> None:
    """A policy that has diverged is the trainer's to say; a number beyond the table would end the process. On a GPU a
    place behind the last token, which is masked by -inf, may win against a NaN."""
    from ascendchat.engine.sampling_kernels import State, choose

    for rows, vocab in ((3, 2500), (17, 4100)):  # blocks of both sizes, of which the last is not full
        logits = torch.randn(rows, vocab, device=PLACE)
        logits[0] = torch.nan
        logits[1, -1] = logits[1, 0] = torch.nan
        lines = [settings_row(Sampling(temperature=float(n % 2), seed=n)) for n in range(rows)]
        settings = SamplingSettings(*(torch.tensor(column, device=PLACE) for column in zip(*lines)))
        read = torch.arange(rows, device=PLACE)
        state = State(*(torch.zeros(rows, dtype=torch.int64, device=PLACE) for _ in range(4)), torch.ones_like(read[0]))
        for random in (False, True):
            choose(logits, read, settings, columns(vocab, PLACE), state, softcap=15.0, random=random)
            assert 0 <= state.token.min() <= state.token.max() < vocab
