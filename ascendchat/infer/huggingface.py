"""Opens Hugging Face models for load.py: a folder of theirs, or a checkpoint that was trained from one.

ascendchat chat --model Qwen2.5-0.5B-Instruct          # the folder
ascendchat chat --run mine --stage rl                  # after `ascendchat rl --model Qwen2.5-0.5B-Instruct --run mine`

Beside the checkpoints of such a run lies what the model is besides its weights, in the folder `huggingface`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ascendchat.checkpoint import Checkpoint, Damaged, read_file
from ascendchat.config import UserError
from ascendchat.hf.folder import Folder, OpenedFolder, at, empty_model, load_tokenizer, open_folder, read_json

BESIDE = "huggingface"  # folder beside the checkpoints: config.json, tokenizer, chat template


@dataclass(frozen=True)
class HFSource:
    """A model folder in the place of a Checkpoint."""

    model: Folder
    state: dict[str, Any] = field(default_factory=lambda: {"stage": "hf"})
    step: int = 0

    @property
    def folder(self) -> Path:
        return self.model.source

    @property
    def fingerprint(self) -> str:
        return self.model.fingerprint


def exported_source(folder: Folder) -> HFSource:
    """A model of our own that `ascendchat export` has written; its config.json says what a checkpoint's state does."""
    state = read_json(folder.path / "config.json")
    return HFSource(folder, state, int(state.get("step") or 0))


def exported_weights(folder: Folder) -> dict[str, torch.Tensor]:
    try:
        return read_file(folder.path / "model.safetensors")
    except (Damaged, OSError) as error:
        raise UserError(
            f"{folder.path / 'model.safetensors'} cannot be read ({error}); export the model again"
        ) from None


def open_hf(folder: Folder, dtype: torch.dtype, seq_len: int | None, tokenizer: str) -> OpenedFolder:
    """A model folder; `tokenizer` names another folder for that."""
    opened = open_folder(folder, dtype, seq_len)
    if not tokenizer or Path(tokenizer) == folder.source:
        return opened
    return OpenedFolder(opened.model, load_tokenizer(at(Path(tokenizer)), folder), folder)


def is_trained_hf(saved: Checkpoint) -> bool:
    return "hf" in (saved.state.get("shape") or {})


def open_trained(saved: Checkpoint, dtype: torch.dtype, seq_len: int | None) -> OpenedFolder:
    """A checkpoint of ours whose model is one of Hugging Face's."""
    beside = saved.folder.parent / BESIDE
    if not (beside / "config.json").is_file():
        raise UserError(
            f"{beside} is missing, which says what model {saved.folder} is; copy it from where the run was trained"
        )
    shape = saved.state["shape"]
    opened = empty_model(beside, dtype, seq_len or shape["seq_len"])
    weights = saved.model()
    own = dict(opened.model.state_dict())
    odd = sorted(set(weights) ^ set(own)) or [name for name in own if own[name].shape != weights[name].shape]
    if odd:
        raise UserError(f"the weight {odd[0]} of {saved.folder} does not fit {beside / 'config.json'}; train it again")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(weights[name])
    return opened
