"""A Hugging Face model on disk: a folder with config.json and safetensors, or a GGUF file.

    folder = find("/models/Qwen2.5-0.5B-Instruct")      # None: it is something else, such as a checkpoint of ours
    folder = find("Qwen/Qwen2.5-0.5B-Instruct")         # the copy that `ascendchat data fetch models/Qwen/...` stored
    model, tokenizer = folder.load(torch.bfloat16)      # on the host; nothing is ever downloaded

transformers reads the weights file by file, in the dtype that they compute in; pickled ones (.bin) are refused.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from safetensors import SafetensorError

from ascendchat.errors import UserError
from ascendchat.models.causal_lm import ATTENTION, CausalLM, register
from ascendchat.models.import_transformers import library
from ascendchat.models.parity import check_parity
from ascendchat.models.tokenizer import HFTokenizer
from ascendchat.models.transformers_4 import add_old_names
from ascendchat.runs.run import run_folder

HUB_ID = re.compile(r"(models/)?(?P<id>\w[\w.-]*/[\w.-]+)")
SAMPLES, SAMPLE_BYTES = 64, 1 << 16  # of each weights file, for the fingerprint
EXPORTED = "ascendchat"  # model_type of our own models, as `ascendchat export` writes them
TOKENIZERS = "tokenizer.json", "*.model", "vocab.*", "*.tiktoken"  # files that hold a vocabulary
LOAD_ERRORS = (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError, SafetensorError)


class LoadedModel(NamedTuple):
    """A model of transformers behind our interfaces, on the host, and its tokenizer."""

    model: CausalLM
    tokenizer: HFTokenizer


@dataclass(frozen=True)
class HFFolder:
    """A model folder, or one GGUF file in `path`. It is a ModelSource (open.py)."""

    path: Path
    gguf: str = ""  # name of the file with the weights, where they are not safetensors

    state: ClassVar[dict[str, Any]] = {"stage": "hf"}
    settings: ClassVar[dict[str, Any]] = {}
    step: ClassVar[int] = 0

    @classmethod
    def at(cls, path: Path) -> HFFolder:
        """An existing folder or GGUF file."""
        return cls(path.parent, path.name) if path.is_file() else cls(path)

    @property
    def folder(self) -> Path:
        """The path that a user would type: the folder, or the GGUF file."""
        return self.path / self.gguf if self.gguf else self.path

    tokenizer_folder = folder

    @property
    def config_folder(self) -> Path:
        """The folder of config.json."""
        return self.path

    @property
    def name(self) -> str:
        """A name for run folders and for the API."""
        return re.sub(r"[^\w.+=@-]", "-", Path(self.gguf).stem if self.gguf else self.path.resolve().name)

    @property
    def results_folder(self) -> Path:
        """The run folder to which evaluations write."""
        return run_folder(self.name, "hf")

    @property
    def exported(self) -> bool:
        """True for a model of our own that `ascendchat export` wrote; transformers does not open it for us."""
        return not self.gguf and read_json(self.path / "config.json").get("model_type") == EXPORTED

    @property
    def fingerprint(self) -> str:
        """A hash of the sizes and of samples of the weights files: whole files take minutes to read."""
        digest = hashlib.sha256()
        for path in [self.folder] if self.gguf else sorted(self.path.glob("*.safetensors")):
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\n".encode())
            with open(path, "rb") as file:
                for number in range(SAMPLES):
                    file.seek(number * max(0, size - SAMPLE_BYTES) // (SAMPLES - 1))
                    digest.update(file.read(SAMPLE_BYTES))
        return digest.hexdigest()[:12]

    @property
    def from_pretrained_arguments(self) -> dict[str, Any]:
        """Arguments for each `from_pretrained` of transformers on this model."""
        return {"local_files_only": True, **({"gguf_file": self.gguf} if self.gguf else {})}

    def load(self, dtype: torch.dtype, seq_len: int | None = None, tokenizer: str = "") -> LoadedModel:
        """Model and tokenizer, on the host. `seq_len`: tokens per row, at most as many as the model has positions;
        `tokenizer`: the folder of another tokenizer."""
        inner = self._read_weights(dtype)
        model = CausalLM(inner, seq_len)
        check_parity(model)
        other = HFFolder.at(Path(tokenizer)) if tokenizer else self
        return LoadedModel(model, read_tokenizer(other, inner.config, inner.generation_config))

    def _read_weights(self, dtype: torch.dtype) -> Any:
        """The model of transformers."""
        arguments, transformers = self.from_pretrained_arguments, library()
        register()
        if self.gguf:
            # transformers has no switch for this progress bar, and TQDM_DISABLE is read when tqdm is first imported.
            vars(importlib.import_module("transformers.modeling_gguf_pytorch_utils"))["tqdm"] = lambda items, **_: items
            if unpacked := getattr(transformers, "GgufConfig", None):  # newer ones may leave weights in their blocks
                arguments["quantization_config"] = unpacked(dequantize=True)
        else:
            arguments["use_safetensors"] = True
        with one_sentence_errors(self):
            inner, report = transformers.AutoModelForCausalLM.from_pretrained(
                self.path,
                dtype=dtype,
                attn_implementation=ATTENTION,
                trust_remote_code=False,
                output_loading_info=True,
                **arguments,
            )
        if quantizer := getattr(inner, "hf_quantizer", None):  # the weights are plain, and can be saved as such
            quantizer.remove_quantization_config(inner)
        check_complete(self, report)
        return inner

    def load_tokenizer(self) -> HFTokenizer:
        """The tokenizer, without reading any weights."""
        transformers = library()
        with one_sentence_errors(self):
            config = transformers.AutoConfig.from_pretrained(self.path, **self.from_pretrained_arguments)
            written = (self.path / "generation_config.json").is_file()
            generation = transformers.GenerationConfig.from_pretrained(self.path) if written else None
        return read_tokenizer(self, config, generation)

    def empty_model(self, dtype: torch.dtype, seq_len: int | None = None) -> LoadedModel:
        """The model that config.json describes, with weights that the caller has to fill in."""
        transformers = library()
        register()
        with one_sentence_errors(self):
            config = transformers.AutoConfig.from_pretrained(self.path, local_files_only=True, trust_remote_code=False)
            inner = transformers.AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation=ATTENTION, trust_remote_code=False
            )
            if (self.path / "generation_config.json").is_file():
                inner.generation_config = transformers.GenerationConfig.from_pretrained(
                    self.path, local_files_only=True
                )
        return LoadedModel(CausalLM(inner, seq_len), read_tokenizer(self, config, inner.generation_config))


def find(named: str | Path) -> HFFolder | None:
    """The Hugging Face model that a path or OWNER/NAME names; None where it names something else. A folder that looks
    like one but cannot be opened is a UserError."""
    path = Path(named).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return HFFolder.at(path)
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
        return HFFolder(path, files[0].name) if files else None
    if "model_type" not in read_json(path / "config.json"):
        raise UserError(f"{path / 'config.json'} names no model_type; give the folder of a whole Hugging Face model")
    if not any(path.glob("*.safetensors")):
        if any(path.glob("*.bin")):
            raise UserError(
                f"{path} holds pickled weights (.bin), which may run code and are not opened; give a model saved as "
                "safetensors (save_pretrained of transformers writes it)"
            )
        raise UserError(f"{path} has a config.json but no weights (*.safetensors); is the download complete?")
    return HFFolder(path)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a downloaded model."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error}); download the model again") from None
    return values if isinstance(values, dict) else {}


def read_tokenizer(folder: HFFolder, config: Any, generation: Any) -> HFTokenizer:
    """The tokenizer in a folder, for a model of transformers with this config."""
    has_vocabulary = any(any(folder.path.glob(name)) for name in TOKENIZERS)
    if not has_vocabulary and not folder.gguf:  # transformers would make an empty one
        raise UserError(
            f"{folder.path} has no tokenizer (tokenizer.json); is the download complete? Another one: --tokenizer DIR"
        )
    with one_sentence_errors(folder):
        inner = library().AutoTokenizer.from_pretrained(
            folder.path, trust_remote_code=False, **folder.from_pretrained_arguments
        )
    return HFTokenizer(inner, config.get_text_config().vocab_size, generation, config)


def describe(model: CausalLM, tokenizer: HFTokenizer, folder: Path) -> None:
    """Write all of a model but its weights: config.json, generation_config.json, tokenizer, chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    model.inner.config.save_pretrained(folder)
    add_old_names(model.inner.config, folder / "config.json")
    if model.inner.generation_config is not None:
        model.inner.generation_config.save_pretrained(folder)
    tokenizer.save(folder)


def check_complete(folder: HFFolder, report: dict[str, Any]) -> None:
    """Refuse a model of which transformers' loading report names missing weights: it fills them with random numbers,
    and goes on."""
    entries = [*(report.get("missing_keys") or ()), *(report.get("mismatched_keys") or ())]
    wrong = sorted(str(entry[0] if isinstance(entry, tuple) else entry) for entry in entries)
    if wrong:
        raise UserError(
            f"{folder.folder}: {len(wrong)} weight(s) are missing or of a wrong size, such as {wrong[0]}; download the "
            "model again"
        )


@contextmanager
def one_sentence_errors(folder: HFFolder) -> Iterator[None]:
    """Turn errors of transformers, which are pages long, into a UserError of one sentence."""
    try:
        yield
    except UserError:
        raise
    except LOAD_ERRORS as error:
        line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        if "gguf" in line.lower() and isinstance(error, ImportError):
            raise UserError(f"{folder.folder}: GGUF files need the package gguf: pip install gguf") from None
        raise UserError(f"{folder.folder} cannot be opened: {line[:300]}") from error
