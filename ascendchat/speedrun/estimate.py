"""Estimate time, memory, disk and downloads of each stage: `ascendchat speedrun --recipe d20-910b-8 --dry-run`.

Training and generating are planned as by `ascendchat plan`, on the chip that the recipe names, which need not be here.
The rest: sets have rough sizes (data/fetch/sets.yaml), evaluations and the encoding of token shards are scaled from
measurements (docs/en/results.md). Unknowns, such as the speed of a network, are left open.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascendchat.chips import Chip, find
from ascendchat.config.commands import PlanConfig
from ascendchat.config.language import pad, translate
from ascendchat.config.rl import RlConfig
from ascendchat.config.train import PUBLISHED, TrainConfig
from ascendchat.data.fetch import folder_of
from ascendchat.data.fetch.sources import SETS, find_set
from ascendchat.data.mixture import parse_entry
from ascendchat.data.read import files_in
from ascendchat.errors import UserError, home
from ascendchat.plan.command import choose_chip
from ascendchat.plan.goals import TooLarge, checkpoint_bytes, inference_plan, rl_plan, train_plan
from ascendchat.plan.show import span
from ascendchat.sizes.hf import HFModel, from_config
from ascendchat.sizes.memory import FP32, bytes_text
from ascendchat.sizes.shape import Shape
from ascendchat.speedrun.recipe import USES_DEVICES, Recipe, Settings, expand_folders

GB = 1e9
ENCODE_TOKENS_PER_SECOND = 0.3e6  # of one core, by `data prepare`: 50.0 M in 9 s on 16 cores
# Seconds of complete evaluations at depth 12 on one H200; they grow with the FLOPs of a token.
EVAL_SECONDS = {"eval base": 169.0, "eval chat": 46.0}
EVAL_CHIP, EVAL_DEPTH = "H200", 12
PROMPT_TOKENS = 256  # of a question, roughly
COMPRESSED = (".xz", ".gz", ".zst", ".parquet")  # roughly four bytes of text for each of theirs
BYTES_PER_TOKEN = 4
DEFAULT_FINETUNE_ROW = 2048  # tokens
QUICK = {"doctor": 0.0, "report": 0.0}  # seconds; less than a minute is shown as none


@dataclass(frozen=True)
class _Estimate:
    """Needs of one stage; None: unknown."""

    seconds: float | None = None
    memory: int | None = None  # bytes on each device
    disk: float | None = 0.0  # bytes that stay
    download: float | None = 0.0  # bytes
    about: str = ""


class _Estimator:
    """Estimates the stages of a recipe; a later one may need results of an earlier one."""

    def __init__(self, recipe: Recipe, chip: Chip, sets: str) -> None:
        self.recipe, self.chip, self.sets = recipe, chip, sets
        self.model: Shape | HFModel | None = recipe.shape() or self._fetched()

    def _fetched(self) -> HFModel | None:
        """The Hugging Face model that a stage opens: its own config.json once it is there, else the recipe's."""
        values = [s.get(key) for _, s in self.recipe.stages for key in ("start", "model", "checkpoint")]
        names = [str(name) for name in values if name and "/" in str(name) and not str(name).startswith("$")]
        seq_len = (
            max([int(s.get("max_seq_len") or 0) for _, s in self.recipe.stages], default=0) or DEFAULT_FINETUNE_ROW
        )
        is_local = bool(names) and Path(names[0]).expanduser().is_dir()  # a folder of one's own
        folder = Path(names[0]).expanduser() if is_local else folder_of(f"models/{names[0]}") if names else None
        path = folder / "config.json" if folder else None
        if path is not None and path.is_file():
            return from_config(json.loads(path.read_text(encoding="utf-8")), seq_len)
        return from_config(self.recipe.model, seq_len) if self.recipe.model else None

    def stage(self, command: str, settings: Settings) -> _Estimate:
        """Estimate one stage."""
        ways: dict[str, Callable[[Settings], _Estimate]] = {
            "data fetch": self.fetch,
            "data prepare": self.prepare,
            "base": self.base,
            "mid": lambda s: self.chats("mid", s),
            "sft": lambda s: self.chats("sft", s),
            "finetune": lambda s: self.chats("finetune", s),
            "rl": self.rl,
            "eval base": lambda s: self.examine("eval base", s),
            "eval chat": lambda s: self.examine("eval chat", s),
            "serve": self.serve,
        }
        try:
            return ways[command](settings) if command in ways else _Estimate(QUICK.get(command))
        except TooLarge as reason:
            need = bytes_text(sum(reason.parts.values()))
            raise UserError(
                f"{command} does not fit {self.chip.name}: {reason.what} needs {need} of "
                f"{bytes_text(self.chip.memory)}; use a recipe of your own with a smaller model or more devices"
            ) from None

    def fetch(self, settings: Settings) -> _Estimate:
        """Estimate a download: rough sizes of the sets that are not here yet."""
        size, is_known, names = 0.0, True, [str(name) for name in settings.get("names") or []]
        for name in names:
            if (folder_of(name) / "manifest.json").is_file():
                continue
            dataset = find_set(name)
            files = int(settings.get("shards") or dataset.shards) if dataset.shards else 1
            size += dataset.size * GB * files
            is_known = is_known and dataset.size > 0
            if name.startswith("models/") and isinstance(self.model, HFModel):
                size, is_known = size + 2.0 * self.model.total_parameters, True
        return _Estimate(None if size else 0.0, None, size, size if is_known else None, " ".join(names))

    def prepare(self, settings: Settings) -> _Estimate:
        """Estimate `data prepare`: encoded on all cores; two bytes per token."""
        sources = [str(source) for source in settings.get("source") or []]
        tokens = self.text_tokens(sources)
        if tokens is None:
            return _Estimate(disk=None)
        return _Estimate(tokens / ENCODE_TOKENS_PER_SECOND / (os.cpu_count() or 1), None, 2.0 * tokens)

    def text_tokens(self, sources: list[str]) -> float | None:
        """Tokens of these sources: fetched sets by the number of their files, files that are here, and folders that
        a stage will prepare from these; None where one is none of them."""
        total = 0.0
        prepared = {s.get("out"): s for c, s in self.recipe.stages if c == "data prepare"}
        for source in sources:
            if source in prepared:
                total += self.text_tokens([str(name) for name in prepared[source].get("source") or []]) or 0.0
            elif source in SETS:
                fetches = [s for c, s in self.recipe.stages if c == "data fetch" and source in (s.get("names") or [])]
                files = int((fetches[0].get("shards") if fetches else None) or SETS[source].shards or 1)
                total += SETS[source].tokens * 1e6 * (files if SETS[source].shards else 1)
            elif (tokens := file_tokens(Path(expand_folders(source, self.sets)))) is not None:
                total += tokens
            else:
                return None
        return total or None

    def plan_config(self, settings: Settings, **more: Any) -> PlanConfig:
        """The config with which `ascendchat plan` would plan the stage."""
        names = ("device_batch_size", "total_batch_size", "activation_checkpointing", "shard", "offload")
        given = {name: settings[name] for name in names if settings.get(name)}
        if settings.get("bits") or settings.get("qlora"):
            given["bits"] = 4
        if settings.get("lora") or settings.get("qlora") or settings.get("finetuning_type") == "lora":
            given["lora_rank"] = settings.get("lora_rank") or 16
        return PlanConfig(**{"devices": self.recipe.devices, "chip": self.chip.name, **given, **more})

    def trained(self, settings: Settings, tokens: float | None, *, averages: bool = False) -> _Estimate:
        """Estimate a training stage of so many tokens; `averages`: it averages late weights."""
        assert self.model is not None
        config = self.plan_config(settings, tokens=max(1, int(tokens)) if tokens else None)
        plan = train_plan(config, self.chip, self.model)
        averaged = FP32 * self.model.total_parameters if averages else 0  # saved at the end
        checkpoints = int(settings.get("keep", TrainConfig.keep)) + 1  # and the best
        saved = checkpoints * checkpoint_bytes(config, self.model, self.chip) + averaged
        seconds = plan["time"]["hours"] * 3600 if tokens else None
        return _Estimate(seconds, plan["memory"]["total"], saved, 0.0, f"{plan['run']['steps']:,} steps" * bool(tokens))

    def base(self, settings: Settings) -> _Estimate:
        if settings.get("minutes"):
            if self.model is None:
                return _Estimate(settings["minutes"] * 60, None, None, 0.0, "at most")
            estimate = self.trained(settings, self.recipe.tokens(), averages=True)
            return _Estimate(settings["minutes"] * 60, estimate.memory, estimate.disk, 0.0, "at most")
        steps, total = settings.get("num_iterations"), settings.get("total_batch_size")
        tokens = steps * total if steps and total else self.recipe.tokens()
        return self.trained(settings, tokens, averages=True)

    def chats(self, stage: str, settings: Settings) -> _Estimate:
        """Estimate mid, sft or finetune: from given steps, else from the tokens of the data."""
        if self.model is None:
            return _Estimate(disk=None)
        steps, total = settings.get("num_iterations"), settings.get("total_batch_size")
        if steps and total:
            return self.trained(settings, steps * total)
        entries = settings.get("data") or PUBLISHED.get(stage) or []
        tokens = self.text_tokens([parse_entry(str(entry))[0] for entry in entries])
        return self.trained(settings, tokens * float(settings.get("epochs", 1.0)) if tokens else None)

    def rl(self, settings: Settings) -> _Estimate:
        """Estimate RL: trainer and generator."""
        if self.model is None:
            return _Estimate(disk=None)
        prompts = settings.get("prompts_per_step", RlConfig.prompts_per_step)
        samples, new = settings.get("samples", RlConfig.samples), settings.get("max_new_tokens", 256)
        context = min(self.model.seq_len, new + PROMPT_TOKENS)
        names = [parse_entry(str(entry))[0] for entry in settings.get("data") or ["gsm8k"]]
        rows = sum(SETS[name].rows for name in names if name in SETS)
        steps = settings.get("num_iterations") or max(1, int(rows * float(settings.get("epochs", 1.0)) / prompts))
        apart, total = int(settings.get("rollout_devices") or 0), prompts * samples * context
        config = self.plan_config(
            {**settings, "device_batch_size": None},  # rows of answers, shorter than those of the plan
            goal="rl",
            devices=self.recipe.devices + apart,
            rollout_devices=apart,
            context=context,
            total_batch_size=total,
            tokens=steps * total,
        )
        plan = rl_plan(config, self.chip, self.model)
        is_known = bool(rows or settings.get("num_iterations"))
        saved = self.trained({"keep": settings.get("keep", TrainConfig.keep)}, None).disk
        seconds = steps * (plan["time"]["rollout_seconds"] + plan["time"]["train_seconds"])
        memory = plan["memory"]["total"]
        return _Estimate(seconds if is_known else None, memory, saved, 0.0, f"{steps:,} steps" * is_known)

    def examine(self, command: str, settings: Settings) -> _Estimate:
        """Scale an evaluation from a measured one; with fewer questions it is shorter."""
        if self.model is None:
            return _Estimate()
        measured, measured_on = Shape.from_depth(EVAL_DEPTH), find(EVAL_CHIP)
        grown = self.model.train_flops_per_token / measured.train_flops_per_token
        faster = self.chip.flops * self.recipe.devices / measured_on.flops
        seconds = EVAL_SECONDS[command] * grown / faster
        toy = "toy" in (settings.get("tasks") or [])  # not among the measured ones
        weights = self.model.total_parameters * 4
        return _Estimate(None if toy else seconds, weights, 0.0, 0.0, str(settings.get("stage") or ""))

    def serve(self, settings: Settings) -> _Estimate:
        """Estimate a server, which runs until it is stopped."""
        if self.model is None:
            return _Estimate(None, None, 0.0, 0.0, translate("until Ctrl-C"))
        config = self.plan_config({}, goal="inference", context=settings.get("context"))
        plan = inference_plan(config, self.chip, self.model)
        return _Estimate(None, plan["memory"]["total"], 0.0, 0.0, translate("until Ctrl-C"))


def file_tokens(path: Path) -> float | None:
    """Rough number of tokens in a file, a folder or the matches of a pattern, by their sizes; None without any."""
    paths = sorted(path.parent.glob(path.name)) if "*" in path.name else [path]
    files = [f for p in paths for f in (files_in(p) if p.is_dir() else [p]) if f.is_file()]
    sizes = [f.stat().st_size * (4 if f.suffix in COMPRESSED else 1) for f in files]
    return sum(sizes) / BYTES_PER_TOKEN if sizes else None


def estimates(recipe: Recipe, chip: Chip, sets: str) -> list[_Estimate]:
    """Estimate every stage."""
    estimator = _Estimator(recipe, chip, sets)
    return [estimator.stage(command, settings) for command, settings in recipe.stages]


def expected_seconds(recipe: Recipe, sets: str) -> list[float | None]:
    """Estimated seconds of every stage, for the progress view; None where there is none. An estimate never stops a
    run."""
    try:
        return [estimate.seconds for estimate in estimates(recipe, choose_chip(recipe.chip)[0], sets)]
    except Exception:  # noqa: BLE001 (whatever a plan stumbles over, such as a folder that nobody may read)
        return [None] * len(recipe.stages)


def show_estimate(recipe: Recipe, wanted: list[bool], sets: str, missing: str = "") -> int:
    """Print the estimates of the stages that would run. `missing`: the sentence about devices that this machine
    lacks."""
    chip, _ = choose_chip(recipe.chip)
    notes = [translate(missing)] if missing else []
    if not recipe.chip:
        notes.append(translate(f"no chip is named: this is for {chip.name}; $ASCENDCHAT_CHIP=... names another"))
    rows = [(n, c, f) for n, ((c, _), f) in enumerate(zip(recipe.stages, estimates(recipe, chip, sets))) if wanted[n]]
    apart = max(int(settings.get("rollout_devices") or 0) for _, settings in recipe.stages)
    print(f"{recipe.run}: {recipe.about}")
    print(f"{recipe.devices}{f' + {apart}' if apart else ''} x {chip.name}, {bytes_text(chip.memory)}\n")
    times, sizes = translate("time"), (translate("memory"), translate("disk"), translate("download"))
    print(f"    {table_line(translate('stage'), times, *sizes)}".rstrip())
    for number, command, f in rows:
        cells = (
            sum_text([f.seconds], duration_text),
            sum_text([device_memory(command, f)]),
            sum_text([f.disk]),
            sum_text([f.download]),
        )
        print(f"{number + 1:>3} {table_line(command, *cells)} {f.about}".rstrip())
    shown_estimates = [f for _, _, f in rows]
    memories = [device_memory(command, f) for _, command, f in rows]
    largest = max((memory or 0 for memory in memories), default=0)
    sums = [
        sum_text([f.seconds for f in shown_estimates], duration_text),
        sum_text([largest or (None if None in memories else 0)]),
    ]
    sums += [sum_text([f.disk for f in shown_estimates]), sum_text([f.download for f in shown_estimates])]
    print(f"    {table_line(translate('together'), *sums)}".rstrip())
    disk = sum(f.disk or 0.0 for f in shown_estimates)
    folder = next(path for path in (home(), *home().parents) if path.exists())
    free = shutil.disk_usage(folder).free
    if disk > free:
        notes.append(translate(f"{bytes_text(disk)} are needed under {home()}, {bytes_text(free)} are free"))
    if any(command == "data prepare" for _, command, _ in rows):
        notes.append(translate("data prepare is counted for the cores of this machine"))
    notes.append(
        translate(
            "times are estimates, sizes of sets are rough, memory is that of one device; ?: nobody knows yet; "
            "-: none, or less than a minute"
        )
    )
    for note in notes:
        print(f"{translate('note: ')}{note}")
    return 0


def device_memory(command: str, estimate: _Estimate) -> int | None:
    """Memory of a device; 0 of a stage that uses none, None if unknown."""
    return estimate.memory if command in USES_DEVICES else 0


def duration_text(seconds: float) -> str:
    return span(seconds / 3600)


def sum_text(values: list[float | None], text: Callable[[float], str] = bytes_text) -> str:
    """Format the sum of the known values, and mark unknown ones: "2.75 h + ?"."""
    total = sum(value or 0.0 for value in values)
    return " + ".join([text(total)] * bool(total) + ["?"] * (None in values)) or "-"


def table_line(*cells: str) -> str:
    """Format one line of the table."""
    return " ".join(pad(cell, width) for cell, width in zip(cells, (16, 14, 11, 11, 11)))
