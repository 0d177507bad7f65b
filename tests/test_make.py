"""What `make` would run, by dry runs: on which device `make demo` trains, and where `make test` tests NPUs."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
TWO = "CARDS=/dev/davinci0 /dev/davinci1"  # what the kernel shows of real NPUs
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")


def dry(*words: str) -> subprocess.CompletedProcess[str]:
    """`make -n`: prints what it would run, and runs nothing."""
    command = ["make", "-n", "--no-print-directory", *words]
    given = ("MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "TEST_FLAGS")  # to the `make test` that runs this test
    environment = {name: value for name, value in os.environ.items() if name not in given}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def last(*words: str) -> str:
    found = dry(*words)
    assert found.returncode == 0, found.stderr
    return found.stdout.strip().splitlines()[-1]


def test_the_demo_trains_on_the_npus_of_this_machine() -> None:
    for words in (["demo"], ["demo", "DEVICE=npu"]):
        assert last(*words, TWO) == ".venv/bin/ascendchat speedrun --recipe tiny-cpu --device-type npu"
        assert "cannsim" not in dry(*words, TWO).stdout
        assert "ascendchat setup --device-type npu --yes" in dry(*words, TWO, "VENV=absent").stdout
    assert last("demo", TWO, "DEVICES=2").endswith("--device-type npu --devices 2")
    assert last("demo", TWO, "DEVICE=cpu").endswith("--recipe tiny-cpu --device-type cpu")


def test_without_npus_the_demo_trains_on_what_is_here() -> None:
    assert last("demo", "CARDS=") == ".venv/bin/ascendchat speedrun --recipe tiny-cpu"
    assert last("demo", "CARDS=", "DEVICE=cuda").endswith("--recipe tiny-cpu --device-type cuda")


@pytest.mark.parametrize("cards", ["CARDS=", TWO])
def test_npus_are_simulated_for_who_says_so_and_for_nobody_else(cards: str) -> None:
    simulated = ".venv/bin/python -m cannsim run --devices {0} -- .venv/bin/ascendchat speedrun --recipe tiny-cpu "
    simulated += "--device-type npu --devices {0}"
    assert last("demo", cards, "DEVICE=cannsim") == simulated.format(2)
    assert last("demo", cards, "DEVICE=cannsim", "DEVICES=4") == simulated.format(4)


def test_npus_that_were_asked_for_and_are_not_here_are_an_error_with_the_next_step() -> None:
    refused = dry("demo", "CARDS=", "DEVICE=npu")
    assert refused.returncode != 0
    assert "no NPU is here (no /dev/davinci*); on simulated ones: make demo DEVICE=cannsim" in refused.stderr
    assert "speedrun" not in refused.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="NPUs and the simulator are there on Linux only")
def test_the_tests_use_the_npus_of_this_machine_besides_simulated_ones() -> None:
    assert last("test", TWO) == ".venv/bin/python tests/suite.py --cards"
    assert last("test", "CARDS=") == ".venv/bin/python tests/suite.py"
    suite: dict[str, Any] = runpy.run_path(str(ROOT / "tests" / "suite.py"))
    assert suite["on_cards"]()[1:] == ["-m", "ascendchat", "selftest", "--device-type", "npu", "--quick"]
    assert "tests/npu on cannsim" in suite["BUDGET"], "the name says that it is simulated"
