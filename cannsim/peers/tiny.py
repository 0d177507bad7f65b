"""What the scripts of this folder share: a tiny model with random weights, a tokenizer of bytes, sums to learn, and the
report. Nothing is downloaded. To be imported first: with PEER_DEVICE=cpu it hides torch_npu."""

from __future__ import annotations

import importlib.metadata
import json
import os
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

DEVICE = os.environ.get("PEER_DEVICE", "npu")
if DEVICE == "cpu":  # as if torch_npu were not installed; where it is and finds no NPU, optimizers fail on the CPU, too
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    sys.modules["torch_npu"] = None  # type: ignore[assignment]

import torch  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: E402
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM  # noqa: E402

TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """A token per byte, and one for each role and end."""
    special = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({token: number for number, token in enumerate([*special, *alphabet])}, []))
    core.add_special_tokens(special)
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<|pad|>", eos_token="<|end|>")
    made.chat_template = TEMPLATE
    return made


def model() -> Qwen3ForCausalLM:
    """Two layers of Qwen3 with grouped heads; the same weights every time."""
    torch.manual_seed(0)
    shape = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, head_dim=16)
    ends = dict(pad_token_id=0, eos_token_id=1, bos_token_id=None, tie_word_embeddings=True)
    return Qwen3ForCausalLM(
        Qwen3Config(vocab_size=264, num_key_value_heads=2, max_position_embeddings=256, **shape, **ends)
    )


def save(folder: str) -> str:
    """The model and its tokenizer on disk, for what wants a path; returns that path."""
    model().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def sums(count: int = 64) -> list[dict[str, str]]:
    """Questions and answers."""
    rng = random.Random(0)
    pairs = [(rng.randint(1, 99), rng.randint(1, 99)) for _ in range(count)]
    return [{"prompt": f"What is {a} plus {b}?", "completion": f" The answer is {a + b}."} for a, b in pairs]


def rows(count: int = 64) -> list[dict[str, Any]]:
    """The same as token ids of one length, ready for a model: what is padding has no label."""
    text = [row["prompt"] + row["completion"] + "<|end|>" for row in sums(count)]
    made = tokenizer()(text, padding="max_length", max_length=48)
    both = zip(made["input_ids"], made["attention_mask"])
    made["labels"] = [[token if seen else -100 for token, seen in zip(*row)] for row in both]
    return [dict(zip(made, row)) for row in zip(*(made[key] for key in ("input_ids", "attention_mask", "labels")))]


def batches(size: int, count: int = 64) -> Iterator[dict[str, torch.Tensor]]:
    """The same as tensors on the device."""
    data = rows(count)
    for first in range(0, count, size):
        yield {name: torch.tensor([row[name] for row in data[first : first + size]]).to(DEVICE) for name in data[0]}


def logged(history: Iterable[Mapping[str, float]], *names: str) -> list[float]:
    """These values of each step, of what a Trainer logged."""
    return [float(row[name]) for row in history if "loss" in row for name in names or ("loss",) if name in row]


def report(losses: list[float], *packages: str, tokens: Iterable[int] = (), **versions: str) -> None:
    """Print the losses and the tokens that were generated, with the versions of these packages; compare.py gets the
    same through a file."""
    if int(os.environ.get("RANK", "0")):
        return
    versions = {name: importlib.metadata.version(name) for name in ("torch", "torch_npu", *packages)} | versions
    said: dict[str, Any] = {"losses": losses, "tokens": list(tokens), "versions": versions, "launches": {}}
    print(DEVICE, said)
    if DEVICE == "npu":
        import cannsim

        said["launches"] = cannsim.launches()
    if place := os.environ.get("PEER_REPORT"):
        Path(place).write_text(json.dumps(said))
