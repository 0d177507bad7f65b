"""Random programs of 20 operators give the same result on the NPU as on the CPU.

python -m cannsim run -- pytest tests/npu/test_fuzz.py

A program is a list of (operator, operands); it is drawn from its seed alone, so a failure is repeated by its number.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

PROGRAMS, LENGTH = 200, 20
SHAPE = (4, 6, 8)  # every value of a program has this shape, so that all operators compose

Unary = Callable[[torch.Tensor], torch.Tensor]
Binary = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# Every operator keeps values near 1, so that errors do not grow without bound.
UNARY: list[Unary] = [
    torch.tanh,
    torch.sigmoid,
    F.silu,
    F.relu,
    torch.sin,
    torch.cos,
    lambda x: x * 0.5,
    lambda x: x - 0.25,
    lambda x: 1.5 - x,
    lambda x: x.clamp(-1, 1),
    lambda x: (x.abs() + 0.1).sqrt(),
    lambda x: (x.square() + 1).rsqrt(),
    lambda x: (x.abs() + 1).log(),
    lambda x: x.softmax(-1) * 4,
    lambda x: x.log_softmax(1) * 0.25,
    lambda x: F.layer_norm(x, (8,)),
    lambda x: F.rms_norm(x, (8,), eps=1e-3),
    lambda x: x - x.mean(-1, keepdim=True),
    lambda x: x.cumsum(-1) / 8,
    lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    lambda x: x.flip(0),
    lambda x: x.roll(2, 1),
    lambda x: torch.cat([x[..., 3:], x[..., :3]], -1),
    lambda x: torch.stack(list(x.unbind(1)), 1),
    lambda x: torch.cat(x.split([2, 4], 1)[::-1], 1),
    lambda x: x.tril(2),
    lambda x: x.masked_fill(x > 1, 0.5),
    lambda x: x.index_select(0, torch.tensor([3, 1, 0, 2], device=x.device)),
    lambda x: x.gather(1, torch.arange(6, device=x.device).flip(0)[None, :, None].expand(SHAPE)),
    lambda x: x[:, torch.tensor([5, 0, 1, 2, 4, 3], device=x.device)],
    lambda x: F.pad(x[..., 1:], (1, 0), value=0.1),
    lambda x: x.amax(-1, keepdim=True).expand(SHAPE) * 0.5 + x * 0.25,
    lambda x: x.logsumexp(-1, keepdim=True).expand(SHAPE) * 0.2,
    lambda x: x.sum(1, keepdim=True).expand(SHAPE) / 6,
    lambda x: torch.linalg.vector_norm(x, dim=-1, keepdim=True) * 0.2 + x * 0.1,
    lambda x: x.repeat_interleave(2, 1)[:, ::2].contiguous(),
    lambda x: x.to(torch.float32).clone().mul_(0.9).add_(0.05),
]
BINARY: list[Binary] = [
    torch.add,
    torch.sub,
    lambda a, b: a * b.clamp(-1, 1),
    lambda a, b: a / (b.abs() + 1),
    torch.maximum,
    torch.minimum,
    lambda a, b: torch.where(a > b, a, b * 0.5),
    lambda a, b: a.lerp(b, 0.3),
    lambda a, b: torch.addcmul(a, b, b.clamp(-1, 1), value=0.1),
    lambda a, b: a @ b.softmax(-1)[:, :1].transpose(1, 2).expand(4, 8, 8) * 0.5,
    lambda a, b: torch.baddbmm(a, a @ a.transpose(1, 2), b, beta=0.5, alpha=0.02).clamp(-3, 3),
    lambda a, b: torch.einsum("bsh,bth->bst", a, b).clamp(-2, 2) @ b * 0.1,
    lambda a, b: a.index_add(0, torch.tensor([0, 2], device=a.device), b[:2]) * 0.5,
    lambda a, b: a.scatter(1, torch.zeros(4, 1, 8, dtype=torch.long, device=a.device), b[:, :1]),
    lambda a, b: torch._foreach_add([a], [b], alpha=0.5)[0] * 0.7,
    lambda a, b: torch._foreach_lerp([a], [b], 0.2)[0],
]


def program(seed: int) -> list[tuple[int, int, int]]:
    """Steps (operator, left, right): operators beyond the unary ones take two of the values made before."""
    draw = random.Random(seed)
    steps = []
    for step in range(LENGTH):
        operator = draw.randrange(len(UNARY) + len(BINARY))
        steps.append((operator, draw.randrange(step + 2), draw.randrange(step + 2)))
    return steps


def run(seed: int, device: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    leaves = [torch.randn(*SHAPE, generator=generator).to(device).requires_grad_() for _ in range(2)]
    values = list(leaves)
    for operator, left, right in program(seed):
        if operator < len(UNARY):
            values.append(UNARY[operator](values[-1]))
        else:
            values.append(BINARY[operator - len(UNARY)](values[left], values[right]))
    total = values[-1] + sum(value.mean() for value in values)
    total.square().mean().backward()
    return total.detach().cpu(), [leaf.grad.cpu() for leaf in leaves if leaf.grad is not None]


@pytest.mark.parametrize("first", range(0, PROGRAMS, 20))
def test_random_programs_agree_with_cpu(first: int) -> None:
    for seed in range(first, first + 20):
        expected, expected_grads = run(seed, "cpu")
        found, found_grads = run(seed, "npu")
        message = f"program {seed}: {program(seed)}"
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, msg=lambda m, s=message: f"{s}\n{m}")
        assert len(found_grads) == len(expected_grads) > 0
        for f, e in zip(found_grads, expected_grads):
            torch.testing.assert_close(f, e, rtol=2e-3, atol=2e-4, msg=lambda m, s=message: f"{s} gradient\n{m}")


def test_programs_use_every_operator() -> None:
    used = {operator for seed in range(PROGRAMS) for operator, _, _ in program(seed)}
    assert used == set(range(len(UNARY) + len(BINARY)))
