"""`ascendchat export --run mine --stage rl --out DIR`: a trained model as a Hugging Face folder.

transformers and vLLM load it as it is: weights, config, tokenizer, chat template. For now models that came from Hugging
Face go back there; also a GGUF file becomes a folder so. Adapters are added to the weights, or with --adapter written
as peft loads them.
"""

from __future__ import annotations

from pathlib import Path

from ascendchat.checkpoint import Checkpoint
from ascendchat.config import UserError
from ascendchat.config.infer import ExportConfig
from ascendchat.device import pick
from ascendchat.dist.context import joined
from ascendchat.hf.export import export, export_adapter
from ascendchat.hf.model import CausalLM
from ascendchat.hf.tokenizer import HFTokenizer
from ascendchat.infer.huggingface import BESIDE, is_adapter
from ascendchat.infer.load import find_checkpoint, open_model


def run(config: ExportConfig) -> int:
    """The command."""
    if not config.out:
        raise UserError("name the folder to write: --out DIR")
    with joined(pick(config.device_type)) as here:
        if config.adapter:
            saved = find_checkpoint(config.run, config.stage, config.checkpoint, here.say)
            write_adapter_folder(saved, Path(config.out).expanduser())
            here.say(f"{saved.folder} -> {config.out}")
            return 0
        opened = open_model(here, config, config.stage)
        if not isinstance(opened.model, CausalLM) or not isinstance(opened.tokenizer, HFTokenizer):
            raise UserError(
                f"{opened.checkpoint.folder} is a model of our own architecture, for which transformers has no code; "
                "serve it with `ascendchat serve`"
            )
        folder = Path(config.out).expanduser()
        export(opened.model, opened.tokenizer, folder)
        here.say(f"{opened.checkpoint.folder} -> {folder}")
    return 0


def write_adapter_folder(saved: Checkpoint, folder: Path) -> None:
    """The adapters of a checkpoint as a folder of peft's."""
    if not is_adapter(saved):
        raise UserError(f"{saved.folder} holds a whole model and no adapters; leave out --adapter")
    export_adapter(saved.folder.parent / BESIDE, saved.model(), folder)
