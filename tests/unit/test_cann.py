"""Which torch_npu belongs to which CANN: one table for `ascendchat doctor` and the guides."""

from __future__ import annotations

from pathlib import Path

import pytest

from ascendchat.device.cann import PAIRS, UNPAIRED, fits, install_line, numbers

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("cann", "machine", "line"),
    [
        ("9.1.0", "aarch64", "torch==2.12.0 torch_npu==2.12.0"),
        ("9.0.0", "x86_64", "torch==2.10.0+cpu torch_npu==2.10.0.post2"),
        ("9.0.0", "aarch64", "torch==2.10.0 torch_npu==2.10.0.post2"),
        ("8.5.0", "x86_64", "torch==2.9.0+cpu torch_npu==2.9.0"),
        ("8.3.RC1", "x86_64", "torch==2.8.0+cpu torch_npu==2.8.0"),
        ("8.2.RC1", "aarch64", "torch==2.6.0 torch_npu==2.6.0"),
        ("9.3.0", "x86_64", "torch==2.13.0 torch_npu==2.13.0"),
    ],
)
def test_the_line_to_type_fits_the_cann_and_the_machine(cann: str, machine: str, line: str) -> None:
    assert install_line(cann, machine).startswith(f"pip install {line} ")


@pytest.mark.parametrize(
    ("wheel", "cann", "right"),
    [
        ("2.6.0.post5", "8.5.0", True),
        ("2.6.0.post5", "8.3.RC1", False),
        ("2.7.1.post4", "9.0.0", True),
        ("2.9.1", "8.5.0", False),
        ("2.14.0", "9.2.0", True),
        ("2.13.0", "9.0.0", False),
        ("2.12.0+git1", "9.1.0", True),
        ("1.11.0", "5.1", True),
    ],
)
def test_pairs_that_do_not_belong_together_are_known(wheel: str, cann: str, right: bool) -> None:
    assert fits(wheel, cann) is right


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_guide_shows_the_pairs_of_the_one_table(language: str) -> None:
    page = (ROOT / "docs" / language / "install.md").read_text(encoding="utf-8")
    for cann, wheels in PAIRS.items():
        if numbers(cann) >= (8, 2):
            assert f"| {' · '.join(wheels)} | {cann} |" in page
    assert " · ".join(UNPAIRED) in page
