"""The simulated runtime: devices, chips, memory, streams, events, contexts, instruments."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
import torch

CHIPS = [
    # name, bf16, inf/nan, cube cores
    ("Ascend910A", False, False, 32),
    ("Ascend910B", False, False, 32),  # the 2019 chip, not an A2
    ("Ascend310P3", False, False, 8),
    ("Ascend910B3", True, True, 20),
    ("Ascend910B4", True, True, 20),
    ("Ascend910_9392", True, True, 24),
]


@pytest.mark.parametrize(("chip", "bf16", "inf_nan", "cores"), CHIPS)
def test_a_chip_has_its_real_capabilities(on_npu, chip, bf16, inf_nan, cores):
    on_npu(
        f"""
        import ctypes, torch
        assert torch.npu.get_device_name(0) == {chip!r}
        assert torch.npu.is_bf16_supported() == {bf16}
        assert torch.npu.get_device_properties(0).cube_core_num == {cores}
        value = ctypes.c_int(-1)
        ctypes.CDLL("libascendcl.so").aclGetCannAttribute(0, ctypes.byref(value))  # 0: INF_NAN
        assert value.value == {int(inf_nan)}
        """,
        chip=chip,
    )


def test_an_unknown_chip_is_refused_with_the_known_names(on_npu):
    (rank,) = on_npu("import torch; torch.ones(1).npu()", chip="Ascend910X", check=False)
    assert not rank.ok
    assert "CANNSIM_CHIP" in rank.output
    assert "Ascend910B3" in rank.output


@pytest.mark.parametrize(
    ("visible", "count"), [("0,1,2,3", 4), ("1,3", 2), ("3,1", 0), ("1,1", 0), ("0, 1", 1), ("2,7", 1)]
)
def test_visible_devices_follow_the_rules_of_cann(on_npu, visible, count):
    on_npu(
        f"import torch; assert torch.npu.device_count() == {count}; assert torch.npu.is_available() == {count > 0}",
        devices=4,
        ASCEND_RT_VISIBLE_DEVICES=visible,
    )


def test_pinned_memory_is_what_was_pinned():
    pageable = torch.arange(10.0)
    pinned = pageable.pin_memory()
    assert not pageable.is_pinned()
    assert pinned.is_pinned()
    assert pinned[3:].is_pinned()
    assert torch.equal(pinned.npu().cpu(), pageable)


def test_swapped_memory_is_seen_by_host_and_device():
    torch_npu = pytest.importorskip("torch_npu")
    swapped = torch_npu.empty_with_swapped_memory([4, 4], dtype=torch.float32, device="npu:0")
    swapped.fill_(3)
    assert torch.equal((swapped + 1).cpu(), torch.full((4, 4), 4.0))
    del swapped
    torch.npu.synchronize()
    assert torch.ones(4).pin_memory().is_pinned()


def test_no_memory_cannot_be_registered():
    runtime, host = torch.npu.npurt(), torch.empty(4096, dtype=torch.uint8)
    assert int(runtime.npuHostRegister(host.data_ptr(), 0, 0)) == 107000
    assert int(runtime.npuHostRegister(host.data_ptr(), 4096, 0)) == 0
    assert int(runtime.npuHostUnregister(host.data_ptr())) == 0


# ---- asynchronous execution

DELAYED = """
import torch
x = torch.zeros(4, device="npu")
torch.npu.synchronize()
a, b = torch.npu.Stream(), torch.npu.Stream()
with torch.npu.stream(a):
    for _ in range(5):
        x += 1
    ready = a.record_event()
with torch.npu.stream(b):
    {wait}
    y = x * 2
torch.npu.synchronize()
print("result", y.cpu().tolist())
"""


LATE = """import ctypes
    acl, event, on = ctypes.CDLL("libascendcl.so"), ctypes.c_void_p(), lambda x: ctypes.c_void_p(x.npu_stream)
    codes = [acl.aclrtCreateEvent(ctypes.byref(event)), acl.aclrtRecordEvent(event, on(a))]
    codes += [acl.aclrtDestroyEvent(event), acl.aclrtStreamWaitEvent(on(b), event), acl.aclrtDestroyEvent(event)]
    assert codes == [0, 0, 0, 0, 100000], codes"""
WAITS = {
    "for the event": "b.wait_event(ready)",
    "for its first record, on a faster stream it is recorded again": (
        "b.wait_event(ready); torch.npu.Stream().record_event(ready)"
    ),
    "for one that is destroyed": LATE,  # torch_npu has a queue for each device, see event.cpp
}


def test_a_missing_synchronisation_between_streams_is_seen(on_npu):
    (rank,) = on_npu(DELAYED.format(wait="pass"), CANNSIM_DELAY_US=200000)  # the host may lose its core for a while
    assert "result [10.0, 10.0, 10.0, 10.0]" not in rank.output


@pytest.mark.parametrize("wait", WAITS)
def test_the_same_program_is_right_if_the_stream_waits(on_npu, wait):
    (rank,) = on_npu(DELAYED.format(wait=WAITS[wait]), CANNSIM_DELAY_US=20000, TASK_QUEUE_ENABLE=0)
    assert "result [10.0, 10.0, 10.0, 10.0]" in rank.output


PROGRAMS: dict[str, tuple[dict[str, object], str]] = {  # delays are long: a thread may lose its core for a while
    "a thread without a device gets 107002 if nobody asks for the behaviour of CANN 8.3": ({}, """
import ctypes, threading
runtime, found = ctypes.CDLL("libascendcl.so"), []
runtime.aclGetRecentErrMsg.restype = ctypes.c_char_p
assert runtime.aclInit(None) == runtime.aclrtSetDevice(0) == 0
def allocate():
    found.append(runtime.aclrtMalloc(ctypes.byref(ctypes.c_void_p()), 64, 0))
    found.append(runtime.aclGetRecentErrMsg())
    runtime.aclrtSetDevice(0)
    found.append(runtime.aclrtMalloc(ctypes.byref(ctypes.c_void_p()), 64, 0))
thread = threading.Thread(target=allocate)
thread.start(); thread.join()
assert found[0] == 107002 and b"context is empty" in found[1] and found[2] == 0, found
"""),
    "as torch_npu asks for it, such a thread silently uses device 0": ({"devices": 2}, """
import threading, torch
torch.npu.set_device(1)
found = []
thread = threading.Thread(target=lambda: found.append(torch.ones(1).npu().device.index))
thread.start(); thread.join()
assert found == [0] and torch.npu.current_device() == 1
"""),
    "tasks run after their launch": ({"CANNSIM_DELAY_US": 500000}, """
import torch, cannsim, time
x = torch.zeros(4, device="npu")
torch.npu.synchronize()
start = time.monotonic()
for _ in range(4):
    x += 1
done = torch.npu.Event()
done.record()
assert not done.query()
done.synchronize()
assert done.query() and time.monotonic() - start >= 4 * 0.5
torch.npu.synchronize()  # the event is done a moment before its task has left the queue
assert cannsim.pending() == 0
"""),
    "a pinned copy needs synchronisation, and a pageable one does not": ({"CANNSIM_DELAY_US": 300000}, """
import torch
target = torch.zeros(4, device="npu")
pinned = torch.ones(4).pin_memory()
torch.npu.synchronize()
target.copy_(pinned, non_blocking=True)
pinned.fill_(7)                      # too early: the copy has not run
assert target.cpu().tolist() == [7.0] * 4
target.copy_(pinned, non_blocking=True)
torch.npu.synchronize()
pinned.fill_(9)
assert target.cpu().tolist() == [7.0] * 4
pageable = torch.ones(4)
target.copy_(pageable, non_blocking=False)
pageable.fill_(7)
assert target.cpu().tolist() == [1.0] * 4
back = torch.zeros(4).pin_memory()
back.copy_(target, non_blocking=True)
assert back.tolist() == [0.0] * 4    # read too early
torch.npu.synchronize()
assert back.tolist() == [1.0] * 4
"""),
    "elapsed time of events is the time of the stream": ({"CANNSIM_DELAY_US": 20000}, """
import torch
x = torch.zeros(4, device="npu")
start, end = (torch.npu.Event(enable_timing=True) for _ in range(2))
start.record()
for _ in range(3):
    x += 1
end.record()
end.synchronize()
assert 60 <= start.elapsed_time(end) < 20000, start.elapsed_time(end)  # milliseconds
"""),
    "processes share the memory of a device": ({"ranks": 2, "CANNSIM_MEMORY_GB": 1}, """
import os, time, torch
torch.npu.set_device(0)                     # both ranks use device 0
held = torch.empty(300 * 2**20, dtype=torch.uint8, device="npu")
end = time.monotonic() + 50
while torch.npu.mem_get_info()[0] > 2**30 - 600 * 2**20 and time.monotonic() < end:
    time.sleep(0.01)
assert torch.npu.mem_get_info()[0] <= 2**30 - 600 * 2**20
time.sleep(2)                               # let the other one see it too
"""),
    "expandable segments grow in place": ({"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}, """
import torch, cannsim
a = torch.ones(30 * 2**20, dtype=torch.uint8, device="npu")
b = torch.ones(30 * 2**20, dtype=torch.uint8, device="npu")
assert (a + b).sum(dtype=torch.int32).item() == 60 * 2**20
assert cannsim.counters()["aclrtMapMem"][0] > 0
del a, b
torch.npu.synchronize()
torch.npu.empty_cache()
assert cannsim.allocated() == 0, cannsim.allocated()
"""),
    "synchronising with a timeout reports 507046": ({"CANNSIM_DELAY_US": 1000000}, """
import ctypes, torch
x = torch.zeros(4, device="npu")
x += 1
stream = ctypes.c_void_p(torch.npu.current_stream().npu_stream)
assert ctypes.CDLL("libascendcl.so").aclrtSynchronizeStreamWithTimeout(stream, 20) == 507046
torch.npu.synchronize()
"""),
    "memory is limited and given back": ({"CANNSIM_MEMORY_GB": 1}, """
import torch, cannsim
assert tuple(torch.npu.mem_get_info()) == (2**30, 2**30)
held = torch.empty(600 * 2**20, dtype=torch.uint8, device="npu")
assert cannsim.allocated() >= 600 * 2**20
try:
    torch.empty(600 * 2**20, dtype=torch.uint8, device="npu")
except torch.OutOfMemoryError as error:
    assert "NPU out of memory. Tried to allocate 60" in str(error), error
else:
    raise AssertionError("allocated more than the device has")
del held
torch.npu.empty_cache()
assert cannsim.allocated() == 0 and cannsim.peak_allocated() >= 600 * 2**20
torch.empty(600 * 2**20, dtype=torch.uint8, device="npu")
"""),
}  # fmt: skip


@pytest.mark.parametrize("situation", PROGRAMS)
def test_the_runtime_behaves_as_that_of_cann(on_npu, situation):
    settings, program = PROGRAMS[situation]
    on_npu(program, **settings)


# ---- instruments


@pytest.mark.slow
def test_a_command_is_told_at_its_end_what_it_launched():
    program = "import torch; x = torch.ones(8, device='npu'); x + x; x + x; torch.npu.synchronize()"
    command = [sys.executable, "-m", "cannsim", "run", "--count", "--", sys.executable, "-c", program]
    last = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stderr.splitlines()[-1]
    total, by_name = re.fullmatch(r"cannsim: (\d+) launches: (.*)", last).groups()
    assert json.loads(by_name)["aclnnAdd"] == 2
    assert int(total) == sum(json.loads(by_name).values())


# ---- memory


def test_memory_runs_out_at_the_chosen_byte(on_npu):
    (rank,) = on_npu(
        """
        import torch
        blocks = []
        while True:
            blocks.append(torch.empty(10 * 2**20, dtype=torch.uint8, device="npu"))
            print("blocks", len(blocks), flush=True)
        """,
        CANNSIM_OOM_AT=64 * 2**20,
        check=False,
    )
    assert not rank.ok
    assert "blocks 4" in rank.output
    assert "blocks 6" not in rank.output  # 10 MiB and padding take 12
    assert "out of memory" in rank.output
