"""device/npu.py on the simulated CANN: `python -m cannsim run --devices 2 -- pytest tests/npu/test_device_npu.py`.

It proves that the right calls are made and what they mean, not how fast a real NPU is. Chips and visible devices are
fixed when a process starts, so those cases run in a child.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import cannsim
from ascendchat.chips import KINDS
from ascendchat.device import Device, describe, pick
from ascendchat.device.accelerator import no_garbage_collection
from ascendchat.errors import UserError

pytestmark = pytest.mark.npu
OnNpu = Callable[..., Any]


PROGRAM = """
import json
from ascendchat.chips import KINDS
from ascendchat.errors import UserError
from ascendchat.device import pick
def result(*values):
    print("RESULT " + json.dumps(values))
"""


def _result(output: str) -> list[object]:
    """What the program gave to result()."""
    lines = [line for line in output.splitlines() if line.startswith("RESULT ")]
    assert len(lines) == 1, output
    values: list[object] = json.loads(lines[0].removeprefix("RESULT "))
    return values


def test_the_npu_comes_first_when_nothing_is_named(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASCENDCHAT_DEVICE", raising=False)
    assert pick().type == "npu"
    assert (device.collective, device.pin, device.compiles) == ("hccl", True, False)
    assert device.chip.name == os.environ.get("CANNSIM_CHIP", "Ascend910B3")
    assert describe(device).startswith(f"npu: {device.chip.name}, ")


def test_bind_chooses_the_device_and_refuses_one_that_is_not_visible(device: Device) -> None:
    last = device.count() - 1
    assert device.bind(last) == torch.device("npu", last)
    assert torch.ones(1, device="npu").device.index == last
    assert device.bind(0).index == 0
    with pytest.raises(UserError, match=rf"local rank {last + 1} has no Ascend NPU: {last + 1} visible"):
        device.bind(last + 1)


def test_a_new_thread_can_compute_once_it_is_bound(device: Device) -> None:
    results: list[float] = []

    def work() -> None:
        where = device.bind(0)
        results.append(float((torch.full((2,), 3.0, device=where) * 2).sum().cpu()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results == [12.0]


def test_the_same_seed_gives_the_same_numbers(device: Device) -> None:
    device.seed(7)
    first, second = torch.rand(8, device="npu").cpu(), torch.rand(8, device="npu").cpu()
    device.seed(7)
    assert torch.equal(first, torch.rand(8, device="npu").cpu())
    assert not torch.equal(first, second)


def test_memory_follows_tensors_and_release_gives_it_back_to_the_driver(device: Device) -> None:
    size = 32 << 20
    device.release()
    device.reset_peak()
    before = device.memory()
    block = torch.empty(size, dtype=torch.uint8, device="npu")
    during = device.memory()
    assert size <= during.used - before.used < size + (1 << 20)
    assert during.peak == during.used
    del block
    held = cannsim.allocated(0)
    after = device.memory()
    assert (after.used, after.peak) == (before.used, during.peak)
    device.release()
    assert held - cannsim.allocated(0) >= size
    device.reset_peak()
    assert device.memory().peak == before.used
    assert after.total == torch.npu.get_device_properties(0).total_memory


def test_release_finds_what_only_holds_itself(device: Device) -> None:
    device.release()
    before = device.memory().used
    with no_garbage_collection():  # that would find it by chance
        ring: list[Any] = [torch.empty(1 << 20, dtype=torch.uint8, device="npu")]
        ring.append(ring)
        del ring
        assert device.memory().used > before
        device.release()
        assert device.memory().used == before


def test_marks_measure_work_on_the_device(device: Device) -> None:
    start = device.event()
    x = torch.ones(400, 400, device="npu")
    for _ in range(5):
        x = x @ x * 1e-3
    end = device.event()
    assert end.since(start) > 0
    device.synchronize()
    assert device.event().since(end) >= 0


def test_fetching_waits_for_the_copy_and_not_for_the_work_behind_it(on_npu: OnNpu) -> None:
    code = """
    import cannsim, torch
    from ascendchat.device import pick
    device = pick("npu")
    x = torch.ones(3, device=device.bind(0))
    device.synchronize()
    fetched = device.fetch(x)
    for _ in range(4):
        x.fill_(2.0)
    found = fetched()
    assert cannsim.pending() > 0, "it waited for all"
    assert found.tolist() == [1.0, 1.0, 1.0]
    """
    on_npu(code, CANNSIM_DELAY_US=200000)  # of each task: this thread may lose its core while the device goes on


def test_host_memory_can_be_pinned(device: Device) -> None:
    assert torch.ones(8).pin_memory().is_pinned() == device.pin


def test_overflow_shows_as_inf_or_nan_on_chips_with_bf16(device: Device) -> None:
    good = torch.ones(3, device="npu")
    assert not device.overflowed([good, good])
    assert device.overflowed([good, torch.full((2,), float("inf"), device="npu")])


def test_compiling_is_the_identity_and_asking_for_it_needs_triton_ascend(device: Device) -> None:
    assert device.compile(torch.neg) is torch.neg
    with pytest.raises(UserError, match="pip install triton-ascend"):
        pick("npu", compiled=True)


def test_a_captured_graph_replays_with_new_inputs(device: Device) -> None:
    still = torch.zeros(4, device="npu")
    replay = device.graph(lambda x: torch.add(x * 3, 1), still)
    for value in (2.0, 5.0):
        out = replay(torch.full((4,), value, device="npu"))
        assert out.cpu().tolist() == [value * 3 + 1] * 4


def test_the_profile_is_set_and_the_npu_runs_under_it(on_npu: OnNpu) -> None:
    code = f"""{PROGRAM}
import os
from ascendchat.chips import KINDS
from ascendchat.device.env import prepare_environment
for name in KINDS["npu"].environment:
    os.environ.pop(name, None)
done = prepare_environment(None)
import torch
device = pick()
result(done.set, device.type, (torch.ones(2, device=device.bind(0)) + 1).cpu().tolist())
"""
    assert _result(on_npu(code)[0].output) == [KINDS["npu"].environment, "npu", [2.0, 2.0]]


def test_chips_without_bf16_compute_in_fp16_with_a_scaled_loss_and_refuse_bf16(on_npu: OnNpu) -> None:
    code = f"""{PROGRAM}
device = pick("npu")
try:
    refused = pick("npu", dtype="bf16").type
except UserError as error:
    refused = str(error)
result(device.chip.name, str(device.dtype), device.scaling.needed, device.scaling.overflow, refused)
"""
    name, dtype, needed, overflow, refused = _result(on_npu(code, chip="Ascend910A")[0].output)
    assert (name, dtype, needed, overflow) == ("Ascend910A", "torch.float16", True, "flag")
    assert str(refused).startswith("Ascend910A has no bf16; use fp16")


def test_newer_chips_compute_in_bf16_without_scaling(on_npu: OnNpu) -> None:
    code = f'{PROGRAM}\nd = pick("npu")\nresult(d.chip.name, str(d.dtype), d.scaling.needed, d.chip.known)'
    found = _result(on_npu(code, chip="Ascend910_9392")[0].output)
    assert found == ["Ascend910_9392", "torch.bfloat16", False, True]


UPDATED = """
import torch
from ascendchat.device import pick
device, still = pick("npu"), lambda: None
if {old}:
    del torch.npu.NPUGraph.update
assert device.graph(still, updates=list) is still
"""


@pytest.mark.parametrize(
    ("old", "queue", "said"),
    [
        (False, 2, "no captured graphs with TASK_QUEUE_ENABLE=2; 1 decodes faster"),
        (True, 1, "no captured graphs: this torch_npu is too old to update them"),
    ],
    ids=["queue", "old"],
)
def test_where_no_graph_can_be_captured_the_function_itself_runs(
    on_npu: OnNpu, old: bool, queue: int, said: str
) -> None:
    (rank,) = on_npu(UPDATED.format(old=old), TASK_QUEUE_ENABLE=queue)
    assert said in rank.output


def test_each_rank_looks_only_at_its_own_device(on_npu: OnNpu) -> None:
    code = f'{PROGRAM}\nimport torch\npick("npu")\nresult(torch.npu.current_device())'
    assert _result(on_npu(code, devices=2, LOCAL_RANK=1)[0].output) == [1]


@pytest.mark.parametrize(
    ("environ", "reason"),
    [
        ({"ASCEND_RT_VISIBLE_DEVICES": "1,0"}, "strictly ascending"),
        ({"ASCEND_RT_VISIBLE_DEVICES": " 0"}, "only digits and commas"),
        ({"CANNSIM_DEVICES": "0"}, "ascendchat doctor"),
    ],
    ids=["descending", "space", "no device"],
)
def test_an_npu_that_cannot_be_seen_is_one_sentence_that_says_why(
    environ: dict[str, str], reason: str, on_npu: OnNpu
) -> None:
    code = f"""{PROGRAM}
try:
    result("picked", pick("npu").type)
except UserError as error:
    result("refused", str(error))
"""
    kind, sentence = _result(on_npu(code, devices=2, **environ)[0].output)
    assert kind == "refused"
    assert reason in str(sentence)
