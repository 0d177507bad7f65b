"""The engine equals a plain decoder without a cache, token by token, whoever shares the batch."""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import engine_models as make
import pytest
import torch

from ascendchat.device import Device, pick
from ascendchat.device.cuda_attention import Flash
from ascendchat.engine.cache import KVCache
from ascendchat.engine.engine import Engine, Request, Sampling
from ascendchat.engine.sampling import Mode
from ascendchat.nn.attention import Attention, Reference, Sdpa
from ascendchat.sizes.shape import Shape

pytestmark = pytest.mark.usefixtures("one_thread")

CONTEXT = 48
MODELS = [
    {"seq_len": 16},  # windows 16, 16, 48: the rings turn
    {"seq_len": 12, "kv_heads": 2, "window_pattern": "SSL"},
    {"seq_len": 64, "kv_heads": 1, "window_pattern": "L", "value_embeddings": False},
    {"seq_len": 16, "kv_heads": 4, "window_pattern": "LS"},
]
BF16_ERROR = 0.25  # in logits: the worst of 4,000 tokens on a CPU was 0.08, wrong caches reached 0.7 and more
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"))]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Device:
    """A CPU, and a GPU where there is one, with exact products."""
    return make.exact(request.param)


def greedy_requests(draw: random.Random, vocab: int, count: int, context: int = CONTEXT) -> list[Request]:
    requests = []
    for _ in range(count):
        prompt = [draw.randrange(vocab) for _ in range(draw.randint(1, context - 2))]
        sampling = Sampling(max_tokens=draw.randint(1, 24), temperature=0.0, stop_tokens=(), tools=False)
        requests.append(Request(prompt, sampling))
    return requests


@pytest.mark.parametrize("sizes", MODELS, ids=["ring", "grouped", "full", "full-ring"])
def test_random_batches_equal_the_reference(device: Device, sizes: dict[str, object]) -> None:
    """Mixed lengths, more requests than slots, answers up to the end of the context."""
    model = make.model(3, **sizes)
    engine = make.engine(model, device, Sdpa(), slots=5, context=CONTEXT)
    draw = random.Random(str(sizes))
    different = set()
    for _ in range(3):
        requests = greedy_requests(draw, model.shape.vocab, draw.randint(1, 9))
        for request, answer in zip(requests, engine.generate(requests)):
            make.assert_greedy(model, request, answer.ids, CONTEXT)
            different.update(answer.ids)
            assert answer.finish_reason == "length"
    assert len(different) > 50, "the model says many things, so the comparison means something"


def test_a_cache_on_the_host_takes_memory_where_it_is_used() -> None:
    device = pick("cpu")
    before = device.memory().used
    cache = KVCache(Shape.from_depth(4, vocab=64), 8, 8192, torch.bfloat16, device.bind(0))
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
            make.assert_greedy(model, request, answer.ids, 300)
    assert {span for _, span, _ in engine.decoder.steps} == {128, 256, 300}


def mixed_requests(vocab: int, count: int = 8) -> list[Request]:
    """Prompts of many lengths, by all ways to choose."""
    draw = random.Random(7)
    ways = [
        Sampling(temperature=0.9, seed=1),
        Sampling(temperature=1.3, top_k=20, seed=2),
        Sampling(temperature=0.0),
        Sampling(temperature=1.0, top_p=0.8, repetition_penalty=1.3, seed=3),
        Sampling(temperature=0.7, min_p=0.1, seed=-4),
    ]
    ways = [replace(way, max_tokens=12, stop_tokens=(), logprobs=True) for way in ways]
    return [
        Request([draw.randrange(vocab) for _ in range(draw.randint(1, 30))], ways[i % len(ways)]) for i in range(count)
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
    other = replace(requests[0], sampling=replace(requests[0].sampling, seed=99))
    assert lonely.generate([other])[0].ids != together[0].ids


def test_only_allowed_tokens_are_chosen_and_other_rows_do_not_notice(device: Device) -> None:
    """More requests than slots and answers of many lengths: rows with and without a restriction follow each other in a
    slot, alone and together, while the others go on."""
    model, draw = make.model(6, seq_len=16), random.Random(8)
    engine = make.engine(model, device, Sdpa(), slots=3, context=CONTEXT)
    free = [
        replace(request, sampling=replace(request.sampling, max_tokens=draw.randint(1, 12)))
        for request in mixed_requests(model.shape.vocab, 11)
    ]
    allowed = [tuple(draw.sample(range(model.shape.vocab), draw.choice((1, 4, 9)))) if i % 2 else () for i in range(11)]
    asked = [
        replace(request, sampling=replace(request.sampling, allowed_tokens=tokens))
        for request, tokens in zip(free, allowed)
    ]
    for tokens, with_some, request, answer in zip(allowed, engine.generate(asked), asked, engine.generate(free)):
        if not tokens:
            assert with_some.ids == answer.ids
            continue
        assert set(with_some.ids) <= set(tokens)
        for token, logprob, logits in zip(
            with_some.ids, with_some.logprobs, make.logits_along(model, request.prompt, with_some.ids, CONTEXT)
        ):
            assert logprob == pytest.approx(logits.log_softmax(-1)[token].item(), abs=1e-4), "the model's own"
            if request.sampling.temperature == 0:
                assert token == max(tokens, key=lambda i: logits[i])


def test_tokens_and_text_come_as_soon_as_they_are_there() -> None:
    """On a CPU no result is late; text is made before an answer ends, so that no step has to make all of it."""
    a, b = b"ab"
    engine = make.engine(make.scripted(make.script([a, b, a])), make.exact("cpu"), Sdpa(), slots=1)
    job = engine.add(Request([a], Sampling(max_tokens=8, temperature=0.0)))
    for count in range(2, 8):
        engine.step()
        assert len(job.completion.ids) == count, "one of the prompt's pass, then one of each step"
    assert job.text.text == "bababa", "read in one of the last steps before the limit"


def test_a_slot_keeps_nothing_of_the_request_before(device: Device) -> None:
    """Every pair of odd and even lengths, before and after, in one slot."""
    model = make.model(12, seq_len=16)
    engine = make.engine(model, device, Sdpa(), slots=1, context=CONTEXT)
    draw = random.Random(5)
    for length, new in ((4, 3), (4, 4), (5, 3), (5, 4), (1, 1), (2, 1), (1, 2), (3, 2)):
        prompt = [draw.randrange(model.shape.vocab) for _ in range(length)]
        request = Request(prompt, Sampling(max_tokens=new, temperature=0.0, stop_tokens=(), tools=False))
        make.assert_greedy(model, request, engine.generate([request])[0].ids, CONTEXT)


def test_a_row_that_is_over_is_short_again(device: Device) -> None:
    """What the others read of the cache must not stay as long as what it has left."""
    model = make.model(5, seq_len=16)
    engine = make.engine(model, device, Sdpa(), slots=2, context=CONTEXT)
    short, long = (engine.add(Request([1, 2, 3], Sampling(max_tokens=count, stop_tokens=()))) for count in (2, 20))
    make.finish(engine, short)
    engine.step()
    assert engine.running.index(long) == 1
    assert engine.decoder.host_length[0] < 3, "its prompt alone was longer"
    assert engine.decoder.host_length[1] > 3


def test_a_step_that_does_not_advance_changes_nothing(device: Device) -> None:
    """As while a graph is recorded: the step runs several times, and then in earnest. A bias of nothing lets it count
    what was chosen, too."""
    model = make.model(13, seq_len=16)
    decoder = make.engine(model, device, Sdpa(), slots=2, context=CONTEXT).decoder
    draw, mode, biased = random.Random(6), Mode(tables=True), Sampling(temperature=0.0, logit_bias=((0, 0.0),))
    prompts = [[draw.randrange(model.shape.vocab) for _ in range(length)] for length in (9, 20)]
    first = decoder.prefill([Request(prompt, biased) for prompt in prompts], [0, 1], mode)[0]
    rows = [[int(token)] for token in first]
    for _ in range(6):
        decoder.advance.zero_()
        with torch.no_grad():
            tries = [decoder._finish(2, mode, *decoder._forward(2, CONTEXT)) for _ in range(3)]
            decoder.advance.fill_(1)
            found = decoder._finish(2, mode, *decoder._forward(2, CONTEXT))
        assert all(torch.equal(found, other) for other in tries)
        for row, token in zip(rows, found[0].tolist()):
            row.append(int(token))
    assert rows == [make.greedy(model, prompt, 7, CONTEXT) for prompt in prompts]
    assert decoder.tables is not None
    assert decoder.tables.counts.sum(dim=1).tolist() == [6, 6], "the last token was not read"


@pytest.mark.parametrize("sizes", MODELS[:2], ids=["ring", "grouped"])
def test_the_cache_is_as_large_as_the_plan_says(sizes: dict[str, object]) -> None:
    shape = make.model(**sizes).shape
    cache = KVCache(shape, 3, CONTEXT, torch.bfloat16, torch.device("cpu"))
    lists = [kept for kept in vars(cache).values() if isinstance(kept, list)]
    tensors = [tensor for kept in lists for tensor in kept]
    assert all(isinstance(tensor, torch.Tensor) for tensor in tensors)
    assert cache.bytes == sum(tensor.nbytes for tensor in tensors) == 4 * 2 * shape.slot_elements(CONTEXT)


def test_of_a_batch_several_enter_together(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass over prompts costs nearly the same for one as for many, and nobody waits for the first answer."""
    model = make.model(5, seq_len=16)
    requests = greedy_requests(random.Random(5), model.shape.vocab, 160)
    requests = [replace(request, prompt=request.prompt[:4]) for request in requests]
    passes, answers = [], []
    for together in (True, False):
        engine = make.engine(model, device, Sdpa(), slots=64, context=CONTEXT)
        prefill, count = engine.decoder.prefill, list[None]()
        monkeypatch.setattr(engine.decoder, "prefill", lambda *given, do=prefill, n=count: n.append(None) or do(*given))
        if together:
            answers.append([answer.ids for answer in engine.generate(requests)])
            assert engine._group == 1, "who comes alone enters alone"
        else:
            jobs = [engine.add(request) for request in requests]
            make.finish(engine, *jobs)
            answers.append([job.completion.ids for job in jobs])
        passes.append(len(count))
    assert answers[0] == answers[1]
    assert passes[0] <= 0.75 * passes[1], passes


def test_a_prompt_that_cannot_be_answered_is_refused(device: Device) -> None:
    engine = make.engine(make.model(), device, context=16)
    for prompt in ([], [0] * 16, [5, -1], [5, 100_000]):
        with pytest.raises(ValueError, match="prompt"):
            engine.add(Request(prompt))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 6, 128), (4, 2, 64), (3, 1, 80), (8, 1, 16)])
@pytest.mark.parametrize(("window", "compiled"), [(1, False), (17, False), (100, False), (2048, False), (2048, True)])
@torch.no_grad()
def test_attention_on_a_gpu_sees_what_the_definition_says(
    heads: int, kv_heads: int, dim: int, window: int, compiled: bool
) -> None:
    """One token of each row, several behind what a cache holds, and whole prompts."""
    generator, kernel, exact = torch.Generator().manual_seed(window), Flash(), Reference()
    cached = torch.compile(kernel.cached, dynamic=False) if compiled else kernel.cached
    for rows, queries, keys in [(1, 1, 2048), (130, 1, 130), (1, 16, 16), (5, 16, 300), (2, 100, 130), (64, 16, 144)]:
        sizes = ((rows, queries, heads, dim), (rows, keys + 9, kv_heads, dim), (rows, keys + 9, kv_heads, dim))
        q, k, v = (torch.randn(size, generator=generator).cuda().bfloat16() for size in sizes)
        there = torch.randint(queries, keys + 1, (rows,), generator=generator).cuda()
        given = q, k[:, :keys], v[:, :keys], there, window, 0.2
        torch.testing.assert_close(cached(*given), exact.cached(*given), atol=2e-2, rtol=2e-2)
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
        assert len(answer.ids) == min(request.sampling.max_tokens, CONTEXT - len(request.prompt))
        logits = make.logits_along(exact, request.prompt, answer.ids, CONTEXT)
        chosen = logits.gather(-1, torch.tensor(answer.ids)[:, None]).squeeze(-1)
        worst = max(worst, (logits.amax(dim=-1) - chosen).max().item())
    return worst


def test_in_bf16_every_token_is_nearly_the_likeliest() -> None:
    assert bf16_shortfall(pick("cpu", dtype="bf16", compiled=False), Sdpa(), 4) < BF16_ERROR


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
@pytest.mark.parametrize("slots", [1, 4])
def test_a_compiled_and_recorded_step_on_a_gpu_gives_the_same_tokens(slots: int) -> None:
    assert bf16_shortfall(pick("cuda", dtype="bf16", compiled=True), Flash(), slots) < BF16_ERROR
