"""Config of `ascendchat rl`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ascendchat.config import option
from ascendchat.config.train import ChatTrainConfig


@dataclass(frozen=True)
class RlConfig(ChatTrainConfig):
    """Reinforcement learning (GRPO and relatives): the model answers, answers are judged, good ones get likelier."""

    data: tuple[str, ...] = ()
    """questions, as NAME or NAME=WEIGHT: tasks with checkable answers (gsm8k, toy_problems, toy_arithmetic_en, ...); by
    default gsm8k, for a model of the embedded corpus its arithmetic and word problems"""
    reward: str = ""
    "function that judges an answer, as module:function; by default whether the task calls it right"
    reward_timeout: float = option(15.0, above=0, most=1e6)
    "seconds after which such a function is given up"
    preset: Literal["default", "grpo", "drgrpo", "dapo", "gspo", "cispo", "reinforce"] = "default"
    "how rewards become a loss"
    prompts_per_step: int = option(16, also=("examples_per_step",), least=1, most=1e6)
    "questions per step, over all devices"
    samples: int = option(8, also=("num_samples", "group_size"), least=2, most=1e5)
    "answers to each question"
    max_new_tokens: int = option(256, least=1, most=1e6)
    "tokens of an answer at most"
    temperature: float = option(1.0, above=0, most=10)
    "of the answers"
    top_k: int = option(0, least=0, most=1e7)
    "choose among this many tokens; 0: all, which keeps the gradient exact"
    refill: int = option(2, least=0, most=100)
    "times that groups without any difference in reward are replaced by other questions"
    epochs: float = option(1.0, above=0, most=1e6)
    "passes over the questions; --steps wins over it"
    num_iterations: int | None = option(None, also=("steps",), least=1, most=1e9)
    "optimizer steps; by default they follow from the epochs"
    lr_multiplier: float = option(0.05, also=("init_lr_frac",), above=0, most=1e3)
    "factor on every learning rate of pretraining"
    eval_every: int = option(60, least=-1, most=1e9)
    "steps between examinations; 0: only at the end, -1: never"
    eval_examples: int = option(256, least=1, most=1e9)
    "questions of an examination at most"
    save_every: int = option(60, least=-1, most=1e9)
    "steps between checkpoints; 0 and -1: only at the end"
    slots: int | None = option(None, least=1, most=1e5)
    "answers generated at the same time on each device; by default all of a step, at most 256"
