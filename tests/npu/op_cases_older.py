"""Operator cases (see op_cases.py): what torch_npu still launches through the interface before aclnn (aclop).

Names with a slash are those under which cannsim counts them. References are plain torch on the CPU.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from op_cases import FLOATS, ONE, Case, X, Y, Z, distinct, randn, torch_npu

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


def _adam_w(var: torch.Tensor, m: torch.Tensor, v: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The third step of torch's AdamW."""
    if var.device.type != "cpu":
        out = (var.clone(), m.clone(), v.abs().clone())
        numbers = (0.9**2, 0.99**2, 0.1, 0.2, 0.9, 0.99, 1e-3)
        return torch_npu.npu_apply_adam_w(*numbers, grad, None, False, True, out=out)
    weight = torch.nn.Parameter(var.clone())
    optimizer = torch.optim.AdamW([weight], 0.1, (0.9, 0.99), 1e-3, 0.2, maximize=True)
    weight.grad = grad
    state = {"step": torch.tensor(2.0), "exp_avg": m.clone(), "exp_avg_sq": v.abs().clone()}
    optimizer.state[weight] = state
    optimizer.step()
    return weight.detach(), state["exp_avg"], state["exp_avg_sq"]


def _bert_adam(norm: float, step_size: float | None = None) -> Callable[..., Any]:
    """Without correction of the bias; a norm over 1 divides the gradient; with a step size as mBART has it."""

    def run(var: torch.Tensor, m: torch.Tensor, v: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        decay, more = (0.2, ()) if step_size is None else (0.0, (step_size, 1))
        if var.device.type != "cpu":
            out = (var.clone(), m.clone(), v.abs().clone())
            return torch_npu.npu_bert_apply_adam(0.1, 0.9, 0.99, 1e-3, grad, 1.0, norm, decay, *more, out=out)
        grad = grad / norm if norm > 1 else grad
        m, v = 0.9 * m + 0.1 * grad, 0.99 * v.abs() + 0.01 * grad * grad
        rate = 0.1 if step_size is None else step_size
        return var - rate * m / (v.sqrt() + 1e-3) - 0.1 * decay * var, m, v

    return run


def _filled(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[0, :, 1:3], x[1, :, 2:8] = 7.0, 7.0
    return x


def _range(*values: int) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.int32).npu()


POINTS, MORE_POINTS = randn(3, 4, seed=51), randn(5, 4, seed=52)
TURNED = torch.tensor([[[4.0, 30.0], [3.0, 9.0], [9.0, 45.0], [8.0, 21.0], [30.0, -20.0]]])  # corners and an angle
TURNED_TOO = torch.tensor([[[5.0, 28.0], [2.0, 12.0], [11.0, 40.0], [9.0, 20.0], [10.0, 40.0]]])
IMAGES = randn(2, 3, 6, 7, seed=53)
REGIONS = torch.tensor([[0, -2.0, -2.0, 22.0, 22.0], [1, 3.0, 4.0, 13.0, 19.0]])
FOUND = torch.tensor([[0.0, 0, 4, 4], [0, 0, 4, 5], [10, 10, 14, 15], [11, 10, 15, 15], [20, 20, 22, 23]])
SCORES = torch.tensor([0.8, 0.9, 0.7, 0.75, 0.1])


def _turned(boxes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (boxes[:, 2:4] + boxes[:, :2]) / 2, boxes[:, 2:4] - boxes[:, :2], boxes[:, 4:].deg2rad().tan()


def _turned_encoded(anchors: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
    (centre, size, slope), (true_centre, true_size, true_slope) = _turned(anchors), _turned(boxes)
    return torch.cat([(true_centre - centre) / size, (true_size / size).log(), true_slope - slope], 1)


def _decoded_again(anchors: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
    weight = torch.ones(5).npu()
    return torch_npu.npu_rotated_box_decode(anchors, torch_npu.npu_rotated_box_encode(anchors, boxes, weight), weight)


def _sampled(images: torch.Tensor, regions: torch.Tensor, more: int = 0) -> torch.Tensor:
    """ROIAlign with 2 x 2 samples per cell, 3 x 2 cells, a scale of 1/4."""
    pooled = torch.zeros(len(regions), images.shape[1], 3, 2)
    height, width = images.shape[2:]
    for n, (image, x1, y1, x2, y2) in enumerate(regions.tolist()):
        for i in range(6):
            for j in range(4):
                y = y1 / 4 + (i + 0.5) * (y2 - y1 + more) / 4 / 6
                x = x1 / 4 + (j + 0.5) * (x2 - x1 + more) / 4 / 4
                if not (-1 <= y <= height and -1 <= x <= width):
                    continue
                y, x = min(max(y, 0), height - 1), min(max(x, 0), width - 1)
                grid = torch.tensor([[[[2 * x / (width - 1) - 1, 2 * y / (height - 1) - 1]]]])
                value = F.grid_sample(images[int(image)][None], grid, align_corners=True)[0, :, 0, 0]
                pooled[n, :, i // 2, j // 2] += value / 4
    return pooled


def _region_gradient(grad: torch.Tensor, regions: torch.Tensor) -> torch.Tensor:
    images = IMAGES.clone().requires_grad_()
    with torch.enable_grad():
        (_sampled(images, regions, more=1) * grad).sum().backward()
    return images.grad


def _overlaps(boxes: torch.Tensor, others: torch.Tensor, of_other: bool) -> torch.Tensor:
    low, high = (
        torch.maximum(boxes[None, :, :2], others[:, None, :2]),
        torch.minimum(boxes[None, :, 2:], others[:, None, 2:]),
    )
    inner = (high - low).clamp(0).prod(-1)
    area, other = (boxes[:, 2:] - boxes[:, :2] + 0.01).prod(-1), (others[:, 2:] - others[:, :2] + 0.01).prod(-1)
    return inner / (other[:, None] if of_other else area + other[:, None] - inner)


def _in_blocks(function: Callable[..., Any]) -> Callable[..., Any]:
    """Comparisons of tensors in a private format go through the older interface."""

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        torch.npu.config.allow_internal_format = True
        try:
            blocks = [torch_npu.npu_format_cast(x, 29) for x in tensors]
            return tuple(torch_npu.npu_format_cast(result, 2) for result in function(*blocks))
        finally:
            torch.npu.config.allow_internal_format = False

    return run


def _compared(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return a == b, a != b, a > b, a >= b, a < b, a <= b


def _cell(x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
    weight, recurrent = randn(16, 8, seed=54).to(x), randn(16, 4, seed=55).to(x)
    bias, other_bias = randn(16, seed=56).to(x), randn(16, seed=57).to(x)
    if x.device.type == "cpu":
        return torch.lstm_cell(x, (h, c), weight, recurrent, bias, other_bias)
    return torch_npu.npu_lstm_cell(x, weight.t(), recurrent.t(), h, c, bias, other_bias)[1:3]


def _layers(kind: type[torch.nn.RNNBase]) -> Callable[..., Any]:
    """Two layers, both ways."""
    torch.manual_seed(0)
    network = kind(8, 4, num_layers=2, bidirectional=True)

    def run(x: torch.Tensor) -> torch.Tensor:
        return copy.deepcopy(network).to(x)(x)[0]

    return run


def _half_dropped(x: torch.Tensor) -> torch.Tensor:
    """Of many ones about half are left, and count twice."""
    left = torch_npu.dropout_with_byte_mask(torch.ones(4000, device=x.device, dtype=x.dtype), 0.5, True)
    return torch.stack([((left == 0) | (left == 2)).all(), ((left == 0).float().mean() - 0.5).abs() < 0.05])


def _chosen(boxes: torch.Tensor, scores: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if boxes.device.type == "cpu":
        return torch.tensor([1, 3, 0]), torch.tensor(2)
    limits = [torch.tensor(value).npu() for value in (0.5, 0.3)]
    return torch_npu.npu_nms_v4(boxes, scores, 3, *limits)


def _view_copied(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    if x.device.type == "cpu":
        x[:, ::2].copy_(y[:, 1:])
    else:
        torch_npu.npu_view_copy(x[:, ::2], y[:, 1:], True)
    return x


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
    Case("npu_indexing", lambda x: torch_npu.npu_indexing(x, [0, 1, 2], [2, 3, 8], [1, 1, 2]), (X,),
         "aclop/StridedSlice", False, FLOATS, lambda x: x[:2, 1:3, 2:8:2]),
    Case("npu_one_hot", lambda x: torch_npu.npu_one_hot(x, -1, 5, 2, -1), (torch.tensor([3, 0, 4], dtype=torch.int32),),
         "aclop/OneHotD", False, ONE, lambda x: F.one_hot(x.long(), 5) * 3.0 - 1),
    Case("npu_view_copy", _view_copied, (X, Y), "aclop/ViewCopy", False, ONE),
    Case("npu_confusion_transpose",
         lambda x: torch_npu.npu_confusion_transpose(torch_npu.npu_confusion_transpose(x, (0, 2, 1), (2, 4, 6), False),
                                                     (2, 0, 1), (4, 12), True),
         (X,), "aclop/ConfusionTransposeD", True, FLOATS,
         lambda x: x.reshape(2, 4, 6).permute(0, 2, 1).permute(2, 0, 1).reshape(4, 12)),
]  # fmt: skip

MATHS = [
    Case("compiled abs", compiled(torch.abs), (X,), "aclop/Abs", False),
    Case("compiled cast and fill", compiled(lambda x: (x.int(), torch.empty_like(x).fill_(3), x.clone().zero_())), (X,),
         "aclop/Cast aclop/Fill aclop/ZerosLike", False, ("float16",)),
    Case("compiled sum", compiled(lambda x: x.sum(1)), (X,), "aclop/ReduceSum", False, ("float32", "float16")),
    Case("compiled clamp", compiled(lambda x, y: (x.clamp(-0.5, 0.7), y.isfinite())),
         (ORDERED, torch.tensor([1.0, -math.inf, math.nan])), "aclop/ClipByValueV2 aclop/IsFinite", False, ONE),
    Case("compiled where", compiled(lambda x, y: torch.where(x > y, x, y)), (X, Y), "aclop/Select", False, ONE),
    Case("compiled, no elements", compiled(lambda x: (x * x, F.mish(x), torch.where(x > 0, x, x), x.softmax(1),
                                                      torch.cat([x, x], 2))),
         (X[:, :0],), "aclop/Mul aclop/Mish aclop/Select aclop/SoftmaxV2 aclop/ConcatD", False, ONE),
    Case("compiled extremes of all", compiled(lambda x: (x.amin(), x.amax())), (X,), "aclop/ReduceMin aclop/ReduceMax",
         False, ONE),
    Case("compiled softmax", compiled(lambda x: x.softmax(1)), (X,), "aclop/SoftmaxV2", False, ("float32", "float16")),
    Case("comparisons of blocks", _in_blocks(_compared), (ORDERED, ORDERED.flip(0)), " ".join(
         f"aclop/{name}" for name in ("Equal", "NotEqual", "Greater", "GreaterEqual", "Less", "LessEqual")), False,
         ("float32", "float16"), _compared),
    *(Case(f"cdist {p}", lambda a, b, p=p: torch.cdist(a, b, p), (POINTS, MORE_POINTS), "aclop/CdistGrad", True, ONE,
           loose=4) for p in (0.5, 1.0, 2.0, math.inf)),
    Case("npu_lstm_cell", _cell, (randn(3, 8, seed=58), randn(3, 4, seed=59), randn(3, 4, seed=60)),
         "aclop/DynamicRNNV2 aclop/DynamicRNNV2Grad", True, ("float32", "float16"), loose=2),
    Case("extremes of blocks", _in_blocks(lambda x: (x.amin(1), x.amax(0))), (ORDERED,),
         "aclop/ReduceMin aclop/ReduceMax", False, ONE, lambda x: (x.amin(1), x.amax(0))),
    Case("slow_conv3d", lambda x, w, b: torch._C._nn.slow_conv3d(x, w, (2, 1, 2), b, (1, 1, 2), (1, 0, 1)),
         (randn(1, 2, 3, 4, 5, seed=73), randn(3, 2, 2, 1, 2, seed=74), randn(3, seed=75)), "aclop/Conv3D", False,
         ("float32", "float16"), loose=2),
    Case("dropout_with_byte_mask", lambda x: (torch_npu.dropout_with_byte_mask(x, 0.0, True), _half_dropped(x)), (X,),
         "aclop/DropOutGenMaskV3 aclop/DropOutDoMaskV3", False, ("float32", "float16"),
         lambda x: (x, torch.tensor([True, True]))),
    Case("npu_dropout_with_add_softmax",
         lambda x, y: torch_npu.npu_dropout_with_add_softmax(x, y.detach(), 0.5, 0.0, -1)[2], (X, Y),
         "aclop/AxpyWithSoftmaxAndDropOutDoMask aclop/DropoutWithMulsAndSoftmaxGrad", True, ("float32", "float16"),
         lambda x, y: (y.detach() + 0.5 * x).softmax(-1), 2),
    Case("LSTM", _layers(torch.nn.LSTM), (randn(5, 3, 8, seed=67),), "aclop/DynamicRNN aclop/DynamicRNNGrad", True,
         ONE, loose=4),
    Case("GRU", _layers(torch.nn.GRU), (randn(5, 3, 8, seed=68),), "aclop/DynamicGRUV2 aclop/DynamicGRUV2Grad", True,
         ONE, loose=4),
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
    *(Case(name, function, (X, Y, Z, LEFT.repeat(1, 1, 2)), f"aclop/{launched}", False, ONE)
      for name, launched, function in (
          ("npu_apply_adam_w", "ApplyAdamW", _adam_w), ("npu_bert_apply_adam", "ApplyAdamV2", _bert_adam(0.5)),
          ("npu_bert_apply_adam clipped", "ApplyAdamV2", _bert_adam(4.0)),
          ("npu_bert_apply_adam of mBART", "ApplyAdamV2", _bert_adam(0.5, 0.3)))),
    Case("compiled ctc_loss", compiled(lambda x: F.ctc_loss(
         x.log_softmax(2), torch.tensor([[0, 2, 4], [2, 1, 0]]).to(x.device), (5, 4), (3, 2), 3, "none")),
         (randn(5, 2, 5, seed=77),), "aclop/LogSoftmaxV2 aclop/CTCLossV2", False, ("float32", "float16")),
    Case("compiled npu_linear", compiled(lambda x, w, b: torch_npu.npu_linear(x, w, b)),
         (LEFT[0], RIGHT[0].T, randn(5, seed=76)), "aclop/MatMulV2", False, ("float16",), F.linear, 2),
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
    Case("npu_iou", lambda a, b: (torch_npu.npu_iou(a, b, 0), torch_npu.npu_iou(a, b, 1)), (FOUND, FOUND[:3] + 1),
         "aclop/Iou", False, ("float16",), lambda a, b: (_overlaps(a, b, False), _overlaps(a, b, True))),
    Case("npu_rotated_box_encode", lambda a, b: torch_npu.npu_rotated_box_encode(a, b, torch.ones(5).npu()),
         (TURNED, TURNED_TOO), "aclop/RotatedBoxEncode", False, ONE, _turned_encoded),
    Case("npu_rotated_box_decode", _decoded_again, (TURNED, TURNED_TOO), "aclop/RotatedBoxDecode", False, ONE,
         lambda a, b: b, 10),
    Case("npu_roi_align", lambda x, r: torch_npu.npu_roi_align(x, r, 0.25, 3, 2, 2, 0), (IMAGES, REGIONS),
         "aclop/ROIAlign", False, ONE, _sampled),
    Case("npu_roi_alignbk", lambda g, r: torch_npu.npu_roi_alignbk(g, r, IMAGES.shape, 2, 3, 0.25, 2),
         (randn(2, 3, 3, 2, seed=66), REGIONS), "aclop/ROIAlignGrad", False, ONE, _region_gradient),
    Case("npu_nms_v4", _chosen, (FOUND, SCORES), "aclop/NonMaxSuppressionV4", False, ONE),
]  # fmt: skip

# (batch, box, [x, y, width, height, degrees]); the last of each has no area
CROSSED = torch.tensor([[[4.0, 3.0, 9.0, 8.0, 30.0], [0.0, 0.0, 2.0, 2.0, 45.0], [5.0, 5.0, 0.0, 3.0, 10.0]]])
CROSSING = torch.tensor([[[5.0, 2.0, 4.0, 9.0, -50.0], [0.0, 0.0, 2.0, 2.0, 0.0], [4.0, 3.0, 1.0, 1.0, 200.0]]])
SCORED = torch.tensor(
    [[0.0, 0, 4, 4, 0.9], [0, 0, 4, 5, 0.8], [9, 9, 13, 13, 0.7], [0, 1, 4, 6, 0.6], [1, 1, 2, 2, 0.5]]
)


def _ends(box: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The lowest and the highest y of the box at each x; outside of it the lowest is above the highest."""
    x, y, width, height, degrees = box.double()
    cosine, sine = degrees.deg2rad().cos(), degrees.deg2rad().sin()
    along, across = torch.tensor([-1, 1, 1, -1]) * width / 2, torch.tensor([-1, -1, 1, 1]) * height / 2
    xs, ys = x + along * cosine - across * sine, y + along * sine + across * cosine
    low, high = torch.full_like(at, torch.inf), torch.full_like(at, -torch.inf)
    for i in range(4):
        x1, x2, y1, y2 = xs[i - 1], xs[i], ys[i - 1], ys[i]
        inside = (at >= torch.minimum(x1, x2)) & (at <= torch.maximum(x1, x2)) & (x1 != x2)
        edge = y1 + (y2 - y1) * (at - x1) / (x2 - x1)
        low, high = torch.where(inside, edge.minimum(low), low), torch.where(inside, edge.maximum(high), high)
    return low, high


def _shared(boxes: torch.Tensor, others: torch.Tensor, of_union: bool) -> torch.Tensor:
    """The area in many thin strips."""
    at = torch.linspace(-12, 16, 400_001, dtype=torch.float64)
    result = torch.zeros(1, boxes.shape[1], others.shape[1], dtype=torch.float64)
    for i, box in enumerate(boxes[0]):
        for j, other in enumerate(others[0]):
            (low, high), (other_low, other_high) = _ends(box, at), _ends(other, at)
            strips = (high.minimum(other_high) - low.maximum(other_low)).clamp(0)
            area = torch.trapezoid(strips, at)
            union = box[2] * box[3] + other[2] * other[3] - area
            result[0, i, j] = area / union if of_union else area
    return result.float()


def _corners(boxes: torch.Tensor) -> torch.Tensor:
    return torch.cat([boxes[..., :2] - boxes[..., 2:4] / 2, boxes[..., :2] + boxes[..., 2:4] / 2, boxes[..., 4:]], -1)


CROSSED_BOXES = [
    Case("npu_rotated_overlaps", lambda a, b: torch_npu.npu_rotated_overlaps(a, b, False), (CROSSED, CROSSING),
         "aclop/RotatedOverlaps", False, ONE, lambda a, b: _shared(a, b, False), 4),
    Case("npu_rotated_overlaps of corners", lambda a, b: torch_npu.npu_rotated_overlaps(_corners(a), _corners(b), True),
         (CROSSED, CROSSING), "aclop/RotatedOverlaps", False, ONE, lambda a, b: _shared(a, b, False), 4),
    Case("npu_rotated_iou", lambda a, b: torch_npu.npu_rotated_iou(a, b, False, 0, True, 0.0, 0.0), (CROSSED, CROSSING),
         "aclop/RotatedIou", False, ONE, lambda a, b: _shared(a, b, True), 4),
    Case("npu_nms_with_mask", lambda x: torch_npu.npu_nms_with_mask(x, 0.5), (SCORED,), "aclop/NMSWithMask", False, ONE,
         # the fourth overlaps only the second by more, which the first has ruled out
         lambda x: (x, torch.arange(5, dtype=torch.int32), torch.tensor([1, 0, 1, 1, 1], dtype=torch.uint8))),
]  # fmt: skip

CASES = [*SHAPES, *MATHS, *BOXES, *CROSSED_BOXES]
