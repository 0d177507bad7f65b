"""`ascendchat export --run mine --stage sft --out DIR`: a model as a Hugging Face folder, for transformers and vLLM.

    export(model, tokenizer, Path("out"))                        # weights, config, tokenizer, chat template
    export_adapter(run / "huggingface", weights, Path("out"))    # a folder for peft, with the tokenizer
    export_own(shape, weights, tokenizer, {"stage": "sft", "step": 100}, Path("out"))

Adapters are merged into their base, or with --adapter written as peft loads them. A GGUF file can be exported to a
folder, not written. A model of our own goes with the code that runs it (models/remote_code), which transformers
executes when it is told to: trust_remote_code=True. Its folder is also one of our own tokenizers and has the shape in
our words, so that we open it without that code.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from ascendchat.checkpoint import write_tensors
from ascendchat.config.generate import ExportConfig
from ascendchat.data.tokenizer.tokenizer import Tokenizer
from ascendchat.device import pick
from ascendchat.errors import UserError
from ascendchat.files import give_default_mode
from ascendchat.models.causal_lm import CausalLM
from ascendchat.models.folder import EXPORTED, describe
from ascendchat.models.hf_checkpoint import BASE, HFCheckpoint
from ascendchat.models.lora import save_weights
from ascendchat.models.open import ModelSource, OwnCheckpoint, find_source, open_model
from ascendchat.models.tokenizer import HFTokenizer
from ascendchat.models.transformers_4 import add_old_names
from ascendchat.nn.gpt import attention_scale
from ascendchat.nn.loss import SOFTCAP
from ascendchat.nn.model import NORM_EPS
from ascendchat.parallel.context import joined
from ascendchat.sizes.shape import SMEAR_GATE_CHANNELS, Shape

CODE = Path(__file__).parent / "remote_code"


def check_free(folder: Path) -> None:
    """Refuse a folder that holds something, since nothing is ever overwritten, or that cannot be written: a user hears
    of it before the work is done."""
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"{folder} is not empty; name another folder")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent):
            pass
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}); name another folder") from None


@contextmanager
def draft_of(folder: Path) -> Iterator[Path]:
    """Give a folder to write to, and rename it to `folder` when it is complete."""
    check_free(folder)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as parent:
        draft = Path(parent) / folder.name
        draft.mkdir()
        yield draft
        if folder.exists():
            folder.rmdir()
        shutil.move(draft, folder)


def export(model: CausalLM, tokenizer: HFTokenizer, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
    """Write the whole model, by default with the weights that it has."""
    with draft_of(folder) as draft:
        describe(model, tokenizer, draft)
        tensors = dict(weights if weights is not None else model.state_dict())
        model.inner.save_pretrained(draft, state_dict={name: tensor.detach().cpu() for name, tensor in tensors.items()})
        add_old_names(model.inner.config, draft / "config.json")  # save_pretrained has written it again
        for file in draft.glob("*.safetensors"):
            give_default_mode(file)


def export_adapter(config_folder: Path, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write adapters as peft loads them. `config_folder` lies beside the checkpoints, and describes them."""
    with draft_of(folder) as draft:
        of_the_base = shutil.ignore_patterns("config.json", "generation_config.json", BASE)
        shutil.copytree(config_folder, draft, ignore=of_the_base, dirs_exist_ok=True)
        save_weights(weights, draft)


def export_own(
    shape: Shape, weights: Mapping[str, Tensor], tokenizer: Tokenizer, about: Mapping[str, Any], folder: Path
) -> None:
    """Write a model of our own. `about`: its stage and step."""
    with draft_of(folder) as draft:
        tokenizer.save(draft, "ascendchat export")
        for file in sorted(CODE.glob("*_ascendchat.py")):
            shutil.copy(file, draft / file.name)
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
        write_tensors(draft / "model.safetensors", tensors, {"format": "pt"})
        dtype = str(tensors["head"].dtype).removeprefix("torch.")
        ids = {"bos_token_id": tokenizer.bos, "eos_token_id": list(tokenizer.stops), "pad_token_id": tokenizer.pad}
        config = {**own_config(shape), **ids, "dtype": dtype, "torch_dtype": dtype}
        config |= {**about, "tokenizer": tokenizer.fingerprint, "shape": shape.to_dict()}
        for name, content in (("config.json", config), ("generation_config.json", ids)):
            (draft / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def own_config(shape: Shape) -> dict[str, Any]:
    """The values of config.json that models/remote_code/configuration_ascendchat.py reads."""
    constants = shape.constants
    pattern = shape.window_pattern
    short = constants.short_window(shape.seq_len)
    kinds = [pattern[layer % len(pattern)] for layer in range(shape.depth - 1)] + ["L"]
    return {
        "model_type": EXPORTED,
        "architectures": ["AscendchatForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_ascendchat.AscendchatConfig",
            "AutoModelForCausalLM": "modeling_ascendchat.AscendchatForCausalLM",
        },
        "vocab_size": shape.vocab,
        "padded_vocab_size": shape.padded_vocab,
        "hidden_size": shape.dim,
        "intermediate_size": shape.mlp_dim,
        "num_hidden_layers": shape.depth,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.seq_len,
        "rope_base": constants.rope_base,
        "attention_scale": attention_scale(shape),
        "windows": [short if kind == "S" else 0 for kind in kinds],
        "value_layers": list(shape.value_layers),
        "value_gate_channels": shape.gate_channels,
        "value_gate_range": constants.gate_range,
        "smear_gate_channels": min(SMEAR_GATE_CHANNELS, shape.dim),
        "logit_cap": SOFTCAP,
        "rms_norm_eps": NORM_EPS,
        "tie_word_embeddings": False,
    }


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
        source = find_source(config.run, config.stage, config.checkpoint, here.say)
        folder = Path(config.out).expanduser()
        if config.adapter:
            write_adapter_folder(source, folder)
        else:
            opened = open_model(source, here, tokenizer=config.tokenizer, attention=config.attention)
            if isinstance(opened.model, CausalLM) and isinstance(opened.tokenizer, HFTokenizer):
                export(opened.model, opened.tokenizer, folder)
            else:
                shape = Shape.from_dict(opened.model.shape.to_dict())
                # the checkpoint's own weights: the device may compute in another dtype
                weights = source.model() if isinstance(source, OwnCheckpoint) else dict(opened.model.state_dict())
                about = {"stage": source.state.get("stage", ""), "step": source.step}
                export_own(shape, weights, opened.tokenizer, about, folder)
        here.say(f"{source.folder} -> {folder}")
    return 0


def write_adapter_folder(source: ModelSource, folder: Path) -> None:
    """Write the adapters of a checkpoint as a folder for peft."""
    if not isinstance(source, HFCheckpoint) or not source.is_adapter:
        raise UserError(f"{source.folder} holds a whole model and no adapters; leave out --adapter")
    source.check_peft_base()
    export_adapter(source.config_folder, source.model(), folder)
