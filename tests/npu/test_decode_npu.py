"""Decoding on the simulated NPU: no AICPU operator, lengths from the host, also in graphs, a kernel that is wrong."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import engine_models as make
import pytest
import torch
from torch.overrides import TorchFunctionMode

import cannsim
from ascendchat.device import Device
from ascendchat.device.npu_attention import NpuSdpa
from ascendchat.engine.engine import Request, Sampling
from ascendchat.engine.sampling import columns, seed_keys, uniform
from ascendchat.nn.attention import Reference, choose, kernels

OnNpu = Callable[..., list[Any]]
CONTEXT = 48
SIZES: dict[str, object] = {"seq_len": 16, "kv_heads": 2, "dim": 64, "head_dim": 16}  # windows 16, 16, 48


DECODING = """
import cannsim, torch
import engine_models as make
from ascendchat.device import pick
from ascendchat.engine.engine import Engine, Request, Sampling
from ascendchat.nn.attention import choose

device = pick("npu")
place = device.bind(0)
assert cannsim.aicpu() == {}
if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 10):  # before that it is an aclop
    assert (torch.ones(2, dtype=torch.int64).npu() >> 1).sum().item() == 0
    assert set(cannsim.aicpu()) == {"aclnnRightShift"}, "the instrument works"
model = make.model(2, device.operators(), seq_len=16, kv_heads=2, dim=64, head_dim=16).to_compute(device.dtype)
kernel, _ = choose("npu", device.dtype, 16, decodes=True)
ways = [
    {}, {"temperature": 0.9, "top_k": 9, "top_p": 0.9, "min_p": 0.01},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "logit_bias": ((5, 1.0),)},
    {"temperature": 0.5, "top_logprobs": 3, "processed_logprobs": True, "allowed_tokens": (5, 70, 33)},
]
for way in ways:
    engine = Engine(model.to(place), kernel, make.tokenizer(), device, place, slots=2, context=48, graphs=False)
    sampling = Sampling(**{"max_tokens": 9, "stop_tokens": (), "temperature": 0.0, **way})
    jobs = [engine.add(Request([7, 8, 9 + n], sampling)) for n in range(2)]
    for _ in range(3):
        engine.step()
    cannsim.reset()
    for _ in range(4):
        engine.step()
    found = cannsim.counters()
    copies = sum(found.get(name, (0,))[0] for name in ("aclrtMemcpy", "aclrtMemcpyAsync"))
    assert not cannsim.aicpu(), (way, cannsim.aicpu())
    assert copies <= 8, (way, copies)
"""


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["Ascend910B3", "Ascend310P3"])
def test_a_decoding_step_has_no_aicpu_operator_and_no_copies_of_constants(on_npu: OnNpu, chip: str) -> None:
    """A copy per step brings the result to the host; another may come from the host."""
    on_npu(DECODING, chip=chip, timeout=240)


def test_noise_on_the_device_is_that_of_the_cpu_bit_by_bit(device: Device) -> None:
    keys, position = torch.tensor([seed_keys(seed) for seed in (0, 5, -5)]), torch.tensor([0, 2047, 5000])
    expected = uniform(keys, position, columns(5000))
    assert torch.equal(uniform(keys.npu(), position.npu(), columns(5000, "npu")).cpu(), expected)


def asked(vocab: int) -> list[Request]:
    draw = partial(Sampling, max_tokens=20, temperature=0.0, stop_tokens=(), tools=False)
    return [Request([(7 * n + i) % vocab for i in range(1 + 5 * n)], draw(max_tokens=4 + 3 * n)) for n in range(6)]


def test_lengths_come_from_the_host_and_graphs_are_updated(device: Device) -> None:
    """Rows of different lengths that enter and leave, rings that turn: as steps without graphs, which equal the CPU."""
    model = make.model(1, device.operators(), **SIZES).to_compute(torch.bfloat16)
    kernel, _ = choose("npu", torch.bfloat16, 16, decodes=True)
    requests = asked(model.shape.vocab)
    cannsim.reset()
    engine = make.engine(model, device, kernel, slots=3, context=CONTEXT)
    jobs = [engine.add(request) for request in requests]
    while not all(job.done for job in jobs):
        engine.step()
        assert engine.decoder.host_length.tolist() == engine.decoder.length.tolist(), (
            "what host and device know of them"
        )
    counts = cannsim.counters()
    assert engine.decoder.graphs
    assert counts["aclmdlRIExecuteAsync"][0] > 10
    assert counts["aclmdlRICaptureTaskUpdateBegin"][0] == 3 * counts["aclmdlRIExecuteAsync"][0], "each layer, each step"
    plain = make.engine(model, device, Reference(), slots=3, context=CONTEXT)
    same = [job.completion.ids == answer.ids for job, answer in zip(jobs, plain.generate(requests))]
    assert sum(same) >= 5, "one may differ by rounding"


FAULTY = """
    import torch
    from ascendchat.device import pick
    from ascendchat.device.npu_attention import NpuFusion
    from ascendchat.errors import UserError
    from ascendchat.nn.attention import Reference, choose, kernels
    from ascendchat.nn.attention import cache_mask
    from ascendchat.nn.attention import decode_fault

    class Masked(NpuFusion):  # as it was: a mask instead of lengths
        def one_query(self, q, k, v, held, scale):
            return self.cached(q, k, v, torch.tensor(held, device=q.device), k.size(1), scale)

    pick("npu").bind(0)
    print("lengths:", decode_fault(kernels("npu")["npu_fusion"], Reference(), "npu", torch.bfloat16, 64))
    print("masks:", decode_fault(Masked(), Reference(), "npu", torch.bfloat16, 64))
    kernels("npu")["npu_fusion"] = Masked()
    print(choose("npu", torch.bfloat16, 64, decodes=True)[1])
    try:
        choose("npu", torch.bfloat16, 64, "npu_fusion", decodes=True)
    except UserError as error:
        print(error)
"""


@pytest.mark.parametrize("fault", [False, True])
def test_a_kernel_that_is_wrong_on_the_device_is_refused_with_a_sentence(on_npu: OnNpu, fault: bool) -> None:
    """vllm-ascend issue 15503, which the simulator has when asked: masks of one query are ignored from key 513 on."""
    (rank,) = on_npu(FAULTY, timeout=120, **({"CANNSIM_HARDWARE": "mask-past-512"} if fault else {}))
    assert "lengths: None" in rank.output, "lengths do not depend on the mask"
    assert ("masks: it is wrong on this device with" in rank.output) == fault
    assert ("attention: sdpa; not npu_fusion" in rank.output) == fault
    assert ("attention kernel npu_fusion cannot run: it is wrong" in rank.output) == fault


def test_a_kernel_is_probed_once(device: Device) -> None:
    """Samples, scores and validation of a run choose a kernel again and again."""

    def calls() -> int:
        return sum(count[0] for name, count in cannsim.counters().items() if "FusedInfer" in name)

    cannsim.reset()
    found = []
    for _ in range(2):
        choose("npu", torch.bfloat16, 48, decodes=True)  # a size that no other test has asked for
        found.append(calls())
    assert found[0] > 0
    assert found[1] == found[0]


@pytest.mark.parametrize(
    ("dtype", "head_dim", "why"),
    [(torch.float32, 64, "not float32"), (torch.bfloat16, 24, "a multiple of 16 up to 512, not 24")],
)
def test_what_the_fused_kernel_cannot_decode_is_known_before(
    device: Device, dtype: torch.dtype, head_dim: int, why: str
) -> None:
    fused = kernels("npu")["npu_fusion"]
    assert fused.refusal("npu", dtype, head_dim) is None, "it trains"
    assert why in str(fused.refusal("npu", dtype, head_dim, decodes=True))
    kernel, reason = choose("npu", dtype, head_dim, decodes=True)
    assert kernel.name == "sdpa"
    assert why in reason


def test_grouped_queries_do_not_depend_on_a_flag_that_old_versions_forget(device: Device) -> None:
    """torch_npu 2.7.1 drops enable_gqa on the way to its plain path."""

    class Seen(TorchFunctionMode):
        flags: list[bool]

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.nn.functional.scaled_dot_product_attention:
                self.flags.append((kwargs or {}).get("enable_gqa", False))
            return func(*args, **(kwargs or {}))

    q, k, v = (torch.randn(2, 9, heads, 16, generator=torch.Generator().manual_seed(heads)) for heads in (4, 2, 2))
    seen = Seen()
    seen.flags = []
    with seen:
        found = NpuSdpa().dense(q.npu(), k.npu(), v.npu(), 4, 0.25)
    assert seen.flags
    assert not any(seen.flags)
    torch.testing.assert_close(found.cpu(), Reference().dense(q, k, v, 4, 0.25), rtol=1e-4, atol=1e-4)


def test_a_chip_that_is_not_in_the_table_opens_with_an_old_torch_npu(on_npu: OnNpu) -> None:
    """2.7.1's is_bf16_supported takes no argument."""
    code = """
    import torch, torch_npu
    from ascendchat.device import pick
    known = torch.npu.is_bf16_supported()
    torch.npu.is_bf16_supported = lambda: known
    device = pick("npu")
    print(device.chip.name, device.chip.known, device.chip.bf16)
    """
    (rank,) = on_npu(code, chip="Ascend950", check=False)
    if "Unsupported soc version" in rank.output:
        pytest.skip("this torch_npu knows no Ascend950")
    assert "Ascend950 False True" in rank.output


def test_a_triton_that_is_not_for_npus_does_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from ascendchat.device.npu import has_triton_ascend

    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not has_triton_ascend()
    (tmp_path / "triton_ascend-3.2.0.dist-info").mkdir()
    (tmp_path / "triton_ascend-3.2.0.dist-info" / "METADATA").write_text("Name: triton-ascend\nVersion: 3.2.0\n")
    assert has_triton_ascend()
