"""TRL: GRPO with a reference model. Answers are sampled from the model by transformers' `generate`; the reward is the
share of digits in them. What is compared is the loss, the reward and the norm of the gradients of each step.

The numbers behind the sampling are drawn on the CPU, since those of an NPU are others.
"""

import tempfile

import tiny
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

draw = torch.multinomial
torch.multinomial = lambda weights, num_samples: draw(weights.cpu(), num_samples).to(weights.device)


def digits(completions: list[str], **columns: object) -> list[float]:
    return [sum(sign.isdigit() for sign in text) / max(len(text), 1) for text in completions]


with tempfile.TemporaryDirectory() as folder:
    arguments = GRPOConfig(
        f"{folder}/run",
        max_steps=4,
        per_device_train_batch_size=8,
        num_generations=4,
        num_iterations=2,
        beta=0.1,
        max_completion_length=12,
        learning_rate=1e-2,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )
    prompts = Dataset.from_list([{"prompt": row["prompt"]} for row in tiny.sums()])
    trainer = GRPOTrainer(tiny.save(f"{folder}/tiny"), digits, arguments, prompts)
    trainer.train()
tiny.report(tiny.logged(trainer.state.log_history, "loss", "reward", "grad_norm"), "trl", "transformers", "accelerate")
