"""Arguments that operators once ignored in silence: they change the result, or are refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from op_cases import torch_npu

import cannsim

SOURCES = cannsim.ROOT / "src" / "ops"
# Parameters that no result depends on: how, not what, is computed, and what the output already says.
EVERYWHERE = {"cubeMathType", "innerPrecise", "outputSize", "dtype_", "probDataType", "buffer"}
# Outputs and settings of CANN's own, of which ours has no need, or which are refused when they would matter.
THERE = {
    "BatchNormElemt": {"eps"},  # invstd holds it
    "BatchNormGatherStatsWithCounts": {"input"},
    "BatchNormReduceBackward": {"weight"},
    "Cdist": {"computeMode"},
    "ConvDepthwise2d": {"kernelSize"},
    "CrossEntropyLoss": {"zlossOut", "lseForZlossOut"},
    "CrossEntropyLossGrad": {"gradZlossOptional", "lseForZlossOptional"},
    "EmbeddingBag": {"sparse"},
    **dict.fromkeys(
        ("GroupedMatmulV4", "GroupedMatmulV5"),
        {"activationQuantScaleOptional", "activationQuantOffsetOptional", "splitItem", "tuningConfigOptional"}
        | {"activationFeatureOutOptional", "dynQuantScaleOutOptional"},
    ),
    "IndexAddV2": {"mode"},
    "MaxPool2dWithMaskBackward": {"mask"},  # found again from the input
    "MoeTokenUnpermute": {"restoreShapeOptional"},  # of the padded mode
    "MoeTokenUnpermuteGrad": {"restoreShapeOptional"},
    "ScatterPaKvCache": {"strides", "offsets"},
    "SimThreadExponential": {"count"},
    "Sort": {"stable"},
    "UniqueDim": {"sorted", "returnInverse"},
}


def closing(text: str, start: int) -> int:
    """Index of the parenthesis that closes the first one at or behind `start`."""
    depth = 0
    for i in range(text.index("(", start), len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    raise ValueError(text[start : start + 80])


def unused(path: Path) -> dict[str, list[str]]:
    """Operator -> parameters that neither its checks nor its computation name; bodies that are macros are left out."""
    text, found = path.read_text().replace("\\\n", "\n"), {}
    for line in re.finditer(r"^ *(?:OP|PRODUCT)\(([\w#]+),\s*\(", text, re.M):
        end = closing(text, line.end() - 1)
        body = text[end + 1 : closing(text, line.start())]
        names = [word.split()[-1] for word in text[line.end() : end].split(",")]
        if re.match(r",\s*[A-Z_]+(_CHECK)?\(", body):
            continue
        allowed = EVERYWHERE | THERE.get(line.group(1), set())
        ignored = [name for name in names if name not in allowed and not re.search(rf"\b{name}\b", body)]
        found.update({line.group(1): ignored} if ignored else {})
    return found


def test_no_operator_ignores_an_argument() -> None:
    assert {path.name: unused(path) for path in sorted(SOURCES.glob("*.cpp")) if unused(path)} == {}


@pytest.mark.parametrize("fixed", [False, True])
def test_scaled_masked_softmax_takes_a_causal_mask_of_its_own(on_npu: Callable[..., object], fixed: bool) -> None:
    """torch_npu uses the aclnn operator from 950 on."""
    code = f"""
import torch, torch_npu, cannsim
x, weight, mask = torch.randn(2, 2, 4, 6), torch.randn(2, 2, 4, 6), torch.rand(2, 1, 4, 6) > 0.7
hidden = torch.ones(4, 6, dtype=torch.bool).triu(1) if {fixed} else mask
expected = x.clone().requires_grad_()
y = torch.softmax((expected * 0.5).masked_fill(hidden, -10000.0), -1)
(y * weight).sum().backward()
found = x.npu().requires_grad_()
z = torch_npu.npu_scaled_masked_softmax(found, mask.npu(), 0.5, {fixed})
(z * weight.npu()).sum().backward()
assert {{"aclnnScaledMaskedSoftmax", "aclnnScaledMaskedSoftmaxBackward"}} <= set(cannsim.launches())
torch.testing.assert_close(z.cpu(), y, rtol=1e-5, atol=1e-6)
torch.testing.assert_close(found.grad.cpu(), expected.grad, rtol=1e-4, atol=1e-6)
"""
    on_npu(code, chip="Ascend950")


def test_fused_inference_adds_the_channels_of_the_positions() -> None:
    """Multi-head latent attention: scores are those of (query, query_rope) and (key, key_rope)."""
    query, rope = torch.randn(2, 4, 1, 512).half(), torch.randn(2, 4, 1, 64).half()
    key, key_rope = torch.randn(2, 1, 8, 512).half(), torch.randn(2, 1, 8, 64).half()
    found, _ = torch_npu.npu_fused_infer_attention_score(
        query.npu(),
        key.npu(),
        key.npu(),
        query_rope=rope.npu(),
        key_rope=key_rope.npu(),
        num_heads=4,
        num_key_value_heads=1,
        scale=0.02,
        input_layout="BNSD",
    )
    q, k = torch.cat([query, rope], -1).float(), torch.cat([key, key_rope], -1).float()
    expected = torch.softmax(q @ k.mT * 0.02, -1) @ key.float()
    torch.testing.assert_close(found.cpu().float(), expected, rtol=4e-3, atol=4e-3)
