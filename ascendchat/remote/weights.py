"""Weight transfer and its verification: by checksums where a server has them, else by log-probabilities of a probe.

checksum(weights)                                  # what `GET /weights` of our server says of equal weights
wrong = compare(told, weights, dtype)              # digests of vLLM's /weight_checker
judge(Probe(...), ...)                             # the same fixed tokens scored on both sides
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor

from ascendchat.data.tokenizer.tokenizer import Tokenizer

Scorer = Callable[[list[int]], Sequence[float]]  # tokens -> log-probability of each but the first

PROBE_TOKENS = 24
VLLM_ROWS = 64
LIMITS = {"float32": 1e-3}  # mean |difference| of log-probabilities between trainer and server, by the server's dtype
EMPTY_DIGEST = hashlib.sha256(b"").hexdigest()  # of a weight that vLLM has packed for a kernel
OTHER_LIMIT = 0.1  # where the server computes in 16 bits
MIN_CHANGE = 1e-4  # mean change of the trainer's log-probabilities above which those of the server must change too

# Weights that vLLM keeps as one, and the parts they are made of, one above the other
JOINED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


def checksum(weights: Mapping[str, Tensor]) -> str:
    """Checksum of weights by name, as they lie in memory."""
    total = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        total.update(raw(tensor))
    return total.hexdigest()[:16]


def as_dtypes(weights: Mapping[str, Tensor], dtypes: Mapping[str, str]) -> dict[str, Tensor]:
    """Weights in the precision in which a server keeps them."""
    return {name: tensor.detach().to(getattr(torch, dtypes[name])) for name, tensor in weights.items()}


def compare(digests: Mapping[str, str], weights: Mapping[str, Tensor]) -> tuple[list[str], int]:
    """Names of vLLM's weights that differ from ours, and how many could not be compared: those of a server whose
    devices have a part each, or that has rearranged them for its kernels. `weights` are in the server's precision."""
    wrong, unknown = [], 0
    if any(":tp" in key and ":tp0:" not in key for key in digests):
        return [], len(digests)
    for key, digest in digests.items():
        expected = expected_tensor(name := key.rpartition(":")[2], weights)
        if expected is None or digest == EMPTY_DIGEST:
            unknown += 1
        elif digest not in (hashlib.sha256(raw(form)).hexdigest() for form in (expected, padded(expected))):
            wrong.append(name)
    return wrong, unknown


def expected_tensor(name: str, weights: Mapping[str, Tensor]) -> Tensor | None:
    """Our weights in the form that vLLM keeps under this name; None if that is unknown."""
    if name in weights:
        return weights[name]
    for joined, parts in JOINED.items():
        if f".{joined}." in name:
            names = [name.replace(f".{joined}.", f".{part}.") for part in parts]
            if all(part in weights for part in names):
                return torch.cat([weights[part] for part in names])
    return None


def padded(table: Tensor) -> Tensor:
    """A table with rows of zeros up to a multiple of 64, the form in which vLLM keeps embedding and head."""
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
    """A scorer that remembers the log-probabilities of the probe now: the trainer's weights may have moved on
    when a replica recovers."""
    if settings.get("scorer") is None:
        return None
    logprobs = tuple(settings["scorer"](probe_of(settings["tokenizer"])))
    return lambda tokens: logprobs


def gap(one: Sequence[float], other: Sequence[float]) -> float:
    """Mean |difference|; infinite where it is no number, or where the counts differ."""
    if len(one) != len(other) or not one:
        return float("inf")
    mean = sum(abs(a - b) for a, b in zip(one, other)) / len(one)
    return mean if mean == mean else float("inf")


def judge(now: Scores, before: Scores | None, dtype: str) -> str:
    """The problem with the server's weights, or "". Either its log-probabilities are not the trainer's, or they are the
    same as before although the trainer's have moved."""
    limit, difference = LIMITS.get(dtype, OTHER_LIMIT), gap(now.trainer, now.server)
    if difference > limit:
        return f"its log-probabilities differ from the trainer's by {difference:.2g} on average, more than {limit:g}"
    if before is not None and before.server == now.server and gap(before.trainer, now.trainer) > MIN_CHANGE:
        return "it still answers with the weights from before"
    return ""


# Weights from a trainer to the workers of a server over a collective of torch.distributed: gloo, nccl or hccl.
#
#     store = listen(); told = {"address": ..., "port": store.port, ...}      # the trainer, rank 0
#     group = TransferGroup("gloo", store, rank=0, size=1 + workers, timeout=60.0)    # every rank at the same time
#     group.send(weights); group.receive(told)
#
# The group stands beside the process's own one: a trainer of several ranks and a worker of vLLM have one each. This
# file also runs inside the server's process (vllm_worker.py), so it imports torch and nothing of ours.


def address_towards(host: str, port: int) -> str:
    """The address of this machine as `host` sees it."""
    with socket.create_connection((host, port), timeout=10.0) as link:
        return str(link.getsockname()[0])


def listen(timeout: float) -> torch_dist.TCPStore:
    """Open the store in which the ranks of a group meet, on a free port of this machine."""
    wait = timedelta(seconds=timeout)
    return torch_dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=wait)


def meet(address: str, port: int, timeout: float) -> torch_dist.TCPStore:
    """Connect to the store of another process."""
    return torch_dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout))


def described(weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """Names, dtypes and shapes of the tensors in the order in which they are sent, and a digest of all."""
    digest = hashlib.sha256()
    for tensor in weights.values():
        digest.update(raw(tensor))
    return {
        "names": list(weights),
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in weights.values()],
        "shapes": [list(tensor.shape) for tensor in weights.values()],
        "digest": digest.hexdigest(),
    }


def raw(tensor: Tensor) -> Any:
    """The bytes of a tensor."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


class TransferGroup:
    """A process group beside the default one. A rank that is late or gone is an error after `timeout` seconds."""

    def __init__(
        self, backend: str, store: torch_dist.TCPStore, *, own: str, name: str, rank: int, size: int, timeout: float
    ) -> None:
        """`own`: address of this machine that the other ranks can reach. `name`: of this group in the store."""
        self.rank, self.timeout = rank, timedelta(seconds=timeout)
        self._store: Any = store
        place = torch_dist.PrefixStore(name, store)
        # torch has public ways to groups within the default one only; this stands beside it, as vLLM's own does.
        if backend == "gloo":
            options: Any = torch_dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [torch_dist.ProcessGroupGloo.create_device(hostname=own)]
            options._timeout = self.timeout
            self._group: Any = torch_dist.ProcessGroupGloo(place, rank, size, options)
        elif backend == "nccl":
            settings = torch_dist.ProcessGroupNCCL.Options()
            settings._timeout = self.timeout
            self._group = torch_dist.ProcessGroupNCCL(place, rank, size, settings)
        else:  # the backend of a plugin, which has registered how it is made
            plugin = torch_dist.Backend._plugins[backend.upper()]
            if plugin.extended_api:
                from torch.distributed.distributed_c10d import _DistributedBackendOptions

                facts = _DistributedBackendOptions()
                facts.store, facts.group_rank, facts.group_size = place, rank, size
                facts.timeout, facts.group_id, facts.global_ranks_in_group = self.timeout, name, list(range(size))
                self._group = plugin.creator_fn(facts, None)
            else:
                self._group = plugin.creator_fn(place, rank, size, self.timeout)

    def broadcast(self, tensor: Tensor) -> None:
        """From rank 0 to all."""
        options = torch_dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, self.timeout
        self._group.broadcast([tensor], options).wait(self.timeout)

    def send(self, weights: Mapping[str, Tensor]) -> None:
        """Rank 0: all tensors, in their order."""
        for tensor in weights.values():
            self.broadcast(tensor.detach().contiguous())

    def receive(self, description: Mapping[str, Any], device: torch.device) -> dict[str, Tensor]:
        """The other ranks: all of them, or an error. They are kept in the host's memory until the last one is there, so
        that a transfer that breaks off has changed nothing."""
        weights: dict[str, Tensor] = {}
        digest = hashlib.sha256()
        for name, dtype, shape in zip(description["names"], description["dtypes"], description["shapes"]):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            self.broadcast(tensor)
            weights[name] = tensor.cpu()
            digest.update(raw(weights[name]))
        if digest.hexdigest() != description["digest"]:
            raise RuntimeError("the weights that arrived are not those that were sent: their checksums differ")
        return weights

    def close(self) -> None:
        """Leave it; the others' next collective is an error."""
        shutdown = getattr(self._group, "shutdown", None)
        if shutdown is not None:
            shutdown()
        self._group = self._store = None
