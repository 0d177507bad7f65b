"""Answers in parts: what goes on behind an answer that was cut short, and how the parts become one.

    request = rest(whole, begun, tokenizer, most=64)     # up to 64 tokens of the answer, those of `begun` included
    answer = joined(whole, begun, generator.generate([request])[0], tokenizer, context)

An answer that can go on has the finish reason "cancelled". The noise of a token is a function of its position, so the
parts have the tokens that one answer would have had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ascendchat.data.tokenizer.tokenizer import Tokenizer
from ascendchat.engine.detokenize import TextStream
from ascendchat.engine.request import Completion, Request


def kept(ids: Sequence[int], tokenizer: Tokenizer) -> int:
    """Tokens that an answer can go on behind: not within a call of the calculator or its result, since a generator
    that is given half a call as its prompt would not run it."""
    special, begin = tokenizer.specials, -1
    for at, token in enumerate(ids):
        if token == special["<|tool_start|>"]:
            begin = at
        elif token == special["<|output_end|>"]:
            begin = -1
    return len(ids) if begin < 0 else begin


def first_tokens(answer: Completion, count: int) -> Completion:
    """An answer as it was when it had `count` tokens."""
    columns = {name: getattr(answer, name)[:count] for name in ("ids", "logprobs", "forced", "versions", "tops")}
    return replace(answer, **columns, text="", finish_reason="cancelled")


def rest(whole: Request, begun: Completion, tokenizer: Tokenizer, most: int) -> Request:
    """The request for what follows, so that the answer has up to `most` tokens in all."""
    written = begun.ids[: kept(begun.ids, tokenizer)] if whole.sampling.tools else begun.ids
    most = min(most, whole.sampling.max_tokens) - len(written)
    return Request([*whole.prompt, *written], replace(whole.sampling, max_tokens=most))


def joined(whole: Request, begun: Completion, more: Completion, tokenizer: Tokenizer, context: int) -> Completion:
    """Both parts as one. It is over when it has stopped, has all its tokens, or has filled the context."""
    count = kept(begun.ids, tokenizer) if whole.sampling.tools else len(begun.ids)
    before = first_tokens(begun, count)
    answer = replace(
        more,
        ids=before.ids + more.ids,
        logprobs=before.logprobs + more.logprobs,
        forced=before.forced + more.forced,
        versions=before.versions + more.versions,
        tops=before.tops + more.tops,
        version=before.version if count else more.version,
    )
    full = len(answer.ids) >= whole.sampling.max_tokens or len(whole.prompt) + len(answer.ids) >= context
    if answer.finish_reason != "stop":
        answer.finish_reason = "length" if full else "cancelled"
    if count:
        text = TextStream(tokenizer, whole.sampling.stop)
        text.feed_all(answer.ids)
        text.close()
        answer.text = text.text
    return answer
