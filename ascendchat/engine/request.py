"""Input and output of the engine: Request and Sampling, Completion and Piece; and the Generator protocol.

engine.generate([Request(prompt, Sampling(max_tokens=64, temperature=0.7, seed=1))])     # see engine.py
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, TypeAlias, get_args

if TYPE_CHECKING:
    from torch import Tensor


MAX_TOPS = 20  # likeliest tokens that can be reported beside each token
MAX_BIAS = 100.0  # far beyond what logits differ by: it decides
GrammarKind = Literal["json_schema", "json", "lark", "regex"]


@dataclass(frozen=True)
class Grammar:
    """A language that the whole answer must belong to; grammar.py reads it.

    json_schema: JSON of this schema, in one line, at most a space behind a comma or colon. json: any JSON object, no
    text. lark: a grammar of llguidance, which can name special tokens: `call: <|tool_start|> /[0-9+]+/ <|tool_end|>`.
    regex: a regular expression of Rust's kind.

    The answer ends ("stop") when nothing can follow, or where the model ends it and the grammar allows. It is cut short
    ("length") by max_tokens, and where a limit of the grammar's own is reached.
    """

    kind: GrammarKind
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            raise ValueError(f"a grammar is one of {', '.join(get_args(GrammarKind))}, not {self.kind!r}")
        if self.kind != "json" and not self.text:
            raise ValueError(f"the grammar of kind {self.kind} is empty")


@dataclass(frozen=True)
class Sampling:
    """Sampling settings of one request, and when it ends."""

    max_tokens: int = 256  # tokens to generate, those of a tool's result included
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # only the k most likely tokens; 0: all
    top_p: float = 1.0  # only the most likely tokens that together reach this share; 1: all
    min_p: float = 0.0  # only tokens at least this likely, relative to the likeliest; 0: all
    repetition_penalty: float = 1.0  # divides positive logits of tokens seen so far, multiplies negative ones
    seed: int = 0  # the same seed and prompt give the same tokens, whatever else is in the batch
    stop: tuple[str, ...] = ()  # texts that end the answer; they are not part of it
    stop_tokens: tuple[int, ...] | None = None  # None: those of the tokenizer
    keep_stop: bool = False  # the stop token is the last of the ids, as a trainer needs it
    logprobs: bool = False  # report the log probability of every token: the model's own,
    processed_logprobs: bool = False  # or that of the draw: after penalties, bias, restriction, temperature and filters
    tools: bool = True  # run calculator calls and force their results into the answer; never with a grammar
    allowed_tokens: tuple[int, ...] = ()  # only these may be chosen, at every step; (): all
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token, -100 to 100: added to its logit); -100 bars it
    presence_penalty: float = 0.0  # -2 to 2, taken off the logit of every token that the model chose before
    frequency_penalty: float = 0.0  # the same, as often as it was chosen; a tool's result does not count
    top_logprobs: int = 0  # report so many of the likeliest tokens beside each token, 20 at most
    grammar: Grammar | None = None  # only answers that fit it; its end is <|assistant_end|>, whatever stop_tokens says

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
        if not all(abs(bias) <= MAX_BIAS for _, bias in self.logit_bias):
            raise ValueError("a logit_bias must lie between -100 and 100")
        if len({token for token, _ in self.logit_bias}) < len(self.logit_bias):
            raise ValueError("logit_bias names a token twice")
        for name, penalty in (("presence", self.presence_penalty), ("frequency", self.frequency_penalty)):
            if not -2 <= penalty <= 2:
                raise ValueError(f"{name}_penalty must lie between -2 and 2, found {penalty}")
        if not 0 <= self.top_logprobs <= MAX_TOPS:
            raise ValueError(f"top_logprobs must lie between 0 and {MAX_TOPS}, found {self.top_logprobs}")


@dataclass(frozen=True)
class Request:
    """One prompt as token ids."""

    prompt: Sequence[int]
    sampling: Sampling = field(default_factory=Sampling)
    salt: str = ""  # whose it is: what was computed for one is never used, and so never noticed, by another


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
    # of each id when asked for: the likeliest tokens and their log probabilities, best first; none where forced
    tops: list[list[tuple[int, float]]] = field(default_factory=list)
    cached_tokens: int = 0  # tokens of the prompt that were still in the cache

    def add(self, token: int, version: int, forced: bool = False) -> None:
        """The next id, by weights of this version."""
        self.ids.append(token)
        self.forced.append(forced)
        self.versions.append(version)


# The one way to generate: `eval chat`, samples in training, rollouts, `chat` and the server know a Generator, no more.
#
#     answers = generator.generate([Request(prompt, Sampling(temperature=0.0)), ...])    # -> [Completion, ...]
#     with closing(generator.stream(request)) as stream: ...                             # Pieces as they come
#     generator.load(weights, version=12)                                                # after a training step
#
# engine.py implements it on a model in this process. On NPUs a trainer wants TASK_QUEUE_ENABLE=2 and captured graphs
# refuse it, so a fast generator may be another process that is spoken to over a connection: nothing here needs the
# model.

Weights: TypeAlias = "Mapping[str, Tensor]"  # by the names of the state_dict; any float dtype, no optimizer state


class Stream(Iterator[Piece], Protocol):
    """The pieces of one answer as they come. Their texts of kind "text" add up to `completion.text`."""

    @property
    def completion(self) -> Completion:
        """The answer so far; whole once the iterator has ended."""

    def close(self) -> None:
        """End the request and free its slot. May be called while the iterator waits, for instance by a signal handler.
        What was written before can still be read; then the iterator ends, with the finish reason "cancelled"."""


class Generator(Protocol):
    """Whatever can continue prompts."""

    @property
    def elsewhere(self) -> bool:
        """True if it answers in another process: several threads may ask it while this one trains."""

    @property
    def version(self) -> int:
        """Version of the weights that answer the next request to begin; see Completion.version for an answer's."""

    @property
    def context(self) -> int:
        """The most tokens that prompt and answer have together."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """All answers, in the order of the requests. One that cannot be answered is a ValueError, and none is begun."""

    def stream(self, request: Request) -> Stream:
        """One answer as it comes."""

    def load(self, weights: Weights, version: int, *, interrupt: bool = False) -> None:
        """Answer with these weights from now on. Answers under way are finished by the old ones first, so that each is
        the work of one version; requests that still wait for a slot are answered by the new ones. With `interrupt`
        answers under way go on with the new weights at once, and Completion.versions says which wrote which token.
        Weights that do not fit the model are a ValueError, and nothing is changed."""

    def renew(self, version: int) -> None:
        """The weights were replaced by somebody else: by a trainer in this process, or on a server by another rank."""


def prompt_room(context: int, max_tokens: int) -> int:
    """Tokens that a prompt may have so that the answer has its max_tokens, or half of the context."""
    return context - min(max_tokens, context // 2)
