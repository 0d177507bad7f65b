"""Weights from a trainer to the workers of a server over a collective of torch.distributed: gloo, nccl or hccl.

    store = listen(); told = {"address": ..., "port": store.port, ...}      # the trainer, rank 0
    group = Group("gloo", store, rank=0, size=1 + workers, timeout=60.0)    # every rank at the same time
    group.send(weights); group.receive(told)

The group stands beside the process's own one: a trainer of several ranks and a worker of vLLM have one each. This file
also runs inside the server's process (vllm_worker.py), so it imports torch and nothing of ours.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor


def address_towards(host: str, port: int) -> str:
    """This machine's address as it is seen from there."""
    with socket.create_connection((host, port), timeout=10.0) as link:
        return str(link.getsockname()[0])


def listen(timeout: float) -> torch_dist.TCPStore:
    """Where the ranks of a group meet, on a free port of this machine."""
    wait = timedelta(seconds=timeout)
    return torch_dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=wait)


def meet(address: str, port: int, timeout: float) -> torch_dist.TCPStore:
    """The store that another process listens on."""
    return torch_dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout))


def described(weights: Mapping[str, Tensor]) -> dict[str, Any]:
    """What the receivers must know before the tensors come, in the order in which they come."""
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


class Group:
    """A process group of its own. Whoever is late or gone is an error after `timeout` seconds, not a wait for ever."""

    def __init__(
        self, backend: str, store: torch_dist.TCPStore, *, own: str, name: str, rank: int, size: int, timeout: float
    ) -> None:
        """`own`: address of this machine that the other ranks can reach. `name`: of this group in the store."""
        self.rank, self.timeout = rank, timedelta(seconds=timeout)
        self._store: Any = store
        place = torch_dist.PrefixStore(name, store)
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

    def receive(self, told: Mapping[str, Any], device: torch.device) -> dict[str, Tensor]:
        """The other ranks: all of them, or an error. They are kept in the host's memory until the last one is there, so
        that a transfer that breaks off has changed nothing."""
        found: dict[str, Tensor] = {}
        digest = hashlib.sha256()
        for name, dtype, shape in zip(told["names"], told["dtypes"], told["shapes"]):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
            self.broadcast(tensor)
            found[name] = tensor.cpu()
            digest.update(raw(found[name]))
        if digest.hexdigest() != told["digest"]:
            raise RuntimeError("the weights that arrived are not those that were sent: their checksums differ")
        return found

    def close(self) -> None:
        """Leave it; the others' next collective is an error."""
        shutdown = getattr(self._group, "shutdown", None)
        if shutdown is not None:
            shutdown()
        self._group = self._store = None
