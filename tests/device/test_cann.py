"""Which torch_npu belongs to which CANN: one table for `ascendchat doctor` and the guides."""

from __future__ import annotations

from pathlib import Path

import pytest

from ascendchat.device.cann import PAIRS, UNPAIRED, fits, install_line, numbers

ROOT = Path(__file__).resolve().parents[2]


def test_the_line_to_type_fits_the_cann_and_the_machine() -> None:
    for cann, machine, line in (
        ("9.0.0", "x86_64", "torch==2.10.0+cpu torch_npu==2.10.0.post2"),
        ("9.0.0", "aarch64", "torch==2.10.0 torch_npu==2.10.0.post2"),
        ("8.3.RC1", "x86_64", "torch==2.8.0+cpu torch_npu==2.8.0"),
        ("9.3.0", "x86_64", "torch==2.13.0 torch_npu==2.13.0"),
    ):
        assert install_line(cann, machine).startswith(f"pip install {line} ")


def test_pairs_that_do_not_belong_together_are_known() -> None:
    right = [("2.6.0.post5", "8.5.0"), ("2.14.0", "9.2.0"), ("2.12.0+git1", "9.1.0"), ("1.11.0", "5.1")]
    wrong = [("2.6.0.post5", "8.3.RC1"), ("2.9.1", "8.5.0")]
    assert [pair for pair in right + wrong if fits(*pair)] == right


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_guide_shows_the_pairs_of_the_one_table(language: str) -> None:
    page = (ROOT / "docs" / language / "install.md").read_text(encoding="utf-8")
    for cann, wheels in PAIRS.items():
        if numbers(cann) >= (8, 2):
            assert f"| {' · '.join(wheels)} | {cann} |" in page
    assert " · ".join(UNPAIRED) in page
