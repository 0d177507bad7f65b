"""`ascendchat export --run mine --stage sft --out DIR`: a trained model as a Hugging Face folder.

transformers loads it offline: weights, config, tokenizer, chat template; vLLM too, where the model came from Hugging
Face (also a GGUF file becomes a folder so). A model of our own brings its code: trust_remote_code=True. Adapters are
added to the weights, or with --adapter written as peft loads them.
"""

from __future__ import annotations

from pathlib import Path

from ascendchat.checkpoint import Checkpoint
from ascendchat.config import UserError
from ascendchat.config.generate import ExportConfig
from ascendchat.device import pick
from ascendchat.models.causal_lm import CausalLM
from ascendchat.models.export import export, export_adapter, export_own
from ascendchat.models.open import find_checkpoint, open_model
from ascendchat.models.tokenizer import HFTokenizer
from ascendchat.models.trained import BESIDE, check_peft_base, is_adapter
from ascendchat.parallel.context import joined
from ascendchat.sizes.shape import Shape


def run(config: ExportConfig) -> int:
    """The command."""
    if config.to == "gguf":
        raise UserError(
            "no maintained library writes GGUF for our own architecture, and llama.cpp has no code to run it: use "
            "--to hf; a model that came from Hugging Face is converted from that folder by llama.cpp's "
            "convert_hf_to_gguf.py"
        )
    if not config.out:
        raise UserError("name the folder to write: --out DIR")
    with joined(pick(config.device_type)) as here:
        if config.adapter:
            saved = find_checkpoint(config.run, config.stage, config.checkpoint, here.say)
            write_adapter_folder(saved, Path(config.out).expanduser())
            here.say(f"{saved.folder} -> {config.out}")
            return 0
        opened = open_model(here, config, config.stage)
        folder, origin = Path(config.out).expanduser(), opened.checkpoint
        if isinstance(opened.model, CausalLM) and isinstance(opened.tokenizer, HFTokenizer):
            export(opened.model, opened.tokenizer, folder)
        else:
            shape = Shape.from_dict(opened.model.shape.to_dict())
            weights = origin.model() if isinstance(origin, Checkpoint) else dict(opened.model.state_dict())
            about = {"stage": origin.state.get("stage", ""), "step": origin.step}
            export_own(shape, weights, opened.tokenizer, about, folder)
        here.say(f"{opened.checkpoint.folder} -> {folder}")
    return 0


def write_adapter_folder(saved: Checkpoint, folder: Path) -> None:
    """The adapters of a checkpoint as a folder of peft's."""
    if not is_adapter(saved):
        raise UserError(f"{saved.folder} holds a whole model and no adapters; leave out --adapter")
    check_peft_base(saved.folder.parent / BESIDE)
    export_adapter(saved.folder.parent / BESIDE, saved.model(), folder)
