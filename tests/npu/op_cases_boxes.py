"""Operator cases (see op_cases.py): boxes that are turned, and those that are left of many."""

from __future__ import annotations

import torch
from op_cases import ONE, Case

try:
    import torch_npu
except ImportError:  # the tests of this folder are skipped then
    torch_npu = None

# (batch, box, [x, y, width, height, degrees]); the last of each has no area
TURNED = torch.tensor([[[4.0, 3.0, 9.0, 8.0, 30.0], [0.0, 0.0, 2.0, 2.0, 45.0], [5.0, 5.0, 0.0, 3.0, 10.0]]])
OTHERS = torch.tensor([[[5.0, 2.0, 4.0, 9.0, -50.0], [0.0, 0.0, 2.0, 2.0, 0.0], [4.0, 3.0, 1.0, 1.0, 200.0]]])
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


CASES = [
    Case("npu_rotated_overlaps", lambda a, b: torch_npu.npu_rotated_overlaps(a, b, False), (TURNED, OTHERS),
         "aclop/RotatedOverlaps", False, ONE, lambda a, b: _shared(a, b, False), 4),
    Case("npu_rotated_overlaps of corners", lambda a, b: torch_npu.npu_rotated_overlaps(_corners(a), _corners(b), True),
         (TURNED, OTHERS), "aclop/RotatedOverlaps", False, ONE, lambda a, b: _shared(a, b, False), 4),
    Case("npu_rotated_iou", lambda a, b: torch_npu.npu_rotated_iou(a, b, False, 0, True, 0.0, 0.0), (TURNED, OTHERS),
         "aclop/RotatedIou", False, ONE, lambda a, b: _shared(a, b, True), 4),
    Case("npu_nms_with_mask", lambda x: torch_npu.npu_nms_with_mask(x, 0.5), (SCORED,), "aclop/NMSWithMask", False, ONE,
         # the fourth overlaps only the second by more, which the first has ruled out
         lambda x: (x, torch.arange(5, dtype=torch.int32), torch.tensor([1, 0, 1, 1, 1], dtype=torch.uint8))),
]  # fmt: skip
