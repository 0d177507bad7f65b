"""The simulated runtime: devices, chips, memory, streams, events, contexts, instruments.

python -m cannsim run -- pytest tests/npu/test_runtime.py
"""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
import torch

import cannsim

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


@pytest.mark.parametrize("chip", ["Ascend910A", "Ascend310P3"])
def test_bf16_is_refused_on_chips_without_it(on_npu, chip):
    (rank,) = on_npu(
        """
        import torch
        torch.npu.set_compile_mode(jit_compile=False)
        x = torch.ones(16, 16, dtype=torch.bfloat16).npu()
        print((x @ x).cpu())
        """,
        chip=chip,
        check=False,
    )
    assert not rank.ok
    assert "EZ1001" in rank.output
    on_npu(
        """
        import torch
        torch.npu.set_compile_mode(jit_compile=False)
        x = torch.ones(16, 16).half().npu()
        assert ((x @ x).cpu() == 16).all()
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


def test_a_missing_synchronisation_between_streams_is_seen(on_npu):
    (rank,) = on_npu(DELAYED.format(wait="pass"), CANNSIM_DELAY_US=200000)  # the host may lose its core for a while
    assert "result [10.0, 10.0, 10.0, 10.0]" not in rank.output


def test_the_same_program_with_the_synchronisation_is_right(on_npu):
    (rank,) = on_npu(DELAYED.format(wait="b.wait_event(ready)"), CANNSIM_DELAY_US=20000)
    assert "result [10.0, 10.0, 10.0, 10.0]" in rank.output


def test_an_event_recorded_again_on_a_faster_stream_still_holds_those_who_wait_for_the_first_record(on_npu):
    wait = "b.wait_event(ready); torch.npu.Stream().record_event(ready)"
    (rank,) = on_npu(DELAYED.format(wait=wait), CANNSIM_DELAY_US=20000)
    assert "result [10.0, 10.0, 10.0, 10.0]" in rank.output


LATE = """import ctypes
    acl, event, on = ctypes.CDLL("libascendcl.so"), ctypes.c_void_p(), lambda x: ctypes.c_void_p(x.npu_stream)
    codes = [acl.aclrtCreateEvent(ctypes.byref(event)), acl.aclrtRecordEvent(event, on(a))]
    print(*codes, acl.aclrtDestroyEvent(event), acl.aclrtStreamWaitEvent(on(b), event), acl.aclrtDestroyEvent(event))"""


def test_a_wait_behind_the_end_of_its_event_waits(on_npu):  # torch_npu has a queue for each device, see event.cpp
    (rank,) = on_npu(DELAYED.format(wait=LATE), CANNSIM_DELAY_US=20000, TASK_QUEUE_ENABLE=0)
    assert "0 0 0 0 100000\nresult [10.0, 10.0, 10.0, 10.0]" in rank.output


def test_tasks_run_after_their_launch(on_npu):
    on_npu(
        """
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
        """,
        CANNSIM_DELAY_US=500000,
    )


def test_a_pinned_copy_needs_synchronisation_and_a_pageable_one_does_not(on_npu):
    on_npu(
        """
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
        """,
        CANNSIM_DELAY_US=300000,  # this thread may lose its core between two lines
    )


def test_elapsed_time_of_events_is_the_time_of_the_stream(on_npu):
    on_npu(
        """
        import torch
        x = torch.zeros(4, device="npu")
        start, end = (torch.npu.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(3):
            x += 1
        end.record()
        end.synchronize()
        assert 60 <= start.elapsed_time(end) < 20000, start.elapsed_time(end)  # milliseconds
        """,
        CANNSIM_DELAY_US=20000,
    )


def test_synchronising_with_a_timeout_reports_507046(on_npu):
    (rank,) = on_npu(
        """
        import ctypes, torch
        x = torch.zeros(4, device="npu")
        x += 1
        stream = ctypes.c_void_p(torch.npu.current_stream().npu_stream)
        print("status", ctypes.CDLL("libascendcl.so").aclrtSynchronizeStreamWithTimeout(stream, 20))
        torch.npu.synchronize()
        """,
        CANNSIM_DELAY_US=1000000,
    )
    assert "status 507046" in rank.output


def test_before_cann_8_3_a_thread_without_a_device_gets_107002():
    program = """
import ctypes, threading, torch
torch.ones(1).npu()
runtime, found = ctypes.CDLL("libascendcl.so"), []
runtime.aclGetRecentErrMsg.restype = ctypes.c_char_p
def allocate():
    found.append(runtime.aclrtMalloc(ctypes.byref(ctypes.c_void_p()), 64, 0))
    found.append(runtime.aclGetRecentErrMsg())
    runtime.aclrtSetDevice(0)
    found.append(runtime.aclrtMalloc(ctypes.byref(ctypes.c_void_p()), 64, 0))
thread = threading.Thread(target=allocate)
thread.start()
thread.join()
assert found[0] == 107002 and b"context is empty" in found[1] and found[2] == 0, found
"""
    env = cannsim.environment() | {"CANNSIM_CANN_VERSION": "8.2.RC1"}  # read when torch_npu is imported
    env.pop("PYTORCH_NPU_ALLOC_CONF", None)  # what a test in this process has set for itself
    subprocess.run([sys.executable, "-c", program], env=env, check=True, timeout=120)


def test_since_cann_8_3_such_a_thread_silently_uses_device_0(on_npu):
    on_npu(
        """
        import threading, torch
        torch.npu.set_device(1)
        found = []
        thread = threading.Thread(target=lambda: found.append(torch.ones(1).npu().device.index))
        thread.start(); thread.join()
        assert found == [0] and torch.npu.current_device() == 1
        """,
        devices=2,
    )


# ---- instruments


def test_launches_are_counted_by_name():
    x = torch.ones(8, 8, device="npu")
    cannsim.reset()
    for _ in range(3):
        x = x @ x
    counted = cannsim.launches()
    assert sum(count for name, count in counted.items() if "atmul" in name or name == "aclnnMm") == 3
    cannsim.reset()
    assert cannsim.launches() == {}


def test_a_command_is_told_at_its_end_what_it_launched():
    program = "import torch; x = torch.ones(8, device='npu'); x + x; x + x; torch.npu.synchronize()"
    command = [sys.executable, "-m", "cannsim", "run", "--count", "--", sys.executable, "-c", program]
    last = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stderr.splitlines()[-1]
    total, by_name = re.fullmatch(r"cannsim: (\d+) launches: (.*)", last).groups()
    assert json.loads(by_name)["aclnnAdd"] == 2
    assert int(total) == sum(json.loads(by_name).values())


def test_the_trace_has_one_json_line_per_call(on_npu, tmp_path):
    path = tmp_path / "trace.jsonl"
    on_npu("import torch; x = torch.ones(4).npu(); x + x; x + x; torch.npu.synchronize()", CANNSIM_TRACE=path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    adds = [line for line in lines if line["name"] == "aclnnAdd"]
    assert [line["call"] for line in adds] == [1, 2]
    assert all(line["device"] == 0 for line in adds)
    assert "aclInit" in {line["name"] for line in lines}


def test_profiling_starts_and_stops(on_npu):
    on_npu(
        """
        import os, tempfile, torch, torch_npu, cannsim
        from torch_npu.profiler import ProfilerActivity, profile
        os.chdir(tempfile.mkdtemp())  # the profiler leaves a folder where it runs
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.NPU]) as prof:
            x = torch.ones(4).npu()
            (x + x).cpu()
            prof.step()
        assert cannsim.counters()["aclprofStart"][0] == 1 and cannsim.counters()["aclprofStop"][0] == 1
        """
    )


# ---- memory


def test_memory_is_limited_and_given_back(on_npu):
    (rank,) = on_npu(
        """
        import torch, cannsim
        free, total = torch.npu.mem_get_info()
        assert total == 2**30 and free == total
        held = torch.empty(600 * 2**20, dtype=torch.uint8, device="npu")
        assert cannsim.allocated() >= 600 * 2**20
        try:
            torch.empty(600 * 2**20, dtype=torch.uint8, device="npu")
        except torch.OutOfMemoryError as error:
            print("refused:", error)
        else:
            raise AssertionError("allocated more than the device has")
        del held
        torch.npu.empty_cache()
        assert cannsim.allocated() == 0 and cannsim.peak_allocated() >= 600 * 2**20
        torch.empty(600 * 2**20, dtype=torch.uint8, device="npu")
        """,
        CANNSIM_MEMORY_GB=1,
    )
    assert "NPU out of memory. Tried to allocate 60" in rank.output


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


def test_processes_share_the_memory_of_a_device(on_npu):
    on_npu(
        """
        import os, time, torch
        torch.npu.set_device(0)                     # both ranks use device 0
        held = torch.empty(300 * 2**20, dtype=torch.uint8, device="npu")
        end = time.monotonic() + 50
        while torch.npu.mem_get_info()[0] > 2**30 - 600 * 2**20 and time.monotonic() < end:
            time.sleep(0.01)
        assert torch.npu.mem_get_info()[0] <= 2**30 - 600 * 2**20
        time.sleep(2)                               # let the other one see it too
        """,
        ranks=2,
        CANNSIM_MEMORY_GB=1,
    )


def test_expandable_segments_grow_in_place(on_npu):
    on_npu(
        """
        import torch, cannsim
        a = torch.ones(30 * 2**20, dtype=torch.uint8, device="npu")
        b = torch.ones(30 * 2**20, dtype=torch.uint8, device="npu")
        assert (a + b).sum(dtype=torch.int32).item() == 60 * 2**20
        assert cannsim.counters()["aclrtMapMem"][0] > 0
        del a, b
        torch.npu.synchronize()
        torch.npu.empty_cache()
        assert cannsim.allocated() == 0, cannsim.allocated()
        """,
        PYTORCH_NPU_ALLOC_CONF="expandable_segments:True",
    )
