"""The products of nn/product_kernel.py equal torch's, for sizes that blocks fit and that they do not.

They need Triton, and a CUDA device or its interpreter: TRITON_INTERPRET=1 pytest tests/unit/test_product_kernel.py
"""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: it comes with a CUDA build of torch")

CUDA = torch.cuda.is_available()
if not CUDA and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no CUDA device, and TRITON_INTERPRET is not 1", allow_module_level=True)
PLACE = torch.device("cuda" if CUDA else "cpu")
OVERLAPS = [False, True] if CUDA and torch.cuda.get_device_capability() >= (9, 0) else [False]


@pytest.mark.parametrize("pdl", OVERLAPS, ids=lambda pdl: "overlapping" if pdl else "in turn")
@pytest.mark.parametrize("squares", [False, True], ids=["plain", "square"])
@pytest.mark.parametrize("turned", [False, True], ids=["(N, K)", "(K, N)"])
@pytest.mark.parametrize("sizes", [(5, 128, 64, 1), (70, 48, 40, 2), (16, 192, 32, 3)], ids=str)
def test_a_product_equals_torch(sizes: tuple[int, int, int, int], turned: bool, squares: bool, pdl: bool) -> None:
    from ascendchat.nn.product_kernel import Blocks, product

    rows, inner, outputs, parts = sizes
    if squares and parts > 1:
        pytest.skip("what is not linear needs the whole sum")
    torch.manual_seed(0)
    x = torch.randn(rows, inner, device=PLACE)
    weight = torch.randn(*((inner, outputs) if turned else (outputs + 8, inner)), device=PLACE)
    out = torch.full((parts, rows, outputs), torch.nan, device=PLACE)
    product(x, weight, out, Blocks(32, parts, deep=32), turned=turned, squares=squares, pdl=pdl)
    wanted = x.double() @ (weight if turned else weight[:outputs].t()).double()
    if squares:
        wanted = wanted.relu().square()
    torch.testing.assert_close(out.sum(dim=0).double(), wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("pdl", OVERLAPS, ids=lambda pdl: "overlapping" if pdl else "in turn")
@pytest.mark.parametrize("sizes", [(5, 3, 2, 1), (70, 2, 4, 2), (6, 3, 3, 2)], ids=str)
def test_attention_is_joined_from_its_parts(sizes: tuple[int, int, int, int], pdl: bool) -> None:
    from ascendchat.nn.product_kernel import Blocks, product

    (rows, heads, cuts, parts), head_dim, outputs = sizes, 64, 40
    torch.manual_seed(0)
    sums, totals = torch.randn(rows, heads, cuts, head_dim, device=PLACE), torch.rand(rows, heads, cuts, device=PLACE)
    weight = torch.randn(outputs, heads * head_dim, device=PLACE)
    out = torch.full((parts, rows, outputs), torch.nan, device=PLACE)
    product(sums, weight, out, Blocks(32, parts, deep=32), totals=totals, pdl=pdl)
    joined = sums.double().sum(dim=2) / totals.double().sum(dim=2)[..., None]
    torch.testing.assert_close(out.sum(dim=0).double(), joined.flatten(1) @ weight.double().t(), atol=1e-3, rtol=1e-4)


def test_stages_that_the_chip_has_no_room_for_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chip of 99 KiB, as most cards for desks have, runs what was measured on one of 227."""
    from ascendchat.nn import product_kernel
    from ascendchat.nn.token_step import MANY_BLOCKS, SOME_BLOCKS

    class Told(Exception):
        pass

    class Launched:
        def __getitem__(self, grid: object) -> Launched:
            return self

        def __call__(self, *tensors: object, **told: object) -> None:
            raise Told(told["stages"])

    monkeypatch.setattr(product_kernel, "_product", Launched())
    x, weight, out = (torch.zeros(64, 256, dtype=torch.bfloat16, device=PLACE) for _ in range(3))
    for room, wanted in ((227, {1: 6, 2: 3}), (99, {1: 4, 2: 2})):
        monkeypatch.setattr(product_kernel, "shared_memory", lambda place, room=room: room << 10)
        for number, blocks in ((1, SOME_BLOCKS["qkv"]), (2, MANY_BLOCKS["qkv"])):
            with pytest.raises(Told) as told:
                product_kernel.product(x, weight, out[None], blocks)
            assert told.value.args == (wanted[number],)
        parts, totals = torch.zeros(64, 2, 4, 128, device=PLACE), torch.ones(64, 2, 4, device=PLACE)
        with pytest.raises(Told) as told:  # which wait there in float32, four for each number of a product
            product_kernel.product(parts, weight, out[None], SOME_BLOCKS["out"], totals=totals)
        assert told.value.args == ({227: 2, 99: 1}[room],)
