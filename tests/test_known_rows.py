"""Every row of the table of commands that users of NPU guides know: it is taken as it is typed, or has its counterpart.

The rows with torchrun are split by torchrun's own parser. Settings and variables of the table are tested where they are
read: test_fp8.py, test_fetch_hubs.py, test_env.py, test_rollout_server.py, test_flash_functions.py.
"""

from __future__ import annotations

import importlib
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ascendchat import cli
from ascendchat.config import parse
from ascendchat.speedrun.recipe import recipe_files
from scripts import nanochat

ROOT = Path(__file__).resolve().parent.parent
ON_EIGHT = "torchrun --standalone --nproc_per_node=8 -m scripts."
TYPED: list[tuple[str, dict[str, Any]]] = [
    ("python -m scripts.base_train", {"device_type": None}),
    (
        "torchrun --nproc_per_node=4 -m scripts.base_train --device-type=npu --depth=12 --max-seq-len=2048 "
        "--device-batch-size=32 --total-batch-size=524288",
        {"device_type": "npu", "depth": 12, "device_batch_size": 32, "total_batch_size": 524288},
    ),
    (
        ON_EIGHT + "base_train -- --depth=12 --device_batch_size=16 --total_batch_size=262144",
        {"depth": 12, "device_batch_size": 16, "total_batch_size": 262144},
    ),
    (ON_EIGHT + "base_train -- --gradient_accumulation_steps=4", {"gradient_accumulation_steps": 4}),
    (ON_EIGHT + "base_train -- --fp8", {"fp8": True}),
    (ON_EIGHT + "base_train -- --depth=20 --run=speedrun", {"depth": 20, "run": "speedrun"}),
    (ON_EIGHT + "mid_train -- --device_batch_size=8", {"device_batch_size": 8}),
    (
        ON_EIGHT + "chat_sft -- --device_batch_size=8 --target_examples_per_step=32",
        {"device_batch_size": 8, "target_examples_per_step": 32},
    ),
    (
        ON_EIGHT + "chat_rl -- --device_batch_size=4 --examples_per_step=16",
        {"device_batch_size": 4, "prompts_per_step": 16},
    ),
    (ON_EIGHT + "base_eval", {}),
    (ON_EIGHT + "chat_eval -- -i sft -a GSM8K", {"stage": "sft", "tasks": ("gsm8k",)}),
    ("python -m scripts.tok_train --max_chars=2000000000", {"max_chars": 2_000_000_000}),
    ("python -m scripts.chat_web --device-type=npu --num-gpus=4", {"device_type": "npu", "devices": 4}),
    ("python -m scripts.chat_cli --device-type=npu", {"device_type": "npu"}),
    ('python -m scripts.chat_cli -p "Why is the sky blue?"', {"prompt": "Why is the sky blue?"}),
]


def script_of(typed: str) -> tuple[str, list[str]]:
    """The script that a line starts, and what it is given."""
    words = shlex.split(typed)
    if words[0] == "torchrun":
        from torch.distributed.run import parse_args

        asked = parse_args(words[1:])
        assert asked.module
        return asked.training_script.removeprefix("scripts."), asked.training_script_args
    assert words[:2] == ["python", "-m"]
    return words[2].removeprefix("scripts."), words[3:]


@pytest.mark.parametrize(("typed", "expected"), TYPED, ids=lambda value: value if isinstance(value, str) else "")
def test_a_known_line_is_taken_as_it_is_typed(typed: str, expected: dict[str, Any]) -> None:
    script, argv = script_of(typed)
    command = nanochat.COMMANDS[script]
    module, name = cli.COMMANDS[" ".join(command)][0].split(":")
    config = parse(
        getattr(importlib.import_module(f"ascendchat.config.{module}"), name), nanochat.translate(script, argv)
    )
    assert {field: getattr(config, field) for field in expected} == expected


@pytest.mark.parametrize(
    ("known", "here"),
    [
        ("bash setup_ascend.sh, ./setup_npu_env.sh", "setup --yes"),
        ("python check_npu.py, ./check_npu_env.sh, python scripts/check_npu_status.py", "doctor"),
        ("bash speedrun_npu.sh, speedrun.sh, ultimate_8npu_speedrun.sh", "speedrun --recipe d20-910b-8"),
        ("./train_distributed_npu.sh 8, python launch_npu_training.py --npus 8", "launch --npus 8 base --depth 12"),
        ("start_mid_train_fixed.sh", "launch --npus 8 mid --device-batch-size 8"),
        ("start_chat_sft_fixed.sh", "launch --npus 8 sft"),
        ("start_chat_rl_fixed.sh", "launch --npus 8 rl"),
        ("calculate_batch_size.py, fix_batch_size_math.sh", "plan --depth 12 --chip Ascend910B3 --npus 8"),
        ("clean_npu_memory.py, emergency_npu_cleanup.sh", "clean --dry-run"),
        ("watch -n 1 npu-smi info", "doctor --watch"),
        ("the defaults of the eight-card guide", "speedrun --recipe qwen-sft-910b-8"),
    ],
)
def test_a_known_script_has_its_counterpart_and_the_pages_say_so(known: str, here: str) -> None:
    name, rest = cli.split_command(here.split())
    config = parse(cli._load("config.", cli.COMMANDS[name][0]), rest)
    if name == "speedrun":
        assert config.recipe in recipe_files()
    if name == "launch":
        inner, rest = cli.split_command(list(config.command))
        parse(cli._load("config.", cli.COMMANDS[inner][0]), rest)
    for language in ("en", "zh"):
        page = (ROOT / "docs" / language / "coming-from-nanochat.md").read_text(encoding="utf-8")
        assert [line for line in known.split(", ") if " the " not in f" {line} " and f"`{line}`" not in page] == []


def test_the_shell_script_takes_the_recipe_for_the_devices(tmp_path: Path) -> None:
    """On a machine with nvidia-smi, on one without, and the one that is asked for."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("dirname", "bash", "python3"):
        (tools / name).symlink_to(f"/usr/bin/{name}" if Path(f"/usr/bin/{name}").exists() else f"/bin/{name}")
    clone = tmp_path / "clone"
    (clone / ".venv" / "bin").mkdir(parents=True)
    (clone / "speedrun.sh").write_text((ROOT / "speedrun.sh").read_text())
    (clone / ".venv" / "bin" / "python").write_text('#!/bin/bash\necho "$@"\n[ "$PWD" = "$SEEN" ]\n')
    (clone / ".venv" / "bin" / "python").chmod(0o755)

    def asked(**environment: str) -> list[str]:
        words = ["/bin/bash", str(clone / "speedrun.sh"), "--dry-run"]
        done = subprocess.run(
            words,
            env={"PATH": str(tools), "SEEN": str(tmp_path), **environment},  # --sets DIR is seen from where one stands
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.split()

    def line(recipe: str) -> list[str]:
        return ["-m", "ascendchat", "speedrun", "--recipe", recipe, "--dry-run"]

    if not os.path.exists("/dev/davinci0"):
        assert asked() == line("tiny-cpu")
        (tools / "nvidia-smi").symlink_to(sys.executable)
        assert asked() == line("d20-h100-8")
    assert asked(RECIPE="d12-910b-4") == line("d12-910b-4")
