"""The model that a training run begins from: a checkpoint of our own GPT, or a Hugging Face model.

    initial = initial_model(config, here, "rl")     # mid and sft take initial_checkpoint, finetune from_hf
    initial.train_model, initial.tokenizer, initial.source

`--start` names a run, a checkpoint folder, a model folder, a GGUF file or OWNER/NAME. Checkpoints of a run that begins
from a Hugging Face model are ours, with the weights under the names of transformers, or of peft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from ascendchat.checkpoint import Checkpoint, Damaged, Shard, newest, verify
from ascendchat.chips import Chip
from ascendchat.config import flags_set
from ascendchat.config.finetune import FinetuneConfig
from ascendchat.config.train import STAGES, HFTrainConfig, OwnModelConfig, StageName, StartConfig
from ascendchat.data.tokenizer.tokenizer import Tokenizer
from ascendchat.engine.open import check_engine
from ascendchat.errors import UserError, home
from ascendchat.models.export import check_free
from ascendchat.models.folder import HFFolder, read_json
from ascendchat.models.hf_checkpoint import HFCheckpoint
from ascendchat.models.lora import LoraSettings
from ascendchat.models.open import (
    ModelSource,
    OwnCheckpoint,
    OwnExport,
    TrainableModel,
    files_at,
    open_for_training,
    source_of,
)
from ascendchat.models.shape import HFShape
from ascendchat.nn.attention import choose
from ascendchat.parallel.context import Context
from ascendchat.runs.run import checkpoints, run_folder
from ascendchat.sizes.batch import largest_rows
from ascendchat.sizes.hf import FAMILIES, HFModel, finetuning, from_config, packing_saves
from ascendchat.sizes.memory import usable
from ascendchat.sizes.shape import Shape
from ascendchat.train.model import TrainModel, build, say_package
from ascendchat.train.stage import Optimizer

ROW = 2048  # tokens of a row of a Hugging Face model, by default
LARGE = 2e9  # parameters from which RL and pairs take the smaller learning rate
RATES = 1e-5, 1e-6
OWN_RATES = "matrix_lr", "embedding_lr", "unembedding_lr", "scalar_lr"  # flags for kinds of weights of our own GPT

_Config = TypeVar("_Config", bound=HFTrainConfig)


@dataclass(frozen=True)
class InitialModel(Generic[_Config]):
    """A model that is ready to be trained by RL or on pairs."""

    train_model: TrainModel[Any]
    tokenizer: Tokenizer
    source: ModelSource
    config: _Config
    name: str  # of the run, by default
    add_files: Callable[[Path], None]  # writes what a checkpoint needs beside its weights
    trained_on: Sequence[str] = ()  # data of the stage before

    def load_weights(self, optimizer: Optimizer) -> None:
        """Read the weights of our own GPT, which the optimizer keeps in float32 too; others were opened with theirs."""
        if isinstance(self.source, OwnCheckpoint):
            optimizer.load(only_weights(self.source.reader()), 0)


def initial_model(config: _Config, here: Context, stage: StageName) -> InitialModel[_Config]:
    """The Hugging Face model that --start names, else a checkpoint of ours of a stage before `stage`."""
    opened = from_hf(config, here)
    if opened is None:
        return from_checkpoint(config, here, stage)
    return with_learner(opened, config, here, opened.source.name)


# ---- a checkpoint of our own GPT ---------------------------------------------------------------


def initial_checkpoint(config: StartConfig, stage: StageName, say: Callable[[str], None]) -> OwnCheckpoint:
    """The checkpoint that --start names: a folder, or a run (its last earlier stage); by default this run's own."""
    named = config.start
    if named and (Path(named) / "config.json").is_file():
        if isinstance(files := files_at(named), OwnExport):
            files.refuse_training()
        raise UserError(
            f"{named} is a Hugging Face model, which `ascendchat {stage}` does not train; finetune and rl do"
        )
    if named and Path(named).is_dir():
        folders = [Path(named)]
    else:
        runs = [named or config.run] if named or config.run else _runs()
        folders = [run_folder(run, earlier) for run in runs for earlier in STAGES[stage].starts_from]
    for folder in folders:
        if (folder / "manifest.json").is_file():
            return OwnCheckpoint.of(_verified(folder, optimizer=True))
        saved = newest(folder, say=say)
        if saved is not None:
            return OwnCheckpoint.of(saved)
    tried = ", ".join(str(folder) for folder in folders) or str(home() / "runs")
    raise UserError(f"no checkpoint to start from in {tried}; train one first: `ascendchat base --run NAME`")


def _verified(folder: Path, *, optimizer: bool) -> Checkpoint:
    """The checkpoint in a folder that --start names."""
    try:
        return verify(folder, optimizer=optimizer)
    except Damaged as damage:
        raise UserError(f"{damage}; name another checkpoint with --start") from None


def _runs() -> list[str]:
    """Runs with a base model, the newest first."""
    saved = (home() / "runs").glob("*/base/latest")
    return [path.parent.parent.name for path in sorted(saved, key=lambda path: -path.stat().st_mtime)]


def only_weights(read: Callable[[Shard], Tensor]) -> Callable[[Shard], Tensor]:
    """Weights from the checkpoint, moments from zero."""
    return lambda shard: read(shard) if shard.kind == "weight" else torch.zeros(shard.stop - shard.start)


def from_checkpoint(config: _Config, here: Context, stage: StageName) -> InitialModel[_Config]:
    """Our own GPT of a stage before `stage`; InitialModel.load_weights reads its weights into the optimizer."""
    if config.learning_rate is not None:
        raise UserError("--learning-rate is of Hugging Face models; ours have one per kind of weight: --lr-multiplier")
    source = initial_checkpoint(config, stage, here.say)
    shape, folder = source.shape, Path(config.tokenizer or source.tokenizer_folder).resolve()
    config = replace(config, tokenizer=str(folder))
    tokenizer = source.load_tokenizer(folder)
    if config.max_seq_len:
        shape = Shape.from_dict({**shape.to_dict(), "seq_len": config.max_seq_len})

    def add_files(run: Path) -> None:
        tokenizer.save(run / "tokenizer")

    train_model = build(config, shape, here, packaged=False)  # log-probabilities of two policies are compared
    return InitialModel(
        train_model, tokenizer, source, config, source.name, add_files, source.settings.get("data") or ()
    )


# ---- a Hugging Face model ----------------------------------------------------------------------


def from_hf(config: HFTrainConfig, here: Context, lora: LoraSettings | None = None) -> TrainableModel | None:
    """The Hugging Face model that --start names, or that a run of ours has trained, on its device; None where --start
    names something else. With `lora` it is frozen and gets adapters."""
    source = hf_source(config, here)
    if source is None:
        return None
    finetune = config if isinstance(config, FinetuneConfig) else None
    own = OWN_RATES if isinstance(config, OwnModelConfig) else () if finetune and finetune.muon else ("matrix_lr",)
    for flag in flags_set(config, own):
        raise UserError(f"{flag} is of our own models; here --learning-rate is that of all")
    if lora is not None and isinstance(source, HFCheckpoint) and finetune and finetune.output_dir:
        raise UserError(
            f"the adapters would be for {source.folder}, a run of ours, which peft cannot open: leave out "
            "--output-dir, and export the merged model afterwards: ascendchat export --run NAME --out DIR"
        )
    refuse_too_large(source.config_folder, config, here)
    if config.fp8:
        here.say("--fp8 is ignored: it is for our own models")
    layout = layout_of(config)
    return open_for_training(
        source,
        here,
        seq_len=config.max_seq_len or source.state.get("shape", {}).get("seq_len") or ROW,
        tokenizer=config.tokenizer,
        trial=check_engine,
        lora=lora,
        bits=layout.bits,
        seed=config.seed,
        checkpoint_activations=config.activation_checkpointing,
        shard=layout.shard,
        offload=layout.offload,
    )


def hf_source(config: HFTrainConfig, here: Context) -> HFFolder | HFCheckpoint | None:
    """The files of that model, unread; None where --start names something else."""
    named = config.start
    if named and (files := files_at(named)):
        if isinstance(files, OwnExport):
            files.refuse_training()
        return files
    path, saved = Path(named).expanduser(), None
    if "/" in named and not path.exists():
        raise UserError(f"there is no file or folder {named}")
    if named and (path / "manifest.json").is_file():
        saved = _verified(path, optimizer=False)
    elif named and checkpoints(path):
        saved = newest(path, optimizer=False, say=here.say)
    elif named and "/" in named:
        return None
    elif named or config.run:
        saved = newest(run_folder(named or config.run, "hf"), optimizer=False, say=here.say)
    source = source_of(saved) if saved else None
    return source if isinstance(source, HFCheckpoint) else None


def with_learner(opened: TrainableModel, config: _Config, here: Context, name: str) -> InitialModel[_Config]:
    """The Hugging Face model as training by RL or on pairs takes it."""
    train_model = learner_of(opened, config, here)
    return InitialModel(train_model, opened.tokenizer, opened.source, config, name, opened.add_files)


def learner_of(opened: TrainableModel, config: HFTrainConfig, here: Context) -> TrainModel:
    """The model with the attention kernel that runs here."""
    device = here.device
    kernel, why = choose(device.type, device.dtype, opened.model.shape.head_dim, config.attention)
    here.say(why)
    train_model = TrainModel(opened.model, kernel, device, here.place, by_document=config.attend == "document")
    say_package(train_model, here)
    return train_model


def refuse_too_large(folder: Path, config: HFTrainConfig, here: Context) -> None:
    """Refuse, before any weight is read, a model that cannot be trained here; the error says what would fit."""
    path = folder / "config.json"
    values: dict[str, Any] = read_json(path) if path.is_file() else {}
    if values.get("model_type") not in FAMILIES:  # the type of a GGUF file is known when it is open
        return
    longest = int(values.get("max_position_embeddings") or ROW)
    counted = from_config(values, min(config.max_seq_len or ROW, longest))
    most_rows(
        counted, here.device.chip, here.world.size, config.activation_checkpointing, **layout_of(config)._asdict()
    )


def check_output(named: str, saved: Checkpoint | None, steps: int) -> None:
    """Refuse, before a run trains, an output folder that is not free; that of a finished run holds its model."""
    if named and not (saved and saved.step >= steps):
        check_free(Path(named).expanduser())


def learning_rate(shape: HFShape, given: float | None) -> float:
    """The rate for all weights of a Hugging Face model. For policy gradients small models bear ten times more."""
    return given or RATES[shape.total_parameters >= LARGE]


class WeightLayout(NamedTuple):
    """Trained and frozen weights of a Hugging Face model, and the devices that hold them: sizes/hf.py counts by it."""

    lora_rank: int = 0  # of the adapters; 0: all weights are trained
    bits: int | None = None  # of the frozen base; None: the dtype of the run
    shard: int = 0  # devices that hold one copy together; 0: every device holds all
    offload: bool = False  # to the memory of the host


def layout_of(config: HFTrainConfig) -> WeightLayout:
    """The layout that the flags of `finetune` ask for; `rl` trains whole models."""
    if not isinstance(config, FinetuneConfig):
        return WeightLayout()
    rank = (config.lora_rank or LoraSettings.rank) if config.lora else 0
    return WeightLayout(rank, config.bits, config.shard, config.offload)


def most_rows(counted: HFModel, chip: Chip, devices: int, checkpointing: bool, *, beside: int = 0, **how: Any) -> int:
    """The largest device batch that fits, by sizes/hf.py. `beside`: bytes for something else; `how`: a WeightLayout."""
    room = usable(chip) - beside  # bytes

    def needed(rows: int) -> int:
        return sum(finetuning(counted, chip, devices, rows, checkpointing, **how).values())

    most = largest_rows(lambda rows: needed(rows) <= room)
    if not most:
        advice = "" if how.get("lora_rank") else ", or train adapters (finetune --lora)"
        if how.get("lora_rank") and not how.get("bits") and not how.get("shard") and packing_saves(chip):
            advice = ", or hold the base in 4 bits (finetune --lora --bits 4)"
        raise UserError(
            f"not even one row of {counted.seq_len} tokens of this model fits {chip.name} ({needed(1) / 2**30:.1f} GiB "
            f"of {room / 2**30:.1f}); give a smaller --max-seq-len, --activation-checkpointing, more devices that "
            f"share the weights out (finetune --shard N){advice}"
        )
    return most
