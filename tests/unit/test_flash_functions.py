"""FlashAttention's functions equal their definition in float64, with gradients.

pytest tests/unit/test_flash_functions.py            # on the CPU
pytest tests/unit/test_flash_functions.py -k cuda    # on a CUDA device
"""

from __future__ import annotations

import pytest
import torch
from flash_cases import check_cache, check_rows, check_sequences

PLACES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seeds", [range(8), range(8, 16)], ids=str)
def test_rows_equal_the_definition(place: str, dtype: torch.dtype, seeds: range) -> None:
    for seed in seeds:
        check_rows(place, seed, dtype)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seeds", [range(8), range(8, 16)], ids=str)
def test_sequences_equal_the_definition(place: str, dtype: torch.dtype, seeds: range) -> None:
    for seed in seeds:
        check_sequences(place, seed, dtype)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seeds", [range(12), range(12, 24)], ids=str)
def test_queries_behind_a_cache_equal_the_definition(place: str, dtype: torch.dtype, seeds: range) -> None:
    for seed in seeds:
        check_cache(place, seed, dtype)
