"""Operator cases (see op_cases.py): what torch_npu still launches through the interface before aclnn (aclop).

Names with a slash are those under which cannsim counts them. References are plain torch on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from op_cases import ONE, Case, X, Y, distinct, randn

try:
    import torch_npu
except ImportError:  # the tests of this folder are skipped then
    torch_npu = None

LEFT, RIGHT = randn(2, 3, 4, seed=41), randn(2, 4, 5, seed=42)
ROW = randn(1, 8, seed=43)
LABELS = torch.rand(3, 8, generator=torch.Generator().manual_seed(44))
ORDERED = distinct(3, 8, seed=45)
CENTRES = torch.tensor([[2.0, 2.0, 2.0, 2.0], [6.0, 5.0, 4.0, 3.0], [1.0, 7.0, 3.0, 4.0]])  # x, y, width, height
SHIFTED = CENTRES + torch.tensor([0.5, -0.25, 0.25, 0.5])
CORNERS = torch.tensor([[1.0, 2.0, 3.0, 5.0], [3.0, 4.0, 9.0, 6.0]])
DELTAS = torch.tensor([[0.1, -0.2, 0.3, 0.2], [0.05, 0.4, -0.1, 5.0]])


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """With operators compiled for each shape, which sends torch_npu to the older interface."""

    def run(*arguments: Any) -> Any:
        if arguments[0].device.type == "cpu":
            return function(*arguments)
        torch.npu.set_compile_mode(jit_compile=True)
        try:
            return function(*arguments)
        finally:
            torch.npu.set_compile_mode(jit_compile=False)

    return run


def _overlap(boxes: torch.Tensor, others: torch.Tensor, centres: bool) -> torch.Tensor:
    """IoU less the penalty of DIoU (distance of the centres) or GIoU (room around both), box by box."""
    low, high = boxes[:2] - boxes[2:] / 2, boxes[:2] + boxes[2:] / 2
    other_low, other_high = others[:2] - others[2:] / 2, others[:2] + others[2:] / 2
    inner = (torch.minimum(high, other_high) - torch.maximum(low, other_low)).clamp(0).prod(0)
    union = (high - low).prod(0) + (other_high - other_low).prod(0) - inner
    around = torch.maximum(high, other_high) - torch.minimum(low, other_low)
    if not centres:
        return (inner / union - (around.prod(0) - union) / around.prod(0))[None]
    return (inner / union - (boxes[:2] - others[:2]).square().sum(0) / around.square().sum(0))[None]


def _shaped(boxes: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """CIoU: DIoU less the difference of the shapes."""
    distance = _distance(boxes, others)
    iou = _overlap(boxes, others, True) + distance
    shape = ((others[2] / others[3]).atan() - (boxes[2] / boxes[3]).atan()).square()[None] * 4 / math.pi**2
    return iou - distance - shape * shape / (1 - iou + shape)


def _distance(boxes: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    low = torch.minimum(boxes[:2] - boxes[2:] / 2, others[:2] - others[2:] / 2)
    high = torch.maximum(boxes[:2] + boxes[2:] / 2, others[:2] + others[2:] / 2)
    return ((boxes[:2] - others[:2]).square().sum(0) / (high - low).square().sum(0))[None]


def _decoded(rois: torch.Tensor, deltas: torch.Tensor) -> torch.Tensor:
    size = rois[:, 2:] - rois[:, :2] + 1
    centre = (rois[:, 2:] + rois[:, :2]) / 2 + size * deltas[:, :2]
    half = size * deltas[:, 2:].clamp(max=-torch.tensor(0.1).log()).exp() / 2 - 0.5
    return torch.cat([centre - half, centre + half], 1).clamp(0, 9)


def _encoded(anchors: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
    size, true_size = anchors[:, 2:] - anchors[:, :2] + 1, boxes[:, 2:] - boxes[:, :2] + 1
    moved = ((boxes[:, 2:] + boxes[:, :2]) / 2 - (anchors[:, 2:] + anchors[:, :2]) / 2) / size
    return torch.cat([moved / 0.1, (true_size / size).log() / 0.2], 1)


def _yolo(anchors: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
    moved = (boxes[:, 2:] + boxes[:, :2] - anchors[:, 2:] - anchors[:, :2]) / 2 / 2 + 0.5
    scaled = (boxes[:, 2:] - boxes[:, :2]) / (anchors[:, 2:] - anchors[:, :2])
    return torch.cat([moved.clamp(1e-6, 1 - 1e-6), scaled.clamp(1e-6).log()], 1)


def _flags(boxes: torch.Tensor) -> torch.Tensor:
    marked = torch.zeros(4, 5, dtype=torch.uint8)
    for x1, y1, x2, y2 in boxes.tolist():
        marked[int((y1 + y2) / 2 // 2), int((x1 + x2) / 2 // 2)] = 1
    return marked.flatten().repeat_interleave(3)


def _adam(var: torch.Tensor, m: torch.Tensor, v: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    m, v = 0.9 * m + 0.1 * grad, 0.99 * v.abs() + 0.01 * grad * grad
    return var - 0.1 * (1 - 0.98) ** 0.5 / (1 - 0.81) * m / (v.sqrt() + 1e-3), m, v


def _npu_adam(var: torch.Tensor, m: torch.Tensor, v: torch.Tensor, grad: torch.Tensor) -> Any:
    out = (var.clone(), m.clone(), v.abs().clone())
    return torch_npu.npu_apply_adam(0.81, 0.98, 0.1, 0.9, 0.99, 1e-3, grad, False, False, out=out)


def _filled(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[0, :, 1:3], x[1, :, 2:8] = 7.0, 7.0
    return x


def _range(*values: int) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.int32).npu()


SHAPES = [
    Case("cat", compiled(lambda x, y: torch.cat([x, y, x], 1)), (X, Y), "aclop/ConcatD", False, ONE),
    Case("BroadcastTo", lambda x: torch_npu.npu_broadcast(x, (3, 8)), (ROW,), "aclop/BroadcastTo", False, ONE,
         lambda x: x.expand(3, 8)),
    Case("npu_transpose", lambda x: torch_npu.npu_transpose(x, (1, 2, 0)), (X,), "aclop/Transpose", False, ONE,
         lambda x: x.permute(1, 2, 0)),
    Case("npu_slice", lambda x: torch_npu.npu_slice(x, [0, 1, 2], [2, 2, 4]), (X,), "aclop/Slice", False, ONE,
         lambda x: x[:, 1:3, 2:6]),
    Case("npu_pad", lambda x: torch_npu.npu_pad(x, (1, 2, 0, 3)), (ROW,), "aclop/Pad", False, ONE,
         lambda x: F.pad(x, (0, 3, 1, 2))),
    Case("npu_stride_add", lambda x: torch_npu.npu_stride_add(x, x, 0, 0, 1), (randn(1, 3, 2, 2, 1, seed=46),),
         "aclop/StrideAdd", False, ONE, lambda x: F.pad(2 * x, (0, 0, 0, 0, 0, 0, 0, 13))),
    Case("npu_masked_fill_range",
         lambda x: torch_npu.npu_masked_fill_range(x, _range(1, 2), _range(3, 9), torch.tensor([7.0]).npu(), -1),
         (X,), "aclop/MaskedFillRange", False, ONE, _filled),
]  # fmt: skip

MATHS = [
    Case("compiled abs", compiled(torch.abs), (X,), "aclop/Abs", False),
    Case("compiled arithmetic", compiled(lambda a, b: (a + b, a - b, a * b, a / b)), (X, Y),
         "aclop/Add aclop/Sub aclop/Mul aclop/RealDiv", False, loose=4),
    Case("compiled products", compiled(lambda a, b: (a[0] @ b[0], torch.bmm(a, b))), (LEFT, RIGHT),
         "aclop/MatMul aclop/BatchMatMul", False, ("float16",), loose=2),
    Case("npu_bmmV2", lambda a, b: torch_npu.npu_bmmV2(a, b, []), (LEFT, RIGHT), "aclop/BatchMatMul", False,
         ("float16",), torch.bmm, 2),
    Case("npu_mish", lambda x: torch_npu.npu_mish(x), (X,), "aclop/Mish aclop/MishGrad", reference=F.mish),
    Case("npu_silu", lambda x: torch_npu.npu_silu(x), (X,), "aclop/Swish aclop/SwishGrad", reference=F.silu),
    Case("npu_max", lambda x: tuple(torch_npu.npu_max(x, 1)), (ORDERED,), "aclop/ArgMaxWithValue", False, ONE,
         lambda x: tuple(x.max(1))),
    Case("npu_min", lambda x: tuple(torch_npu.npu_min(x, 1)), (ORDERED,), "aclop/ArgMinWithValue", False, ONE,
         lambda x: tuple(x.min(1))),
    Case("npu_sort_v2", lambda x: torch_npu.npu_sort_v2(x, dim=1, descending=True), (ORDERED,), "aclop/SortV2", False,
         ("float16",), lambda x: x.sort(1, descending=True)[0]),
    Case("npu_softmax_cross_entropy", lambda x, y: torch_npu.npu_softmax_cross_entropy_with_logits(x, y),
         (randn(3, 8, seed=47), LABELS), "aclop/SoftmaxCrossEntropyWithLogits", False, ONE,
         lambda x, y: -(y * x.log_softmax(1)).sum(1)),
    Case("npu_sign_bits_pack", lambda x: torch_npu.npu_sign_bits_pack(x, 1), (torch.arange(17.0) - 5,),
         "aclop/SignBitsPack", False, ("float32", "float16"), lambda x: torch.tensor([[224, 255, 1]])),
    Case("npu_sign_bits_unpack", lambda x: torch_npu.npu_sign_bits_unpack(x, 1, torch.float32),
         (torch.tensor([5, 128], dtype=torch.uint8),), "aclop/SignBitsUnpack", False, ONE,
         lambda x: torch.tensor([[1.0, -1, 1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 1]])),
    Case("npu_apply_adam", _npu_adam, (X, Y, randn(2, 3, 8, seed=48), ORDERED.reshape(1, 3, 8).expand(2, 3, 8) / 9),
         "aclop/ApplyAdamD", False, ONE, _adam),
]  # fmt: skip

BOXES = [
    Case("npu_diou", lambda a, b: torch_npu.npu_diou(a, b, True, False, 0), (CENTRES.T, SHIFTED.T),
         "aclop/DIoU aclop/DIoUGrad", True, ONE, lambda a, b: _overlap(a, b, True)),
    Case("npu_giou", lambda a, b: torch_npu.npu_giou(a, b, True, False, 0), (CENTRES.T, SHIFTED.T),
         "aclop/GIoU aclop/GIoUGrad", True, ONE, lambda a, b: _overlap(a, b, False).T),
    Case("npu_ciou", lambda a, b: torch_npu.npu_ciou(a, b, True, False, 0, True), (CENTRES.T, SHIFTED.T),
         "aclop/CIoU", False, ONE, _shaped),
    Case("npu_bounding_box_decode",
         lambda a, b: torch_npu.npu_bounding_box_decode(a, b, 0, 0, 0, 0, 1, 1, 1, 1, (10, 10), 0.1),
         (CORNERS, DELTAS), "aclop/BoundingBoxDecode", False, ONE, _decoded),
    Case("npu_bounding_box_encode",
         lambda a, b: torch_npu.npu_bounding_box_encode(a, b, 0, 0, 0, 0, 0.1, 0.1, 0.2, 0.2),
         (CORNERS, CORNERS + 0.5), "aclop/BoundingBoxEncode", False, ("float16",), _encoded, 4),
    Case("npu_yolo_boxes_encode",
         lambda a, b: torch_npu.npu_yolo_boxes_encode(a, b, torch.full((2,), 2, dtype=torch.int32).npu(), False),
         (CORNERS, CORNERS.flip(0)), "aclop/YoloBoxesEncode", False, ONE, _yolo),
    Case("npu_anchor_response_flags", lambda x: torch_npu.npu_anchor_response_flags(x, [4, 5], [2, 2], 3), (CORNERS,),
         "aclop/AnchorResponseFlags", False, ONE, _flags),
]  # fmt: skip

CASES = [*SHAPES, *MATHS, *BOXES]
