"""LoRA adapters by peft: small matrices beside the linear layers of a frozen model; they alone are trained.

    add_lora(model, LoraSettings(rank=16, alpha=32))     # base frozen; adapters on every linear layer but the head
    adapter_weights(model)                               # by peft's names, for the checkpoints of such a run
    write_adapter(model, base, folder)                   # adapter_config.json: settings, and the path of the base
    merge(load_adapter(model, folder, weights))          # the plain model, with the adapters added to its weights

peft loads a folder with adapter_config.json and adapter_model.safetensors onto the unchanged base.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ascendchat.checkpoint import Unfit, check_fit, write_tensors
from ascendchat.errors import UserError, nearest
from ascendchat.models.causal_lm import CausalLM
from ascendchat.models.import_transformers import library
from ascendchat.version import install_command

NAME = "default"  # peft's name for the only adapter
PREFIX = "base_model.model."  # before each name in peft's own files
EXPERTS = "experts"  # name of the module of experts in models
OF_EXPERTS = re.compile(r"(gate|up|down)_proj|w[123]|(\w+_)?gate|router")  # linear layers in it, and routers
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@dataclass(frozen=True)
class LoraSettings:
    """The adapters to add. `targets`: names of linear layers, or `all`; `dropout`: of an adapter's input."""

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = ("all",)
    dropout: float = 0.0
    rslora: bool = False
    dora: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "targets": list(self.targets)}


def peft_library() -> ModuleType:
    """Import peft, after transformers was imported by models/import_transformers.py."""
    library()
    try:
        import peft
    except ImportError as error:
        raise UserError(f"LoRA needs peft ({error}); install it: {install_command('hf')}") from None
    return peft


def add_lora(model: CausalLM, settings: LoraSettings, seed: int = 0) -> list[str]:
    """Freeze the model and add adapters in its dtype, equal on every rank; their output is 0 at first. Returns the
    names of the layers that have them."""
    check_targets(model, settings.targets)
    every, names = settings.targets == ("all",), linear_names(model)
    config = peft_library().LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        use_rslora=settings.rslora,
        use_dora=settings.dora,
        target_modules=list(settings.targets) if not every else names if has_experts(model) else "all-linear",
        task_type="CAUSAL_LM",
    )
    _inject(model, config, seed)
    model.to_compute(model.dtype)  # older versions of peft make them in float32 beside packed weights
    return names if every else list(settings.targets)


def has_experts(model: CausalLM) -> bool:
    return any(name.rpartition(".")[2] == EXPERTS for name, _ in model.inner.named_modules())


def linear_names(model: CausalLM) -> list[str]:
    """Names of linear layers that can have adapters. Not the head: losses are computed from its plain matrix. Nor
    experts and routers, of which peft adapts all or none, by their old names; in a model with experts other layers with
    such a name, as those of a shared expert, have no adapters either."""
    head, experts = model.inner.get_output_embeddings(), has_experts(model)
    layers = [(name, m) for name, m in model.inner.named_modules() if isinstance(m, torch.nn.Linear) and m is not head]
    names = sorted({name.rpartition(".")[2] for name, _ in layers})
    return [name for name in names if not (experts and OF_EXPERTS.fullmatch(name))]


def _inject(model: CausalLM, config: Any, seed: int = 0) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft_library().inject_adapter_in_model(config, model.inner, adapter_name=NAME)


def check_targets(model: CausalLM, targets: tuple[str, ...]) -> None:
    """Refuse names of layers that do not exist or cannot have adapters."""
    if targets == ("all",):
        return
    names = linear_names(model)
    for target in targets:
        if target not in names and OF_EXPERTS.fullmatch(target) and has_experts(model):
            raise UserError(
                f"--lora-target {target}: experts and their routers have no adapters here; name other layers: "
                f"{', '.join(names)}, or all"
            )
        if target not in names:
            raise UserError(
                f"--lora-target {target}: no linear layer has this name; {nearest(target, ['all', *names])}"
            )


def adapter_weights(model: CausalLM) -> dict[str, Tensor]:
    """The adapters' weights, by their names in peft's files."""
    weights = peft_library().get_peft_model_state_dict(model.inner, adapter_name=NAME, save_embedding_layers=False)
    return {PREFIX + name: tensor for name, tensor in weights.items()}


def write_adapter(model: CausalLM, base: str, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
    """Write adapter_config.json for adapters on `base`; with `weights` a whole folder for peft."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model.inner.peft_config[NAME]
    config.base_model_name_or_path, config.inference_mode = base, True
    config.save_pretrained(folder)
    config.inference_mode = False
    if weights is not None:
        save_weights(weights, folder)


def save_weights(weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write adapter_model.safetensors."""
    write_tensors(folder / WEIGHTS, {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()})


def load_adapter(model: CausalLM, folder: Path, weights: Mapping[str, Tensor]) -> CausalLM:
    """Add the adapters that adapter_config.json in `folder` describes, with the given weights."""
    peft = peft_library()
    values = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    _inject(model, peft.LoraConfig.from_peft_type(**{**values, "inference_mode": False}))
    try:
        check_fit(adapter_weights(model), weights, finite=False)
    except Unfit as unfit:
        raise UserError(f"the adapter weight {unfit.weight} does not fit {folder / CONFIG}; train it again") from None
    plain = {name.removeprefix(PREFIX): tensor for name, tensor in weights.items()}
    peft.set_peft_model_state_dict(model.inner, plain, adapter_name=NAME)
    return model


@torch.no_grad()
def merge(model: CausalLM) -> CausalLM:
    """Add the adapters to the weights of their layers, and remove them: names are as before `add_lora`."""
    peft_library()
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = {name: m for name, m in model.inner.named_modules() if isinstance(m, BaseTunerLayer)}
    for module in layers.values():
        module.merge()
    for name, module in layers.items():
        parent, _, child = name.rpartition(".")
        if parent in layers:  # peft wraps a module once for each of its parameters: the outermost is replaced
            continue
        setattr(model.inner.get_submodule(parent), child, module.get_base_layer())
    del model.inner.peft_config
    return model.requires_grad_(True)  # type: ignore[return-value]
