"""Opens Hugging Face models for open.py: a folder of theirs, or a checkpoint that was trained from one.

ascendchat chat --model Qwen2.5-0.5B-Instruct          # the folder
ascendchat chat --run mine --stage rl                  # after `ascendchat rl --model Qwen2.5-0.5B-Instruct --run mine`

Beside the checkpoints of such a run lies what the model is besides its weights, in the folder `huggingface`. A
checkpoint of LoRA holds adapters alone: there the folder also says which, and where the model is that they are for.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ascendchat.checkpoint import Checkpoint, Damaged, read_file, verify
from ascendchat.errors import UserError
from ascendchat.files import write_atomic
from ascendchat.models.folder import Folder, OpenedFolder, at, empty_model, find, load_tokenizer, open_folder, read_json
from ascendchat.models.lora import load_adapter, merge
from ascendchat.models.trial import check
from ascendchat.runs.run import NAME as STEP

BESIDE = "huggingface"  # folder beside the checkpoints: config.json, tokenizer, chat template
BASE = "base.json"  # in it, with adapters: the path and the fingerprint of the model that they are for


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
    return open_folder(folder, dtype, seq_len, at(Path(tokenizer)) if tokenizer else None)


def is_trained_hf(saved: Checkpoint) -> bool:
    return "hf" in (saved.state.get("shape") or {})


def is_adapter(saved: Checkpoint) -> bool:
    """Whether it holds adapters and not a whole model."""
    return bool(saved.state.get("lora"))


def write_base(origin: HFSource | Checkpoint, beside: Path) -> None:
    """Say what the adapters of a run are for."""
    known = {"path": str(origin.folder.absolute()), "fingerprint": origin.fingerprint}
    write_atomic(beside / BASE, json.dumps(known, indent=1))


def check_peft_base(beside: Path) -> None:
    """peft opens adapters on a model of Hugging Face; those on a run of ours would name a folder that it cannot."""
    known = read_json(beside / BASE) if (beside / BASE).is_file() else {}
    path = Path(str(known.get("path", "unknown")))
    if (path / "manifest.json").is_file() or (not path.exists() and STEP.fullmatch(path.name)):
        raise UserError(
            f"the adapters in {beside.parent} are for {path}, a run of ours, which peft cannot open: leave out "
            "--adapter to export the merged model, or export that run first and train the adapters on its folder"
        )


def open_base(beside: Path, dtype: torch.dtype, seq_len: int) -> OpenedFolder:
    """The model that adapters are for, with the tokenizer that lies beside them; it must be the very same."""
    about = beside / BASE
    known = read_json(about) if about.is_file() else {}
    if not {"path", "fingerprint"} <= set(known):
        raise UserError(
            f"{about} cannot be read, which says what the adapters are for; copy it from where they were trained"
        )
    path, opened, found = Path(known["path"]), None, ""
    if (path / "manifest.json").is_file():
        try:
            saved = verify(path, optimizer=False)
        except Damaged as damage:
            raise UserError(f"{damage}: the adapters in {beside.parent} are for it; restore it") from None
        opened, found = open_trained(saved, dtype, seq_len), saved.fingerprint
    elif path.exists() and (folder := find(path)):
        found = folder.fingerprint
        opened = open_folder(folder, dtype, seq_len, Folder(beside)) if found == known["fingerprint"] else None
    if opened is None or found != known["fingerprint"]:
        what = "has changed since" if found else "is not there"
        raise UserError(
            f"{path} {what}: the adapters in {beside.parent} were trained on it; bring it back, or set its path in "
            f"{beside / BASE}"
        )
    return OpenedFolder(opened.model, load_tokenizer(Folder(beside)), opened.folder)


def open_trained(saved: Checkpoint, dtype: torch.dtype, seq_len: int | None) -> OpenedFolder:
    """A checkpoint of ours whose model is one of Hugging Face's."""
    beside = saved.folder.parent / BESIDE
    if not (beside / "config.json").is_file():
        raise UserError(
            f"{beside} is missing, which says what model {saved.folder} is; copy it from where the run was trained"
        )
    shape = saved.state["shape"]
    if is_adapter(saved):
        base = open_base(beside, dtype, seq_len or shape["seq_len"])
        return OpenedFolder(merge(load_adapter(base.model, beside, saved.model())), base.tokenizer, base.folder)
    opened = empty_model(beside, dtype, seq_len or shape["seq_len"])
    weights = saved.model()
    own = dict(opened.model.state_dict())
    odd = sorted(set(weights) ^ set(own)) or [name for name in own if own[name].shape != weights[name].shape]
    if odd:
        raise UserError(f"the weight {odd[0]} of {saved.folder} does not fit {beside / 'config.json'}; train it again")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(weights[name])
    check(opened.model)  # which learns how wide its heads are
    return opened
