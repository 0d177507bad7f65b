"""What a run starts from: `--start RUN` or `--start FOLDER`, a checkpoint of ours or a model of Hugging Face's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

from ascendchat.checkpoint import Checkpoint, Damaged, Shard, newest, verify
from ascendchat.chips import Chip
from ascendchat.config.train import STAGES, ChatTrainConfig, StageName, StepConfig
from ascendchat.data.tokenizer.tokenizer import Tokenizer
from ascendchat.engine.open import try_engine
from ascendchat.errors import UserError, home
from ascendchat.models.causal_lm import CausalLM
from ascendchat.models.export import check_free, describe
from ascendchat.models.folder import Folder, OpenedFolder, find, read_json, refuse_ours
from ascendchat.models.fused import fuse
from ascendchat.models.lora import LoraSettings, add_lora, has_experts, write_adapter
from ascendchat.models.open import open_tokenizer, settings_of, tokenizer_folder
from ascendchat.models.quantize import pack
from ascendchat.models.shape import HFShape
from ascendchat.models.tokenizer import HFTokenizer
from ascendchat.models.trained import BESIDE, HFSource, is_trained_hf, open_hf, open_trained, write_base
from ascendchat.nn.attention import choose
from ascendchat.parallel.context import Context
from ascendchat.runs.run import checkpoints, run_folder
from ascendchat.sizes.batch import largest_rows
from ascendchat.sizes.hf import FAMILIES, HFModel, finetuning, from_config, packing_saves
from ascendchat.sizes.memory import usable
from ascendchat.sizes.shape import Shape
from ascendchat.train.model import TrainModel, build, say_package

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def starting_point(config: ChatTrainConfig, stage: StageName, say: Callable[[str], None]) -> Checkpoint:
    """The checkpoint to start from: a folder, a run (its last earlier stage), or this run's own earlier stage."""
    named = config.start
    if named and (Path(named) / "config.json").is_file():
        refuse_ours(Folder(Path(named)))
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
            try:
                return verify(folder)
            except Damaged as damage:
                raise UserError(f"{damage}; name another checkpoint with --start") from None
        found = newest(folder, say=say)
        if found is not None:
            return found
    tried = ", ".join(str(folder) for folder in folders) or str(home() / "runs")
    raise UserError(f"no checkpoint to start from in {tried}; train one first: `ascendchat base --run NAME`")


def _runs() -> list[str]:
    """Runs with a base model, the newest first."""
    saved = (home() / "runs").glob("*/base/latest")
    return [path.parent.parent.name for path in sorted(saved, key=lambda path: -path.stat().st_mtime)]


def only_weights(read: Callable[[Shard], Tensor]) -> Callable[[Shard], Tensor]:
    """Weights from the checkpoint, moments from zero."""
    return lambda shard: read(shard) if shard.kind == "weight" else torch.zeros(shard.stop - shard.start)


# The model that `ascendchat rl` and learning from pairs start from, ready to be trained: Hugging Face's or ours.
#
# begin = begin_with_theirs(config, here) or begin_with_ours(config, here, "rl")
# begin.learner, begin.tokenizer, begin.origin

_Config = TypeVar("_Config", bound=ChatTrainConfig)


@dataclass(frozen=True)
class Beginning(Generic[_Config]):
    """The model that a run starts from, ready to be trained."""

    learner: TrainModel[Any]
    tokenizer: Tokenizer
    origin: Any  # Checkpoint | HFSource
    config: _Config
    run: str  # its name, where nobody says
    add_files: Callable[[Path], None]
    learnt_from: Sequence[str] = ()


def begin_with_ours(config: _Config, here: Context, stage: StageName) -> Beginning[_Config]:
    """A checkpoint of a stage before `stage`; the weights are read by whoever makes the optimizer."""
    if getattr(config, "learning_rate", None) is not None:
        raise UserError("--learning-rate is of Hugging Face models; ours have one per kind of weight: --lr-multiplier")
    origin = starting_point(config, stage, here.say)
    shape = Shape.from_dict(origin.state["shape"])
    tokens = tokenizer_folder(config.tokenizer, origin).resolve()
    config = replace(config, tokenizer=str(tokens))
    tokenizer = open_tokenizer(tokens, origin, shape)
    if config.max_seq_len:
        shape = Shape.from_dict({**shape.to_dict(), "seq_len": config.max_seq_len})

    def add_files(run: Path) -> None:
        tokenizer.save(run / "tokenizer")

    learnt_from = settings_of(origin).get("data") or ()
    name = origin.folder.parent.parent.name
    learner = build(config, shape, here, packaged=False)  # log-probabilities of two policies are compared
    return Beginning(learner, tokenizer, origin, config, name, add_files, learnt_from)


def begin_with_theirs(config: _Config, here: Context) -> Beginning[_Config] | None:
    """A Hugging Face model; None where --start names no such."""
    theirs = open_start(config, here)
    if theirs is None:
        return None
    device, model = here.device, theirs.model
    kernel, why = choose(device.type, device.dtype, model.shape.head_dim, config.attention)
    here.say(why)
    learner = TrainModel(model, kernel, device, here.place, by_document=config.attend == "document")
    say_package(learner, here)
    return Beginning(learner, theirs.tokenizer, theirs.origin, config, theirs.name, theirs.add_files)


# Training that starts from a Hugging Face model: `ascendchat finetune`, `ascendchat rl --model Qwen2.5-0.5B-Instruct`.
#
#     theirs = open_start(config, here)                   # None: what --start names is a checkpoint of ours
#     theirs.model, theirs.tokenizer, theirs.origin
#
# All weights are trained, or adapters (models/lora.py). Checkpoints are ours, with the weights under the names of
# transformers, or of peft; beside them lies what else makes the model a Hugging Face folder again (`ascendchat
# export`).

ROW = 2048  # tokens of a row where nobody says
LARGE = 2e9  # parameters from which the learning rate is the smaller one
RATES = 1e-5, 1e-6
OURS = "matrix_lr", "embedding_lr", "unembedding_lr", "scalar_lr"  # rates of what our own models are made of


@dataclass(frozen=True)
class Theirs:
    """A model to start from, on its device."""

    model: CausalLM
    mesh: DeviceMesh | None  # of the devices that share its weights out (nn/sharded.py)
    tokenizer: HFTokenizer
    origin: HFSource | Checkpoint
    lora: LoraSettings | None = None  # the adapters that it was given

    @property
    def name(self) -> str:
        """Of the run, where nobody says."""
        origin = self.origin
        return origin.model.name if isinstance(origin, HFSource) else origin.folder.parent.parent.name

    def add_files(self, run: Path) -> None:
        """What the model is besides its weights; without it the checkpoints are lost."""
        describe(self.model, self.tokenizer, run / BESIDE)
        if self.lora:
            write_adapter(self.model, str(self.origin.folder.absolute()), run / BESIDE)
            write_base(self.origin, run / BESIDE)


def open_start(config: ChatTrainConfig, here: Context, lora: LoraSettings | None = None) -> Theirs | None:
    """The model that --start names, if it is one of Hugging Face's: a folder, a GGUF file, or a checkpoint or run of
    ours that was trained from one. With `lora` it is frozen and gets adapters."""
    seq_len, dtype = config.max_seq_len, here.device.dtype
    found = start_of(config, here)
    if found is None:
        return None
    for name in OURS:
        if getattr(config, name) is not None and not (name == "matrix_lr" and getattr(config, "muon", False)):
            raise UserError(f"--{name.replace('_', '-')} is of our own models; here --learning-rate is that of all")
    if isinstance(found, Checkpoint):
        if lora is not None and getattr(config, "output_dir", None):
            raise UserError(
                f"the adapters would be for {found.folder}, a run of ours, which peft cannot open: leave out "
                "--output-dir, and export the merged model afterwards: ascendchat export --run NAME --out DIR"
            )
        refuse_too_large(found.folder.parent / BESIDE, config, here)
        opened = open_trained(found, dtype, seq_len)
        return Theirs(*_on_device(opened, config, here, lora), opened.tokenizer, found, lora)
    refuse_too_large(found.path, config, here)
    opened = open_hf(found, dtype, seq_len or ROW, config.tokenizer)
    try_engine(opened)
    return Theirs(*_on_device(opened, config, here, lora), opened.tokenizer, HFSource(found), lora)


def start_of(config: ChatTrainConfig, here: Context) -> Folder | Checkpoint | None:
    """Where that model is; None where --start names something else."""
    named = config.start
    if named and (folder := find(named)):
        return folder
    path, saved = Path(named).expanduser(), None
    if "/" in named and not path.exists():
        raise UserError(f"there is no file or folder {named}")
    if named and (path / "manifest.json").is_file():
        try:
            saved = verify(path, optimizer=False)
        except Damaged as damage:
            raise UserError(f"{damage}; name another checkpoint with --start") from None
    elif named and checkpoints(path):
        saved = newest(path, optimizer=False, say=here.say)
    elif named and "/" in named:
        return None
    elif named or config.run:
        saved = newest(run_folder(named or config.run, "hf"), optimizer=False, say=here.say)
    return saved if saved and is_trained_hf(saved) else None


def refuse_too_large(folder: Path, config: StepConfig, here: Context) -> None:
    """Before any weight is read: a model that cannot be trained here is a UserError that says what would fit."""
    path = folder / "config.json"
    values: dict[str, Any] = read_json(path) if path.is_file() else {}
    if values.get("model_type") not in FAMILIES:  # that of a GGUF file is known when it is open
        return
    longest = int(values.get("max_position_embeddings") or ROW)
    counted = from_config(values, min(getattr(config, "max_seq_len", None) or ROW, longest))
    most_rows(counted, here.device.chip, here.world.size, config.activation_checkpointing, **kept(config))


def _on_device(
    opened: OpenedFolder, config: StepConfig, here: Context, lora: LoraSettings | None
) -> tuple[CausalLM, DeviceMesh | None]:
    model = opened.model.to_compute(here.device.dtype)
    model.train()  # it comes ready to answer, and then recomputes no activations
    if getattr(config, "bits", None):
        here.say(pack(model, here.place))
    if lora:
        names = add_lora(model, lora, config.seed)
        if has_experts(model):
            here.say(f"adapters on {', '.join(names)}; experts and routers stay as they are")
    if names := fuse(model, here.device.operators(), here.place):
        here.say(f"fused operators: {', '.join(names)}")
    if config.activation_checkpointing:
        model.checkpoint_activations()
    if config.fp8:
        here.say("--fp8 is ignored: it is for our own models")
    together = getattr(config, "shard", 0)
    model.compiles_layers = not (names or together or getattr(config, "bits", None))
    if not together:
        return model.to(here.place), None
    from ascendchat.nn.sharded import mesh_over, share_out_weights

    mesh = mesh_over(here.place, together)
    offload = bool(getattr(config, "offload", False))
    share_out_weights(model, model.inner.base_model.layers, mesh, here.device.dtype, offload=offload)
    copies = here.world.size // together
    here.say(f"{together} devices share the weights out" + (f", in {copies} copies" if copies > 1 else ""))
    return model, mesh


def check_output(named: str, saved: Checkpoint | None, steps: int) -> None:
    """Before a run trains: the folder that will receive its model must be free. That of a finished run holds it."""
    if named and not (saved and saved.step >= steps):
        check_free(Path(named).expanduser())


def learning_rate(shape: HFShape, asked: float | None) -> float:
    """Of all weights. As measured by others for policy gradients: small models bear ten times more."""
    return asked or RATES[shape.total_parameters >= LARGE]


def kept(config: StepConfig) -> dict[str, Any]:
    """What is trained, and where it is kept, as sizes/hf.py counts it."""
    rank = (getattr(config, "lora_rank", None) or LoraSettings.rank) if getattr(config, "lora", False) else 0
    how = {"lora_rank": rank, "bits": getattr(config, "bits", None)}
    return {**how, "shard": getattr(config, "shard", 0), "offload": bool(getattr(config, "offload", False))}


def most_rows(counted: HFModel, chip: Chip, devices: int, checkpointing: bool, *, beside: int = 0, **how: Any) -> int:
    """The largest device batch that fits beside so many bytes of something else, by sizes/hf.py; `how`: see `kept`."""
    have = usable(chip) - beside

    def needed(rows: int) -> int:
        return sum(finetuning(counted, chip, devices, rows, checkpointing, **how).values())

    most = largest_rows(lambda rows: needed(rows) <= have)
    if not most:
        other = "" if how.get("lora_rank") else ", or train adapters (finetune --lora)"
        if how.get("lora_rank") and not how.get("bits") and not how.get("shard") and packing_saves(chip):
            other = ", or hold the base in 4 bits (finetune --lora --bits 4)"
        raise UserError(
            f"not even one row of {counted.seq_len} tokens of this model fits {chip.name} ({needed(1) / 2**30:.1f} GiB "
            f"of {have / 2**30:.1f}); give a smaller --max-seq-len, --activation-checkpointing, more devices that "
            f"share the weights out (finetune --shard N){other}"
        )
    return most
