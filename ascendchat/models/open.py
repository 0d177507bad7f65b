"""Opens a trained model by name, to generate and evaluate with it or to go on training it.

    source = find_source(run="demo", stage="sft")          # also named="Qwen/Qwen2.5-0.5B-Instruct": a ModelSource
    opened = open_model(source, here)                      # opened.model, opened.tokenizer, opened.kernel
    opened = open_for_training(source, here, lora=...)     # a Hugging Face model; ours are built by train/model.py

Four kinds of places hold a model; `files_at` and `source_of` alone tell them apart:

    HFFolder        a folder of Hugging Face, a GGUF file, or OWNER/NAME that was fetched
    HFCheckpoint    a run that was trained from one of these
    OwnCheckpoint   a run of our own GPT; also what `import nanochat` makes
    OwnExport       a folder that `ascendchat export` wrote of such a run
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import torch
from torch import Tensor

from ascendchat.checkpoint import Checkpoint, Damaged, Unfit, check_fit, newest, read_file, verify
from ascendchat.config.train import STAGES
from ascendchat.data.tokenizer.tokenizer import Tokenizer
from ascendchat.data.verify import MANIFEST
from ascendchat.errors import UserError, home
from ascendchat.models.causal_lm import CausalLM
from ascendchat.models.folder import HFFolder, LoadedModel, describe, find, read_json
from ascendchat.models.fused import fuse
from ascendchat.models.hf_checkpoint import CONFIG_FOLDER, HFCheckpoint, write_base
from ascendchat.models.lora import LoraSettings, add_lora, has_experts, write_adapter
from ascendchat.models.quantize import pack
from ascendchat.models.tokenizer import HFTokenizer
from ascendchat.nn.attention import Attention, choose
from ascendchat.nn.gpt import GPT
from ascendchat.nn.model import LanguageModel
from ascendchat.parallel.context import Context
from ascendchat.runs.run import NAME, named_folder
from ascendchat.sizes.shape import Shape

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Trial = Callable[[LoadedModel], None]  # refuses a model that cannot be used as the caller wants to


class _OwnSource:
    """The part that is common to checkpoints and exports of our own GPT."""

    folder: Path
    state: dict[str, Any]

    @property
    def shape(self) -> Shape:
        """The sizes of the model."""
        if "shape" not in self.state:
            raise UserError(f"{self.folder / 'state.json'} names no model shape; name another --checkpoint")
        return Shape.from_dict(self.state["shape"])

    def load_tokenizer(self, path: Path) -> Tokenizer:
        """The tokenizer in a folder; another one than the model was trained with is a UserError, not gibberish."""
        if not (path / MANIFEST).exists():  # to train one is no help here
            raise UserError(
                f"no tokenizer in {path}; name the folder of the one that {self.folder} was trained with: "
                f"--tokenizer FOLDER"
            )
        tokenizer = Tokenizer.load(path)
        if tokenizer.fingerprint != self.state.get("tokenizer") or tokenizer.vocab_size != self.shape.vocab:
            raise UserError(
                f"{self.folder} was not trained with the tokenizer in {path}; give the one it was trained with: "
                f"--tokenizer FOLDER"
            )
        return tokenizer


class OwnCheckpoint(_OwnSource, Checkpoint):
    """A checkpoint of our own GPT."""

    @classmethod
    def of(cls, saved: Checkpoint) -> OwnCheckpoint:
        """A checkpoint that is known to hold our GPT."""
        return cls(saved.folder, saved.state)

    @property
    def tokenizer_folder(self) -> Path:
        """The copy beside the checkpoints, else the folder that training read if it is there, else the default one."""
        recorded = str(self.settings.get("tokenizer") or "")
        folders = [self.folder.parent / "tokenizer", *([Path(recorded)] if recorded else [])]
        return next((folder for folder in folders if folder.is_dir()), home() / "tokenizer")


class OwnExport(_OwnSource):
    """A folder that `ascendchat export` wrote of our own GPT; its config.json has the state of the checkpoint."""

    def __init__(self, files: HFFolder) -> None:
        self.folder = self.tokenizer_folder = files.path
        self.name, self.results_folder, self.fingerprint = files.name, files.results_folder, files.fingerprint
        self.state, self.settings = read_json(files.path / "config.json"), dict[str, Any]()
        self.step = int(self.state.get("step") or 0)

    def refuse_training(self) -> NoReturn:
        """Raise a UserError: training needs a checkpoint."""
        raise UserError(
            f"{self.folder} is an exported model of our own: chat, serve and eval open it, training does not; "
            "train its run instead (--run NAME, or --start FOLDER of a checkpoint)"
        )

    def model(self) -> dict[str, Tensor]:
        """All weights by name."""
        path = self.folder / "model.safetensors"
        try:
            return read_file(path)
        except (Damaged, OSError) as error:
            raise UserError(f"{path} cannot be read ({error}); export the model again") from None


ModelSource: TypeAlias = HFFolder | HFCheckpoint | OwnCheckpoint | OwnExport  # each has folder, name, state, settings,
# step, fingerprint, tokenizer_folder, results_folder, and a way to read its weights


def source_of(saved: Checkpoint) -> OwnCheckpoint | HFCheckpoint:
    """A checkpoint as the kind of source that it is."""
    return HFCheckpoint(saved.folder, saved.state) if HFCheckpoint.holds(saved) else OwnCheckpoint.of(saved)


def files_at(named: str) -> HFFolder | OwnExport | None:
    """The model folder or GGUF file that a path or OWNER/NAME names; None where it names a run or a checkpoint."""
    files = find(named)
    return OwnExport(files) if files and files.exported else files


def find_source(run: str, stage: str | None, named: str, say: Callable[[str], None]) -> ModelSource:
    """The model that is named; else the newest checkpoint of the run and stage; else the one that was written last."""
    if named and (files := files_at(named)):
        return files
    folder = named_folder(run, stage, named)
    if named and NAME.fullmatch(folder.name):
        try:
            return source_of(verify(folder, optimizer=False))
        except Damaged as damage:
            raise UserError(f"{damage}; name another checkpoint: --checkpoint {folder.parent}") from None
    saved = newest(folder, optimizer=False, say=say)
    if saved is None:
        raise UserError(f"no checkpoint in {folder}; train one first, or name another: --run, --stage or --checkpoint")
    return source_of(saved)


# ---- to generate and evaluate ------------------------------------------------------------------


@dataclass(frozen=True)
class OpenedModel:
    """A model on its device, ready to generate and to be evaluated."""

    model: LanguageModel
    kernel: Attention
    tokenizer: Tokenizer
    source: ModelSource
    why_kernel: str  # the sentence that says why this kernel was chosen
    here: Context

    @property
    def chats(self) -> bool:
        """True if it was trained on conversations."""
        if isinstance(self.tokenizer, HFTokenizer):
            return self.tokenizer.template is not None
        facts = STAGES.get(self.source.state.get("stage", ""))
        return bool(facts and facts.chats)

    @property
    def identity(self) -> dict[str, Any]:
        """Which weights these are, for results."""
        source = self.source
        return {"checkpoint": str(source.folder), "model": source.fingerprint, "step": source.step}

    @property
    def machine(self) -> dict[str, Any]:
        """Chip, processes, dtype and kernel that it runs on, for results."""
        dtype = str(self.here.device.dtype).removeprefix("torch.")
        here = {"chip": self.here.device.chip.name, "world": self.here.world.size}
        return {**here, "dtype": dtype, "attention": self.kernel.name}


def open_model(
    source: ModelSource,
    here: Context,
    *,
    seq_len: int | None = None,
    tokenizer: str = "",
    attention: str | None = None,
    trial: Trial | None = None,
) -> OpenedModel:
    """Load a model in the dtype of the device. `seq_len`: tokens of a row of a Hugging Face model; `tokenizer`: another
    folder than the model's own; `trial`: for a Hugging Face model that no run of ours has trained."""
    device, text = here.device, None
    model: LanguageModel
    if isinstance(source, OwnCheckpoint | OwnExport):
        text = source.load_tokenizer(Path(tokenizer or source.tokenizer_folder))
        model = _load_own(source, here)
    else:
        loaded = source.load(device.dtype, seq_len, tokenizer)
        if trial is not None and isinstance(source, HFFolder):
            trial(loaded)
        model, text = loaded.model.requires_grad_(False).eval().to(here.place), loaded.tokenizer
        fuse(loaded.model, device.operators(), here.place)
    kernel, why = choose(device.type, device.dtype, model.shape.head_dim, attention, decodes=True)
    return OpenedModel(model, kernel, text, source, why, here)


def _load_own(source: OwnCheckpoint | OwnExport, here: Context) -> GPT:
    """Our GPT with its weights, on the device."""
    device = here.device
    with torch.device("meta"):  # no memory yet: weights go from the file to the device, without a copy in between
        model = GPT(source.shape, device.operators()).requires_grad_(False).eval().to_compute(device.dtype)
    own, weights = model.state_dict(), source.model()
    try:
        check_fit(own, weights, finite=False)
    except Unfit as unfit:
        if unfit.kind in ("missing", "unknown"):
            raise UserError(
                f"{source.folder} was written by another version of ascendchat: "
                f"{'unknown' if unfit.kind == 'unknown' else 'missing'} weight {unfit.weight}; train it again, or name "
                "another --checkpoint"
            ) from None
        raise UserError(
            f"{source.folder}: the weight {unfit.weight} does not fit its own state.json; name another --checkpoint"
        ) from None
    on_device = {name: weights[name].to(here.place, tensor.dtype, copy=True) for name, tensor in own.items()}
    model.load_state_dict(on_device, assign=True)
    return model


# ---- to train ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainableModel:
    """A Hugging Face model on its device, ready to be trained."""

    model: CausalLM
    mesh: DeviceMesh | None  # of the devices that share its weights out (nn/sharded.py)
    tokenizer: HFTokenizer
    source: HFFolder | HFCheckpoint
    lora: LoraSettings | None = None  # settings of its adapters; None: all weights are trained

    def add_files(self, run: Path) -> None:
        """Write all of the model but its weights beside the checkpoints of a run, which are useless without it."""
        folder = run / CONFIG_FOLDER
        describe(self.model, self.tokenizer, folder)
        if self.lora:
            write_adapter(self.model, str(self.source.folder.absolute()), folder)
            write_base(self.source, folder)


def open_for_training(
    source: HFFolder | HFCheckpoint,
    here: Context,
    *,
    seq_len: int,
    tokenizer: str = "",
    trial: Trial | None = None,
    lora: LoraSettings | None = None,
    bits: int | None = None,
    seed: int = 0,
    checkpoint_activations: bool = False,
    shard: int = 0,
    offload: bool = False,
) -> TrainableModel:
    """Load a Hugging Face model, and prepare it in this order: pack the base, add adapters, fuse operators, move it to
    the device. `bits`: of the packed base; `shard`: devices that share the weights out; `offload`: on their hosts."""
    device, place, say = here.device, here.place, here.say
    loaded = source.load(device.dtype, seq_len, tokenizer)
    if trial is not None and isinstance(source, HFFolder):
        trial(loaded)
    model = loaded.model.to_compute(device.dtype)
    model.train()  # it comes in eval mode, which recomputes no activations
    if bits:
        say(pack(model, place))
    if lora:
        names = add_lora(model, lora, seed)
        if has_experts(model):
            say(f"adapters on {', '.join(names)}; experts and routers stay as they are")
    if names := fuse(model, device.operators(), place):
        say(f"fused operators: {', '.join(names)}")
    if checkpoint_activations:
        model.checkpoint_activations()
    model.compiles_layers = not (names or shard or bits)
    mesh = None
    if shard:
        from ascendchat.nn.sharded import mesh_over, share_out_weights

        mesh = mesh_over(place, shard)
        share_out_weights(model, model.inner.base_model.layers, mesh, device.dtype, offload=offload)
        copies = here.world.size // shard
        say(f"{shard} devices share the weights out" + (f", in {copies} copies" if copies > 1 else ""))
    else:
        model = model.to(place)
    return TrainableModel(model, mesh, loaded.tokenizer, source, lora)
