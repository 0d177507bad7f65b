"""What cannsim has learnt of hardware: compressed masks, published limits, streams, processes, known faults."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

OnNpu = Callable[..., list[Any]]

MASKS = """
import torch, torch_npu

T, D = 300, 16  # several blocks, the last one not full
q, k, v = (torch.randn(1, T, 2, D) for _ in range(3))
triangle = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
i, j = torch.arange(T)[:, None], torch.arange(T)[None]
block = i // 128 == j // 128
causal, band = j > i, (j > i) | (j < i - 129)

def plain(hidden):
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * 0.25
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(hidden, -1e30).softmax(-1), v)

def attend(mask, mode, **more):
    known = {"scale": 0.25, "atten_mask": mask.npu(), "sparse_mode": mode, **more}
    return torch_npu.npu_fusion_attention(q.npu(), k.npu(), v.npu(), 2, "BSND", **known)[0].cpu()

def near(a, b):
    return torch.allclose(a, b, atol=1e-4)

for mode in (2, 3):
    assert near(attend(triangle, mode), plain(causal)), mode
    # Of an inverted mask the kernel reads what lies in the blocks on the diagonal; the others it knows to be seen.
    rows = torch.arange(T) != 127  # the only one that sees nothing then
    assert near(attend(~triangle, mode)[:, rows], plain(torch.where(block, j <= i, causal))[:, rows]), mode
    assert near(attend(torch.zeros_like(triangle), mode), plain(causal & ~block)), mode
window = {"pre_tockens": 129, "next_tockens": 0}
assert near(attend(triangle, 4, **window), plain(band))
wrong = attend(~triangle, 4, **window)
assert not near(wrong[:, :256], plain(band)[:, :256]), "an inverted mask gives other numbers"
assert not near(attend(torch.zeros_like(triangle), 4, **window), plain(band))
"""


def test_compressed_masks_are_read_where_a_kernel_reads_them(on_npu: OnNpu) -> None:
    on_npu(MASKS)


LIMITS = """
import torch, torch_npu

def refused(text, run):
    try:
        run()
        torch.npu.synchronize()
    except RuntimeError as error:
        assert "161002" in str(error) and text in str(error), error
    else:
        raise AssertionError(f"accepted: {text}")

def dense(length):
    q = torch.zeros(1, length, 1, 1, dtype=torch.float16, device="npu")
    return torch_npu.npu_fusion_attention(q[:, :1], q, q, 1, "BSND")

def packed(tokens, documents):
    q = torch.zeros(tokens, 1, 16, dtype=torch.float16, device="npu")
    ends = list(range(1, documents)) + [tokens]
    return torch_npu.npu_fusion_attention(q, q, q, 1, "TND", actual_seq_qlen=ends, actual_seq_kvlen=ends)

def decoding(heads, dim):
    q = torch.zeros(1, 1, heads, dim, dtype=torch.float16, device="npu")
    return torch_npu.npu_fused_infer_attention_score(q, q, q, num_heads=heads, input_layout="BSND")

dense(2**20)
packed(2100, 2048)
decoding(255, 256)
torch.npu.synchronize()
refused("should be at most 1048576", lambda: dense(2**20 + 1))
refused("T of query and key", lambda: packed(2**20 + 1, 1))
refused("at most 2048 values, but found 2049", lambda: packed(2100, 2049))
refused("should be below 65535", lambda: decoding(256, 256))
"""


def test_published_upper_limits_are_checked(on_npu: OnNpu) -> None:
    on_npu(LIMITS, TASK_QUEUE_ENABLE=0)


GRAPHS = """
import torch
x, graphs = torch.zeros(4, device="npu"), []

def capture():
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        x + 1
    return graph

for _ in range(80):
    capture().reset()  # gives its streams back
try:
    while len(graphs) < 100:
        graphs.append(capture())
except RuntimeError as error:
    print("after", len(graphs), "EL0009" in str(error) or "207008" in str(error))
"""


def test_streams_run_out_when_graphs_hold_them(on_npu: OnNpu) -> None:
    (few,), (many,) = (on_npu(GRAPHS, CANNSIM_STREAMS=limit, TASK_QUEUE_ENABLE=1, check=False) for limit in (60, 2048))
    assert re.search(r"after [1-9]\d* True", few.output), few
    assert "after" not in many.output, many


PROCESSES = """
import ctypes, os, signal, torch, torch_npu

started = []

class Process:  # sets the device, says how that went, and does what it is told until it is killed
    def __init__(self, device=0):
        answers, answer = os.pipe()
        orders, order = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            signal.alarm(120)
            try:
                torch_npu.npu.set_device(device)
                said = f"holds {torch.ones(2, device=f'npu:{device}').sum().item()}"
            except RuntimeError as error:
                said = str(error)
            os.write(answer, said.encode())
            os.read(orders, 1)
            os.write(answer, str(ctypes.CDLL("libascendcl.so").aclrtResetDevice(device)).encode())
            signal.pause()
        started.append(self.pid)
        self.answers, self.order, self.said = answers, order, os.read(answers, 9999).decode()

    def reset(self):
        os.write(self.order, b"r")
        assert os.read(self.answers, 9) == b"0"

first, second, third = Process(), Process(), Process()
assert first.said == second.said == "holds 2.0", (first.said, second.said)
assert "507033" in third.said, third.said
assert "Reason: 2 processes hold it, and no more may hold one Ascend910B3" in third.said, third.said
assert Process(1).said == "holds 2.0", "the other device has two places of its own"

os.kill(first.pid, signal.SIGKILL)
os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)  # dead, and still in the table of processes
fourth = Process()
assert fourth.said == "holds 2.0", fourth.said
assert "507033" in Process().said
second.reset()  # goes on, without the device
assert Process().said == "holds 2.0"
assert "507033" in Process().said
os.kill(fourth.pid, signal.SIGKILL)
os.waitpid(fourth.pid, 0)
assert Process().said == "holds 2.0"
for pid in set(started) - {fourth.pid}:
    os.kill(pid, signal.SIGKILL)
"""


def test_a_device_refuses_more_processes_than_its_limit_until_one_has_gone(on_npu: OnNpu) -> None:
    on_npu(PROCESSES, devices=2, CANNSIM_PROCESSES_PER_DEVICE=2)


OPENING = """
import ctypes, os, time
acl = ctypes.CDLL("libascendcl.so")
answers, answer = os.pipe()
for _ in range(2):
    if os.fork() == 0:
        acl.aclInit(None)
        began = time.monotonic()
        code = acl.aclrtSetDevice(0)
        os.write(answer, f"{code} {time.monotonic() - began > 1.9}\\n".encode())
        os._exit(acl.aclrtResetDevice(0))
said = b""
while said.count(b"\\n") < 2:
    said += os.read(answers, 999)
print("SAID", sorted(said.decode().splitlines()))
"""


def test_a_process_holds_the_device_while_it_opens_it(on_npu: OnNpu) -> None:
    (rank,) = on_npu(OPENING, CANNSIM_PROCESSES_PER_DEVICE=1, CANNSIM_OPEN_SECONDS=4, CANNSIM_TIME_SCALE=0.5)
    assert "SAID ['0 True', '507033 False']" in rank.output


CROWD = """
import ctypes, os, signal, torch, torch_npu
answers, answer = os.pipe()
pids = []
for _ in range(66):
    pids.append(os.fork())
    if pids[-1] == 0:
        signal.alarm(120)
        acl = ctypes.CDLL("libascendcl.so")
        acl.aclInit(None)
        os.write(answer, f"{acl.aclrtSetDevice(0)}\\n".encode())
        signal.pause()
said = b""
while said.count(b"\\n") < 66:
    said += os.read(answers, 9999)
for pid in pids:
    os.kill(pid, signal.SIGKILL)
print("HELD", said.split().count(b"0"), "REFUSED", said.split().count(b"507033"))
"""


@pytest.mark.parametrize(("chip", "limit"), [("Ascend910B3", 63), ("Ascend910A", 64)])
def test_the_limit_on_processes_follows_the_chip_when_all_come_at_once(on_npu: OnNpu, chip: str, limit: int) -> None:
    (rank,) = on_npu(CROWD, chip=chip)
    assert f"HELD {limit} REFUSED {66 - limit}" in rank.output


FAULTS = """
import os, torch, torch.distributed as dist
rank = int(os.environ["RANK"])
torch.npu.set_device(rank)
dist.init_process_group("hccl")
total, told = torch.full((2048,), rank + 1.0).npu(), torch.full((4,), float(rank)).npu()
dist.all_reduce(total)
dist.broadcast(told, 1)
print("FOUND", total[0].item(), told[0].item(), flush=True)
"""


@pytest.mark.parametrize(
    ("fault", "found"), [("", ("3.0 1.0", "3.0 1.0")), ("wrong-reduce,stale-broadcast", ("1.0 0.0", "1.0 1.0"))]
)
def test_collectives_can_be_made_wrong(on_npu: OnNpu, fault: str, found: tuple[str, str]) -> None:
    ranks = on_npu(FAULTS, 2, CANNSIM_HARDWARE=fault)
    assert [f"FOUND {text}" in rank.output for text, rank in zip(found, ranks)] == [True, True], ranks


HOOK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
int aclrtMallocAlign32(void** address, size_t bytes, int policy) {
  int (*behind)(void**, size_t, int) = dlsym(RTLD_NEXT, "aclrtMallocAlign32");
  fprintf(stderr, "asked for %zu bytes\\n", bytes);
  return behind ? behind(address, bytes, policy) : -1;
}
"""


@pytest.mark.slow
def test_a_preloaded_library_finds_the_function_behind_its_own(tmp_path: Path) -> None:
    (tmp_path / "hook.c").write_text(HOOK)
    hook = tmp_path / "libhook.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(hook), str(tmp_path / "hook.c"), "-ldl"], check=True)
    code = "import torch, torch_npu; print(torch.ones(2, device='npu').sum().item())"
    # Other tests of this process may have left a setting by which torch_npu allocates through another function.
    command = ["env", "-u", "PYTORCH_NPU_ALLOC_CONF", f"LD_PRELOAD={hook}", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "asked for" in done.stderr
    assert "2.0" in done.stdout
