"""Checkpoints of ours whose model came from Hugging Face: those of `ascendchat finetune`, and of `rl --model DIR`.

    checkpoint = HFCheckpoint(saved.folder, saved.state)
    model, tokenizer = checkpoint.load(torch.bfloat16)     # adapters are merged into their base

Beside the checkpoints of a run lies all of the model but its weights, in the folder `huggingface`. A checkpoint of LoRA
holds adapters alone: that folder then also has adapter_config.json, and base.json with the path of their base model.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from ascendchat.checkpoint import Checkpoint, Damaged, Unfit, check_fit, verify
from ascendchat.errors import UserError
from ascendchat.files import write_atomic
from ascendchat.models.folder import HFFolder, LoadedModel, find, read_json
from ascendchat.models.lora import load_adapter, merge
from ascendchat.models.parity import check_parity
from ascendchat.runs.run import NAME as STEP

CONFIG_FOLDER = "huggingface"  # beside the checkpoints: config.json, tokenizer, chat template
BASE = "base.json"  # in it, for adapters: path and fingerprint of their base model


class HFCheckpoint(Checkpoint):
    """A checkpoint with the weights of a model of transformers, or with adapters. It is a ModelSource (open.py)."""

    @staticmethod
    def holds(saved: Checkpoint) -> bool:
        """True for a checkpoint of this kind, False for one of our own GPT."""
        return "hf" in (saved.state.get("shape") or {})

    @property
    def config_folder(self) -> Path:
        """The folder with config.json, the tokenizer and the chat template."""
        return self.folder.parent / CONFIG_FOLDER

    tokenizer_folder = config_folder

    @property
    def is_adapter(self) -> bool:
        """True if it holds adapters and not a whole model."""
        return bool(self.state.get("lora"))

    def load(self, dtype: torch.dtype, seq_len: int | None = None, tokenizer: str = "") -> LoadedModel:
        """Model and tokenizer, on the host; adapters are merged. The tokenizer is always the run's own."""
        config = self.config_folder / "config.json"
        if not config.is_file():
            raise UserError(
                f"{self.config_folder} is missing, which says what model {self.folder} is; copy it from where the run "
                "was trained"
            )
        seq_len = seq_len or self.state["shape"]["seq_len"]
        if self.is_adapter:
            base = self._load_base(dtype, seq_len)
            return base._replace(model=merge(load_adapter(base.model, self.config_folder, self.model())))
        loaded = HFFolder(self.config_folder).empty_model(dtype, seq_len)
        weights, own = self.model(), loaded.model.state_dict()
        try:
            check_fit(own, weights, finite=False)
        except Unfit as unfit:
            raise UserError(
                f"the weight {unfit.weight} of {self.folder} does not fit {config}; train it again"
            ) from None
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(weights[name])
        check_parity(loaded.model)  # and the model learns how wide its heads are
        return loaded

    def _load_base(self, dtype: torch.dtype, seq_len: int) -> LoadedModel:
        """The unchanged model that the adapters were trained on, with the tokenizer that lies beside the adapters."""
        about = self.config_folder / BASE
        base = read_json(about) if about.is_file() else {}
        if not {"path", "fingerprint"} <= set(base):
            raise UserError(
                f"{about} cannot be read, which says what the adapters are for; copy it from where they were trained"
            )
        path, run = Path(base["path"]), self.folder.parent
        source: HFCheckpoint | HFFolder | None = None
        if (path / "manifest.json").is_file():
            try:
                saved = verify(path, optimizer=False)
            except Damaged as damage:
                raise UserError(f"{damage}: the adapters in {run} are for it; restore it") from None
            source = HFCheckpoint(saved.folder, saved.state)
        elif path.exists():
            source = find(path)
        if source is None or source.fingerprint != base["fingerprint"]:
            what = "has changed since" if source else "is not there"
            raise UserError(
                f"{path} {what}: the adapters in {run} were trained on it; bring it back, or set its path in {about}"
            )
        loaded = source.load(dtype, seq_len, str(self.config_folder))
        return loaded._replace(tokenizer=HFFolder(self.config_folder).load_tokenizer())

    def check_peft_base(self) -> None:
        """Refuse adapters on a run of ours, whose folder peft could not open."""
        about = self.config_folder / BASE
        base = read_json(about) if about.is_file() else {}
        path = Path(str(base.get("path", "unknown")))
        if (path / "manifest.json").is_file() or (not path.exists() and STEP.fullmatch(path.name)):
            raise UserError(
                f"the adapters in {self.folder.parent} are for {path}, a run of ours, which peft cannot open: leave "
                "out --adapter to export the merged model, or export that run first and train the adapters on its "
                "folder"
            )


def write_base(source: HFFolder | HFCheckpoint, folder: Path) -> None:
    """Write path and fingerprint of the base model of a run's adapters."""
    base = {"path": str(source.folder.absolute()), "fingerprint": source.fingerprint}
    write_atomic(folder / BASE, json.dumps(base, indent=1))
