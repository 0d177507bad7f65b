"""Weights from a trainer to the workers of a server over HCCL: the group of remote/weights.py on simulated NPUs."""

from __future__ import annotations

SYNC = """
import os, torch, torch.distributed as dist
from datetime import timedelta
from ascendchat.remote.weights import TransferGroup, described, meet
rank, world, port = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["MASTER_PORT"])
torch.npu.set_device(rank)
place = torch.device("npu", rank)
assert dist.get_default_backend_for_device(place) == "hccl"
if rank == 0:
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
else:
    store = meet("127.0.0.1", port, 60.0)
group = TransferGroup("hccl", store, own="127.0.0.1", name="weights", rank=rank, size=world, timeout=60.0)
for version in range(3):
    noise = torch.Generator().manual_seed(version)
    weights = {"a": torch.randn(300, 70, generator=noise).bfloat16(), "b": torch.randn(5, generator=noise)}
    weights["turned"] = weights["a"].t()
    if rank == 0:
        group.send({name: tensor.to(place) for name, tensor in weights.items()})
    else:
        found = group.receive(described(weights), place)
        assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
        assert {tensor.device.type for tensor in found.values()} == {"cpu"}
if rank == 0:  # who has the store leaves last
    store.wait([f"done{other}" for other in range(1, world)], timedelta(seconds=60))
else:
    store.set(f"done{rank}", "")
group.close()
print("synced")
"""


OWN = """
import os, torch, torch.distributed as dist
torch.npu.set_device(int(os.environ["RANK"]))
dist.init_process_group("hccl", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(3, device="npu"))
"""


def test_weights_go_over_hccl_beside_a_group_of_each_process(on_npu):
    """As a trainer and the workers of vLLM have."""
    ranks = on_npu(OWN + SYNC, 3, timeout=200)
    assert all("synced" in rank.output for rank in ranks)
