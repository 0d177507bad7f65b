"""The engine equals a plain decoder without a cache, token by token, whoever shares the batch."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from typing import Any

import engine_models as make
import pytest
import torch

from ascendchat.device import Device, pick
from ascendchat.infer.cache import Cache
from ascendchat.infer.engine import Engine, Request, Sampling
from ascendchat.infer.sampling import Mode
from ascendchat.nn.attention import Attention, Flash, Reference, Sdpa
from ascendchat.nn.gpt import GPT, dense
from ascendchat.nn.loss import softcap
from ascendchat.nn.products import products
from ascendchat.plan.shape import Shape

pytestmark = pytest.mark.usefixtures("one_thread")

CONTEXT = 48
MODELS = [
    {"seq_len": 16},  # windows 16, 16, 48: the rings turn
    {"seq_len": 12, "kv_heads": 2, "window_pattern": "SSL"},
    {"seq_len": 64, "kv_heads": 1, "window_pattern": "L", "value_embeddings": False},
    {"seq_len": 16, "kv_heads": 4, "window_pattern": "LS"},
]
BF16_ERROR = 0.25  # in logits: the worst of 4,000 tokens on a CPU was 0.08, wrong caches reach 0.7 and more
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"))]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Device:
    found = pick(request.param, dtype="fp32", compiled=False)
    torch.set_float32_matmul_precision("highest")  # exact products: the tokens are compared, not a tolerance
    return found


def greedy_requests(draw: random.Random, vocab: int, count: int, context: int = CONTEXT) -> list[Request]:
    requests = []
    for _ in range(count):
        prompt = [draw.randrange(vocab) for _ in range(draw.randint(1, context - 2))]
        sampling = Sampling(max_tokens=draw.randint(1, 24), temperature=0.0, stop_tokens=(), tools=False)
        requests.append(Request(prompt, sampling))
    return requests


@torch.no_grad()
def assert_greedy(model: GPT, request: Request, ids: list[int], context: int = CONTEXT) -> None:
    """Without a cache and alone: every token is the likeliest one after all before it."""
    expected = min(request.sampling.max_tokens, context - len(request.prompt))
    assert len(ids) == expected
    row = torch.tensor([[*request.prompt, *ids]], device=model.head.device)
    hidden = model(row, dense(model, Reference(), context))[0]
    best = softcap(hidden @ model.head[: model.shape.vocab].t()).argmax(dim=-1).tolist()
    assert ids == best[len(request.prompt) - 1 : -1]


@pytest.mark.parametrize("batches", [3, pytest.param(15, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sizes", MODELS, ids=["ring", "grouped", "full", "full-ring"])
def test_random_batches_equal_the_reference(device: Device, sizes: dict[str, object], batches: int) -> None:
    """Four models, so 60 batches: mixed lengths, more requests than slots, answers up to the end of the context."""
    model = make.model(3, **sizes)
    engine = make.engine(model, device, Sdpa(), slots=5, context=CONTEXT)
    draw = random.Random(str(sizes))
    different = set()
    for _ in range(batches):
        requests = greedy_requests(draw, model.shape.vocab, draw.randint(1, 9))
        for request, answer in zip(requests, engine.generate(requests)):
            assert_greedy(model, request, answer.ids)
            different.update(answer.ids)
            assert answer.finish_reason == "length"
    assert len(different) > 50, "the model says many things, so the comparison means something"


def test_recomputing_every_token_gives_the_same_answer(device: Device) -> None:
    model = make.model(4, seq_len=16)
    engine = make.engine(model, device, Sdpa(), slots=3, context=CONTEXT)
    requests = greedy_requests(random.Random(1), model.shape.vocab, 6)
    for request, answer in zip(requests, engine.generate(requests)):
        assert answer.ids == make.greedy(model, request.prompt, request.sampling.max_tokens, CONTEXT)


def test_a_cache_on_the_host_takes_memory_where_it_is_used() -> None:
    device = pick("cpu")
    before = device.memory().used
    cache = Cache(Shape.from_depth(4, vocab=64), 8, 8192, torch.bfloat16, device.bind(0))
    assert cache.bytes > 256 << 20
    assert device.memory().used - before < 16 << 20
    cache.keys[3][8, 100] = 1
    assert [float(tensor.sum()) for tensor in cache.keys] == [0, 0, 0, cache.keys[3][0, 0].numel()]


def test_long_contexts_are_read_in_slices_that_grow(device: Device) -> None:
    """Steps read 128, 256, then all 300 keys, and a layer with a window of 128 wraps around."""
    model = make.model(3, seq_len=512, window_pattern="SL", kv_heads=2)
    assert model.shape.windows(300) == (128, 300, 300)
    engine = make.engine(model, device, Sdpa(), slots=3, context=300)
    draw = random.Random(11)
    for lengths in ((3, 120, 7), (100, 250, 140, 290)):
        greedy = Sampling(max_tokens=20, temperature=0.0, stop_tokens=(), tools=False)
        requests = [Request([draw.randrange(model.shape.vocab) for _ in range(n)], greedy) for n in lengths]
        for request, answer in zip(requests, engine.generate(requests)):
            assert_greedy(model, request, answer.ids, 300)
    assert {span for _, span, _ in engine.decoder._steps} == {128, 256, 300}


def mixed_requests(vocab: int, count: int = 8) -> list[Request]:
    draw = random.Random(7)
    ways = [
        Sampling(temperature=0.9, seed=1),
        Sampling(temperature=1.3, top_k=20, seed=2),
        Sampling(temperature=0.0),
        Sampling(temperature=1.0, top_p=0.8, repetition_penalty=1.3, seed=3),
        Sampling(temperature=0.7, min_p=0.1, seed=-4),
    ]
    return [
        Request(
            [draw.randrange(vocab) for _ in range(draw.randint(1, 30))],
            Sampling(**{**vars(ways[i % len(ways)]), "max_tokens": 12, "stop_tokens": (), "logprobs": True}),
        )
        for i in range(count)
    ]


def test_what_a_seed_gives_does_not_depend_on_the_rest_of_the_batch(device: Device) -> None:
    model = make.model(5, seq_len=16)
    requests = mixed_requests(model.shape.vocab)
    together = make.engine(model, device, Sdpa(), slots=8, context=CONTEXT).generate(requests)
    crowded = make.engine(model, device, Sdpa(), slots=3, context=CONTEXT).generate(requests[::-1])[::-1]
    lonely = make.engine(model, device, Sdpa(), slots=1, context=CONTEXT)
    alone = [lonely.generate([request])[0] for request in requests]
    for a, b, c in zip(together, crowded, alone):
        assert a.ids == b.ids == c.ids
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
    other = Request(requests[0].prompt, Sampling(**{**vars(requests[0].sampling), "seed": 99}))
    assert lonely.generate([other])[0].ids != together[0].ids


def test_log_probabilities_are_those_of_the_model(device: Device) -> None:
    model = make.model(6, seq_len=16)
    engine = make.engine(model, device, Sdpa(), slots=4, context=CONTEXT)
    for request, answer in zip(requests := mixed_requests(model.shape.vocab, 5), engine.generate(requests)):
        row = list(request.prompt)
        for token, logprob in zip(answer.ids, answer.logprobs):
            expected = make.logits_of(model, row, CONTEXT).log_softmax(-1)[token].item()
            assert logprob == pytest.approx(expected, abs=1e-4)
            row.append(token)


def test_only_allowed_tokens_are_chosen_and_other_rows_do_not_notice(device: Device) -> None:
    """More requests than slots and answers of many lengths: rows with and without a restriction follow each other in a
    slot, alone and together, while the others go on."""
    model, draw = make.model(6, seq_len=16), random.Random(8)
    engine = make.engine(model, device, Sdpa(), slots=3, context=CONTEXT)
    free = [
        Request(request.prompt, Sampling(**{**vars(request.sampling), "max_tokens": draw.randint(1, 12)}))
        for request in mixed_requests(model.shape.vocab, 15)
    ]
    allowed = [tuple(draw.sample(range(model.shape.vocab), draw.choice((1, 4, 9)))) if i % 2 else () for i in range(15)]
    asked = [
        Request(request.prompt, Sampling(**{**vars(request.sampling), "allowed_tokens": tokens}))
        for request, tokens in zip(free, allowed)
    ]
    for tokens, with_some, request, answer in zip(allowed, engine.generate(asked), asked, engine.generate(free)):
        if not tokens:
            assert with_some.ids == answer.ids
            continue
        assert set(with_some.ids) <= set(tokens)
        row = list(request.prompt)
        for token, logprob in zip(with_some.ids, with_some.logprobs):
            logits = make.logits_of(model, row, CONTEXT)
            assert logprob == pytest.approx(logits.log_softmax(-1)[token].item(), abs=1e-4), "the model's own"
            if request.sampling.temperature == 0:
                assert token == max(tokens, key=lambda i: logits[i])
            row.append(token)


def test_without_a_restriction_no_mask_is_made(device: Device) -> None:
    model = make.model(6, seq_len=16)
    engine = make.engine(model, device, Sdpa(), context=CONTEXT)
    engine.generate(mixed_requests(model.shape.vocab))
    assert engine.decoder.barred is None
    assert not any(mode.restricted for *_, mode in engine.decoder._steps)


def test_a_prompt_of_one_token_is_enough(device: Device) -> None:
    model = make.model(10, seq_len=16)
    engine = make.engine(model, device, Sdpa(), slots=2, context=CONTEXT)
    sampling = Sampling(max_tokens=6, temperature=0.0, stop_tokens=(), tools=False)
    requests = [Request([token], sampling) for token in (0, 17, 99, 200)]
    for request, answer in zip(requests, engine.generate(requests)):
        assert_greedy(model, request, answer.ids)


def test_a_slot_keeps_nothing_of_the_request_before(device: Device) -> None:
    """Every pair of odd and even lengths, before and after, in one slot."""
    model = make.model(12, seq_len=16)
    engine = make.engine(model, device, Sdpa(), slots=1, context=CONTEXT)
    draw = random.Random(5)
    for length, new in ((4, 3), (4, 4), (5, 3), (5, 4), (1, 1), (2, 1), (1, 2), (3, 2)):
        prompt = [draw.randrange(model.shape.vocab) for _ in range(length)]
        request = Request(prompt, Sampling(max_tokens=new, temperature=0.0, stop_tokens=(), tools=False))
        assert_greedy(model, request, engine.generate([request])[0].ids)


def test_a_step_that_does_not_advance_changes_nothing(device: Device) -> None:
    """As while a graph is recorded: the step runs several times, and then in earnest."""
    model = make.model(13, seq_len=16)
    decoder = make.engine(model, device, Sdpa(), slots=2, context=CONTEXT).decoder
    draw, mode = random.Random(6), Mode()  # greedy
    prompts = [[draw.randrange(model.shape.vocab) for _ in range(length)] for length in (9, 20)]
    first = decoder.prefill([Request(prompt) for prompt in prompts], [0, 1], mode)[0]
    rows = [[*prompt, int(token)] for prompt, token in zip(prompts, first)]
    for _ in range(6):
        decoder.advance.zero_()
        with torch.no_grad():
            tries = [decoder._extend(2, mode, decoder._read(2, CONTEXT)) for _ in range(3)]
            decoder.advance.fill_(1)
            found = decoder._extend(2, mode, decoder._read(2, CONTEXT))
        assert all(torch.equal(found, other) for other in tries)
        for row, token in zip(rows, found[0].tolist()):
            row.append(int(token))
    for prompt, row in zip(prompts, rows):
        assert row == [*prompt, *make.greedy(model, prompt, 7, CONTEXT)]


@pytest.mark.parametrize("sizes", MODELS, ids=["ring", "grouped", "full", "full-ring"])
def test_the_cache_is_as_large_as_the_plan_says(sizes: dict[str, object]) -> None:
    shape = make.model(**sizes).shape
    cache = Cache(shape, 3, CONTEXT, torch.bfloat16, torch.device("cpu"))
    lists = [kept for kept in vars(cache).values() if isinstance(kept, list)]
    tensors = [tensor for kept in lists for tensor in kept]
    assert all(isinstance(tensor, torch.Tensor) for tensor in tensors)
    assert cache.bytes == sum(tensor.nbytes for tensor in tensors) == 4 * 2 * shape.slot_elements(CONTEXT)


def test_requests_can_join_while_others_run(device: Device) -> None:
    model = make.model(8, seq_len=16)
    engine = make.engine(model, device, Sdpa(), slots=2, context=CONTEXT)
    requests = greedy_requests(random.Random(2), model.shape.vocab, 5)
    jobs = []
    for request in requests:
        jobs.append(engine.add(request))
        engine.step(), engine.step()
    while not all(job.done for job in jobs):
        engine.step()
    for request, job in zip(requests, jobs):
        assert_greedy(model, request, job.completion.ids)


def test_of_a_batch_several_enter_together(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass over prompts costs nearly the same for one as for many, and nobody waits for the first answer."""
    model = make.model(5, seq_len=16)
    requests = greedy_requests(random.Random(5), model.shape.vocab, 256)
    requests = [replace(request, prompt=request.prompt[:4]) for request in requests]
    passes = {"batch": 0, "one by one": 0}
    answers = {}
    for way in passes:
        engine = make.engine(model, device, Sdpa(), slots=64, context=CONTEXT)
        prefill = engine.decoder.prefill

        def counted(*arguments: Any, way: str = way, prefill: Any = prefill) -> Any:
            passes[way] += 1
            return prefill(*arguments)

        monkeypatch.setattr(engine.decoder, "prefill", counted)
        if way == "batch":
            answers[way] = [answer.ids for answer in engine.generate(requests)]
            continue
        jobs = [engine.add(request) for request in requests]
        while not all(job.done for job in jobs):
            engine.step()
        answers[way] = [job.completion.ids for job in jobs]
    assert answers["batch"] == answers["one by one"]
    assert passes["batch"] <= 0.75 * passes["one by one"], passes
    assert engine._group == 1


def test_a_prompt_that_cannot_be_answered_is_refused(device: Device) -> None:
    engine = make.engine(make.model(), device, context=16)
    for prompt in ([], [0] * 16, [-1], [100_000]):
        with pytest.raises(ValueError, match="prompt"):
            engine.add(Request(prompt))


def test_one_query_as_products_equals_the_reference() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, n, h, 8, generator=generator) for n, h in ((1, 4), (20, 2), (20, 2)))
    lengths = torch.tensor([20, 1, 7])
    torch.testing.assert_close(products(q, k, v, lengths, 0.4), Reference().cached(q, k, v, lengths, 20, 0.4))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "places", "span", "lengths"),
    [
        (4, 2, 64, 48, 32, [32, 1, 7]),
        (3, 1, 80, 400, 300, [300, 129]),
        (6, 6, 128, 2048, 2048, [2048]),
        (2, 2, 16, 130, 130, list(range(1, 131))),
    ],
)
def test_decoding_on_a_gpu_reads_only_the_tokens_that_are_there(
    heads: int, kv_heads: int, dim: int, places: int, span: int, lengths: list[int], compiled: bool
) -> None:
    generator, rows, kernel = torch.Generator().manual_seed(0), len(lengths), Flash()
    sizes = ((rows, 1, heads, dim), (rows, places, kv_heads, dim), (rows, places, kv_heads, dim))
    q, k, v = (torch.randn(size, generator=generator).cuda().bfloat16() for size in sizes)
    there = torch.tensor(lengths).cuda()
    attend = torch.compile(kernel.cached, dynamic=False) if compiled else kernel.cached
    found = attend(q, k[:, :span], v[:, :span], there, span, 0.2)
    expected = Reference().cached(q, k[:, :span], v[:, :span], there, span, 0.2)
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 6, 128), (4, 2, 64), (8, 1, 16)])
@pytest.mark.parametrize("window", [1, 17, 100, 400])
@torch.no_grad()
def test_prompts_on_a_gpu_see_what_the_definition_says(heads: int, kv_heads: int, dim: int, window: int) -> None:
    """Whole prompts, and new tokens behind what the rows of a cache hold."""
    generator, kernel, exact = torch.Generator().manual_seed(window), Flash(), Reference()
    for rows, queries, keys in [(1, 16, 16), (3, 48, 48), (5, 16, 300), (2, 100, 130), (64, 16, 144)]:
        sizes = ((rows, queries, heads, dim), (rows, keys, kv_heads, dim), (rows, keys, kv_heads, dim))
        q, k, v = (torch.randn(size, generator=generator).cuda().bfloat16() for size in sizes)
        there = torch.randint(queries, keys + 1, (rows,), generator=generator).cuda()
        found, expected = (one.cached(q, k, v, there, window, 0.2) for one in (kernel, exact))
        torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
        found, expected = (one.dense(q, k[:, :queries], v[:, :queries], window, 0.2) for one in (kernel, exact))
        torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


@torch.no_grad()
def bf16_shortfall(device: Device, kernel: Attention, slots: int) -> float:
    """How far the tokens that an engine chooses in bf16 fall short of the likeliest ones, in logits, at most.

    The logits are those of the same weights in float32, without a cache, each behind the tokens that were chosen: one
    tie that falls the other way does not change what is asked of the tokens after it.
    """
    place = device.bind(0)
    model = make.model(9, seq_len=64, window_pattern="L", dim=64, head_dim=32).to_compute(torch.bfloat16).to(place)
    requests = greedy_requests(random.Random(3), model.shape.vocab, 8)
    engine = Engine(
        model, kernel, make.tokenizer(), device, place, slots=slots, context=CONTEXT, compiled=device.compiles
    )
    exact, worst = copy.deepcopy(model).cpu().float(), 0.0
    for request, answer in zip(requests, engine.generate(requests)):
        ids, before = answer.ids, len(request.prompt)
        assert len(ids) == min(request.sampling.max_tokens, CONTEXT - before)
        hidden = exact(torch.tensor([[*request.prompt, *ids]]), dense(exact, Reference(), CONTEXT))[0, before - 1 : -1]
        logits = softcap(hidden @ exact.head[: exact.shape.vocab].t())  # (tokens, V)
        chosen = logits.gather(-1, torch.tensor(ids)[:, None]).squeeze(-1)
        worst = max(worst, (logits.amax(dim=-1) - chosen).max().item())
    return worst


@pytest.mark.parametrize("slots", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_in_bf16_every_token_is_nearly_the_likeliest(slots: int) -> None:
    assert bf16_shortfall(pick("cpu", dtype="bf16", compiled=False), Sdpa(), slots) < BF16_ERROR


def forget(
    cache: Cache, layer: int, rows: torch.Tensor, position: torch.Tensor, qkv: torch.Tensor, share: torch.Tensor
) -> torch.Tensor:
    return qkv


def misplace(
    cache: Cache, layer: int, rows: torch.Tensor, position: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> None:
    cache.keys[layer].index_put_((rows, position - 1), k[:, 0])
    cache.values[layer].index_put_((rows, position - 1), v[:, 0])


@pytest.mark.parametrize(
    ("part", "wrong"), [("shift_tokens", forget), pytest.param("put_tokens", misplace, marks=pytest.mark.slow)]
)
def test_a_wrong_cache_does_not_pass_for_rounding(monkeypatch: pytest.MonkeyPatch, part: str, wrong: object) -> None:
    monkeypatch.setattr(Cache, part, wrong)
    assert bf16_shortfall(pick("cpu", dtype="bf16", compiled=False), Sdpa(), 4) > 2 * BF16_ERROR


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("slots", [1, 4])
def test_a_compiled_and_recorded_step_on_a_gpu_gives_the_same_tokens(slots: int) -> None:
    assert bf16_shortfall(pick("cuda", dtype="bf16", compiled=True), Flash(), slots) < BF16_ERROR
