"""Tiny models with random weights in which every part matters, a tokenizer of bytes, and a plain reference decoder."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from ascendchat.data.tokenizer.tokenizer import Tokenizer
from ascendchat.device import Device, pick
from ascendchat.engine.engine import Engine, Request, RequestState
from ascendchat.nn.attention import Attention, Reference
from ascendchat.nn.gpt import GPT, dense
from ascendchat.nn.loss import softcap
from ascendchat.sizes.shape import Shape

MERGES = [(104, 101), (108, 108), (256, 257), (228, 189), (229, 165)]  # he, ll, hell, and first bytes of 你 and 好


def tokenizer() -> Tokenizer:
    return Tokenizer(MERGES)


def model(seed: int = 0, ops: object = None, depth: int = 3, **sizes: object) -> GPT:
    """Random weights; output projections, smear and head are not the near-zero ones a training starts from."""
    base = {"vocab": tokenizer().vocab_size, "seq_len": 256, "dim": 32, "head_dim": 8, "window_pattern": "SSL"}
    shape = Shape.from_depth(depth, **{**base, **sizes})  # type: ignore[arg-type]
    made = GPT(shape, ops)  # type: ignore[arg-type]
    made.initialise(seed)
    generator = torch.Generator().manual_seed(seed + 1000)
    with torch.no_grad():
        for block in made.blocks:
            block.out.normal_(0, 0.2, generator=generator)
            block.down.normal_(0, 0.2, generator=generator)
            block.shift.normal_(0, 0.5, generator=generator)
            if hasattr(block, "gate"):
                block.gate.normal_(0, 0.5, generator=generator)
        made.head.normal_(0, 0.6, generator=generator)
        made.smear_gate.normal_(0, 0.5, generator=generator)
        made.smear.fill_(0.7)
    return made


def exact(kind: str) -> Device:
    """A device whose products are not rounded: tokens are compared, not a tolerance."""
    found = pick(kind, dtype="fp32", compiled=False)
    torch.set_float32_matmul_precision("highest")
    return found


def engine(
    made: GPT,
    device: Device,
    kernel: Attention | None = None,
    *,
    slots: int = 4,
    context: int = 64,
    late: int | None = None,
    **more: Any,
) -> Engine:
    """`late`: passes whose results are not read at once, as on accelerators; `more`: as Engine takes it."""
    place = device.bind(0)
    sizes = {"slots": slots, "context": context, **more}
    found = Engine(made.to(place), kernel or Reference(), tokenizer(), device, place, **sizes)
    found.lag = found.lag if late is None else late
    return found


def finish(running: Engine, *jobs: RequestState) -> None:
    """Step until they are done, for so many steps as no test of these has."""
    for _ in range(2000):
        if all(job.done for job in jobs):
            return
        running.step()
    raise AssertionError("the engine does not come to an end")


@torch.no_grad()
def logits_along(made: GPT, prompt: list[int], ids: list[int], context: int) -> torch.Tensor:
    """(tokens, V): what each token of an answer is chosen from: no cache, alone, reference attention."""
    row = torch.tensor([[*prompt, *ids]], device=made.head.device)
    hidden = made(row, dense(made, Reference(), context))[0, len(prompt) - 1 : -1]
    return softcap(hidden @ made.head[: made.shape.vocab].t())


def logits_of(made: GPT, row: list[int], context: int) -> torch.Tensor:
    """Next-token logits (V,) after a row."""
    return logits_along(made, row, [0], context)[0]


def greedy(made: GPT, prompt: list[int], count: int, context: int, stops: tuple[int, ...] = ()) -> list[int]:
    """One prompt at a time, the slow way."""
    row = list(prompt)
    while len(row) < min(len(prompt) + count, context):
        token = int(logits_of(made, row, context).argmax())
        if token in stops:
            break
        row.append(token)
    return row[len(prompt) :]


def assert_greedy(made: GPT, request: Request, ids: list[int], context: int) -> None:
    """As many tokens as were asked for or fit, each of them the likeliest one after all before it."""
    assert len(ids) == min(request.sampling.max_tokens, context - len(request.prompt))
    assert ids == logits_along(made, request.prompt, ids, context).argmax(dim=-1).tolist()


def scripted(follows: dict[int, int], seq_len: int = 256) -> GPT:
    """A real model whose weights make it a table: after token t it is sure of follows[t], whatever came before."""
    vocab = tokenizer().vocab_size
    shape = Shape.from_depth(1, vocab=vocab, seq_len=seq_len, dim=128, head_dim=16, value_embeddings=False)
    made = GPT(shape)
    made.initialise(0)
    with torch.no_grad():
        made.head.zero_()
        directions = torch.nn.functional.rms_norm(made.embed.weight, (128,))
        for token, successor in follows.items():
            made.head[successor] += directions[token] * 0.1
    return made


def script(*runs: list[int]) -> dict[int, int]:
    """Runs of tokens, each after the other; a token may have one successor only."""
    follows: dict[int, int] = {}
    for run in runs:
        for token, successor in itertools.pairwise(run):
            assert follows.setdefault(token, successor) == successor, "a token has two successors"
    return follows


def calculator_script() -> tuple[dict[int, int], list[int]]:
    """<|assistant_start|> -> 17+25 in the calculator, then 你好 and the end; and the tokens of the whole answer."""
    text, special = tokenizer(), tokenizer().specials
    call = [special["<|tool_start|>"], *text.encode("17+25"), special["<|tool_end|>"]]
    result = [special["<|output_start|>"], *text.encode("42"), special["<|output_end|>"]]
    last = text.encode("你好!")
    follows = script(
        [special["<|assistant_start|>"], *call], [special["<|output_end|>"], *last, special["<|assistant_end|>"]]
    )
    return follows, [*call, *result, *last]
