"""TRL: supervised fine-tuning of prompts and completions, through LoRA."""

import tempfile

import tiny
from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

with tempfile.TemporaryDirectory() as folder:
    arguments = SFTConfig(
        folder,
        max_steps=8,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        max_length=64,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )
    trainer = SFTTrainer(
        tiny.model(),
        args=arguments,
        train_dataset=Dataset.from_list(tiny.sums()),
        processing_class=tiny.tokenizer(),
        peft_config=LoraConfig(r=4, target_modules="all-linear"),
    )
    trainer.train()
tiny.report(tiny.logged(trainer.state.log_history), "trl", "transformers", "accelerate", "peft", "datasets")
