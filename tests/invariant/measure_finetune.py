"""LoRA of a real model by `ascendchat finetune`, and by a plain loop of transformers and peft on the same rows.

python tests/invariant/measure_finetune.py MODEL DATA FOLDER [STEPS] [LENGTH ROWS HELD_OUT]   # minutes on a quiet CPU

The plain loop does what TRL's SFTTrainer does without packing: the conversations of a step are padded to the longest,
logits of all places are made, the loss is the mean over the assistant's tokens; torch's AdamW, clipping, a cosine. Both
print the held-out loss before and after, and the seconds of processor time that a step takes, which other programs on
the machine change less than seconds of the clock.
"""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RATE, RANK, WARMUP = 5e-4, 16, 1
SIZES = sys.argv[5:8]  # for a machine that is busy with other things
LENGTH, ROWS, HELD_OUT = (int(SIZES[0]), int(SIZES[1]), float(SIZES[2])) if SIZES else (512, 2, 0.05)


def ours(model: str, data: str, folder: Path, steps: int) -> dict[str, Any]:
    """The command, in a process of its own."""
    sizes = f"--max-seq-len {LENGTH} --device-batch-size {ROWS} --steps {steps} --learning-rate {RATE}"
    pace = (
        f"--warmup-steps {WARMUP} --val-size {HELD_OUT} --save-every 0 --eval-every 0 --sample-every -1 --log-every 1"
    )
    words = [sys.executable, "-m", "ascendchat", "finetune", "--model", model, "--data", data, "--run", "measured"]
    words += ["--resume", "never", "--log-every", "1"]
    words += [
        *sizes.split(),
        *pace.split(),
        "--device-type",
        "cpu",
        "--lora",
        "--lora-rank",
        str(RANK),
        "--resume",
        "never",
    ]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        words, env={**os.environ, "ASCENDCHAT_HOME": str(folder)}, capture_output=True, text=True, check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    from ascendchat.record import read_metrics

    rows = read_metrics(folder / "runs" / "measured" / "hf")
    losses = [row["loss"] for row in rows if "loss" in row]
    seconds = sorted(row["seconds"] for row in rows if "seconds" in row)
    return {
        "before": float(done.stdout.split("held-out loss before: ")[1].split()[0]),
        "after": next(row["val_loss"] for row in rows if "val_loss" in row),
        "losses": losses,
        "median_seconds": seconds[len(seconds) // 2],
        "processor_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "peak_gib": after.ru_maxrss / 2**20,
    }


def plain(model: str, data: str, steps: int) -> dict[str, Any]:
    """The same without us, but for the reading and the order of the conversations."""
    import torch

    from ascendchat.data.mixture import Batches
    from ascendchat.hf.folder import find, load_tokenizer
    from ascendchat.hf.lora import peft_library
    from ascendchat.nn import IGNORE
    from ascendchat.tasks.mixture import Portion, open_chat_mixture

    folder = find(model)
    assert folder is not None
    peft, begun = peft_library(), time.process_time()
    import transformers

    named = {"gguf_file": folder.gguf} if folder.gguf else {}
    base = transformers.AutoModelForCausalLM.from_pretrained(folder.path, dtype=torch.float32, **named)
    settings = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    torch.manual_seed(0)
    net = peft.get_peft_model(base, settings)
    mixture = open_chat_mixture(
        (data,), "sft", load_tokenizer(folder), LENGTH, say=lambda _: None, portion=Portion(HELD_OUT)
    )

    def padded(batch: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        inputs, targets = (torch.from_numpy(array).view(-1) for array in (batch.inputs, batch.targets))
        spans = list(zip(inputs.split(batch.lengths.tolist()), targets.split(batch.lengths.tolist())))
        spans = [(i, t) for i, t in spans if (t != IGNORE).any()]
        tokens = torch.nn.utils.rnn.pad_sequence([i for i, _ in spans], batch_first=True)
        wanted = torch.nn.utils.rnn.pad_sequence([t for _, t in spans], batch_first=True, padding_value=IGNORE)
        lengths = torch.tensor([len(i) for i, _ in spans])
        return tokens, wanted, (torch.arange(tokens.size(1))[None] < lengths[:, None]).long()

    def nats(batch: Any) -> tuple[torch.Tensor, int]:
        tokens, wanted, mask = padded(batch)
        logits = net(input_ids=tokens, attention_mask=mask, use_cache=False).logits
        total = torch.nn.functional.cross_entropy(
            logits.view(-1, logits.size(-1)).float(), wanted.view(-1), ignore_index=IGNORE, reduction="sum"
        )
        return total, int((wanted != IGNORE).sum())

    @torch.no_grad()
    def held_out() -> float:
        net.eval()
        (rows,) = mixture.validation
        batches = Batches([(rows, 1.0)], 1)
        found = [nats(batches.batch(number)) for number in range(rows.per_epoch)]
        net.train()
        return sum(float(total) for total, _ in found) / sum(count for _, count in found)

    before = held_out()
    learns = [parameter for parameter in net.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learns, lr=RATE, weight_decay=0.0)
    batches, losses, seconds = Batches(mixture.sources, ROWS), list[float](), list[float]()
    for step in range(steps):
        clock = time.perf_counter()
        total, count = nats(batches.batch(step))
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(learns, 1.0)
        left = 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (steps - WARMUP)))
        for group in optimizer.param_groups:
            group["lr"] = RATE * ((step + 1) / WARMUP if step < WARMUP else left)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total.detach()) / count)
        seconds.append(time.perf_counter() - clock)
    after = held_out()
    return {
        "before": before,
        "after": after,
        "losses": losses,
        "median_seconds": sorted(seconds)[len(seconds) // 2],
        "processor_seconds": time.process_time() - begun,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


if __name__ == "__main__":
    where, number = Path(sys.argv[3]), int(sys.argv[4]) if len(sys.argv) > 4 else 30
    for name, found in (("ours", ours(sys.argv[1], sys.argv[2], where, number)), ("plain", {})):
        print(name, json.dumps(found or plain(sys.argv[1], sys.argv[2], number)), flush=True)
