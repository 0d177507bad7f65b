"""The part of a weight sync that runs inside vLLM's workers; vllm.py, in the trainer, calls it by /collective_rpc.

    VLLM_SERVER_DEV_MODE=1 PYTHONPATH=FOLDER_OF_ASCENDCHAT python -m vllm.entrypoints.openai.api_server \\
        --worker-extension-cls ascendchat.remote.vllm_worker.WeightReceiver ...

vLLM adds these methods to its worker class. Its own transfer engines speak raw NCCL or HCCL, which need the devices and
cannot be joined without importing vllm; this one takes any collective of torch.distributed, gloo on CPUs as well. It
needs nothing of vLLM but `reload_weights`, which all versions since 0.16 have. Arguments are JSON in a string, since
/collective_rpc passes strings only.
"""

from __future__ import annotations

import json
from typing import Any

from ascendchat.remote.weights import TransferGroup, address_towards, meet


class WeightReceiver:
    """Methods of a worker of vLLM, whose attributes `device`, `rank`, `vllm_config` and `reload_weights` it uses."""

    def ascendchat_join(self, told: str) -> dict[str, Any]:
        """Meet the trainer in a group; a group from before is left."""
        self.ascendchat_leave()
        worker: Any = self
        facts, parallel = json.loads(told), worker.vllm_config.parallel_config
        replica = getattr(parallel, "data_parallel_index", getattr(parallel, "data_parallel_rank", 0))
        rank = 1 + replica * parallel.world_size + worker.rank
        store = meet(facts["address"], facts["port"], facts["timeout"])
        worker.ascendchat_group = TransferGroup(
            facts["backend"],
            store,
            own=address_towards(facts["address"], facts["port"]),
            name=facts["name"],
            rank=rank,
            size=facts["size"],
            timeout=facts["timeout"],
        )
        return {"rank": rank}

    def ascendchat_receive(self, told: str) -> dict[str, Any]:
        """Take all weights from the trainer, then load them; whatever fails before the last one is there changes
        nothing."""
        worker: Any = self
        facts = json.loads(told)
        weights = worker.ascendchat_group.receive(facts, worker.device)
        worker.reload_weights(weights_iterator=iter(weights.items()))
        return {"loaded": len(weights)}

    def ascendchat_leave(self) -> dict[str, Any]:
        """Give the group up."""
        worker: Any = self
        group, worker.ascendchat_group = getattr(worker, "ascendchat_group", None), None
        if group is not None:
            group.close()
        return {"left": group is not None}
