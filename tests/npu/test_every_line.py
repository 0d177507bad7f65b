"""Every statement for the NPU, in device/npu*.py and nn/attention.py, is executed on simulated chips: the scenarios
below, each in a process of its own.

A new line there that none of them reaches fails this test: add the scenario that needs it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cannsim

sys.path.insert(0, str(Path(__file__).resolve().parent))
from marked_lines import statements

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NPU = {  # () is all
    "ascendchat.device.npu": (),
    "ascendchat.device.npu_attention": (),
    "ascendchat.nn.attention": ("NpuFusion", "causal_mask", "Eager"),
}

PROGRAM = '''
import json, os, sys
sys.path[:0] = [{here!r}, {root!r}]
from marked_lines import watch

seen = {{name: watch(name, path) for name, path in {files!r}.items()}}

def hide(name):
    """As on a machine where that package is not installed."""
    import importlib.util
    find = importlib.util.find_spec
    importlib.util.find_spec = lambda wanted: None if wanted == name else find(wanted)

def refused(call):
    from ascendchat.config import UserError
    try:
        return f"not refused: {{call()}}"
    except UserError as error:
        return str(error)

{body}
print("SEEN " + json.dumps({{name: sorted(lines) for name, lines in seen.items()}}))
'''

TRAINING = """
import tempfile
from copy import deepcopy
from pathlib import Path
import torch
from ascendchat.device import pick
from ascendchat.nn.attention import choose
from ascendchat.nn.documents import documents
from ascendchat.nn.gpt import GPT, dense
from ascendchat.nn.loss import head_loss
from ascendchat.plan.shape import Shape

device = pick("npu")
place = device.bind(0)
ops = device.operators()
assert ops is not None, "this chip has fused operators"
assert deepcopy(ops) is ops
assert device.software()["CANN"] and device.software()["torch_npu"]
wide = torch.randn(3, 64).to(place, device.dtype)
assert ops.weighted_norm(wide, wide[0], 1e-6).shape == ops.swiglu(wide, wide).shape == wide.shape
model = GPT(Shape.from_depth(2, vocab=60, seq_len=16, dim=64, head_dim=32), ops)
model.initialise(0)
model.to_compute(device.dtype).to(place)
tokens = torch.randint(0, 60, (2, 17)).to(place)
hidden = model(tokens[:, :-1], dense(model, choose("npu", device.dtype, 32)[0]))
device.clear_overflow()
head_loss(hidden, model.head, tokens[:, 1:], 60).backward()
assert not device.overflowed([p.grad for p in model.parameters() if p.grad is not None])
kernel, why = choose("npu", device.dtype, 32)
assert why == "attention: npu_fusion"
kernel.dense(*[torch.randn(1, 16, 2, 32).to(place, device.dtype) for _ in "qkv"], 4, 1.0)
known = documents(kernel, [6, 10], torch.zeros(1, 16).to(place), device.dtype)
kernel.packed(*[torch.randn(1, 16, 2, 32).to(place, device.dtype) for _ in "qkv"], known.bounds, 16, 1.0)
kernel.cached(*[torch.randn(1, n, 2, 32).half().to(place) for n in (1, 16, 16)], torch.tensor([9]).to(place), 16, 1.0)
assert "it needs an Ascend NPU" in choose("cpu", torch.float32, 32)[1]
stop = device.trace(Path(tempfile.mkdtemp()))
torch.ones(4, device=place).add(1)
assert stop().name == "trace_view.json"
"""

FLASH = """
import torch
from ascendchat.device import pick
from ascendchat.nn import flash

place = pick("npu").bind(0)
x = torch.randn(2, 16, 2, 32).half().to(place)
for limits in ({}, {"causal": True}, {"window_size": (3, 1)}):
    flash.flash_attn_func(x, x, x, return_attn_probs=True, **limits)
ends = torch.tensor([0, 6, 16], dtype=torch.int32).to(place)
flash.flash_attn_varlen_func(x[0], x[0], x[0], ends, ends, 10, 10)
flash.flash_attn_with_kvcache(x[:, :1], x, x, cache_seqlens=9)
flash.flash_attn_with_kvcache(x[:1, :1], x, x, cache_seqlens=20, block_table=torch.tensor([[1, 0]]).to(place))
"""

DECODING = """
import torch
from ascendchat.device import pick
from ascendchat.nn.attention import KERNELS, choose

device = pick("npu")
place = device.bind(0)
assert choose("npu", device.dtype, 32, decodes=True)[1] == "attention: npu_fusion"
for dtype, size, why in ((torch.float32, 32, "not float32"), (device.dtype, 24, "not 24"), (device.dtype, 800, "768")):
    assert why in KERNELS["npu_fusion"].refusal("npu", dtype, size, decodes=True)
q, k = (torch.randn(2, n, 2, 32).to(place, device.dtype) for n in (1, 16))
held = [3, 16]
replay = device.graph(lambda: KERNELS["npu_fusion"].one_query(q, k, k, held, 1.0), updates=lambda: [
    {"actual_seq_lengths_kv": list(held)}])
for held[0] in (1, 9, 2, 16):
    there = torch.tensor(held).to(place)
    torch.testing.assert_close(replay(), KERNELS["reference"].cached(q, k, k, there, 16, 1.0), atol=0.03, rtol=0.03)
del torch.npu.NPUGraph.update
fn = lambda: None
assert device.graph(fn, updates=list) is fn
"""

GRAPH = """
import torch
from ascendchat.device import pick

device = pick("npu")
still = torch.zeros(4, device=device.bind(0))
replay = device.graph(lambda x: x * 3, still)
assert replay(still + 2).cpu().tolist() == [6.0] * 4
"""

OLD = """
import torch
from ascendchat.device import pick
from ascendchat.nn.attention import choose
from ascendchat.nn.documents import documents

device = pick("npu")
kernel, why = choose("npu", device.dtype, 32)
assert "Ascend910A has no fused training attention" in why
half = torch.tensor([60000.0], device=device.bind(0)).half()
assert device.operators() is None
device.clear_overflow()
half + 1
assert not device.overflowed([])
half * 2
assert device.overflowed([])
device.clear_overflow()
kernel.dense(*[torch.randn(1, 16, 2, 32).half().to(half.device) for _ in "qkv"], 16, 1.0)
known = documents(kernel, [6, 10], torch.zeros(1, 16).npu(), torch.float16)
kernel.packed(*[torch.randn(1, 16, 2, 32).half().to(half.device) for _ in "qkv"], known.bounds, 16, 1.0)
kernel.cached(*[torch.randn(1, n, 2, 32).half().to(half.device) for n in (1, 16, 16)], torch.tensor([9]).npu(), 16, 1.0)
assert not device.overflowed([]), "attention hides keys without an infinity"
"""

NONE = """
from ascendchat.device import pick

print(refused(lambda: pick("npu")))
"""

COMPILED = """
import importlib.metadata
from ascendchat.device import npu, pick

print(refused(lambda: pick("npu", compiled=True)))
importlib.metadata.distribution = lambda name: name
hide("triton")
assert not npu.has_triton_ascend()
"""

# Without cannsim, so that torch_npu finds no CANN.
NOTHING = """
from ascendchat.device import npu, pick

assert npu.why_unusable(False) == "torch_npu is not loaded"
print(refused(lambda: pick("npu")))
hide("torch_npu")
print(refused(lambda: pick("npu")))
"""

SCENARIOS: list[tuple[str, dict[str, Any], str]] = [  # program, chip and environment, what it must say
    (TRAINING, {}, ""),
    (FLASH, {}, ""),
    (DECODING, {"TASK_QUEUE_ENABLE": "1"}, "too old to update them"),
    (GRAPH, {"TASK_QUEUE_ENABLE": "1"}, ""),
    (GRAPH, {"TASK_QUEUE_ENABLE": "2"}, "no captured graphs with TASK_QUEUE_ENABLE=2"),
    (OLD, {"chip": "Ascend910A"}, ""),
    (NONE, {"CANNSIM_DEVICES": "0"}, "no NPU answers"),
    (NONE, {"ASCEND_RT_VISIBLE_DEVICES": "1,0"}, "strictly ascending"),
    (COMPILED, {}, "pip install triton-ascend"),
]


def lines(output: str) -> dict[str, list[int]]:
    (found,) = [line for line in output.splitlines() if line.startswith("SEEN ")] or [output]
    assert found.startswith("SEEN "), output
    executed: dict[str, list[int]] = json.loads(found.removeprefix("SEEN "))
    return executed


def without_cann(program: str) -> str:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("CANNSIM", "ASCEND", "LD_LIBRARY"))
    }
    environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_every_statement_for_the_npu_is_executed(on_npu: Callable[..., list[Any]]) -> None:
    assert cannsim.active()
    files = {name: str(ROOT / f"{name.replace('.', '/')}.py") for name in NPU}
    where = {"here": str(HERE), "root": str(ROOT), "files": files}
    outputs = []
    for body, settings, says in SCENARIOS:
        (rank,) = on_npu(PROGRAM.format(body=body, **where), devices=2, **settings)
        assert says in rank.output
        outputs.append(rank.output)
    output = without_cann(PROGRAM.format(body=NOTHING, **where))
    assert "the CANN libraries are not loaded" in output
    assert "pip install" in output
    missed = []
    for name, parts in NPU.items():
        text = Path(files[name]).read_text(encoding="utf-8").splitlines()
        seen = {line for each in (*outputs, output) for line in lines(each)[name]}
        missed += [f"{name}:{line}: {text[line - 1].strip()}" for line in statements(files[name], *parts) - seen]
    assert not missed, "\n".join(sorted(missed))
