"""transformers: Trainer, ten steps with evaluation and a checkpoint, then greedy generation."""

import tempfile

import tiny
from transformers import Trainer, TrainingArguments

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        max_steps=10,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=5,
        save_steps=5,
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )
    trainer = Trainer(tiny.model(), arguments, train_dataset=tiny.rows(), eval_dataset=tiny.rows(8))
    trainer.train()
model = trainer.model.eval()
prompt = tiny.tokenizer()("What is 1 plus 2?", return_tensors="pt").to(model.device)
answer = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0].tolist()
tiny.report(tiny.logged(trainer.state.log_history), "transformers", "accelerate", tokens=answer)
