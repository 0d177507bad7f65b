"""The flags of nanochat's scripts, in its versions of November 2025 and of July 2026, in the words of our commands.

    run("base_train")        # what `python -m scripts.base_train ...` does

FLAGS is the table of docs/en/coming-from-nanochat.md. A flag that is not in it reaches the command as it is. No torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ascendchat.cli import main
from ascendchat.config.train import PUBLISHED, STAGES
from ascendchat.errors import UserError, home

COMMANDS = {
    "tok_train": ["tokenizer", "train"],
    "base_train": ["base"],
    "mid_train": ["mid"],
    "chat_sft": ["sft"],
    "chat_rl": ["rl"],
    "base_eval": ["eval", "base"],
    "chat_eval": ["eval", "chat"],
    "chat_cli": ["chat"],
    "chat_web": ["serve"],
}


@dataclass(frozen=True)
class Flag:
    """What becomes of one flag: the same, another name, another meaning (a function of translate), or nothing."""

    here: str = ""  # our name for it
    short: str = ""  # its letter
    usual: tuple[str, ...] = ()  # values that mean the default: the flag is left out
    unused: str = ""  # what stands in its place; shown when the flag is given
    special: str = ""  # a function of SPECIAL
    switch: bool = False  # its value may be left out


SAME, AUTO = Flag(), Flag(usual=("-1", "-1.0"))
DRY = Flag(usual=("0",), switch=True, unused="checkpoints are always written; give the run a name of its own")
START = Flag(special="start")
TAG = Flag("run", usual=("",))
DTYPE = Flag(unused="the device's own type is used; $ASCENDCHAT_DTYPE chooses another")
EXAMS = Flag(usual=("-1",), unused="`ascendchat eval chat` examines a model, also one that is still being trained")
WHOLE = Flag(unused="the whole validation part is used")
BETAS = Flag(unused="Adam's betas are fixed for each group of parameters (nn/optim.py)")
CHAT = {
    "source": Flag(short="i", special="stage"),
    "model-tag": replace(TAG, short="g"),
    "step": Flag(short="s", special="stage"),
    "temperature": Flag(short="t"),
    "device-type": Flag(usual=("",)),
    "dtype": replace(DTYPE, short="d"),
}


def each(names: str, flag: Flag = SAME) -> dict[str, Flag]:
    """The same for every one of these names."""
    return dict.fromkeys(names.split(), flag)


TRAIN = {
    **each("run", Flag(special="tracked_run")),
    **each("model-tag", TAG),
    **each("device-type", Flag(usual=("",))),
    **each("max-seq-len device-batch-size embedding-lr unembedding-lr matrix-lr eval-every"),
    **each("num-iterations total-batch-size", AUTO),
}
CHAT_TRAIN = {
    **TRAIN,
    **each("init-lr-frac", Flag("lr-multiplier")),
    **each("weight-decay", Flag(usual=("0", "0.0"), unused="mid-training and SFT have no weight decay")),
    **each("eval-tokens", WHOLE),
    **each("dtype", DTYPE),
    **each("model-step step", START),
    **each("dry-run", DRY),
}
FLAGS: dict[str, dict[str, Flag]] = {
    "tok_train": {
        **each("max-chars vocab-size"),
        "doc-cap": Flag(unused="documents are read whole; --max-chars bounds all of them together"),
    },
    "base_train": {
        **TRAIN,
        **each("depth head-dim window-pattern scalar-lr weight-decay warmup-steps warmup-ratio warmdown-ratio"),
        **each("final-lr-frac eval-tokens core-metric-every core-metric-max-per-task sample-every save-every"),
        **each("target-flops target-param-data-ratio", AUTO),
        "fp8": Flag(switch=True),
        "aspect-ratio": Flag(special="width"),
        "fp8-recipe": Flag(unused="8-bit products have one scale per matrix"),
        **each("adam-beta1 adam-beta2", BETAS),
        "grad-clip": Flag(unused="gradients are not clipped; a spike of the loss stops the run"),
        "resume-from-step": Flag(usual=("-1",), unused="a run goes on from its newest checkpoint by itself"),
    },
    "mid_train": CHAT_TRAIN,
    "chat_sft": {
        **CHAT_TRAIN,
        "num-epochs": Flag("epochs"),
        **each("target-examples-per-step warmup-ratio warmdown-ratio final-lr-frac"),
        "eval-steps": WHOLE,
        "source": START,
        "load-optimizer": Flag(special="moments"),
        **each("mmlu-epochs gsm8k-epochs", Flag(special="mixture")),
        **each("chatcore-every chatcore-max-cat chatcore-max-sample", EXAMS),
        **each("eval-metrics-every eval-metrics-max-problems", EXAMS),
    },
    "chat_rl": {
        **{name: flag for name, flag in CHAT_TRAIN.items() if name not in ("max-seq-len", "total-batch-size")},
        **each("weight-decay", Flag(usual=("0", "0.0"), unused="RL has no weight decay")),
        **each("examples-per-step num-samples max-new-tokens temperature top-k save-every eval-examples"),
        "num-epochs": Flag("epochs"),
        "source": START,
    },
    "base_eval": {
        "eval": Flag(special="scores"),
        "model-tag": TAG,
        "step": Flag(special="base_step"),
        "max-per-task": SAME,
        "split-tokens": Flag("eval-tokens"),
        "device-type": Flag(usual=("",)),
        "device-batch-size": Flag(unused="--tokens-per-batch bounds a forward pass"),
    },
    "chat_eval": {
        **CHAT,
        "task-name": Flag(short="a", special="tasks"),
        "max-new-tokens": Flag(short="m"),
        "num-samples": Flag("samples", short="n"),
        "max-problems": Flag("max-per-task", short="x"),
        "top-k": Flag(short="k", unused="all tokens can be drawn; with temperature 0, as by default, none is"),
        "batch-size": Flag(short="b", unused="--tokens-per-batch and --slots bound what runs at once"),
    },
    "chat_cli": {**CHAT, "prompt": Flag(short="p", usual=("",)), "top-k": Flag(short="k")},
    "chat_web": {
        **CHAT,
        "num-gpus": Flag("devices", short="n"),
        "top-k": Flag(short="k"),
        "max-tokens": Flag(short="m"),
        "port": Flag(short="p"),
        "host": SAME,
    },
}

TASKS = {name: name.lower().replace("-", "_") for name in ("ARC-Easy", "ARC-Challenge", "MMLU", "GSM8K", "HumanEval")}
Given = dict[str, str]  # flag -> value, of those that FLAGS has


def whole(flag: str, value: str) -> int:
    """A whole number, or the sentence."""
    try:
        return int(value)
    except ValueError:
        raise UserError(f"--{flag}: {value!r} is not a whole number") from None


def tracked_run(given: Given) -> list[str]:
    """There the name at Weights & Biases, here that of the run; "dummy" is none."""
    if given["run"] in ("dummy", ""):
        return []
    if given.get("model-tag"):
        say(f"--run {given['run']} is not used: --model-tag names the run; --track wandb sends its metrics there")
        return []
    say("--run names the run and its folder; --track wandb sends its metrics there")
    return [f"--run={given['run']}"]


def width(given: Given) -> list[str]:
    """Layers times the ratio, in whole heads."""
    depth, ratio = whole("depth", given.get("depth", "20")), whole("aspect-ratio", given["aspect-ratio"])
    head = max(1, whole("head-dim", given.get("head-dim", "128")))
    return [f"--dim={-(-depth * ratio // head) * head}"]


def model_folder(given: Given, stages: tuple[str, ...]) -> Path:
    """The stage's folder, or the checkpoint of --step in it, of the run that is named or was written last."""
    wanted = given.get("source", "")
    step = given.get("model-step") or given.get("step") or ""
    last = f"step_{whole('step', step):06d}" if step else "latest"
    tag = given.get("model-tag") or given.get("run") or "*"
    names = [wanted] if wanted else [*stages]
    folders = [folder for name in names for folder in (home() / "runs").glob(f"{tag}/{name}/{last}")]
    if not folders:
        raise UserError(f"there is no {home() / 'runs' / tag / (wanted or '*') / last}; leave --step out, or --source")
    newest = max(folders, key=lambda folder: (-names.index(folder.parent.name), folder.stat().st_mtime))
    return newest if step else newest.parent


def start(given: Given) -> list[str]:
    """What mid-training and SFT start from. Our own --source is a folder of data sets."""
    if "source" in given and given["source"] not in STAGES:
        return [f"--source={given['source']}"]
    return [f"--start={model_folder(given, STAGES['sft'].starts_from)}"]


def stage(given: Given) -> list[str]:
    """Which model chat_cli and chat_eval open. Our own --source is a folder of data sets."""
    if "source" in given and given["source"] not in STAGES:
        return [f"--source={given['source']}"]
    if "step" in given:
        return [f"--checkpoint={model_folder(given, tuple(reversed(STAGES)))}"]
    return [f"--stage={given['source']}"]


def base_step(given: Given) -> list[str]:
    return [f"--checkpoint={model_folder(given, ('base',))}"]


def moments(given: Given) -> list[str]:
    return ["--load-optimizer" if whole("load-optimizer", given["load-optimizer"]) else "--no-load-optimizer"]


def mixture(given: Given) -> list[str]:
    """A set that is read n times is named n times."""
    times = {name: whole(f"{name}-epochs", given.get(f"{name}-epochs", "1")) for name in ("mmlu", "gsm8k")}
    usual = PUBLISHED["sft"]
    times = {name: times[name] if f"{name}-epochs" in given else usual.count(name) for name in times}
    names = [name for name in usual if name not in times]
    return ["--data=" + ",".join([*names, *(name for name, count in times.items() for _ in range(count))])]


def scores(given: Given) -> list[str]:
    wanted = [name.strip() for name in given["eval"].split(",") if name.strip()]
    if "sample" in wanted:
        say("--eval sample is not used: `ascendchat chat` shows the model's text")
    left = [name for name in wanted if name != "sample"]
    return [f"--eval={','.join(left)}"] if left else []


def tasks(given: Given) -> list[str]:
    names = given["task-name"].split("|")
    if "SpellingBee" in names:
        say("--task-name SpellingBee is not used: there is no such examination here")
    left = [TASKS.get(name, name) for name in names if name != "SpellingBee"]
    return [f"--tasks={','.join(left)}"] if left else []


FUNCTIONS = (tracked_run, width, start, stage, base_step, moments, mixture, scores, tasks)
SPECIAL: dict[str, Callable[[Given], list[str]]] = {function.__name__: function for function in FUNCTIONS}


def say(text: str) -> None:
    """Once, however many ranks there are."""
    if os.environ.get("RANK", "0") == "0":
        print(f"nanochat: {text}", file=sys.stderr)


def translate(script: str, argv: list[str]) -> list[str]:
    """The arguments of our command."""
    flags = FLAGS[script]
    letters = {flag.short: name for name, flag in flags.items() if flag.short}
    given: Given = {}
    words: list[str] = []
    rest = list(argv)
    while rest:
        token = rest.pop(0)
        name, equals, value = token.partition("=")
        name = letters.get(name[1:], "") if len(name) == 2 else name[2:].replace("_", "-")
        flag = flags.get(name) if token.startswith("-") else None
        if flag is None:
            words.append(token)
            continue
        if not equals and (not rest or rest[0].startswith("--")):
            if not flag.switch:
                raise UserError(f"{token} needs a value")
            value, equals = "true", "="
        given[name] = value if equals else rest.pop(0)
    specials = dict.fromkeys(flags[name].special for name in given if flags[name].special)
    for name, value in given.items():
        flag = flags[name]
        if value in flag.usual or flag.special:
            continue
        if flag.unused:
            say(f"--{name} is not used: {flag.unused}")
        else:
            words.append(f"--{flag.here or name}={value}")
    for special in specials:
        words += SPECIAL[special](given)
    fetched = home() / "data" / "climbmix"
    if script == "tok_train" and not any(word.startswith("--source") or word[0] != "-" for word in words):
        words += [str(fetched)] if fetched.is_dir() else []  # there the text that was fetched is the default
    return words


def run(script: str) -> int:
    """The script's command with its arguments translated."""
    try:
        words = translate(script, sys.argv[1:])
    except UserError as error:
        print(f"scripts.{script}: {error}", file=sys.stderr)
        return 2
    return main([*COMMANDS[script], *words])
