"""A Hugging Face model on disk: a folder with config.json and safetensors, or a GGUF file.

    folder = find("/models/Qwen2.5-0.5B-Instruct")      # None: it is something else, such as a checkpoint of ours
    folder = find("Qwen/Qwen2.5-0.5B-Instruct")         # what `ascendchat data fetch models/Qwen/...` has stored
    opened = open_folder(folder, torch.bfloat16)        # model and tokenizer; nothing is ever downloaded

Weights are read in the dtype that they compute in, file by file; pickled ones (.bin) are refused.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from ascendchat.errors import UserError
from ascendchat.models.causal_lm import ATTENTION, CausalLM, register
from ascendchat.models.import_transformers import library
from ascendchat.models.tokenizer import HFTokenizer
from ascendchat.models.trial import check

HUB_ID = re.compile(r"(models/)?(?P<id>\w[\w.-]*/[\w.-]+)")
BLOCKS, BLOCK = 64, 1 << 16  # of each file that make its fingerprint
OURS = "ascendchat"  # model type of our own models, as `ascendchat export` writes them
TOKENIZERS = "tokenizer.json", "*.model", "vocab.*", "*.tiktoken"  # files that hold a vocabulary
TROUBLE = (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError, SafetensorError)


@dataclass(frozen=True)
class Folder:
    """Where a model is."""

    path: Path
    gguf: str = ""  # name of the file with the weights, where they are not safetensors

    @property
    def name(self) -> str:
        """For run folders and the API."""
        return re.sub(r"[^\w.+=@-]", "-", Path(self.gguf).stem if self.gguf else self.path.resolve().name)

    @property
    def source(self) -> Path:
        return self.path / self.gguf if self.gguf else self.path

    @property
    def fingerprint(self) -> str:
        """Of the weights: sizes and samples of the files, since whole ones take minutes to read."""
        digest = hashlib.sha256()
        for path in [self.source] if self.gguf else sorted(self.path.glob("*.safetensors")):
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\n".encode())
            with open(path, "rb") as file:
                for number in range(BLOCKS):
                    file.seek(number * max(0, size - BLOCK) // (BLOCKS - 1))
                    digest.update(file.read(BLOCK))
        return digest.hexdigest()[:12]


@dataclass(frozen=True)
class OpenedFolder:
    """A model and its tokenizer."""

    model: CausalLM
    tokenizer: HFTokenizer
    folder: Folder


def at(path: Path) -> Folder:
    """A folder, or a GGUF file, that is known to be there."""
    return Folder(path.parent, path.name) if path.is_file() else Folder(path)


def find(named: str | Path) -> Folder | None:
    """The model that a path names; None where it names nothing of Hugging Face's. What looks like one but cannot be
    opened is a UserError."""
    path = Path(named).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return at(path)
    if not path.is_dir():
        hub = HUB_ID.fullmatch(str(named))
        if not hub or path.exists():
            return None
        from ascendchat.data.fetch import folder_of  # reads its table of sets: 0.1 s that other models do not wait for

        path = folder_of(f"models/{hub['id']}")
        if not path.is_dir():
            raise UserError(
                f"{named} is not on this machine; fetch it first: ascendchat data fetch models/{hub['id']}, or give "
                "the folder of a model"
            )
    if not (path / "config.json").is_file():
        files = sorted(path.glob("*.gguf"))
        if len(files) > 1:
            raise UserError(f"{path} holds {len(files)} GGUF files; name one of them, such as {files[0]}")
        return Folder(path, files[0].name) if files else None
    if "model_type" not in read_json(path / "config.json"):
        raise UserError(f"{path / 'config.json'} names no model_type; give the folder of a whole Hugging Face model")
    if not any(path.glob("*.safetensors")):
        if any(path.glob("*.bin")):
            raise UserError(
                f"{path} holds pickled weights (.bin), which may run code and are not opened; give a model saved as "
                "safetensors (save_pretrained of transformers writes it)"
            )
        raise UserError(f"{path} has a config.json but no weights (*.safetensors); is the download complete?")
    return Folder(path)


def is_ours(folder: Folder) -> bool:
    """Whether it is a model of our own, exported: it is opened as such (models/open.py), not by transformers."""
    return not folder.gguf and read_json(folder.path / "config.json").get("model_type") == OURS


def refuse_ours(folder: Folder) -> None:
    """For those who train."""
    if is_ours(folder):
        raise UserError(
            f"{folder.path} is an exported model of our own: chat, serve and eval open it, training does not; "
            "train its run instead (--run NAME, or --start FOLDER of a checkpoint)"
        )


def read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error}); download the model again") from None
    return found if isinstance(found, dict) else {}


def open_folder(
    folder: Folder, dtype: torch.dtype, seq_len: int | None = None, tokenizer: Folder | None = None
) -> OpenedFolder:
    """Model and tokenizer of a folder, on the host. `seq_len`: tokens per row, at most as many as the model knows;
    `tokenizer`: the folder of another one."""
    refuse_ours(folder)
    named: dict[str, Any] = {"gguf_file": folder.gguf} if folder.gguf else {}
    transformers = library()
    register()
    if folder.gguf:  # it asks nobody before it draws a progress bar
        vars(importlib.import_module("transformers.modeling_gguf_pytorch_utils"))["tqdm"] = lambda items, **_: items
        if unpacked := getattr(transformers, "GgufConfig", None):  # newer ones may leave weights in their blocks
            named["quantization_config"] = unpacked(dequantize=True)
    with explained(folder):
        made, about = transformers.AutoModelForCausalLM.from_pretrained(
            folder.path,
            dtype=dtype,
            attn_implementation=ATTENTION,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            **({} if folder.gguf else {"use_safetensors": True}),
            **named,
        )
    if quantizer := getattr(made, "hf_quantizer", None):  # the weights are plain, and can be saved as such
        quantizer.remove_quantization_config(made)
    complain(folder, about)
    model = CausalLM(made, seq_len)
    check(model)
    return OpenedFolder(model, read_tokenizer(tokenizer or folder, made.config, made.generation_config), folder)


def read_tokenizer(folder: Folder, config: Any, generation: Any) -> HFTokenizer:
    """The tokenizer in a folder, for a model of transformers with this config."""
    named = {"gguf_file": folder.gguf} if folder.gguf else {}
    there = any(any(folder.path.glob(name)) for name in TOKENIZERS)
    if not there and not folder.gguf:  # transformers makes an empty one
        raise UserError(
            f"{folder.path} has no tokenizer (tokenizer.json); is the download complete? Another one: --tokenizer DIR"
        )
    with explained(folder):
        inner = library().AutoTokenizer.from_pretrained(
            folder.path, local_files_only=True, trust_remote_code=False, **named
        )
    return HFTokenizer(inner, config.get_text_config().vocab_size, generation, config)


def load_tokenizer(folder: Folder) -> HFTokenizer:
    """The tokenizer of a folder whose weights are not read."""
    transformers = library()
    with explained(folder):
        named = {"gguf_file": folder.gguf} if folder.gguf else {}
        config = transformers.AutoConfig.from_pretrained(folder.path, local_files_only=True, **named)
        written = (folder.path / "generation_config.json").is_file()
        generation = transformers.GenerationConfig.from_pretrained(folder.path) if written else None
    return read_tokenizer(folder, config, generation)


def empty_model(path: Path, dtype: torch.dtype, seq_len: int | None = None) -> OpenedFolder:
    """The model that the config.json of a folder describes, without its weights: somebody will fill them in."""
    folder, transformers = Folder(path), library()
    register()
    with explained(folder):
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        made = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=ATTENTION, trust_remote_code=False
        )
        if (path / "generation_config.json").is_file():
            made.generation_config = transformers.GenerationConfig.from_pretrained(path, local_files_only=True)
    return OpenedFolder(CausalLM(made, seq_len), read_tokenizer(folder, config, made.generation_config), folder)


def complain(folder: Folder, about: dict[str, Any]) -> None:
    """transformers fills what a file lacks with random numbers, and goes on."""
    entries = [*(about.get("missing_keys") or ()), *(about.get("mismatched_keys") or ())]
    wrong = sorted(str(entry[0] if isinstance(entry, tuple) else entry) for entry in entries)
    if wrong:
        raise UserError(
            f"{folder.source}: {len(wrong)} weight(s) are missing or of a wrong size, such as {wrong[0]}; download the "
            "model again"
        )


class explained:
    """Errors of transformers in one sentence; its own are pages."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, UserError) or not isinstance(error, TROUBLE):
            return
        line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        if "gguf" in line.lower() and isinstance(error, ImportError):
            raise UserError(f"{self.folder.source}: GGUF files need the package gguf: pip install gguf") from None
        raise UserError(f"{self.folder.source} cannot be opened: {line[:300]}") from error
