"""chips.py: names are matched whole, figures are those of the data sheets, unknown chips get cautious ones."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ascendchat import chips
from ascendchat.chips import CHIPS, GIB, KINDS, detected, find, unknown
from ascendchat.errors import UserError


@pytest.mark.parametrize(
    ("spellings", "name"),
    [
        ("Ascend910B3|910B3|ascend910b3|Ascend 910B3|昇腾910B3", "Ascend910B3"),
        ("910B4-1", "Ascend910B4-1"),
        ("910ProB", "Ascend910ProB"),
        ("Ascend910_9372", "Ascend910_9372"),
        ("Ascend950DT_95A1", "Ascend950DT"),
        ("NVIDIA H100 80GB HBM3|h100", "NVIDIA H100 80GB HBM3"),
        ("  NVIDIA  GeForce RTX 4090 ", "NVIDIA GeForce RTX 4090"),
        ("CPU", "cpu"),
    ],
)
def test_find_knows_the_spellings_of_torch_and_the_vendor_tools(spellings: str, name: str) -> None:
    assert {find(spelling).name for spelling in spellings.split("|")} == {name}


@pytest.mark.parametrize(
    ("names", "choices"),
    [
        ("910B|Ascend910B|Ascend 910B|昇腾910B|910b*", "Ascend910B1 Ascend910B2 Ascend910B3 Ascend910B4 Ascend910A"),
        ("A2|Atlas A2|Atlas 800T A2|800I A2", "Ascend910B1 Ascend910B2 Ascend910B3 Ascend910B4"),
        ("A3|910C|Ascend910C|Atlas 800T A3", "Ascend910_9392 Ascend910_9382"),
        ("910|Ascend910|npu|ascend", "Ascend910B3 Ascend910_9392"),
        ("310|310P|Ascend310|300I Duo|Atlas 300I Pro", "Ascend310P3"),
        ("950|Ascend950", "Ascend950DT Ascend950PR"),
        ("A100|NVIDIA A100", "A100-40GB A100-80GB"),
        ("a100-pcie|A100 PCIe", "A100-PCIe-40GB A100-PCIe-80GB"),
        ("V100|Tesla V100", "V100-16GB V100-32GB"),
        ("gpu|cuda|NVIDIA", "H100 A100-80GB"),
    ],
)
def test_a_name_of_several_chips_is_answered_with_the_choices_and_each_of_them_works(names: str, choices: str) -> None:
    for name in names.split("|"):
        with pytest.raises(UserError, match="does not name one chip") as caught:
            find(name)
        for choice in choices.split():
            assert choice in str(caught.value)
    figures = {(find(c).memory, find(c).flops) for c in choices.split()}
    assert len(figures) > 1 or " " not in choices  # the choice matters


def test_an_unknown_name_is_refused_with_the_nearest_ones() -> None:
    with pytest.raises(UserError, match=r"no chip '910B5' .*910B3"):
        find("910B5")
    with pytest.raises(UserError, match="for example Ascend910B3"):
        find("qwertyuiop")


@given(st.sampled_from(sorted(CHIPS)), st.text("0123456789ABx", min_size=1, max_size=2))
def test_a_name_with_something_behind_it_never_matches_the_shorter_chip(name: str, tail: str) -> None:
    longer = name + tail
    if chips._key(longer) in chips._spellings():
        assert find(longer).name.casefold() != name.casefold()
    else:
        with pytest.raises(UserError):
            find(longer)


def test_spellings_differ_and_figures_are_plausible_and_in_base_units() -> None:
    spellings = [s.casefold() for chip in CHIPS.values() for s in (chip.name, *chip.aliases)]
    assert len(spellings) == len(set(spellings))
    for chip in CHIPS.values():
        assert chip.device_type in KINDS, chip.name
        assert 4 * GIB <= chip.memory <= 300 * GIB, chip.name
        assert 0 <= chip.reserved < chip.memory / 4, chip.name
        assert 1e10 < chip.flops < 1e16, chip.name
        assert 1e10 < chip.bandwidth < min(1e13, chip.flops), "every chip computes faster than it reads"
        assert chip.node_link > 1e8, chip.name
        assert chip.known, chip.name


def test_a_detected_chip_has_the_memory_the_driver_reports() -> None:
    assert detected("Ascend910B3", "npu", 61 * GIB).memory == 61 * GIB
    assert detected("Ascend910B3", "npu", 61 * GIB).reserved == 0  # the driver's part is already taken off
    assert detected("Ascend910B3", "npu", 0).reserved == 3 * GIB
    old = detected("Ascend910B", "npu", 0)  # without a digit: the old chip
    assert (old.bf16, old.fused_attention, old.memory) == (False, False, 32 * GIB)


def test_a_detected_chip_that_is_not_in_the_table_gets_cautious_figures_and_says_so() -> None:
    for chip in (detected("Ascend999X", "npu", 10 * GIB), unknown("Ascend999X", "npu", 10 * GIB)):
        assert not chip.known
        assert not chip.bf16
        assert not chip.fused_attention
        assert (chip.name, chip.memory, chip.device_type) == ("Ascend999X", 10 * GIB, "npu")
        assert "not in the chip table" in chip.source
    assert detected("Ascend910B3", "cuda", GIB).known is False  # a name of another device type does not count


def test_this_cpu_is_this_machine() -> None:
    chip = chips.this_cpu()
    assert 0 < chip.memory <= chips.os.sysconf("SC_PAGE_SIZE") * chips.os.sysconf("SC_PHYS_PAGES")
    assert chip.flops >= chips.CPU_CORE_FLOPS


def test_a_share_of_the_peak_is_only_shown_where_the_peak_is_known() -> None:
    """A CPU measured while others hold its cores, and an unlisted GPU taken for a slow one, showed over 100 % MFU."""
    assert find("Ascend910B3").peak == 294.9e12, "of dense matrices"
    assert detected("NVIDIA H200", "cuda", 140 * GIB).peak == 989.4e12
    assert chips.this_cpu().peak is None
    assert detected("NVIDIA X999", "cuda", 80 * GIB).peak is None


def test_each_device_type_names_its_variable_its_collective_and_its_tool() -> None:
    assert list(KINDS) == ["npu", "cuda", "mps", "cpu"]
    facts = {name: (kind.visible, kind.collective, kind.tool) for name, kind in KINDS.items()}
    assert facts["npu"] == ("ASCEND_RT_VISIBLE_DEVICES", "hccl", "npu-smi")
    assert facts["cuda"] == ("CUDA_VISIBLE_DEVICES", "nccl", "nvidia-smi")
    assert facts["cpu"][1] == facts["mps"][1] == "gloo"


def test_chips_and_device_and_env_import_without_torch() -> None:
    code = "import ascendchat.chips, ascendchat.device, ascendchat.device.env, sys; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
