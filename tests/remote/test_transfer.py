"""Weights over a collective of torch.distributed between real processes: whole, or an error in time."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from warm_process import Popen

from ascendchat.remote.weights import TransferGroup, address_towards, described, listen, meet

ROOT = Path(__file__).resolve().parents[2]

RECEIVER = """
import json, sys, torch
from ascendchat.remote.weights import TransferGroup, meet
told = json.loads(sys.argv[1])
store, place = meet("127.0.0.1", told["port"], 60), {"own": "127.0.0.1", "name": "g"}
group = TransferGroup("gloo", store, **place, rank=told["rank"], size=told["size"], timeout=told["timeout"])
for facts in iter(sys.stdin.readline, ""):
    found = group.receive(json.loads(facts), torch.device("cpu"))
    print(json.dumps({name: tensor.float().sum().item() for name, tensor in found.items()}), flush=True)
"""


def receiver(port: int, rank: int, size: int, timeout: float = 60.0) -> subprocess.Popen[str]:
    told = json.dumps({"port": port, "rank": rank, "size": size, "timeout": timeout})
    command = [sys.executable, "-c", RECEIVER, told]
    return Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def weights(seed: int) -> dict[str, torch.Tensor]:
    noise = torch.Generator().manual_seed(seed)
    made = {"b": torch.randn(7, 5, generator=noise), "a": torch.randn(3, generator=noise).bfloat16()}
    return {**made, "turned": made["b"].t(), "scalar": torch.tensor(float(seed))}


@pytest.mark.slow
def test_all_ranks_receive_what_was_sent_again_and_again_and_a_dead_one_is_an_error() -> None:
    store = listen(60.0)
    assert address_towards("127.0.0.1", store.port) == "127.0.0.1"
    others = [receiver(store.port, rank, 3) for rank in (1, 2)]
    group = TransferGroup("gloo", store, own="127.0.0.1", name="g", rank=0, size=3, timeout=60.0)
    for seed in (1, 2):
        sent = weights(seed)
        facts = json.dumps(described(sent))
        for other in others:
            assert other.stdin is not None
            other.stdin.write(facts + "\n")
            other.stdin.flush()
        group.send(sent)
        for other in others:
            assert other.stdout is not None
            found = json.loads(other.stdout.readline())
            assert found == pytest.approx({name: tensor.float().sum().item() for name, tensor in sent.items()})
    others[1].kill()
    others[1].wait()
    big = {str(i): torch.zeros(1 << 20) for i in range(20)}  # more than lies in the sockets' buffers
    with pytest.raises(RuntimeError):
        group.send(big)
    group.close()
    others[0].kill()
    others[0].wait()


def test_who_waits_for_a_rank_that_never_comes_gives_up() -> None:
    store = listen(0.5)
    with pytest.raises(RuntimeError):
        TransferGroup("gloo", store, own="127.0.0.1", name="g", rank=0, size=2, timeout=0.5).send(weights(1))


def test_changed_bytes_are_noticed() -> None:
    store, sent = listen(60.0), weights(1)
    facts, errors = {**described(sent), "digest": "0" * 64}, list[str]()

    def receive() -> None:
        there = meet("127.0.0.1", store.port, 60.0)  # one client of the store for each rank
        other = TransferGroup("gloo", there, own="127.0.0.1", name="g", rank=1, size=2, timeout=60.0)
        try:
            other.receive(facts, torch.device("cpu"))
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    TransferGroup("gloo", store, own="127.0.0.1", name="g", rank=0, size=2, timeout=60.0).send(sent)
    thread.join(60)
    assert errors == ["the weights that arrived are not those that were sent: their checksums differ"]
