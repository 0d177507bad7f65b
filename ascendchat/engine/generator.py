"""The one way to generate: `eval chat`, samples in training, rollouts, `chat` and the server know a Generator, no more.

    answers = generator.generate([Request(prompt, Sampling(temperature=0.0)), ...])    # -> [Completion, ...]
    with closing(generator.stream(request)) as stream: ...                             # Pieces as they come
    generator.load(weights, version=12)                                                # after a training step

engine.py implements it on a model in this process. On NPUs a trainer wants TASK_QUEUE_ENABLE=2 and captured graphs
refuse it, so a fast generator may be another process that is spoken to over a connection: nothing here needs the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from ascendchat.engine.request import Completion, Piece, Request

if TYPE_CHECKING:
    from torch import Tensor

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
        """Whether it answers in another process, so that several threads may ask it while this one trains."""

    @property
    def version(self) -> int:
        """Of the weights that answer the next request to begin. What wrote an answer is its Completion.version."""

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


def check_fit(own: Weights, weights: Weights) -> None:
    """Weights with other names, shapes or kinds of numbers than the model's own are a ValueError, and such as are not
    finite in its dtypes."""
    if odd := sorted(set(own) ^ set(weights)):
        problem = "missing" if odd[0] in own else "unknown"
        raise ValueError(f"these weights do not fit the model: {odd[0]} is {problem}")
    for name, tensor in own.items():
        if weights[name].shape != tensor.shape:
            sizes = f"{tuple(weights[name].shape)} instead of {tuple(tensor.shape)}"
            raise ValueError(f"these weights do not fit the model: {name} is {sizes}")
        if weights[name].is_floating_point() != tensor.is_floating_point():
            raise ValueError(
                f"these weights do not fit the model: {name} is {weights[name].dtype} instead of {tensor.dtype}"
            )
    for name, tensor in own.items():
        if not weights[name].to(tensor.dtype).isfinite().all():  # a large number is not, in 16 bits
            raise ValueError(f"these weights hold numbers that are not finite, in {name} as {tensor.dtype}")
