"""Mid-training and SFT: `ascendchat mid --run demo`, `ascendchat sft --run demo`. Conversations, loss on the replies.

Both start from the last checkpoint of an earlier stage and are Stages of the one loop; they differ in their defaults.
A mixture is written NAME=WEIGHT,...: `toyworld` (embedded), a file of conversations in any known format, a prepared
corpus of text (whose loss is on every token), or a set known to `ascendchat data fetch`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ascendchat import dist, tasks
from ascendchat.checkpoint import Checkpoint, Damaged, newest, to_continue, verify
from ascendchat.config import UserError, home
from ascendchat.config.train import PUBLISHED, ChatTrainConfig
from ascendchat.data.chat import Conversation, Counts, has_reply, render_prompt
from ascendchat.data.corpus import IGNORE, Corpus, Rows, absolute, named, open_mixture
from ascendchat.data.fetch import folder_of
from ascendchat.data.pack import ChatBatches, ChatRows
from ascendchat.data.tokenizer import Tokenizer
from ascendchat.data.toyworld import chats
from ascendchat.device import Device, describe
from ascendchat.files import write_atomic
from ascendchat.infer.load import open_tokenizer, settings_of, tokenizer_folder
from ascendchat.nn.loss import token_nats
from ascendchat.nn.optim import Piece
from ascendchat.plan import schedule
from ascendchat.plan.batch import Split, batch_for
from ascendchat.plan.schedule import Curve
from ascendchat.plan.shape import Shape
from ascendchat.record import open_run, run_folder
from ascendchat.tasks import Watch
from ascendchat.train.loop import Options, fit, load_state
from ascendchat.train.rows import Learner, RowStage, build, share_out, training_device

EARLIER = {"mid": ("base",), "sft": ("mid", "base")}  # where a stage starts from, the first that is there
WARMDOWN = {"mid": 1.0, "sft": 0.5}  # share of the run that lowers the learning rate
TEXT_TOKENS = 1_000_000  # of each text's validation split
VALIDATION = 0.02  # share of a file's conversations that is kept for validation
ASKED = ("Who are you?", "What is 17 + 25?", "你是谁？")
SAME = ("shape", "tokenizer", "data", "total_batch", "seed", "steps", "start")

Source = tuple[Rows, float]
Pack = Callable[[Iterable[Conversation], Counts], ChatRows]


class ChatStage(RowStage):
    """Cross-entropy on the assistant's tokens of packed conversations."""

    def __init__(
        self, name: str, learner: Learner, split: Split, steps: int, sources: list[Source], validation: list[ChatRows],
        texts: list[Corpus], tokenizer: Tokenizer, config: ChatTrainConfig, facts: dict[str, Any],
    ) -> None:  # fmt: skip
        self.name, self.sources, self.validation, self.texts, self.facts = name, sources, validation, texts, facts
        usual = Curve(warmup=min(20, steps // 10), warmdown=WARMDOWN[name], final=0.0)
        super().__init__(learner, split, steps, tokenizer, config, usual)

    def batches(self, rows_per_step: int) -> ChatBatches:
        return ChatBatches(self.sources, self.split.seq_len, rows_per_step, self.seed)

    def rates(self, step: int) -> dict[str, float]:
        values, down = (0.85, 0.95, 0.95), self.curve.warmdown
        momentum = schedule.momentum(step, self.steps, values=values, ramp=300, warmdown=down)
        return {**super().rates(step), "momentum": momentum}

    def evaluate(self, step: int) -> dict[str, float]:
        """Loss on held-out replies; bits per byte of the texts in the mixture that have a validation split."""
        return {**self._reply_loss(), **self.text_bits(self.texts, TEXT_TOKENS)}

    def _reply_loss(self) -> dict[str, float]:
        if not self.validation:
            return {}
        total = torch.zeros(2, device=self.learner.place)  # nats, targets
        for inputs, targets, lengths in self._validation_rows():
            known = self.learner.documents(inputs, lengths)
            hidden = self.model(inputs, self.learner.attend, documents=known)
            nats = token_nats(hidden, self.model.head, targets, self.model.shape.vocab)
            total += torch.stack((nats.sum(), (targets != IGNORE).sum().float()))
        dist.all_reduce(total, "sum")
        nats_sum, count = total.tolist()
        return {"val_loss": nats_sum / count}

    def _validation_rows(self) -> Iterator[tuple[Tensor, Tensor, NDArray[np.int32]]]:
        world, size = dist.world(), self.split.rows
        for rows in self.validation:
            batches = ChatBatches([(rows, 1.0)], self.split.seq_len, rows.per_epoch, 0)
            for first in range(world.rank * size, rows.per_epoch, world.size * size):
                batch = batches.batch(0, first, min(first + size, rows.per_epoch))
                inputs, targets = (torch.from_numpy(x).to(self.learner.place) for x in (batch.inputs, batch.targets))
                yield inputs, targets, batch.lengths

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


def starting_point(config: ChatTrainConfig, stage: str, say: Callable[[str], None]) -> Checkpoint:
    """The checkpoint to start from: a folder, a run (its last earlier stage), or this run's own earlier stage."""
    named = config.start
    if named and Path(named).is_dir():
        folders = [Path(named)]
    else:
        runs = [named or config.run] if named or config.run else _runs()
        folders = [run_folder(run, earlier) for run in runs for earlier in EARLIER[stage]]
    for folder in folders:
        if (folder / "manifest.json").is_file():
            try:
                return verify(folder)
            except Damaged as damage:
                raise UserError(f"{damage}; name another checkpoint with --start") from None
        found = newest(folder, say=say)
        if found is not None:
            return found
    tried = ", ".join(str(folder) for folder in folders) or str(home() / "runs")
    raise UserError(f"no checkpoint to start from in {tried}; train one first: `ascendchat base --run NAME`")


def _runs() -> list[str]:
    """Runs with a base model, the newest first."""
    saved = (home() / "runs").glob("*/base/latest")
    return [path.parent.parent.name for path in sorted(saved, key=lambda path: -path.stat().st_mtime)]


def default_data(config: ChatTrainConfig, stage: str, origin: Checkpoint) -> tuple[str, ...]:
    """The embedded conversations for a model that knows only the embedded world, else the published ones."""
    learnt = [Path(named(str(entry))[0]).name for entry in settings_of(origin).get("data") or ()]
    if learnt and set(learnt) == {"toyworld"}:
        return ("toyworld",)
    sets = list(dict.fromkeys(PUBLISHED[stage]))
    missing = [name for name in sets if not config.source and not (folder_of(name) / "manifest.json").is_file()]
    if missing:
        raise UserError(
            f"no --data given: `{stage}` takes {', '.join(sets)}, and {', '.join(missing)} not fetched yet; get them: "
            f"`ascendchat data fetch {' '.join(missing)}`; or name your own: --data FILES"
        )
    return PUBLISHED[stage]


def parted(found: Iterable[Conversation], held: list[Conversation]) -> Iterator[Conversation]:
    """The conversations to train on, in one pass over all; those that are kept for validation go to `held`. One without
    a reply cannot validate: it goes on, to be counted with the others that are left out."""
    for conversation in found:
        said = json.dumps(conversation, sort_keys=True).encode()
        if int(hashlib.sha256(said).hexdigest()[:8], 16) < VALIDATION * 2**32 and has_reply(conversation):
            held.append(conversation)
        else:
            yield conversation


def open_chats(
    name: str, stage: str, config: ChatTrainConfig, watch: Watch | None, pack: Pack, say: Callable[[str], None]
) -> tuple[ChatRows, ChatRows]:
    """Rows to train on and rows to validate on of one entry of the mixture, which is read once."""
    counts, held = Counts(), list[Conversation]()
    if name == "toyworld":
        train = chats("train", kind=stage, seed=config.seed)
    else:
        source = tasks.load(name, "train", config.source)
        for notice in source.notices:
            say(notice)
        train = parted(watch.over(source) if watch else source, held)
    begin: list[Conversation] = []  # up to the first with a reply
    for conversation in train:
        begin.append(conversation)
        if has_reply(conversation):
            break
    else:  # the hash chose all that have one for validation
        begin, held = [*begin, *held], []
    rows = pack(itertools.chain(begin, train), counts)
    say(f"{name}: {counts.line()}; {rows.per_epoch} rows, {rows.filled:.0%} full")
    if name == "toyworld":
        return rows, pack(chats("validation", kind=stage, seed=config.seed), Counts())
    if not held:
        say(f"{name} is too small to keep some for validation: validated on the first, which is also trained on")
    return rows, pack(held or begin[-1:], Counts())


def watch_for(config: ChatTrainConfig) -> Watch | None:
    """Looks for evaluation questions in the mixture, as far as their sets are in --source."""
    names = [named(entry)[0] for entry in config.data]
    if not config.source or all(name == "toyworld" or _is_corpus(name) for name in names):
        return None
    examined = []
    for name in tasks.EVALUATIONS:
        try:
            examined.append(tasks.load(name, source=config.source))
        except UserError:  # this set is not in the folder, so it will not be examined from there either
            continue
    return Watch(examined)


def report_overlaps(watch: Watch | None, folder: Path, say: Callable[[str], None]) -> None:
    """Say which evaluation questions stand in the mixture; where only the first are shown, all go to a file."""
    lines, found = (watch.lines(), watch.found()) if watch else ([], [])
    for line in lines:
        say(line)
    whole = folder / "overlaps.txt"
    if sum(line.startswith(" ") for line in lines) < len(found):
        write_atomic(whole, "".join(f"{overlap.line()}\n" for overlap in found))
        say(f"all {len(found)} of them: {whole}")
    else:
        whole.unlink(missing_ok=True)  # of an earlier run of this name


def _is_corpus(name: str) -> bool:
    """Whether this is a folder that `ascendchat data prepare` wrote."""
    return any(Path(name).glob("*.tokens"))


def open_sources(
    config: ChatTrainConfig, stage: str, tokenizer: Tokenizer, seq_len: int, say: Callable[[str], None],
    watch: Watch | None = None,
) -> tuple[list[Source], list[ChatRows], str]:  # fmt: skip
    """Rows to train on with their weights, rows to validate on, and a fingerprint of them all."""
    sources: list[Source] = []
    validation: list[ChatRows] = []
    identity = hashlib.sha256()
    given = [named(entry) for entry in config.data]
    if len({weight is None for _, weight in given}) > 1:
        raise UserError("give every entry of --data a weight, or none: --data chats.jsonl=0.7,corpus=0.3")

    def pack(found: Iterable[Conversation], counts: Counts) -> ChatRows:
        return ChatRows.build(tokenizer, found, seq_len, config.seed, counts)

    for name, weight in given:
        rows: Rows
        if _is_corpus(name):
            corpus = Corpus.open(name)
            if corpus.tokenizer != tokenizer.fingerprint:
                raise UserError(f"{name} was prepared with another tokenizer than the model's; prepare it again")
            rows = Rows(corpus, seq_len, config.seed)
            identity.update(corpus.fingerprint.encode())
        else:
            rows, held = open_chats(name, stage, config, watch, pack, say)
            validation.append(held)
            identity.update(rows.ids.tobytes())
        sources.append((rows, float(rows.per_epoch) if weight is None else weight))
    return sources, validation, identity.hexdigest()[:16]


def validation_texts(config: ChatTrainConfig) -> list[Corpus]:
    """The validation splits of the texts in the mixture that have one."""
    names = [name for name, _ in map(named, config.data) if _is_corpus(name)]
    return [corpus for corpus, _ in open_mixture(names, split="val", needed=False)] if names else []


def steps_of(config: ChatTrainConfig, shape: Shape, device: Device, sources: list[Source]) -> tuple[Split, int]:
    """Batch and steps: `epochs` over all rows."""
    rows = sum(source.per_epoch for source, _ in sources)
    total = config.total_batch_size or batch_for(int(rows * shape.seq_len * config.epochs), shape.seq_len)
    if config.target_examples_per_step:
        total = config.target_examples_per_step * shape.seq_len
    split = share_out(config, shape, device, total)
    per_step = split.devices * split.rows * split.accumulation
    return split, config.num_iterations or max(1, math.ceil(rows * config.epochs / per_step))


def only_weights(read: Callable[[Piece], Tensor]) -> Callable[[Piece], Tensor]:
    """Weights from the checkpoint, moments from zero."""
    return lambda piece: read(piece) if piece.kind == "weight" else torch.zeros(piece.stop - piece.start)


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
    data = absolute(config.data or default_data(config, stage, origin))
    config = replace(config, tokenizer=str(where), data=data)  # what later commands look up
    tokenizer = open_tokenizer(where, origin, shape)
    if config.max_seq_len and config.max_seq_len != shape.seq_len:
        shape = Shape.from_dict({**shape.to_dict(), "seq_len": config.max_seq_len})
    watch = watch_for(config) if main else None
    sources, validation, fingerprint = open_sources(config, stage, tokenizer, shape.seq_len, say, watch)
    split, steps = steps_of(config, shape, device, sources)
    learner = build(config, shape, device, place, say)
    start_from = f"{origin.state.get('stage')} step {origin.step} {origin.fingerprint}"
    facts = {"data": [fingerprint, *[weight for _, weight in sources]], "start": start_from}
    texts = validation_texts(config)
    trained = ChatStage(stage, learner, split, steps, sources, validation, texts, tokenizer, config, facts)
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
            report_overlaps(watch, folder, say)
        result = fit(trained, device, record, options, title=stage)
    trained.close()
    dist.teardown()
    return 128 + result.stopped_by if result.stopped_by else 0
