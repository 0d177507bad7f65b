"""What a worker on a CPU sets up before it answers."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from ascendchat.serve.worker import threads

PRODUCTS = """
import time, torch
from ascendchat.device.cpu import prefer_plain_products
torch.set_num_threads(1)
rows, weight = torch.randn(16, 128), torch.randn(384, 128)
def cost():
    best = float("inf")
    for _ in range(50):
        begun = time.process_time()
        for _ in range(10):
            rows @ weight.t()
        best = min(best, time.process_time() - begun)
    return best
before = cost()
prefer_plain_products()
print(before / cost())
"""


def test_one_core_is_left_to_the_front_unless_the_user_has_named_a_number() -> None:
    assert [threads(cores, 1, named=False) for cores in (1, 2, 8)] == [1, 1, 7]
    assert threads(8, 2, named=False) == 3
    assert threads(8, 2, named=True) == 4
    assert threads(2, 16, named=True) == 1


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in ("aarch64", "arm64"), reason="only on ARM torch chooses oneDNN here")
def test_products_of_a_few_rows_are_not_slower_than_by_default() -> None:
    done = subprocess.run([sys.executable, "-c", PRODUCTS], capture_output=True, text=True, check=True)
    assert float(done.stdout) > 1.2  # about eight, on a Neoverse N1
