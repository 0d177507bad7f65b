"""Writes a model as a Hugging Face folder, which transformers and vLLM load as it is.

export(model, tokenizer, Path("out"))                  # weights, config, tokenizer, chat template
export_adapter(run / "huggingface", weights, Path("out"))    # a folder of peft's, with the tokenizer
describe(model, tokenizer, run / "huggingface")        # all but the weights
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from ascendchat.config import UserError
from ascendchat.hf.lora import save_weights
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
    with appearing(folder) as draft:
        describe(model, tokenizer, draft)
        known = dict(weights if weights is not None else model.state_dict())
        model.inner.save_pretrained(draft, state_dict={name: tensor.detach().cpu() for name, tensor in known.items()})


def export_adapter(beside: Path, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Adapters as peft has them: `beside` is the folder next to the checkpoints, which describes them."""
    with appearing(folder) as draft:
        left_out = shutil.ignore_patterns("config.json", "generation_config.json", "base.json")  # those of the base
        shutil.copytree(beside, draft, ignore=left_out)
        save_weights(weights, draft)


def check_free(folder: Path) -> None:
    """Nothing is ever written over."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is not empty; name another folder")


@contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """A place to write a folder in, which bears its name when all is there."""
    check_free(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as place:
        draft = Path(place) / folder.name
        yield draft
        if folder.exists():
            folder.rmdir()
        shutil.move(draft, folder)
