"""`ascendchat rl --run demo`: reinforcement learning of a chat model on questions whose answers can be checked.

A step: the model answers each question several times (infer/engine.py), answers are judged (tasks/rewards.py), each is
compared with the others to its question, and the likelier the better ones become (train/grpo.py). What is generated in
a step is a pure function of (weights, seed, step): so a run that is resumed generates the very same answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from ascendchat.checkpoint import to_continue
from ascendchat.config import UserError
from ascendchat.config.rl import RlConfig
from ascendchat.data.mixture import absolute, parse_entry
from ascendchat.data.tokenizer import Tokenizer
from ascendchat.data.toyworld import LANGUAGES
from ascendchat.dist.context import Context
from ascendchat.infer.engine import Engine
from ascendchat.infer.generator import prompt_room
from ascendchat.infer.load import open_tokenizer, settings_of, tokenizer_folder
from ascendchat.infer.request import Completion, Sampling
from ascendchat.plan.shape import Shape
from ascendchat.record import run_folder
from ascendchat.tasks import Task, load
from ascendchat.tasks.rewards import Judge
from ascendchat.train.grpo import PRESETS, length_penalty
from ascendchat.train.policy import RlStage
from ascendchat.train.rollout import Questions, Rollout
from ascendchat.train.rows import Learner, build, share_out
from ascendchat.train.run import train_stage, training_context
from ascendchat.train.start import only_weights, starting_point

MOST_SLOTS = 256
# Two-step problems, and what is nearest to them: with them alone, answers to one-step problems fell from 99 to 41 %.
NEAREST = tuple(f"toy_{topic}_{language}=0.1" for topic in ("problem", "arithmetic") for language in LANGUAGES)
TOY_QUESTIONS = ("toy_problems=0.6", *NEAREST)
NOT_HERE = "warm_start", "target_examples_per_step", "total_batch_size"  # flags of mid and sft without a meaning here


def default_questions(learnt_from: Sequence[str]) -> tuple[str, ...]:
    """Where no --data is given."""
    toy = {Path(parse_entry(entry).name).name for entry in learnt_from} == {"toyworld"}
    return TOY_QUESTIONS if toy else ("gsm8k",)


def run(config: RlConfig) -> int:
    """The command."""
    if asked := next((name for name in NOT_HERE if getattr(config, name)), ""):
        raise UserError(
            f"--{asked.replace('_', '-')} means nothing here; a step is --prompts-per-step times --samples answers, "
            "and the run starts from weights alone"
        )
    with training_context(config) as here:
        origin = starting_point(config, "rl", here.say)
        here.say(f"starting from {origin.folder}")
        shape = Shape.from_dict(origin.state["shape"])
        tokens = tokenizer_folder(config.tokenizer, origin).resolve()
        data = absolute(config.data or default_questions(settings_of(origin).get("data") or ()))
        config = replace(config, tokenizer=str(tokens), data=data, attend=config.attend or "document")
        tokenizer = open_tokenizer(tokens, origin, shape)
        if config.max_seq_len:
            shape = Shape.from_dict({**shape.to_dict(), "seq_len": config.max_seq_len})
        room = prompt_room(shape.seq_len, config.max_new_tokens)
        if config.max_new_tokens >= shape.seq_len:  # an answer ends with its row, and lengths are measured by that
            config = replace(config, max_new_tokens=shape.seq_len - 1)
        questions = Questions(data, tokenizer, config.seed, room, config.source)
        learner = build(config, shape, here)
        answers = -(-config.prompts_per_step // here.world.size) * config.samples
        engine = engine_of(learner, tokenizer, config.slots or min(MOST_SLOTS, answers))
        rollout = rollout_of(config, questions, engine, here)
        steps = config.num_iterations or max(1, int(questions.per_epoch * config.epochs) // config.prompts_per_step)
        folder = run_folder(config.run or origin.folder.parent.parent.name, "rl")
        split = share_out(config, shape, here.device, here.world.size * batch_rows(answers) * shape.seq_len)
        exam = [examination(parse_entry(entry).name, config.source) for entry in data]
        stage = RlStage(learner, split, steps, engine, rollout, exam, tokenizer, config, origin, folder)
        saved = to_continue(folder, config.resume, say=here.say)
        if not saved:
            stage.optimizer.load(only_weights(origin.reader()), 0)

        def add_files(run: Path) -> None:
            tokenizer.save(run / "tokenizer")

        facts = {"method": asdict(stage.method), "learning_rates": stage.learning_rates, "start": str(origin.folder)}
        return train_stage(stage, here, config, folder, saved, title="rl", facts=facts, add_files=add_files)


def rollout_of(config: RlConfig, questions: Questions, engine: Engine, here: Context) -> Rollout:
    """How answers are asked for and judged."""
    most, share = config.max_new_tokens, PRESETS[config.preset].soft_length

    def shaped(reward: float, answer: Completion) -> float:
        return reward + length_penalty(len(answer.ids), most, share)

    sampling = Sampling(most, config.temperature, config.top_k, logprobs=True, keep_stop=True)
    judge = Judge(config.reward, config.reward_timeout, say=here.say)
    return Rollout(questions, engine, judge, sampling, config.samples, config.seed, shaped)


def examination(name: str, source: str) -> Task:
    """The questions to be examined with: those kept for validation, else those of the test."""
    try:
        return load(name, "val", source)
    except UserError:  # it has no such split
        return load(name, "test", source)


def batch_rows(answers: int) -> int:
    """Rows that the answers of a step may fill, as a power of two: the size of the learning rates follows from it."""
    return 1 << max(0, (answers // 4).bit_length())


def engine_of(learner: Learner, tokenizer: Tokenizer, slots: int) -> Engine:
    """The engine around the very weights that are trained."""
    context = learner.model.shape.seq_len
    return Engine(
        learner.model,
        learner.kernel,
        tokenizer,
        learner.device,
        learner.place,
        slots=slots,
        context=context,
        graphs=False,  # a trainer's process cannot capture on every chip
        prefill_tokens=slots * context,  # all prompts before the first step: only the last answer is waited for
    )
