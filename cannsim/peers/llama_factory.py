"""LLaMA-Factory: `llamafactory-cli train` for LoRA, by the same entry; it finds the NPU by itself."""

import json
import tempfile
from pathlib import Path

import tiny
from llamafactory.train.tuner import run_exp

with tempfile.TemporaryDirectory() as folder:
    columns = {"prompt": "prompt", "response": "completion"}
    Path(folder, "sums.json").write_text(json.dumps(tiny.sums()))
    Path(folder, "dataset_info.json").write_text(json.dumps({"sums": {"file_name": "sums.json", "columns": columns}}))
    arguments = dict(
        stage="sft",
        do_train=True,
        model_name_or_path=tiny.save(f"{folder}/tiny"),
        finetuning_type="lora",
        lora_target="all",
        lora_rank=4,
        dataset="sums",
        dataset_dir=folder,
        template="default",
        cutoff_len=96,
        output_dir=f"{folder}/run",
        max_steps=8,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=1,
        use_v1_kernels=True,  # RMSNorm, rotation and SwiGLU by the NPU's own operators; nothing on the CPU
        report_to="none",
        seed=0,
    )
    run_exp(arguments)
    state = json.loads(Path(folder, "run", "trainer_state.json").read_text())
tiny.report(tiny.logged(state["log_history"]), "llamafactory", "transformers", "accelerate", "peft", "trl", "datasets")
