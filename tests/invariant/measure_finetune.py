"""A real model, tuned by `ascendchat finetune` and by TRL's SFTTrainer, on the same conversations.

python tests/invariant/measure_finetune.py MODEL DATA FOLDER [STEPS LENGTH ROWS HELD_OUT [ROLES]]   # minutes on a CPU
pip install trl datasets                # for the role trl; ROLES: ours,trl, one process each, as often as named
FULL=1 DEVICE=cuda python ...           # all weights instead of LoRA; on a GPU, in bf16

TRL gets the conversations that are packed into our rows of each step, padded
to the longest, since without a varlen kernel TRL's packing lets them see each other. AdamW, clipping and a cosine from
the first step on are the same everywhere. Each prints the held-out loss before and after, and of the steps alone (not
of opening the model) the seconds of the clock and of the processor; those other programs on the machine change less.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

UNLABELLED = -100  # as transformers marks what is not learnt
FULL, DEVICE = bool(os.environ.get("FULL")), os.environ.get("DEVICE", "cpu")
RATE, RANK, DEFAULTS = 1e-4 if FULL else 5e-4, 16, ("30", "512", "2", "0.05", "ours,trl")


class Clock:
    """Seconds of each step: of the clock, and of the processor in all threads."""

    def __init__(self) -> None:
        self.wall, self.processor = list[float](), list[float]()
        self.begun = (0.0, 0.0)

    def begin(self) -> None:
        self.begun = time.perf_counter(), time.process_time()

    def end(self) -> None:
        if DEVICE == "cuda":
            import torch

            torch.cuda.synchronize()
        self.wall.append(time.perf_counter() - self.begun[0])
        self.processor.append(time.process_time() - self.begun[1])

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        self.begin()
        yield
        self.end()


class Task:
    """The conversations of each step, and those that are held out, as our command takes them."""

    def __init__(self, model: str, data: str, steps: int, length: int, rows: int, held_out: float) -> None:
        from ascendchat.data.mixture import MixtureLoader
        from ascendchat.models.folder import find
        from ascendchat.tasks.chat_mixture import EntryOptions, open_chat_mixture

        folder = find(model)
        assert folder is not None
        self.folder, self.named = folder, {"gguf_file": folder.gguf} if folder.gguf else {}
        tokenizer = folder.load_tokenizer()
        mixture = open_chat_mixture(
            (data,), "sft", tokenizer, length, say=lambda _: None, options=EntryOptions(held_out), find_overlaps=False
        )
        batches = MixtureLoader(mixture.sources, rows)
        self.steps = [self.padded(batches.batch(step), tokenizer.pad) for step in range(steps)]
        (kept,) = mixture.validation
        batches = MixtureLoader([(kept, 1.0)], 1)
        self.held_out = [self.padded(batches.batch(number), tokenizer.pad) for number in range(kept.per_epoch)]

    def padded(self, batch: Any, pad: int) -> dict[str, Any]:
        """input_ids, labels and attention_mask as transformers takes them."""
        import torch

        from ascendchat.nn import IGNORE

        spans, at = [], 0
        inputs, targets = (torch.from_numpy(array).view(-1) for array in (batch.inputs, batch.targets))
        for count in batch.lengths.tolist():
            ids, wanted = inputs[at : at + count], targets[at : at + count]
            at += count
            if (wanted != IGNORE).any():  # else it is padding of ours
                last = wanted[-1:].where(wanted[-1:] != IGNORE, torch.tensor(pad))
                wanted = wanted.where(wanted != IGNORE, torch.tensor(UNLABELLED))
                spans.append((torch.cat((ids, last)), torch.cat((torch.tensor([UNLABELLED]), wanted))))
        pack = torch.nn.utils.rnn.pad_sequence
        tokens = pack([ids for ids, _ in spans], batch_first=True, padding_value=pad)
        lengths = torch.tensor([len(ids) for ids, _ in spans])
        return {
            "input_ids": tokens,
            "labels": pack([wanted for _, wanted in spans], batch_first=True, padding_value=UNLABELLED),
            "attention_mask": (torch.arange(tokens.size(1))[None] < lengths[:, None]).long(),
        }

    @property
    def tokens(self) -> int:
        """Of all conversations of all steps, without padding."""
        return sum(int(step["attention_mask"].sum()) for step in self.steps)

    def network(self) -> Any:
        import torch
        import transformers

        found = transformers.AutoModelForCausalLM.from_pretrained(self.folder.path, dtype=torch.float32, **self.named)
        found.is_quantized = False  # of a GGUF file they were, and TRL would refuse them
        return found.to(DEVICE)

    def adapters(self) -> Any:
        import torch

        from ascendchat.models.lora import peft_library

        torch.manual_seed(0)
        return (
            None
            if FULL
            else peft_library().LoraConfig(
                r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM"
            )
        )

    def loss(self, net: Any) -> float:
        """Held out, per token."""
        import torch

        net.eval()
        with torch.no_grad():
            there = ({name: tensor.to(DEVICE) for name, tensor in batch.items()} for batch in self.held_out)
            found = [(net(**batch).loss, int((batch["labels"] != UNLABELLED).sum())) for batch in there]
        net.train()
        return sum(float(loss) * count for loss, count in found) / sum(count for _, count in found)


def ours(task: Task, argv: list[str]) -> tuple[float, float, list[float], Clock]:
    """The command, with a clock around its steps."""
    from ascendchat.cli import main
    from ascendchat.runs.run import read_metrics
    from ascendchat.train import loop

    model, data, folder, steps, length, rows, held_out = argv
    os.environ["ASCENDCHAT_HOME"] = folder
    clock, step = Clock(), loop.train_step

    def timed(*arguments: Any) -> Any:
        with clock.step():
            return step(*arguments)

    vars(loop)["train_step"] = timed
    words = ["finetune", "--model", model, "--data", data, "--run", "measured", "--resume", "never"]
    words += [] if FULL else f"--lora --lora-rank {RANK}".split()
    words += f"--max-seq-len {length} --device-batch-size {rows} --steps {steps}".split()
    words += f"--learning-rate {RATE} --warmup-steps 0 --val-size {held_out} --save-every 0 --eval-every 0".split()
    words += "--sample-every -1 --log-every 1 --device-type".split() + [DEVICE]
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert main(words) == 0, said.getvalue()
    found = read_metrics(Path(folder) / "runs" / "measured" / "hf")
    before = float(said.getvalue().split("held-out loss before: ")[1].split()[0])
    after = next(row["val_loss"] for row in found if "val_loss" in row)
    return before, after, [row["loss"] for row in found if "loss" in row], clock


def trl(task: Task, argv: list[str]) -> tuple[float, float, list[float], Clock]:
    """SFTTrainer without packing, with a clock from the beginning to the end of its steps."""
    import datasets
    import torch
    import transformers
    from trl import SFTConfig, SFTTrainer

    clock = Clock()

    class Timer(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_begin(self, *arguments: Any, **named: Any) -> None:
            clock.begin()

        def on_step_end(self, *arguments: Any, **named: Any) -> None:
            clock.end()

    class Trainer(SFTTrainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(task.steps, batch_size=None)  # type: ignore[arg-type]

    net = task.network()
    before, count = task.loss(net), len(task.steps)
    settings = SFTConfig(
        output_dir=f"{argv[2]}/trl",
        max_steps=count,
        per_device_train_batch_size=1,
        learning_rate=RATE,
        lr_scheduler_type="cosine",
        warmup_steps=0,
        weight_decay=0.0,
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        bf16=DEVICE == "cuda",
        use_cpu=DEVICE == "cpu",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        seed=0,
    )
    rows = datasets.Dataset.from_list([{"input_ids": [1, 2], "labels": [1, 2]}] * count)  # never read: see the loader
    tokenizer = transformers.AutoTokenizer.from_pretrained(task.folder.path, **task.named)
    adapters = task.adapters()
    with contextlib.redirect_stdout(sys.stderr):
        trainer = Trainer(
            net, settings, train_dataset=rows, processing_class=tokenizer, peft_config=adapters, callbacks=[Timer()]
        )
        trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return before, task.loss(trainer.model), losses, clock


def device_peak() -> int:
    """Bytes of the GPU."""
    import torch

    return torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0


def measure(role: str, argv: list[str]) -> dict[str, Any]:
    """One of them, in this process."""
    model, data, _, steps, length, rows, held_out = argv
    task = Task(model, data, int(steps), int(length), int(rows), float(held_out))
    before, after, losses, clock = {"ours": ours, "trl": trl}[role](task, argv)
    return {
        "role": role,
        "before": before,
        "after": after,
        "tokens": task.tokens,
        "wall_seconds": sum(clock.wall),
        "processor_seconds": sum(clock.processor),
        "tokens_per_second": task.tokens / sum(clock.wall),
        "tokens_per_processor_second": task.tokens / sum(clock.processor),
        "median_step": sorted(clock.wall)[len(clock.wall) // 2],
        "device_gib": device_peak() / 2**30,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "losses": losses,
    }


if __name__ == "__main__":
    if sys.argv[1] == "--role":
        print(json.dumps(measure(sys.argv[2], sys.argv[3:])), flush=True)
    else:
        given = [*sys.argv[1:], *DEFAULTS[len(sys.argv) - 4 :]]
        for name in given[7].split(","):
            subprocess.run([sys.executable, __file__, "--role", name, *given[:7]], check=True)
