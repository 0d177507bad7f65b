"""`ascendchat import nanochat DIR [--run NAME]`: checkpoints of nanochat, or of its NPU ports, as a run of ours.

    DIR/base_checkpoints/d18/model_013351.pt, meta_013351.json      -> runs/d18/base/step_013351
    DIR/mid_checkpoints, chatsft_checkpoints, chatrl_checkpoints    -> runs/d18/mid, sft, rl
    DIR/tokenizer/tokenizer.pkl                                     -> the folder `tokenizer` beside each of them

Every version of nanochat is our GPT (nn/gpt.py) with other constants (FORMULAS in sizes/shape.py) and without some of
its parts, whose weights are then zero. The weights in a file show which version wrote it. The files are pickles:
weights are read as tensors only, the tokenizer by an unpickler of our own; nothing in them is executed.
"""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from ascendchat.checkpoint import Writer
from ascendchat.config.generate import ImportNanochatConfig
from ascendchat.data.tokenizer.bpe import merges_of
from ascendchat.data.tokenizer.tokenizer import Tokenizer
from ascendchat.errors import UserError
from ascendchat.nn.gpt import GPT
from ascendchat.runs.run import run_folder
from ascendchat.sizes.shape import SMEAR_GATE_CHANNELS, VOCAB_MULTIPLE, Shape, round_up

STAGE_OF = {
    "base_checkpoints": "base",
    "mid_checkpoints": "mid",
    "chatsft_checkpoints": "sft",
    "chatrl_checkpoints": "rl",
}
FILE = re.compile(r"model_(\d+)\.pt")
SIZES = ("sequence_len", "vocab_size", "n_layer", "n_head", "n_kv_head", "n_embd")
PREFIXES = ("_orig_mod.", "module.")  # of weights of compiled and of wrapped models


class _Source(NamedTuple):
    """One checkpoint of nanochat."""

    stage: str
    file: Path

    @property
    def step(self) -> int:
        return int(self.file.stem.removeprefix("model_"))

    @property
    def tag(self) -> str:
        return self.file.parent.name

    @property
    def tokenizer(self) -> Path:
        return self.file.parents[2] / "tokenizer"


def run(config: ImportNanochatConfig) -> int:
    """Run `ascendchat import nanochat`."""
    if len(config.paths) != 1:
        raise UserError("name one folder of nanochat: ascendchat import nanochat ~/.cache/nanochat")
    checkpoints = sources(Path(config.paths[0]).expanduser(), config.model_tag, config.step)
    name = config.run or checkpoints[0].tag
    folders = [run_folder(name, source.stage) for source in checkpoints]
    for folder in folders:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"{folder} is there already; choose another name: --run NAME")
    tokenizer = read_tokenizer((Path(config.tokenizer or checkpoints[0].tokenizer)).expanduser() / "tokenizer.pkl")
    draft = folders[0].parent.with_name(f".{name}.importing")  # a killed import may have left its draft here
    shutil.rmtree(draft, ignore_errors=True)
    try:
        lines = [write(source, tokenizer, config.window_pattern, draft / source.stage) for source in checkpoints]
        for folder, line in zip(folders, lines):  # only now: no stage is visible before all are written
            folder.parent.mkdir(parents=True, exist_ok=True)
            (draft / folder.name).replace(folder)
            print(line.replace(str(draft / folder.name), str(folder)))
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    print(f"next: ascendchat chat --run {name}")
    return 0


# ---- finding the files -------------------------------------------------------------------------


def sources(path: Path, tag: str = "", step: int | None = None) -> list[_Source]:
    """The checkpoints at a path, in the order of their stages."""
    if path.is_file():
        if not FILE.fullmatch(path.name):
            raise UserError(f"{path} is no checkpoint of nanochat: those are called model_013351.pt")
        return [_Source(_stage(path.parent), path.absolute())]
    if not path.is_dir():
        raise UserError(f"there is no folder {path}; name that of nanochat, which holds base_checkpoints")
    path = path.absolute()
    if any(FILE.fullmatch(file.name) for file in path.iterdir()):
        models = [path]
    else:
        kinds = [path] if path.name in STAGE_OF else [path / kind for kind in STAGE_OF if (path / kind).is_dir()]
        models = [model for kind in kinds for model in sorted(kind.iterdir()) if any(model.glob("model_*.pt"))]
    tags = sorted({model.name for model in models})
    if not tags:
        raise UserError(f"{path} holds no checkpoints of nanochat (base_checkpoints/d18/model_013351.pt)")
    if tag not in tags if tag else len(tags) > 1:
        raise UserError(f"{path} holds the models {', '.join(tags)}; name one of them: --model-tag {tags[0]}")
    checkpoints = []
    for model in models:
        files = {_Source("", file).step: file for file in model.iterdir() if FILE.fullmatch(file.name)}
        if model.name == (tag or tags[0]) and (step is None or step in files):
            checkpoints.append(_Source(_stage(model), files[max(files) if step is None else step]))
    if not checkpoints:
        raise UserError(f"{path} holds no model_{step or 0:06d}.pt; leave out --step, or give one that is there")
    return checkpoints


def _stage(model: Path) -> str:
    kind = model.absolute().parent.name
    if kind not in STAGE_OF:
        raise UserError(f"{model} lies in {kind}, which says no stage; put it into one of {', '.join(STAGE_OF)}")
    return STAGE_OF[kind]


# ---- reading and converting --------------------------------------------------------------------


def write(source: _Source, tokenizer: Tokenizer, pattern: str, folder: Path) -> str:
    """Write one checkpoint of ours, and its tokenizer beside it; returns a line about it."""
    weights, config = read_weights(source.file), read_config(source)
    shape = shape_of(source.file, weights, {**config, **({"window_pattern": pattern} if pattern else {})})
    if tokenizer.vocab_size != shape.vocab:
        raise UserError(
            f"{source.file} has {shape.vocab} tokens, its tokenizer {tokenizer.vocab_size}; name the one that it was "
            "trained with: --tokenizer FOLDER"
        )
    try:
        converted = convert(source.file, weights, shape)
    except RuntimeError as error:  # of torch: matrices that do not fit together
        raise UserError(f"{source.file} does not fit its meta file ({error}); copy both from the same place") from None
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder / "tokenizer", f"ascendchat import nanochat {source.file}")
    state = {"stage": source.stage, "shape": shape.to_dict(), "tokenizer": tokenizer.fingerprint}
    writer = Writer(folder)
    writer.save(source.step, model=converted, shards={}, state={**state, "imported": str(source.file)}, last=True)
    writer.wait()
    sizes = f"{shape.depth} layers of {shape.dim}, {shape.total_parameters / 1e6:.1f} M parameters"
    return f"{source.file} -> {folder / f'step_{source.step:06d}'} ({shape.formulas}: {sizes})"


def read_weights(path: Path) -> dict[str, Tensor]:
    """Tensors by name, in float32."""
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        reason = re.sub(r"\s+", " ", str(error).partition("WeightsUnpickler error: ")[2] or "not a pickle of tensors")
        raise UserError(
            f"{path} holds more than tensors, and is not opened; nothing in it was run ({reason[:150].strip()})"
        ) from None
    except (RuntimeError, OSError, EOFError, ValueError, KeyError) as error:
        line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"{path} cannot be read ({line[:150]}); copy it again from where it was trained") from None
    if not isinstance(weights, dict) or not all(isinstance(tensor, Tensor) for tensor in weights.values()):
        raise UserError(f"{path} is no state_dict of a model; import the file model_*.pt")
    return {_bare(str(name)): tensor for name, tensor in weights.items()}


def _bare(name: str) -> str:
    """The name of a weight without the prefixes of wrappers."""
    while prefix := next((known for known in PREFIXES if name.startswith(known)), ""):
        name = name.removeprefix(prefix)
    return name


def read_config(source: _Source) -> dict[str, Any]:
    """The `model_config` of the meta file."""
    path = source.file.with_name(f"meta_{source.file.stem.removeprefix('model_')}.json")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))["model_config"]
        return {**values, **{name: int(values[name]) for name in SIZES}}
    except FileNotFoundError:
        raise UserError(f"{path} is missing, which says the sizes of the model; copy it beside that") from None
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise UserError(f"{path} has no whole model_config ({error!r}); copy it again") from None


def formulas_of(weights: Mapping[str, Tensor]) -> str:
    """The version of nanochat that makes such weights, as FORMULAS names it."""
    gates = [tensor.size(1) for name, tensor in weights.items() if name.endswith("attn.ve_gate.weight")]
    if "smear_lambda" in weights:
        return "nanochat-2026-03-14"
    if gates:
        return "nanochat-2026-03-09" if gates[0] == 12 else "nanochat-2026-01"
    return "nanochat-2026-01" if "resid_lambdas" in weights else "nanochat-2025-10"


def shape_of(path: Path, weights: Mapping[str, Tensor], config: Mapping[str, Any]) -> Shape:
    """The shape of our GPT for these weights."""
    depth, dim, heads = config["n_layer"], config["n_embd"], config["n_head"]
    up, table = (weights.get(name) for name in ("transformer.h.0.mlp.c_fc.weight", "transformer.wte.weight"))
    if up is None or table is None:
        raise UserError(
            f"{path} is no model of nanochat: it lacks transformer.wte or transformer.h.0.mlp.c_fc; import model_*.pt"
        )
    if heads < 1 or dim % heads:
        raise UserError(
            f"{path}: its meta file names {heads} heads for a width of {dim}, which does not fit; copy both again"
        )
    return Shape(
        depth=depth,
        dim=dim,
        heads=heads,
        kv_heads=config["n_kv_head"],
        head_dim=dim // heads,
        mlp_dim=up.size(0),
        vocab=config["vocab_size"],
        padded_vocab=round_up(max(config["vocab_size"], table.size(0)), VOCAB_MULTIPLE),
        seq_len=config["sequence_len"],
        window_pattern=str(config.get("window_pattern") or "L").upper(),
        value_layers=tuple(i for i in range(depth) if f"value_embeds.{i}.weight" in weights),
        formulas=formulas_of(weights),
    )


def convert(path: Path, weights: Mapping[str, Tensor], shape: Shape) -> dict[str, Tensor]:
    """The weights of our GPT. An unused weight belongs to an architecture that we do not know, which is refused."""
    left = dict(weights)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in GPT(shape).state_dict().items()}

    def take(name: str) -> Tensor:
        if name not in left:
            raise UserError(f"{path} lacks the weight {name}; copy the file again from where it was trained")
        return left.pop(name).float()

    def table(name: str) -> Tensor:
        rows = take(name)
        return torch.cat((rows, rows.new_zeros(shape.padded_vocab - rows.size(0), rows.size(1))))

    def rotated(name: str) -> Tensor:
        """nanochat rotates queries and keys in the other direction, which is ours with the halves of a head swapped."""
        return take(name).unflatten(0, (-1, 2, shape.head_dim // 2)).flip(1).flatten(0, 2)

    made = {"embed.weight": table("transformer.wte.weight"), "head": table("lm_head.weight")}
    for i in range(shape.depth):
        there, here = f"transformer.h.{i}.", f"blocks.{i}."
        parts = [rotated(f"{there}attn.{part}.weight") for part in ("c_q", "c_k")] + [take(f"{there}attn.c_v.weight")]
        made[here + "qkv"] = torch.cat(parts).reshape(shapes[here + "qkv"])
        made[here + "shift"] = torch.zeros(shapes[here + "shift"])
        made[here + "out"] = take(there + "attn.c_proj.weight")
        made[here + "up"] = take(there + "mlp.c_fc.weight")
        made[here + "down"] = take(there + "mlp.c_proj.weight").t().contiguous()
        if i in shape.value_layers:
            made[here + "gate"] = take(there + "attn.ve_gate.weight")
            made[f"values.{i}.weight"] = table(f"value_embeds.{i}.weight")
    plain = "resid_lambdas" not in left  # the model of 2025: a plain residual stream
    made["residual"] = torch.ones(shape.depth) if plain else take("resid_lambdas")
    made["first"] = torch.zeros(shape.depth) if plain else take("x0_lambdas")
    smears = "smear_lambda" in left
    made["smear_gate"] = take("smear_gate.weight") if smears else torch.zeros(1, min(SMEAR_GATE_CHANNELS, shape.dim))
    made["smear"] = take("smear_lambda") if smears else torch.zeros(1)
    made["backout"] = take("backout_lambda") if smears else torch.zeros(1)
    unknown = sorted(name for name in left if name not in ("cos", "sin"))
    if unknown:
        raise UserError(
            f"{path} has {unknown[0]}, which no version of nanochat has that we know: its model is another one "
            "and cannot be imported"
        )
    wrong = [name for name, size in shapes.items() if made[name].shape != size]
    if wrong:
        raise RuntimeError(f"{wrong[0]} is {tuple(made[wrong[0]].shape)} instead of {tuple(shapes[wrong[0]])}")
    return made


# Reading nanochat's tokenizer.pkl.
#
#     tokenizer = read_tokenizer(Path("nanochat/tokenizer/tokenizer.pkl"))
#
# The file is a pickled tiktoken Encoding, and unpickling can run any program. So the one name that such a file needs
# stands for a class of our own that only stores its state, and every other name is refused before it is looked up.

RENAMED = {"<|python_start|>": "<|tool_start|>", "<|python_end|>": "<|tool_end|>"}
NEEDED = ("bos", *(f"{who}_{edge}" for who in ("user", "assistant", "tool", "output") for edge in ("start", "end")))
BROKEN = (pickle.UnpicklingError, EOFError, ValueError, TypeError, KeyError, IndexError, AttributeError, MemoryError)


class _PickledEncoding:
    """The state of a tiktoken Encoding, uninterpreted."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _bytes(text: str, encoding: str) -> bytes:
    """Replaces codecs.encode, by which pickles before protocol 3 write bytes."""
    if type(text) is not str or encoding != "latin1":
        raise pickle.UnpicklingError("a call that makes no bytes")
    return text.encode("latin1")


class _Reader(pickle.Unpickler):
    """An unpickler that accepts the names in a pickled tiktoken Encoding, and no others."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        super().__init__(file)
        self.path = path

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("tiktoken.core", "Encoding"):
            return _PickledEncoding
        if (module, name) == ("_codecs", "encode"):
            return _bytes
        raise UserError(
            f"{self.path} asks for {module}.{name}, which no tokenizer of nanochat needs: nothing of it was run, and "
            "it is not opened; get the file from where the model was trained"
        )


def read_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer.pkl: it gives the same ids for every text; special tokens have our names."""
    try:
        with open(path, "rb") as file:
            encoding = _Reader(file, path).load()
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}); name the folder that holds it: --tokenizer FOLDER"
        ) from None
    except BROKEN as error:
        raise UserError(f"{path} is no whole pickle ({error or type(error).__name__}); copy it again") from None
    state = getattr(encoding, "state", None)
    if not isinstance(encoding, _PickledEncoding) or not isinstance(state, dict):
        raise UserError(
            f"{path} holds no vocabulary of its own; only tokenizers that nanochat has trained are imported"
        )
    pattern: Any = state.get("pat_str")
    ranks: Any = state.get("mergeable_ranks")
    specials: Any = state.get("special_tokens")
    if type(pattern) is not str or not _table(ranks, bytes) or not _table(specials, str):
        raise UserError(
            f"{path} is no tokenizer of nanochat: pattern, ranks or special tokens are missing; copy it again"
        )
    return _tokenizer(path, pattern, ranks, specials)


def _table(value: Any, kind: type) -> bool:
    """True for a non-empty dict from `kind` to int."""
    return type(value) is dict and bool(value) and all(type(k) is kind and type(n) is int for k, n in value.items())


def _tokenizer(path: Path, pattern: str, ranks: dict[bytes, int], specials: dict[str, int]) -> Tokenizer:
    """Our tokenizer with these tokens, if it gives them the same ids."""
    ordered = sorted(specials, key=specials.__getitem__)
    names = [RENAMED.get(name, name) for name in ordered]
    if missing := [name for name in NEEDED if f"<|{name}|>" not in names]:
        raise UserError(
            f"{path} has no special token <|{missing[0]}|>, so no conversation can be written; name another: "
            "--tokenizer FOLDER"
        )
    try:
        made = Tokenizer(merges_of(ranks), pattern, names)
    except (RuntimeError, ValueError, AssertionError) as error:
        raise UserError(
            f"{path} is no byte-level BPE as nanochat learns it ({error}); name another: --tokenizer FOLDER"
        ) from None
    same = all(ranks.get(token) == number for number, token in enumerate(made.tokens))
    if not same or len(ranks) != len(made.tokens) or list(made.specials.values()) != [specials[n] for n in ordered]:
        raise UserError(
            f"{path} numbers its tokens otherwise than nanochat does (bytes, merges, special tokens); name another: "
            "--tokenizer FOLDER"
        )
    return made
