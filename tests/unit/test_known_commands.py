"""What users of existing guides type is accepted word for word."""

from __future__ import annotations

import importlib.util
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from ascendchat.config import parse
from ascendchat.config.train import BaseConfig, MidConfig, SftConfig

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--device-type=npu", {"device_type": "npu"}),
        ("--device-type=npu --depth=12 --max-seq-len=2048 --device-batch-size=32 --total-batch-size=524288",
         {"depth": 12, "max_seq_len": 2048, "device_batch_size": 32, "total_batch_size": 524288}),
        ("--depth 12 --max-seq-len 2048 --device-batch-size 32 --total-batch-size 524288 --device-type npu",
         {"depth": 12, "total_batch_size": 524288, "device_type": "npu"}),
        ("-- --depth=12 --device_batch_size=16 --total_batch_size=262144", {"depth": 12, "device_batch_size": 16}),
        ("--gradient_accumulation_steps=4", {"gradient_accumulation_steps": 4}),
        ("--fp8", {"fp8": True}),
    ],
)  # fmt: skip
def test_flags_of_pretraining(flags: str, expected: dict[str, object]) -> None:
    config = parse(BaseConfig, flags.split())
    assert {name: getattr(config, name) for name in expected} == expected


def test_flags_of_mid_training_and_sft() -> None:
    assert parse(MidConfig, ["--device_batch_size=8"]).device_batch_size == 8
    found = parse(SftConfig, ["--", "--device_batch_size=8", "--target_examples_per_step=32"])
    assert (found.device_batch_size, found.target_examples_per_step) == (8, 32)


@pytest.mark.parametrize(
    ("script", "command"),
    [
        ("tok_train", ["tokenizer", "train"]), ("base_train", ["base"]), ("mid_train", ["mid"]), ("chat_sft", ["sft"]),
        ("base_eval", ["eval", "base"]), ("chat_eval", ["eval", "chat"]), ("chat_cli", ["chat"]),
    ],
)  # fmt: skip
def test_scripts_are_the_commands(script: str, command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []
    monkeypatch.setattr("ascendchat.cli.main", lambda argv: called.append(argv) or 0)
    monkeypatch.setattr(sys, "argv", [script, "--flag"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "scripts" / f"{script}.py"), run_name="__main__")
    assert ended.value.code == 0
    assert called == [[*command, "--flag"]]


@pytest.mark.parametrize("path", sorted((ROOT / "scripts").glob("*_*.py")), ids=lambda path: path.stem)
def test_a_worker_process_that_imports_a_script_does_not_start_it_again(path: Path) -> None:
    runpy.run_path(str(path), run_name="__mp_main__")


@pytest.mark.skipif(importlib.util.find_spec("torch_npu") is None, reason="torch_npu is not installed here")
def test_an_npu_that_is_not_there_is_one_sentence_and_status_2() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    result = subprocess.run(
        [sys.executable, "-m", "scripts.base_train", "--device-type=npu"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert "set_env.sh" in result.stderr
