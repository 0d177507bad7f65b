"""`ascendchat rl --run demo`: reinforcement learning of a chat model on questions whose answers can be checked.

A step: the model answers each question several times (engine/engine.py), answers are judged (rl/rewards.py), and those
that are better than the mean of their group become likelier (rl/grpo.py). What is generated in a step is a pure
function of (weights, seed, step), so a resumed run generates the very same answers; on a GPU up to rounding, which
depends on the batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ascendchat.checkpoint import to_continue
from ascendchat.config.rl import RlConfig
from ascendchat.data.mixture import absolute, parse_entry
from ascendchat.data.tokenizer.tokenizer import Tokenizer
from ascendchat.data.toyworld import LANGUAGES
from ascendchat.engine.engine import Engine
from ascendchat.engine.request import Generator, Sampling, prompt_room
from ascendchat.errors import UserError
from ascendchat.models.open import ModelSource, OwnCheckpoint
from ascendchat.models.shape import HFShape
from ascendchat.nn.invariant import InvariantLMHead
from ascendchat.nn.logprobs import Float32LMHead, LMHead, SamplingDistribution, head_logprobs
from ascendchat.parallel import collectives
from ascendchat.parallel.context import Context
from ascendchat.remote.rollouts import ServerSizes, check_addresses, open_rollouts
from ascendchat.rl.grpo import PRESETS
from ascendchat.rl.invariant import InvariantTrainModel, batch_invariant
from ascendchat.rl.questions import QuestionFile, load_questions
from ascendchat.rl.rewards import Judge
from ascendchat.rl.rollout import QuestionMixture, Rollout
from ascendchat.rl.schedule import RolloutSchedule
from ascendchat.rl.source import AsyncRolloutSource, SyncRolloutSource
from ascendchat.rl.stage import PolicyLoss, RlStage, method_of
from ascendchat.rl.workflow import Workflows
from ascendchat.runs.run import run_folder
from ascendchat.sizes.batch import Split
from ascendchat.sizes.memory import caches, policy_logits
from ascendchat.sizes.shape import Shape
from ascendchat.tasks.task import Task
from ascendchat.train.model import TrainModel
from ascendchat.train.rows import share_out
from ascendchat.train.run import train_stage, training_context
from ascendchat.train.start import InitialModel, initial_model

MAX_SLOTS = 256  # of the engine
BUSY_TOKENS = 1 << 15  # in a micro-batch: more make no device faster
MAX_MEASURED = 256  # questions whose length is looked at
# Two-step problems, and what is nearest to them: with them alone, answers to one-step problems fell from 99 to 41 %.
NEAREST = tuple(f"toy_{topic}_{language}=0.1" for topic in ("problem", "arithmetic") for language in LANGUAGES)
TOY_QUESTIONS = ("toy_problems=0.6", *NEAREST)


def default_questions(trained_on: Sequence[str]) -> tuple[str, ...]:
    """The questions where no --data is given: `trained_on` names the data of SFT."""
    toy = {Path(parse_entry(entry).name).name for entry in trained_on} == {"toyworld"}
    return TOY_QUESTIONS if toy else ("gsm8k",)


def run(config: RlConfig) -> int:
    """The command."""
    check_addresses(config.rollouts)
    with training_context(config) as here, ExitStack() as stack:
        config = replace(config, attend=config.attend or "document")
        begin = initial_model(config, here, "rl")
        origin, tokenizer, train_model = begin.source, begin.tokenizer, begin.train_model
        here.say(f"starting from {origin.folder}")
        shape, config = train_model.model.shape, begin.config
        data = absolute(config.data or default_questions(begin.trained_on))
        config = replace(config, data=data)
        room = prompt_room(shape.seq_len, config.max_new_tokens)
        if config.max_new_tokens >= shape.seq_len:  # an answer ends with its row, and lengths are measured by that
            config = replace(config, max_new_tokens=shape.seq_len - 1)
        questions = QuestionMixture(data, tokenizer, config.seed, room, config.source)
        check_answers(questions, config, here)
        train_model = batch_invariant(train_model) if config.batch_invariant else train_model
        answers = -(-config.prompts_per_step // here.world.size) * config.samples
        drawn = SamplingDistribution(
            shape.vocab, config.temperature, config.top_k, train_model.model.softcap, readout=readout_of(train_model)
        )
        slots = config.slots or min(MAX_SLOTS, answers)
        engine = cache(lambda: engine_of(train_model, tokenizer, slots, drawn.readout))
        folder = run_folder(config.run or begin.name, "rl")
        generator = stack.enter_context(generator_of(config, engine, slots, begin, folder, here))
        batches = max(1, int(questions.per_epoch * config.epochs) // config.prompts_per_step)
        steps = config.num_iterations or batches * config.updates
        rollout = rollout_of(config, questions, generator, here, shape.seq_len)
        source = source_of(config, rollout, steps)
        split = split_of(config, shape, here, answers, slots)
        reference, exact = reference_of(config, train_model, origin), config.batch_invariant
        policy_loss = PolicyLoss(train_model, method_of(config), drawn, reference, exact=exact)
        exam = examinations(data, config.source)
        stage = RlStage(policy_loss, split, steps, engine, source, exam, tokenizer, config, origin, folder)
        saved = to_continue(folder, config.resume, say=here.say)
        if not saved:
            begin.load_weights(stage.optimizer)
        facts = {"method": asdict(stage.method), "learning_rates": stage.learning_rates, "start": str(origin.folder)}
        return train_stage(stage, here, config, folder, saved, title="rl", facts=facts, add_files=begin.add_files)


@contextmanager
def generator_of(
    config: RlConfig,
    engine: Callable[[], Engine],
    slots: int,
    begin: InitialModel[RlConfig],
    folder: Path,
    here: Context,
) -> Iterator[Generator]:
    """The generator of rollouts: an engine around the weights that are trained, or servers."""
    shape, origin = begin.train_model.model.shape, begin.source
    named = config.rollouts != ("local",)
    if not named and not config.rollout_devices and not config.inference_engine:
        yield engine()
        return
    if config.batch_invariant:
        raise UserError(
            "--batch-invariant holds for answers of this process only; leave it out, or generate here (local)"
        )
    if named and config.rollout_devices:
        raise UserError("--rollouts and --rollout-devices exclude each other; leave one of them out")
    there = origin.state.get("shape") or {}
    if "window_pattern" in there and shape.windows() != Shape.from_dict(there).windows(shape.seq_len):
        raise UserError(
            f"--max-seq-len {shape.seq_len}: a server opens the model with rows of {there['seq_len']}, and what its "
            "short windows see would differ; leave it out, or generate in this process (--rollouts local)"
        )
    sizes, place = ServerSizes(slots * here.world.size, shape.seq_len), folder / "rollouts"
    more: dict[str, Any] = {"folder": place, "sizes": sizes, "scorer": scorer_of(begin.train_model)}
    with open_rollouts(config, begin.tokenizer, origin.folder, here.say, here=here, **more) as pool:
        yield pool


def source_of(config: RlConfig, rollout: Rollout, steps: int) -> SyncRolloutSource:
    """The source of groups for --rollout-mode."""
    if config.rollout_mode != "sync" and not rollout.generator.elsewhere:
        raise UserError(
            f"--rollout-mode {config.rollout_mode} generates while it trains: give the address of a server "
            "(--rollouts), or let one be started on devices of its own (--rollout-devices)"
        )
    world = collectives.world()
    schedule = RolloutSchedule(
        per_batch=config.prompts_per_step,
        staleness=config.staleness if config.rollout_mode == "async" else 0,
        refill=config.refill if PRESETS[config.preset].drop_equal else 0,
        batches=-(-steps // config.updates),
        rank=world.rank,
        ranks=world.size,
    )
    return (SyncRolloutSource if config.rollout_mode == "sync" else AsyncRolloutSource)(rollout, schedule)


def rollout_of(
    config: RlConfig, questions: QuestionMixture, generator: Generator, here: Context, context: int
) -> Rollout:
    """Build the rollout: sampling, judge, workflow. `context`: tokens of a row."""
    drawn = config.temperature != 1.0 or config.top_k > 0  # from another distribution than the model's own
    sampling = Sampling(
        config.max_new_tokens, config.temperature, config.top_k, keep_stop=True, logprobs=True, processed_logprobs=drawn
    )
    judge = Judge(config.reward, config.reward_timeout, say=here.say)
    share = PRESETS[config.preset].soft_length
    rollout = Rollout(questions, generator, judge, sampling, config.samples, config.seed, share)
    if config.workflow:
        rollout.workflow = Workflows(
            config.workflow,
            questions.tokenizer,
            generator,
            judge,
            sampling,
            seed=config.seed,
            room=questions.room,
            context=context,
            timeout=config.workflow_timeout,
            least=config.prompts_per_step // here.world.size * config.samples,
            say=here.say,
        )
    return rollout


def check_answers(questions: QuestionMixture, config: RlConfig, here: Context) -> None:
    """Refuse questions without answers or a reward; say which rows were left out or are too long."""
    for task in questions.tasks:
        for notice in task.notices:
            here.say(notice)
        if isinstance(task, QuestionFile) and not task.checkable and not (config.reward or config.workflow):
            raise UserError(
                f"the questions of {task.name} have no answers that can be compared; give them a column answer (text, "
                "a number, or a list of these: each is right) or test, or name --reward"
            )
    seen = min(MAX_MEASURED, questions.per_epoch)
    if cut := questions.cut(seen):
        here.say(
            f"{cut} of the first {seen} questions have more than the {questions.room} tokens that --max-new-tokens "
            "leaves of the context, and lose their beginning"
        )


def examinations(data: Sequence[str], source: str) -> list[Task]:
    """The evaluation tasks: those questions that have answers."""
    tasks = [examination(parse_entry(entry).name, source) for entry in data]
    return [task for task in tasks if not isinstance(task, QuestionFile) or task.checkable]


def examination(name: str, source: str) -> Task:
    """One evaluation task: its validation questions, else those of the test."""
    try:
        return load_questions(name, "val", source)
    except UserError:  # it has no such split
        return load_questions(name, "test", source)


def batch_rows(answers: int) -> int:
    """Rows that the answers of a step may fill, as a power of two; learning rates are scaled by it."""
    return 1 << max(0, (answers // 4).bit_length())


def split_of(config: RlConfig, shape: Shape | HFShape, here: Context, answers: int, slots: int) -> Split:
    """Size of micro-batches that fit beside the engine's caches. The last one of a step is filled up with padding, so
    they are no larger than it takes to keep a device busy."""
    own, chip = isinstance(shape, Shape), here.device.chip
    counted = shape if isinstance(shape, Shape) else shape.counted
    beside = sum(caches(counted, chip, slots, shape.seq_len).values()) + (policy_logits(chip) if own else 0)
    total = here.world.size * batch_rows(answers) * shape.seq_len
    split = share_out(config, shape, here.device, total, beside=beside)
    while not config.device_batch_size and split.rows * shape.seq_len > BUSY_TOKENS and (less := split.smaller()):
        split = less
    return split


def readout_of(train_model: TrainModel) -> LMHead:
    """The head of generator and trainer: logits in float32, whatever the model's dtype."""
    kind = InvariantLMHead if isinstance(train_model, InvariantTrainModel) else Float32LMHead
    return kind(train_model.model.head.dtype, train_model.place)


def scorer_of(train_model: TrainModel) -> Callable[[list[int]], list[float]]:
    """A function that gives log-probabilities of all tokens but the first, by the weights now."""
    model = train_model.model
    drawn = SamplingDistribution(model.shape.vocab, softcap=model.softcap, readout=readout_of(train_model))

    @torch.no_grad()
    def score(tokens: list[int]) -> list[float]:
        row = torch.tensor([tokens], device=train_model.place)
        inputs = row[:, :-1].contiguous()
        documents = train_model.documents(inputs, np.array([inputs.numel()], dtype=np.int32))
        hidden = model(inputs, train_model.attend, documents=documents)  # not compiled: no other row has this length
        logprobs: list[float] = head_logprobs(hidden, model.head, row[:, 1:], drawn)[0].tolist()
        return logprobs

    return score


def reference_of(config: RlConfig, train_model: TrainModel, origin: ModelSource) -> TrainModel | None:
    """A frozen copy of the initial model, if --kl asks for one."""
    if not config.kl:
        return None
    model = deepcopy(train_model.model).requires_grad_(False)
    if isinstance(origin, OwnCheckpoint):  # others were opened with their weights
        model.load_state_dict(origin.model(train_model.place))
    return type(train_model)(
        model, train_model.kernel, train_model.device, train_model.place, by_document=train_model.by_document
    )


def engine_of(train_model: TrainModel, tokenizer: Tokenizer, slots: int, readout: LMHead) -> Engine:
    """The engine around the very weights that are trained."""
    exact, context = isinstance(train_model, InvariantTrainModel), train_model.model.shape.seq_len
    return Engine(
        train_model.model,
        train_model.reader,
        tokenizer,
        train_model.device,
        train_model.place,
        slots=slots,
        context=context,
        graphs=train_model.device.compiles,  # the task queue of a trainer on NPUs captures nothing
        reuse=not exact,  # a prompt that is read behind others' tokens has its keys in another order, where rings turn
        prefill_tokens=slots * context,  # all prompts before the first step: only the last answer is waited for
        readout=readout,
    )
