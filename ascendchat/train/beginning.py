"""The model that `ascendchat rl` and learning from pairs start from, ready to be trained: Hugging Face's or ours.

begin = begin_with_theirs(config, here) or begin_with_ours(config, here, "rl")
begin.learner, begin.tokenizer, begin.origin
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from ascendchat.config import UserError
from ascendchat.config.stages import StageName
from ascendchat.config.train import ChatTrainConfig
from ascendchat.data.tokenizer.tokenizer import Tokenizer
from ascendchat.models.open import open_tokenizer, settings_of, tokenizer_folder
from ascendchat.nn.attention import choose
from ascendchat.parallel.context import Context
from ascendchat.sizes.shape import Shape
from ascendchat.train.huggingface import open_start
from ascendchat.train.model import Learner, build, say_package
from ascendchat.train.start import starting_point

_Config = TypeVar("_Config", bound=ChatTrainConfig)


@dataclass(frozen=True)
class Beginning(Generic[_Config]):
    """The model that a run starts from, ready to be trained."""

    learner: Learner[Any]
    tokenizer: Tokenizer
    origin: Any  # Checkpoint | HFSource
    config: _Config
    run: str  # its name, where nobody says
    add_files: Callable[[Path], None]
    learnt_from: Sequence[str] = ()


def begin_with_ours(config: _Config, here: Context, stage: StageName) -> Beginning[_Config]:
    """A checkpoint of a stage before `stage`; the weights are read by whoever makes the optimizer."""
    if getattr(config, "learning_rate", None) is not None:
        raise UserError("--learning-rate is of Hugging Face models; ours have one per kind of weight: --lr-multiplier")
    origin = starting_point(config, stage, here.say)
    shape = Shape.from_dict(origin.state["shape"])
    tokens = tokenizer_folder(config.tokenizer, origin).resolve()
    config = replace(config, tokenizer=str(tokens))
    tokenizer = open_tokenizer(tokens, origin, shape)
    if config.max_seq_len:
        shape = Shape.from_dict({**shape.to_dict(), "seq_len": config.max_seq_len})

    def add_files(run: Path) -> None:
        tokenizer.save(run / "tokenizer")

    learnt_from = settings_of(origin).get("data") or ()
    name = origin.folder.parent.parent.name
    learner = build(config, shape, here, packaged=False)  # log-probabilities of two policies are compared
    return Beginning(learner, tokenizer, origin, config, name, add_files, learnt_from)


def begin_with_theirs(config: _Config, here: Context) -> Beginning[_Config] | None:
    """A Hugging Face model; None where --start names no such."""
    theirs = open_start(config, here)
    if theirs is None:
        return None
    device, model = here.device, theirs.model
    kernel, why = choose(device.type, device.dtype, model.shape.head_dim, config.attention)
    here.say(why)
    learner = Learner(model, kernel, device, here.place, by_document=config.attend == "document")
    say_package(learner, here)
    return Beginning(learner, theirs.tokenizer, theirs.origin, config, theirs.name, theirs.add_files)
