"""A trained model ready for use: `ascendchat chat --run NAME --stage sft` finds its checkpoint here.

    opened = open_model(here, config, config.stage)        # --run, --checkpoint, or nothing: what was written last
                                                           # --model DIR: a Hugging Face model (trained.py)
    opened.model, opened.tokenizer, opened.checkpoint.state["stage"]

Weights come in the device's compute dtype. The checkpoint says which tokenizer it was trained with; another one is an
error here and not gibberish later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ascendchat.checkpoint import Checkpoint, Damaged, newest, verify
from ascendchat.config import load_yaml
from ascendchat.config.generate import EvalBaseConfig, EvalChatConfig, ModelConfig
from ascendchat.config.train import STAGES
from ascendchat.data.tokenizer.tokenizer import Tokenizer
from ascendchat.data.verify import MANIFEST
from ascendchat.errors import UserError, home
from ascendchat.models.causal_lm import CausalLM
from ascendchat.models.folder import OpenedFolder, is_ours
from ascendchat.models.folder import find as find_hf
from ascendchat.models.fused import fuse
from ascendchat.models.trained import (
    BESIDE,
    HFSource,
    exported_source,
    exported_weights,
    is_trained_hf,
    open_hf,
    open_trained,
)
from ascendchat.nn.attention import Attention, choose
from ascendchat.nn.gpt import GPT
from ascendchat.nn.model import LanguageModel
from ascendchat.parallel.context import Context
from ascendchat.runs.run import NAME, named_folder, run_folder
from ascendchat.sizes.shape import Shape


@dataclass(frozen=True)
class Opened:
    """A model and what belongs to it."""

    model: LanguageModel
    kernel: Attention
    tokenizer: Tokenizer
    checkpoint: Checkpoint | HFSource
    settings: dict[str, Any]  # what its stage was trained with
    why_kernel: str  # the sentence that says why this kernel was chosen
    here: Context

    @property
    def chats(self) -> bool:
        """Whether it was trained on conversations."""
        if isinstance(self.model, CausalLM):
            return self.tokenizer.template is not None
        facts = STAGES.get(self.checkpoint.state.get("stage", ""))
        return bool(facts and facts.chats)

    @property
    def stage_folder(self) -> Path:
        """Where results about it go."""
        saved = self.checkpoint
        return run_folder(saved.model.name, "hf") if isinstance(saved, HFSource) else saved.folder.parent

    @property
    def identity(self) -> dict[str, Any]:
        """Which model it is, for results."""
        saved = self.checkpoint
        return {"checkpoint": str(saved.folder), "model": saved.fingerprint, "step": saved.step}

    @property
    def machine(self) -> dict[str, Any]:
        """What it runs on, for results."""
        dtype = str(self.here.device.dtype).removeprefix("torch.")
        here = {"chip": self.here.device.chip.name, "world": self.here.world.size}
        return {**here, "dtype": dtype, "attention": self.kernel.name}


def open_model(
    here: Context,
    config: ModelConfig | EvalChatConfig | EvalBaseConfig,
    stage: str | None,
    trial: Callable[[OpenedFolder], None] | None = None,
) -> Opened:
    """Find, verify and load what the flags name; everything that does not fit is a UserError. `trial` refuses a model
    folder of Hugging Face that cannot be used as the caller wants to."""
    device, length = here.device, config.row_length()
    if config.checkpoint and (folder := find_hf(config.checkpoint)):
        if is_ours(folder):
            return _ours(exported_source(folder), here, config)
        found = open_hf(folder, device.dtype, length, config.tokenizer)
        if trial is not None:
            trial(found)
        return _opened(found, HFSource(folder), {}, here, config.attention)
    saved = find_checkpoint(config.run, stage, config.checkpoint, here.say)
    if is_trained_hf(saved):
        return _opened(open_trained(saved, device.dtype, length), saved, settings_of(saved), here, config.attention)
    return _ours(saved, here, config)


def _ours(saved: Checkpoint | HFSource, here: Context, config: ModelConfig | EvalChatConfig | EvalBaseConfig) -> Opened:
    """A model of our own."""
    device = here.device
    if "shape" not in saved.state:
        raise UserError(f"{saved.folder / 'state.json'} names no model shape; name another --checkpoint")
    shape = Shape.from_dict(saved.state["shape"])
    text = open_tokenizer(tokenizer_folder(config.tokenizer, saved), saved, shape)
    operators = device.operators()
    with torch.device("meta"):  # no memory yet: weights go from the file to their place, without a copy in between
        model = GPT(shape, operators).requires_grad_(False).eval().to_compute(device.dtype)
    weights = saved.model() if isinstance(saved, Checkpoint) else exported_weights(saved.model)
    expected = dict(model.state_dict())
    odd = sorted(set(weights) ^ set(expected))
    if odd:
        raise UserError(
            f"{saved.folder} was written by another version of ascendchat: "
            f"{'unknown' if odd[0] in weights else 'missing'} weight {odd[0]}; train it again, or name another "
            "--checkpoint"
        )
    wrong = [name for name, tensor in expected.items() if weights[name].shape != tensor.shape]
    if wrong:
        raise UserError(
            f"{saved.folder}: the weight {wrong[0]} does not fit its own state.json; name another --checkpoint"
        )
    placed = {name: weights[name].to(here.place, tensor.dtype, copy=True) for name, tensor in expected.items()}
    model.load_state_dict(placed, assign=True)
    kernel, why = choose(device.type, device.dtype, shape.head_dim, config.attention, decodes=True)
    settings = settings_of(saved) if isinstance(saved, Checkpoint) else {}
    return Opened(model, kernel, text, saved, settings, why, here)


def _opened(
    found: OpenedFolder, source: Checkpoint | HFSource, settings: dict[str, Any], here: Context, attention: str | None
) -> Opened:
    """A Hugging Face model on the device."""
    model = found.model.requires_grad_(False).eval().to(here.place)
    fuse(model, here.device.operators(), here.place)
    kernel, why = choose(here.device.type, here.device.dtype, model.shape.head_dim, attention, decodes=True)
    return Opened(model, kernel, found.tokenizer, source, settings, why, here)


def find_checkpoint(run: str, stage: str | None, checkpoint: str, say: Callable[[str], None]) -> Checkpoint:
    """The checkpoint that was named; else the newest of the run and stage; else of whatever was written last."""
    folder = named_folder(run, stage, checkpoint)
    if checkpoint and NAME.fullmatch(folder.name):
        try:
            return verify(folder, optimizer=False)
        except Damaged as damage:
            raise UserError(f"{damage}; name another checkpoint: --checkpoint {folder.parent}") from None
    saved = newest(folder, optimizer=False, say=say)
    if saved is None:
        raise UserError(f"no checkpoint in {folder}; train one first, or name another: --run, --stage or --checkpoint")
    return saved


def settings_of(saved: Checkpoint) -> dict[str, Any]:
    """What the stage of a checkpoint was trained with; nothing when it was moved away from its run."""
    path = saved.folder.parent / "config.yaml"
    return load_yaml(path) if path.is_file() else {}


def tokenizer_folder(named: str, saved: Checkpoint | HFSource) -> Path:
    """Where the tokenizer of a model is: the folder named, the copy beside its checkpoints, the one it was trained with
    if that is still there, or that of $ASCENDCHAT_HOME."""
    if named:
        return Path(named)
    if isinstance(saved, HFSource):
        return saved.folder
    if is_trained_hf(saved):
        return saved.folder.parent / BESIDE
    recorded = str(settings_of(saved).get("tokenizer") or "")
    places = [saved.folder.parent / "tokenizer", *([Path(recorded)] if recorded else [])]
    return next((place for place in places if place.is_dir()), home() / "tokenizer")


def open_tokenizer(path: Path, saved: Checkpoint | HFSource, shape: Shape) -> Tokenizer:
    """The tokenizer in a folder; it must be the one that the model was trained with."""
    if not (path / MANIFEST).exists():  # to train one is no help here
        raise UserError(
            f"no tokenizer in {path}; name the folder of the one that {saved.folder} was trained with: "
            f"--tokenizer FOLDER"
        )
    tokenizer = Tokenizer.load(path)
    if tokenizer.fingerprint != saved.state.get("tokenizer") or tokenizer.vocab_size != shape.vocab:
        raise UserError(
            f"{saved.folder} was not trained with the tokenizer in {path}; give the one it was trained with: "
            f"--tokenizer FOLDER"
        )
    return tokenizer
