"""nanochat's model as published, in plain torch and float64, for tests: weights of every era, their logits, its files.

Eras: `2025-10` (plain), `2026-01` (value embeddings, weights on the residual stream, windows), `2026-03-09` (sharper
attention, other gates) and `2026-03-14` (smear, backout).
"""

from __future__ import annotations

import itertools
import json
import math
import pickle
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Era(NamedTuple):
    base: float  # of the rotation
    gain: float  # on queries and keys
    gate: tuple[int, float] | None  # channels and range of the gates of the value embeddings
    share: int  # part of the row in a short window
    block: int  # of which it is a multiple


ERAS = {
    "2025-10": Era(1e4, 1.0, None, 1, 1),
    "2026-01": Era(1e4, 1.0, (32, 2.0), 2, 1),
    "2026-03-09": Era(1e5, 1.15, (12, 3.0), 3, 128),
    "2026-03-14": Era(1e5, 1.2, (12, 3.0), 4, 128),
}
SPECIALS = ["bos", "user_start", "user_end", "assistant_start", "assistant_end"]
SPECIALS += ["python_start", "python_end", "output_start", "output_end"]
PATTERN = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"""
)


def sizes(era: str, vocab: int, **changed: Any) -> dict[str, Any]:
    """The model_config of a meta file."""
    found = {"sequence_len": 256, "vocab_size": vocab, "n_layer": 4, "n_head": 4, "n_kv_head": 2, "n_embd": 64}
    return {**found, **({} if era == "2025-10" else {"window_pattern": "SSL"}), **changed}


def weights(era: str, config: dict[str, Any], rows: int) -> dict[str, Tensor]:
    """Random ones, none of them zero, so that every part matters. `rows`: of the padded vocabulary."""
    made = torch.Generator().manual_seed(7)
    dim, depth, head = config["n_embd"], config["n_layer"], config["n_embd"] // config["n_head"]
    kv = config["n_kv_head"] * head

    def draw(*size: int, std: float = 0.1) -> Tensor:
        return torch.randn(*size, generator=made) * std

    found = {"transformer.wte.weight": draw(rows, dim, std=1.0), "lm_head.weight": draw(rows, dim, std=0.4)}
    for i in range(depth):
        for name, size in (("c_q", dim), ("c_k", kv), ("c_v", kv), ("c_proj", dim)):
            found[f"transformer.h.{i}.attn.{name}.weight"] = draw(size, dim)
        found[f"transformer.h.{i}.mlp.c_fc.weight"] = draw(4 * dim, dim)
        found[f"transformer.h.{i}.mlp.c_proj.weight"] = draw(dim, 4 * dim)
    gate = ERAS[era].gate
    if gate:
        found["resid_lambdas"], found["x0_lambdas"] = 1 + draw(depth), 0.2 + draw(depth)
        for i in range((depth - 1) % 2, depth, 2):
            found[f"value_embeds.{i}.weight"] = draw(rows, kv, std=1.0)
            found[f"transformer.h.{i}.attn.ve_gate.weight"] = draw(config["n_kv_head"], gate[0], std=0.5)
    if era == "2026-03-14":
        found["smear_gate.weight"] = draw(1, 24, std=0.5)
        found["smear_lambda"], found["backout_lambda"] = torch.tensor([0.7]), torch.tensor([0.3])
    return found


def logits(era: str, config: dict[str, Any], given: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """(B, T) -> (B, T, V), from the formulas."""
    known, told = ERAS[era], {name: tensor.double() for name, tensor in given.items()}
    depth, count = config["n_layer"], tokens.size(1)
    x = norm(told["transformer.wte.weight"][tokens])
    if "smear_lambda" in told:
        gate = torch.sigmoid(x[:, 1:, :24] @ told["smear_gate.weight"].T) * told["smear_lambda"]
        x = torch.cat((x[:, :1], x[:, 1:] + gate * x[:, :-1]), 1)
    first, middle = x, torch.zeros_like(x)
    short = math.ceil(math.ceil(config["sequence_len"] / known.share) / known.block) * known.block
    for i in range(depth):
        pattern = config.get("window_pattern", "L")
        far = short if pattern[i % len(pattern)] == "S" and i < depth - 1 else count
        if "resid_lambdas" in told:
            x = told["resid_lambdas"][i] * x + told["x0_lambdas"][i] * first
        x = x + attention(known, config, told, i, norm(x), tokens, far)
        up = torch.relu(norm(x) @ told[f"transformer.h.{i}.mlp.c_fc.weight"].T) ** 2
        x = x + up @ told[f"transformer.h.{i}.mlp.c_proj.weight"].T
        if i == depth // 2:
            middle = x
    if "backout_lambda" in told:
        x = x - told["backout_lambda"] * middle
    raw = norm(x) @ told["lm_head.weight"][: config["vocab_size"]].T
    return 15 * torch.tanh(raw / 15)


def norm(x: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-7).sqrt()


def attention(
    era: Era, config: dict[str, Any], told: dict[str, Tensor], layer: int, x: Tensor, tokens: Tensor, far: int
) -> Tensor:
    """`far`: tokens before the own one that are seen."""
    rows, count, dim = x.shape
    heads, groups = config["n_head"], config["n_kv_head"]
    size, name = dim // heads, f"transformer.h.{layer}.attn."
    q, k, v = ((x @ told[f"{name}{part}.weight"].T).view(rows, count, -1, size) for part in ("c_q", "c_k", "c_v"))
    if era.gate and f"value_embeds.{layer}.weight" in told:
        gate = era.gate[1] * torch.sigmoid(x[..., : era.gate[0]] @ told[name + "ve_gate.weight"].T)
        v = v + gate[..., None] * told[f"value_embeds.{layer}.weight"][tokens].view(rows, count, groups, size)
    angle = torch.arange(count)[:, None] * era.base ** -(torch.arange(0, size, 2).double() / size)
    turn = torch.polar(torch.ones_like(angle), -angle)[:, None]  # against the usual direction

    def turned(part: Tensor) -> Tensor:
        pairs = torch.complex(part[..., : size // 2], part[..., size // 2 :]) * turn
        return norm(torch.cat((pairs.real, pairs.imag), -1)) * era.gain

    q, k = turned(q), turned(k)
    k, v = (part.repeat_interleave(heads // groups, 2) for part in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / size**0.5
    distance = torch.arange(count)[:, None] - torch.arange(count)
    scores = scores.masked_fill((distance < 0) | (distance > far), -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2) @ told[name + "c_proj.weight"].T


def ranks(texts: str, merges: int) -> dict[bytes, int]:
    """Tokens of a small vocabulary, by plain BPE over words."""
    found = {bytes([value]): value for value in range(256)}
    words = [[bytes([value]) for value in (" " + word).encode()] for word in texts.split()]
    while len(found) < 256 + merges:
        counts: dict[tuple[bytes, bytes], int] = {}
        for word in words:
            for pair in itertools.pairwise(word):
                counts[pair] = counts.get(pair, 0) + 1
        best = max(counts, key=lambda pair: (counts[pair], pair))
        found[best[0] + best[1]] = len(found)
        for word in words:
            for at in range(len(word) - 1, 0, -1):
                if at < len(word) and (word[at - 1], word[at]) == best:
                    word[at - 1 : at + 1] = [best[0] + best[1]]
    return found


def specials(first: int) -> dict[str, int]:
    return {f"<|{name}|>": first + number for number, name in enumerate(SPECIALS)}


def write_tokenizer(folder: Path, state: Any) -> None:
    """tokenizer.pkl as pickle.dump writes a tiktoken Encoding; made without tiktoken."""
    Encoding = type("Encoding", (), {"__getstate__": lambda self: state})
    Encoding.__module__ = "tiktoken.core"
    stand_in = types.ModuleType("tiktoken.core")
    stand_in.Encoding = Encoding  # type: ignore[attr-defined]
    before = sys.modules.get("tiktoken.core")
    sys.modules["tiktoken.core"] = stand_in
    try:
        data = pickle.dumps(Encoding(), protocol=4)
    finally:
        if before is None:
            del sys.modules["tiktoken.core"]
        else:
            sys.modules["tiktoken.core"] = before
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.pkl").write_bytes(data)


def save(folder: Path, step: int, given: dict[str, Tensor], config: dict[str, Any], prefix: str = "") -> None:
    """model_000005.pt and meta_000005.json."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({prefix + name: tensor for name, tensor in given.items()}, folder / f"model_{step:06d}.pt")
    (folder / f"meta_{step:06d}.json").write_text(json.dumps({"step": step, "model_config": config}))
