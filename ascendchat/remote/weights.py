"""Whether a server has the weights that it was sent: checksums where it tells them, else log-probabilities.

checksum(weights)                                  # what `GET /weights` of our server says of equal weights
wrong = compare(told, weights, dtype)              # digests of vLLM's /weight_checker
judge(Probe(...), ...)                             # the same fixed tokens scored on both sides
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ascendchat.data.tokenizer.tokenizer import Tokenizer
from ascendchat.remote.transfer import raw

Scorer = Callable[[list[int]], Sequence[float]]  # tokens -> log-probability of each but the first

PROBE_TOKENS = 24
VLLM_ROWS = 64
LIMITS = {"float32": 1e-3}  # mean |difference| of log-probabilities between trainer and server, by the server's dtype
NOTHING = hashlib.sha256(b"").hexdigest()  # of a weight that vLLM has packed for a kernel and keeps elsewhere
OTHER_LIMIT = 0.1  # of a server that calculates with fewer digits
MOVED = 1e-4  # a mean change of the trainer's own log-probabilities that a server's must show, too

# Weights that vLLM keeps as one, and the parts they are made of, one above the other
JOINED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


def checksum(weights: Mapping[str, Tensor]) -> str:
    """Of weights by name, as they lie in memory: equal weights have equal checksums."""
    total = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        total.update(raw(tensor))
    return total.hexdigest()[:16]


def as_dtypes(weights: Mapping[str, Tensor], dtypes: Mapping[str, str]) -> dict[str, Tensor]:
    """Weights in the precision in which a server keeps them."""
    return {name: tensor.detach().to(getattr(torch, dtypes[name])) for name, tensor in weights.items()}


def compare(told: Mapping[str, str], weights: Mapping[str, Tensor]) -> tuple[list[str], int]:
    """Names of vLLM's weights that differ from ours, and how many could not be compared: those of a server whose
    devices have a part each, or that has rearranged them for its kernels. `weights` are in the server's precision."""
    wrong, unknown = [], 0
    if any(":tp" in key and ":tp0:" not in key for key in told):
        return [], len(told)
    for key, digest in told.items():
        expected = expected_tensor(name := key.rpartition(":")[2], weights)
        if expected is None or digest == NOTHING:
            unknown += 1
        elif digest not in (hashlib.sha256(raw(form)).hexdigest() for form in (expected, padded(expected))):
            wrong.append(name)
    return wrong, unknown


def expected_tensor(name: str, weights: Mapping[str, Tensor]) -> Tensor | None:
    """What vLLM makes of our weights under this name of its own; None if that is not known."""
    if name in weights:
        return weights[name]
    for joined, parts in JOINED.items():
        if f".{joined}." in name:
            names = [name.replace(f".{joined}.", f".{part}.") for part in parts]
            if all(part in weights for part in names):
                return torch.cat([weights[part] for part in names])
    return None


def padded(table: Tensor) -> Tensor:
    """As vLLM keeps embedding and head: with rows of zeros up to a multiple of 64."""
    return torch.cat([table, table.new_zeros(-len(table) % VLLM_ROWS, *table.shape[1:])]) if table.dim() == 2 else table


@dataclass(frozen=True)
class Scores:
    """Log-probabilities of the probe's tokens, by the trainer and by the server, at one version."""

    trainer: tuple[float, ...]
    server: tuple[float, ...]


def probe_tokens(vocab: int) -> list[int]:
    """A fixed prompt: tokens spread over the vocabulary."""
    return [(7 + 7919 * i) % vocab for i in range(PROBE_TOKENS)]


def probe_of(tokenizer: Tokenizer | None) -> list[int]:
    return probe_tokens(tokenizer.vocab_size if tokenizer else 256)


def remembered(settings: Mapping[str, Any]) -> Scorer | None:
    """What the `scorer` of a Remote says of its probe now: a server that comes back is verified when the weights of the
    trainer may have moved on."""
    if settings.get("scorer") is None:
        return None
    found = tuple(settings["scorer"](probe_of(settings["tokenizer"])))
    return lambda tokens: found


def gap(one: Sequence[float], other: Sequence[float]) -> float:
    """Mean |difference|; infinite where it is no number, or where the counts differ."""
    if len(one) != len(other) or not one:
        return float("inf")
    mean = sum(abs(a - b) for a, b in zip(one, other)) / len(one)
    return mean if mean == mean else float("inf")


def judge(now: Scores, before: Scores | None, dtype: str) -> str:
    """What is wrong with the server's weights, or nothing. Two signs: the log-probabilities are not the trainer's, or
    they are the very same as before although the trainer's have moved."""
    limit, found = LIMITS.get(dtype, OTHER_LIMIT), gap(now.trainer, now.server)
    if found > limit:
        return f"its log-probabilities differ from the trainer's by {found:.2g} on average, more than {limit:g}"
    if before is not None and before.server == now.server and gap(before.trainer, now.trainer) > MOVED:
        return "it still answers with the weights from before"
    return ""
