"""Writes a model as a Hugging Face folder, which transformers and vLLM load as it is.

export(model, tokenizer, Path("out"))                  # weights, config, tokenizer, chat template
describe(model, tokenizer, run / "huggingface")        # all but the weights
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from ascendchat.config import UserError
from ascendchat.hf.model import CausalLM
from ascendchat.hf.tokenizer import HFTokenizer


def describe(model: CausalLM, tokenizer: HFTokenizer, folder: Path) -> None:
    """What a model is besides its weights: config.json, generation_config.json, tokenizer, chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    model.inner.config.save_pretrained(folder)
    if model.inner.generation_config is not None:
        model.inner.generation_config.save_pretrained(folder)
    tokenizer.save(folder)


def export(model: CausalLM, tokenizer: HFTokenizer, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
    """The whole model, by default with the weights that it has. The folder appears when it is complete."""
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"{folder} is not empty; name another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as place:
        draft = Path(place) / folder.name
        describe(model, tokenizer, draft)
        known = dict(weights if weights is not None else model.state_dict())
        model.inner.save_pretrained(draft, state_dict={name: tensor.detach().cpu() for name, tensor in known.items()})
        if folder.exists():
            folder.rmdir()
        shutil.move(draft, folder)
