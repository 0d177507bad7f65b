"""Settings of `ascendchat finetune`: YAML files as users of LLaMA-Factory and of small guides have them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ascendchat.config import parse
from ascendchat.config.finetune import NOT_USED, FinetuneConfig
from ascendchat.errors import UserError
from ascendchat.nn.preference import Weights
from ascendchat.train.finetune import checked, lora_settings, run_name
from ascendchat.train.preference import weights_of

FACTORY_LORA = """
### model
model_name_or_path: Qwen/Qwen2.5-7B-Instruct
trust_remote_code: true

### method
stage: sft
finetuning_type: lora
lora_rank: 8
lora_target: all

### dataset
dataset: identity,alpaca_en_demo
dataset_dir: data
template: qwen
cutoff_len: 1024
max_samples: 1000
dataloader_num_workers: 4

### output
output_dir: saves/qwen2.5-7b/lora/sft
logging_steps: 10
save_steps: 500
plot_loss: true
report_to: none

### train
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
resume_from_checkpoint: null

### eval
val_size: 0.1
eval_strategy: steps
eval_steps: 500
"""
FACTORY_FULL = """
model_name_or_path: /models/Qwen2.5-0.5B-Instruct
finetuning_type: full
dataset: alpaca_zh_demo
neat_packing: true
save_total_limit: 3
max_steps: -1
num_train_epochs: 2
lr_scheduler_type: linear
warmup_steps: 20
weight_decay: 0.1
max_grad_norm: 0.5
gradient_checkpointing: true
seed: 42
"""
SMALL_GUIDE = """
model_name: ./qwen
train_file: train.jsonl
output_dir: ./output
batch_size: 4
max_length: 512
num_epochs: 3
learning_rate: 5e-5
warmup_steps: 0
warmup_ratio: 0.03
lora: true
lora_r: 8
lora_alpha: 32
lora_dropout: 0.05
target_modules: [q_proj, v_proj]
"""


def read(tmp_path: Path, text: str, *flags: str) -> FinetuneConfig:
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return parse(FinetuneConfig, [str(path), *flags])


def test_a_lora_file_of_llama_factory_means_the_same_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = checked(read(tmp_path, FACTORY_LORA))
    assert (config.start, config.data) == ("Qwen/Qwen2.5-7B-Instruct", ("identity", "alpaca_en_demo"))
    assert (config.max_seq_len, config.max_samples, config.dataset_dir) == (1024, 1000, "data")
    assert (config.device_batch_size, config.gradient_accumulation_steps, config.epochs) == (1, 8, 3.0)
    assert (config.save_every, config.eval_every, config.log_every, config.val_size) == (500, 500, 10, 0.1)
    lora = lora_settings(config)
    assert lora is not None
    assert (lora.rank, lora.alpha, lora.targets) == (8, 16.0, ("all",))
    assert run_name(config, None) == "saves-qwen2.5-7b-lora-sft"  # type: ignore[arg-type]  # not asked
    said = capsys.readouterr().err.splitlines()
    assert len(said) == len({line.split(": ")[1].split()[0] for line in said}), "one line each"
    assert any("template is not used: the model's own chat template" in line for line in said)
    named = [line.split(": ")[1].split()[0] for line in said]
    assert "resume_from_checkpoint" not in named  # it is null
    assert "report_to" not in named
    assert set(named) <= set(NOT_USED)


def test_a_full_file_of_llama_factory_means_the_same_here(tmp_path: Path) -> None:
    config = checked(read(tmp_path, FACTORY_FULL, "--epochs", "1"))
    assert lora_settings(config) is None
    assert (config.epochs, config.num_iterations, config.keep) == (1.0, None, 3)  # a flag wins over the file
    assert (config.lr_scheduler_type, config.warmup_steps, config.weight_decay) == ("linear", 20, 0.1)
    assert config.activation_checkpointing
    assert (config.max_grad_norm, config.packing, config.seed) == (0.5, True, 42)


def test_the_plain_names_of_a_small_guide(tmp_path: Path) -> None:
    config = checked(read(tmp_path, SMALL_GUIDE))
    assert (config.start, config.data, config.device_batch_size) == ("./qwen", ("train.jsonl",), 4)
    assert (config.max_seq_len, config.epochs, config.learning_rate) == (512, 3, 5e-5)
    assert (config.warmup_steps, config.warmup_ratio) == (None, 0.03)  # 0 steps and a share: the share
    lora = lora_settings(config)
    assert lora is not None
    assert (lora.rank, lora.alpha, lora.dropout, lora.targets) == (8, 32.0, 0.05, ("q_proj", "v_proj"))
    assert not lora.rslora
    assert not lora.dora


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("lora_rnak: 8", "did you mean lora_rank"),
        ("quantization_bit: 8", "choose from: 4"),
        ("load_in_8bit: true", "a base is held in 4 bits"),
        ("finetuning_type: freeze", "choose from: full, lora"),
        ("stage: ppo", "choose from: sft, dpo, orpo, simpo"),
        ("lr_scheduler_type: polynomial", "is not a valid value"),
        ("use_galore: true", "choose finetuning_type"),
    ],
)
def test_what_is_not_done_here_is_refused_by_name(tmp_path: Path, line: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        read(tmp_path, f"model_name_or_path: x\ndataset: y\n{line}\n")


def test_a_setting_that_is_off_asks_for_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert read(tmp_path, "model: x\nquantization_bit: null\nuse_galore: false\nplot_loss: false\n").start == "x"
    assert capsys.readouterr().err == ""
    with pytest.raises(UserError, match="--template is not done here: the model's own chat template"):
        parse(FinetuneConfig, ["--model", "x", "--template", "qwen"])


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("", "name the model"),
        ("--model x", "name what to learn"),
        ("--model x --data y --lora-rank 4", "belongs to LoRA"),
        ("--model x --data y --bf16 --fp16", "exclude each other"),
        ("--model x --data y --muon --lora", "adapters are trained by AdamW"),
        ("--model x --data y --warm-start", "--warm-start is not done here: it is for models of our own"),
        ("--model x --data y --stage orpo --label-smoothing 0.1", r"is used by --stage dpo\|simpo, not by orpo"),
        ("--model x --data y --stage dpo --simpo-gamma 0.5", "--simpo-gamma is used by --stage simpo, not by dpo"),
        ("--model x --data y --stage dpo --pref-loss orpo --simpo-gamma 1", "not by orpo"),
        ("--model x --data y --pref-beta 0.1", r"used by --stage dpo\|orpo\|simpo, not by sft"),
    ],
)
def test_what_contradicts_itself_is_refused(flags: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        checked(parse(FinetuneConfig, flags.split()))


def test_numbers_of_a_loss_on_pairs_go_to_it() -> None:
    flags = "--model x --data y --stage simpo --label-smoothing 0.1 --pref-ftx 1".split()
    config = checked(parse(FinetuneConfig, flags))
    assert weights_of("simpo", config) == Weights(beta=2.0, smoothing=0.1, gamma=0.5, sft=1.0)
    config = checked(parse(FinetuneConfig, [*flags, "--simpo-gamma", "0"]))
    assert weights_of("simpo", config).gamma == 0.0


def test_rates_follow_what_is_trained() -> None:
    rates = [
        checked(parse(FinetuneConfig, ["--model", "x", "--data", "y", *more])).learning_rate
        for more in ([], ["--lora"])
    ]
    assert rates == [1e-5, 1e-4]


@pytest.mark.slow
def test_training_imports_fsdp_only_when_weights_are_shared_out() -> None:
    """It takes most of a second."""
    code = (
        "import sys, ascendchat.train.chat, ascendchat.train.finetune; print('torch.distributed.fsdp' in sys.modules)"
    )
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "False", done.stderr[-2000:]
