"""What goes into the engine and what comes out: Request and Sampling, Completion and Piece.

engine.generate([Request(prompt, Sampling(max_tokens=64, temperature=0.7, seed=1))])     # see engine.py
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple


@dataclass(frozen=True)
class Grammar:
    """What an answer must look like; grammar.py reads it."""

    kind: Literal["json_schema", "json", "lark", "regex"]
    text: str = ""


@dataclass(frozen=True)
class Sampling:
    """How one request chooses its tokens and when it ends."""

    max_tokens: int = 256  # tokens to generate, those of a tool's result included
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # only the k most likely tokens; 0: all
    top_p: float = 1.0  # only the most likely tokens that together reach this share; 1: all
    min_p: float = 0.0  # only tokens at least this likely, relative to the likeliest; 0: all
    repetition_penalty: float = 1.0  # divides positive logits of tokens seen so far, multiplies negative ones
    seed: int = 0  # the same seed and prompt give the same tokens, whatever else is in the batch
    stop: tuple[str, ...] = ()  # texts that end the answer; they are not part of it
    stop_tokens: tuple[int, ...] | None = None  # None: <|assistant_end|> and <|bos|>
    keep_stop: bool = False  # the stop token is the last of the ids, as a trainer needs it
    logprobs: bool = False  # report the log probability of every token
    tools: bool = True  # run calculator calls and force their results into the answer
    allowed_tokens: tuple[int, ...] = ()  # only these may be chosen, at every step; (): all
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, number added to its logit); -100 bars it
    presence_penalty: float = 0.0  # taken off the logit of every token generated before
    frequency_penalty: float = 0.0  # the same, as often as it was generated
    top_logprobs: int = 0  # report so many of the likeliest tokens beside each token
    grammar: Grammar | None = None  # only answers that fit it

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, found {self.max_tokens}")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be 0 or more, found {self.temperature}")
        if self.top_k < 0 or not 0 < self.top_p <= 1 or not 0 <= self.min_p <= 1:
            raise ValueError(f"top_k {self.top_k}, top_p {self.top_p}, min_p {self.min_p}: one is out of range")
        if not self.repetition_penalty > 0:
            raise ValueError(f"repetition_penalty must be positive, found {self.repetition_penalty}")
        if "" in self.stop:
            raise ValueError("a stop text must not be empty")


@dataclass(frozen=True)
class Request:
    """One prompt as token ids."""

    prompt: list[int]
    sampling: Sampling = field(default_factory=Sampling)


class Piece(NamedTuple):
    """Some text of an answer, whole characters only: what the reader sees, a tool call, or its result."""

    kind: Literal["text", "tool", "output"]
    text: str


@dataclass
class Completion:
    """One answer."""

    ids: list[int] = field(default_factory=list)  # without the stop token, unless it was to be kept
    text: str = ""  # what the reader sees: no tool calls, no special tokens, cut before a stop text
    logprobs: list[float | None] = field(default_factory=list)  # of each id when asked for; None where forced
    forced: list[bool] = field(default_factory=list)  # of each id: put there by a tool, not chosen by the model
    finish_reason: Literal["stop", "length", "cancelled"] = "stop"
    version: int = 0  # of the weights that wrote its first token
    versions: list[int] = field(default_factory=list)  # of the weights that wrote each id
    tops: list[list[tuple[int, float]]] = field(default_factory=list)  # of each id when asked for: (token, log prob)
    cached_tokens: int = 0  # tokens of the prompt that were still in the cache
