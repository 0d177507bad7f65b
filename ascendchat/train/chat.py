"""Mid-training and SFT: `ascendchat mid --run demo`, `ascendchat sft --run demo`. Conversations, loss on the replies.

Both start from the last checkpoint of an earlier stage and are Stages of the one loop; they differ in their defaults.
tasks/mixture.py says what --data may hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ascendchat import dist
from ascendchat.checkpoint import to_continue
from ascendchat.config.train import ChatTrainConfig
from ascendchat.data.chat import render_prompt
from ascendchat.data.mixture import Batches, absolute
from ascendchat.data.tokenizer import Tokenizer
from ascendchat.device import Device, describe
from ascendchat.infer.load import open_tokenizer, settings_of, tokenizer_folder
from ascendchat.nn import IGNORE
from ascendchat.nn.loss import token_nats
from ascendchat.plan import schedule
from ascendchat.plan.batch import Split, batch_for
from ascendchat.plan.schedule import Curve
from ascendchat.plan.shape import Shape
from ascendchat.record import open_run, run_folder
from ascendchat.tasks.mixture import ChatMixture, default_data, open_chat_mixture
from ascendchat.tasks.overlap import report_overlaps
from ascendchat.train.loop import Options, fit, load_state
from ascendchat.train.rows import Learner, RowStage, build, share_out, training_device
from ascendchat.train.start import only_weights, starting_point

WARMDOWN = {"mid": 1.0, "sft": 0.5}  # share of the run that lowers the learning rate
TEXT_TOKENS = 1_000_000  # of each text's validation split
ASKED = ("Who are you?", "What is 17 + 25?", "你是谁？")
SAME = ("shape", "tokenizer", "data", "total_batch", "seed", "steps", "start")


class ChatStage(RowStage):
    """Cross-entropy on the assistant's tokens of packed conversations."""

    def __init__(
        self, name: str, learner: Learner, split: Split, steps: int, mixture: ChatMixture, tokenizer: Tokenizer,
        config: ChatTrainConfig, facts: dict[str, Any],
    ) -> None:  # fmt: skip
        self.name, self.mixture, self.facts = name, mixture, facts
        usual = Curve(warmup=min(20, steps // 10), warmdown=WARMDOWN[name], final=0.0)
        super().__init__(learner, split, steps, tokenizer, config, usual)

    def batches(self, rows_per_step: int) -> Batches:
        return Batches(self.mixture.sources, rows_per_step)

    def rates(self, step: int) -> dict[str, float]:
        values, down = (0.85, 0.95, 0.95), self.curve.warmdown
        momentum = schedule.momentum(step, self.steps, values=values, ramp=300, warmdown=down)
        return {**super().rates(step), "momentum": momentum}

    def evaluate(self, step: int) -> dict[str, float]:
        """Loss on held-out replies; bits per byte of the texts in the mixture that have a validation split."""
        return {**self._reply_loss(), **self.text_bits(self.mixture.texts, TEXT_TOKENS)}

    def _reply_loss(self) -> dict[str, float]:
        if not self.mixture.validation:
            return {}
        total = torch.zeros(2, device=self.learner.place)  # nats, targets
        for inputs, targets in self._validation_rows():
            hidden = self.model(inputs, self.learner.attend)
            nats = token_nats(hidden, self.model.head, targets, self.model.shape.vocab)
            total += torch.stack((nats.sum(), (targets != IGNORE).sum().float()))
        dist.all_reduce(total, "sum")
        nats_sum, count = total.tolist()
        return {"val_loss": nats_sum / count}

    def _validation_rows(self) -> Iterator[tuple[Tensor, Tensor]]:
        world, size = dist.world(), self.split.rows
        for rows in self.mixture.validation:
            batches = Batches([(rows, 1.0)], rows.per_epoch)
            for first in range(world.rank * size, rows.per_epoch, world.size * size):
                batch = batches.batch(0, first, min(first + size, rows.per_epoch))
                yield tuple(torch.from_numpy(x).to(self.learner.place) for x in (batch.inputs, batch.targets))  # type: ignore[misc]

    def sample(self, step: int) -> list[str]:
        end = self.tokenizer.specials["<|assistant_end|>"]
        texts = []
        for question in ASKED:
            prompt = render_prompt(self.tokenizer, [{"role": "user", "content": question}])
            texts.append(f"{question} | {self.continue_text(list(prompt), stop=end)}")
        return texts

    def state_dict(self) -> dict[str, Any]:
        return {
            "stage": self.name,
            "shape": self.model.shape.to_dict(),
            "tokenizer": self.tokenizer.fingerprint,
            "total_batch": self.split.total,
            "steps": self.steps,
            "seed": self.seed,
            **self.facts,
        }


def batch_and_steps(config: ChatTrainConfig, shape: Shape, device: Device, rows: int) -> tuple[Split, int]:
    """Batch and steps: `epochs` over all rows."""
    total = config.total_batch_size or batch_for(int(rows * shape.seq_len * config.epochs), shape.seq_len)
    if config.target_examples_per_step:
        total = config.target_examples_per_step * shape.seq_len
    split = share_out(config, shape, device, total)
    per_step = split.devices * split.rows * split.accumulation
    return split, config.num_iterations or max(1, math.ceil(rows * config.epochs / per_step))


def run_stage(config: ChatTrainConfig, stage: str) -> int:
    """Train one stage; `ascendchat mid` and `ascendchat sft` are this."""
    device = training_device(config)
    world = dist.init(device)
    place = device.bind(world.local_rank)
    main = world.rank == 0
    say = print if main else lambda text: None
    say(describe(device))
    origin = starting_point(config, stage, say)
    say(f"starting from {origin.folder}")
    shape = Shape.from_dict(origin.state["shape"])
    where = tokenizer_folder(config.tokenizer, origin).resolve()
    learnt = settings_of(origin).get("data") or ()
    data = absolute(config.data or default_data(stage, learnt, config.source))
    config = replace(config, tokenizer=str(where), data=data)  # what later commands look up
    tokenizer = open_tokenizer(where, origin, shape)
    if config.max_seq_len and config.max_seq_len != shape.seq_len:
        shape = Shape.from_dict({**shape.to_dict(), "seq_len": config.max_seq_len})
    mixture = open_chat_mixture(
        data, stage, tokenizer, shape.seq_len, seed=config.seed, source=config.source, find_overlaps=main, say=say
    )
    split, steps = batch_and_steps(config, shape, device, mixture.per_epoch)
    learner = build(config, shape, device, place, say)
    start_from = f"{origin.state.get('stage')} step {origin.step} {origin.fingerprint}"
    facts = {"data": mixture.facts, "start": start_from}
    trained = ChatStage(stage, learner, split, steps, mixture, tokenizer, config, facts)
    folder = run_folder(config.run or origin.folder.parent.parent.name, stage)
    found = to_continue(folder, config.resume, say=say)
    if found:
        start = load_state(trained, found, {k: v for k, v in trained.state_dict().items() if k in SAME})
    else:
        start = 0
        read = origin.reader()
        if config.warm_start:
            trained.optimizer.load(read, origin.state.get("updates", origin.step))
        else:
            trained.optimizer.load(only_weights(read), 0)
    if start >= steps:
        say(f"{folder} is finished: {start} steps; --resume never starts anew")
        return 0
    say(
        f"{steps} steps of {split.total} tokens = {split.devices} device(s) x {split.rows} rows x {split.accumulation} "
        f"micro-batch(es) x {shape.seq_len}" + (f"; continuing after step {start}" if start else "")
    )
    options = Options.of(config, start, found)
    about = {"chip": device.chip.name, "world": world.size, "start": str(origin.folder)} | trained.about_rates
    with open_run(folder, config, facts=about, resume_step=start or None, track=config.track, main=main) as record:
        if main:
            tokenizer.save(folder / "tokenizer")  # a model without its tokenizer is lost
            report_overlaps(mixture.overlaps, folder, say)
        result = fit(trained, device, record, options, title=stage)
    trained.close()
    dist.teardown()
    return 128 + result.stopped_by if result.stopped_by else 0
