"""Training that starts from a Hugging Face model: `ascendchat rl --model Qwen2.5-0.5B-Instruct`.

    theirs = open_start(config, here)                   # None: what --start names is a checkpoint of ours
    theirs.model, theirs.tokenizer, theirs.origin

All weights are trained, by AdamW. Checkpoints are ours, with the weights under the names of transformers; beside them
lies what else makes the model a Hugging Face folder again (`ascendchat export`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ascendchat.checkpoint import Checkpoint, Damaged, verify
from ascendchat.chips import Chip
from ascendchat.config import UserError
from ascendchat.config.train import ChatTrainConfig, StepConfig
from ascendchat.dist.context import Context
from ascendchat.hf.export import describe
from ascendchat.hf.folder import OpenedFolder, find
from ascendchat.hf.fused import fuse
from ascendchat.hf.model import CausalLM
from ascendchat.hf.shape import HFShape
from ascendchat.hf.tokenizer import HFTokenizer
from ascendchat.infer.huggingface import BESIDE, HFSource, is_trained_hf, open_hf, open_trained
from ascendchat.plan.batch import largest_rows
from ascendchat.plan.hf import finetuning
from ascendchat.plan.memory import usable

ROW = 2048  # tokens of a row where nobody says
LARGE = 2e9  # parameters from which the learning rate is the smaller one
RATES = 1e-5, 1e-6
OURS = "matrix_lr", "embedding_lr", "unembedding_lr", "scalar_lr"  # rates of what our own models are made of


@dataclass(frozen=True)
class Theirs:
    """A model to start from, on its device."""

    model: CausalLM
    tokenizer: HFTokenizer
    origin: HFSource | Checkpoint

    @property
    def name(self) -> str:
        """Of the run, where nobody says."""
        origin = self.origin
        return origin.model.name if isinstance(origin, HFSource) else origin.folder.parent.parent.name

    def add_files(self, run: Path) -> None:
        """What the model is besides its weights; without it the checkpoints are lost."""
        describe(self.model, self.tokenizer, run / BESIDE)


def open_start(config: ChatTrainConfig, here: Context) -> Theirs | None:
    """The model that --start names, if it is one of Hugging Face's: a folder, a GGUF file, or a checkpoint of ours
    that was trained from one."""
    named, seq_len, dtype = config.start, config.max_seq_len, here.device.dtype
    origin: HFSource | Checkpoint
    if named and (folder := find(named)):
        origin, opened = HFSource(folder), open_hf(folder, dtype, seq_len or ROW, config.tokenizer)
    elif named and (Path(named) / "manifest.json").is_file():
        try:
            origin = verify(Path(named), optimizer=False)
        except Damaged as damage:
            raise UserError(f"{damage}; name another checkpoint with --start") from None
        if not is_trained_hf(origin):
            return None
        opened = open_trained(origin, dtype, seq_len)
    else:
        return None
    for name in OURS:
        if getattr(config, name) is not None:
            raise UserError(f"--{name.replace('_', '-')} is of our own models; here --learning-rate is that of all")
    return Theirs(_on_device(opened, config, here), opened.tokenizer, origin)


def _on_device(opened: OpenedFolder, config: StepConfig, here: Context) -> CausalLM:
    model = opened.model.to_compute(here.device.dtype).to(here.place)
    if names := fuse(model, here.device.operators()):
        here.say(f"fused operators: {', '.join(names)}")
    if config.activation_checkpointing:
        model.checkpoint_activations()
    if config.fp8:
        here.say("--fp8 is ignored: it is for our own models")
    return model


def learning_rate(shape: HFShape, asked: float | None) -> float:
    """Of all weights. As measured by others for policy gradients: small models bear ten times more."""
    return asked or RATES[shape.total_parameters >= LARGE]


def most_rows(shape: HFShape, chip: Chip, devices: int, checkpointing: bool, beside: int = 0) -> int:
    """The largest device batch that fits beside so many bytes of something else, by plan/hf.py."""
    counted, have = shape.counted, usable(chip) - beside
    most = largest_rows(lambda rows: sum(finetuning(counted, chip, devices, rows, checkpointing).values()) <= have)
    if not most:
        raise UserError(
            f"not even one row of {shape.seq_len} tokens of this model fits {chip.name}; give a smaller --max-seq-len, "
            "--activation-checkpointing, or more devices"
        )
    return most
