"""How nn/triton_decoding.py is launched; what it computes is in test_gpt_step.py, in whole steps of decoding.

It needs Triton, and a CUDA device or its interpreter: TRITON_INTERPRET=1 pytest tests/nn/test_triton_decoding.py
"""

from __future__ import annotations

import os
from unittest.mock import MagicMock

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: it comes with a CUDA build of torch")

CUDA = torch.cuda.is_available()
if not CUDA and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no CUDA device, and TRITON_INTERPRET is not 1", allow_module_level=True)
PLACE = torch.device("cuda" if CUDA else "cpu")


def test_stages_that_the_chip_has_no_room_for_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chip of 99 KiB, as most cards for desks have, runs what was measured on one of 227."""
    from ascendchat.engine.gpt_step import MANY_BLOCKS, SOME_BLOCKS
    from ascendchat.nn import triton_decoding

    launched: list[int] = []
    kernel = MagicMock()
    kernel.__getitem__.return_value = lambda *tensors, stages, **told: launched.append(stages)
    monkeypatch.setattr(triton_decoding, "_product", kernel)
    x, weight, out = (torch.zeros(64, 256, dtype=torch.bfloat16, device=PLACE) for _ in range(3))
    parts, totals = torch.zeros(64, 2, 4, 128, device=PLACE), torch.ones(64, 2, 4, device=PLACE)
    for room in (227, 99):
        monkeypatch.setattr(triton_decoding, "shared_memory", lambda place, room=room: room << 10)
        triton_decoding.product(x, weight, out[None], SOME_BLOCKS["qkv"])
        triton_decoding.product(x, weight, out[None], MANY_BLOCKS["qkv"])
        triton_decoding.product(parts, weight, out[None], SOME_BLOCKS["out"], totals=totals)  # in float32, four each
    assert launched == [6, 3, 2, 4, 2, 1]
