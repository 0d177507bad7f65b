"""`ascendchat finetune --model Qwen2.5-0.5B-Instruct --data talk.jsonl [--lora]`: fine-tuning of existing models.

A Stage of the one loop: rows hold several conversations, which do not see each other, the loss is on what the assistant
says, and the model's own chat template renders them. All weights are trained, or adapters (models/lora.py). `--stage
dpo` and the other losses on pairs are in preference.py.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ascendchat.checkpoint import UNWRITTEN, to_continue
from ascendchat.config import flags_set
from ascendchat.config.finetune import FinetuneConfig
from ascendchat.data.chat.dataset_info import DEFAULT_DATASET_DIR, listed_data
from ascendchat.data.chat.preview import colours, preview_mixture
from ascendchat.data.mixture import MixtureLoader, absolute
from ascendchat.data.tokenizer.tokenizer import Tokenizer
from ascendchat.device import pick
from ascendchat.errors import NotSaved, UserError
from ascendchat.models.export import export, export_adapter
from ascendchat.models.hf_checkpoint import CONFIG_FOLDER
from ascendchat.models.jinja_template import ChatTemplate
from ascendchat.models.lora import LoraSettings, adapter_weights
from ascendchat.models.open import ModelSource, TrainableModel
from ascendchat.models.quantize import check_packing
from ascendchat.models.shape import HFShape
from ascendchat.models.tokenizer import HFTokenizer
from ascendchat.nn.optim import Group, adamw_groups, muon_groups
from ascendchat.parallel.context import Context
from ascendchat.runs.run import run_folder
from ascendchat.sizes import schedule
from ascendchat.sizes.batch import Split
from ascendchat.sizes.hf import FINETUNE_ROWS, check_bits, check_bits_on
from ascendchat.sizes.schedule import Curve
from ascendchat.tasks.by_name import knows
from ascendchat.tasks.chat_mixture import ChatMixture, EntryOptions, held_out_rows, open_chat_mixture
from ascendchat.tasks.contamination import report_overlaps
from ascendchat.tasks.pair_mixture import PairMixture
from ascendchat.train.chat import chat_evaluation, chat_identity
from ascendchat.train.evaluation import Evaluation, reply_loss
from ascendchat.train.model import TrainModel, optimizer_for
from ascendchat.train.preference import PreferenceStage, check_numbers, train_pairs
from ascendchat.train.rows import RowStage, curve, learning_rates, row_facts, seeder, share_out, total_flag
from ascendchat.train.run import train_stage, training_context, with_attend
from ascendchat.train.stage import Optimizer
from ascendchat.train.start import (
    check_output,
    from_checkpoint,
    from_hf,
    hf_source,
    layout_of,
    learner_of,
    with_learner,
)

FEW_STEPS = 100  # a step takes fewer rows where the run would have fewer steps than this
FULL_RATE, LORA_RATE, MUON_RATE = 1e-5, 1e-4, 1e-3
OWN_FACTOR = 0.05  # on the rates of pretraining, for pairs
LORA_ONLY = "lora_rank", "lora_alpha", "lora_dropout", "lora_target", "use_rslora", "use_dora"


def finetune_stage(
    train_model: TrainModel,
    split: Split,
    steps: int,
    mixture: ChatMixture,
    config: FinetuneConfig,
    theirs: TrainableModel,
) -> RowStage:
    """Put together the stage of cross-entropy on the assistant's tokens, for a Hugging Face model."""
    tokenizer, model, lora = theirs.tokenizer, theirs.model, theirs.lora
    lrs = learning_rates(config, model.shape, split.total)
    lr_curve = curve(config, steps, Curve(warmup=min(20, steps // 10), warmdown=1.0, final=0.0))
    if config.muon:
        groups = muon_groups(model, lrs["all"], config.matrix_lr or MUON_RATE, config.weight_decay)
    else:
        groups = adamw_groups(model, lrs["all"], config.weight_decay)
    identity = chat_identity("hf", train_model, split, steps, mixture, tokenizer, config, theirs.source)
    if theirs.mesh is None:
        evaluation = chat_evaluation(train_model, tokenizer, mixture)
    else:  # ranks that gather weights layer by layer would not take part in samples and bits per byte equally often
        evaluation = Evaluation(partial(reply_loss, train_model, mixture.validation))
    stage = RowStage(
        train_model,
        split,
        steps,
        batches=partial(MixtureLoader, mixture.sources),
        optimizer=finetuning_optimizer(train_model, lrs, groups, theirs),
        rates=partial(finetuning_rates, steps=steps, curve=lr_curve, config=config),
        identity={**identity, **adapter_identity(config, theirs), "optimizer": "muon" if config.muon else "adamw"},
        facts=row_facts(train_model, split, lrs, lr_curve),
        evaluation=evaluation,
        reseed=seeder(train_model, config.seed) if config.lora_dropout else None,
        weights=partial(trained_weights, theirs, train_model.device.dtype),
    )
    if lora:  # no gradients of frozen weights: a third less of each product
        stage.flops_per_token += 6.0 * stage.trained - 2.0 * model.shape.counted.matmul_parameters
    return stage


def finetuning_rates(step: int, *, steps: int, curve: Curve, config: FinetuneConfig) -> dict[str, float]:
    """Arguments of the optimizer for a model of Hugging Face."""
    scale = schedule.finetuning_scale(step, steps, config.lr_scheduler_type, curve.warmup, curve.final)
    rates = {"lr_scale": scale, **({"clip": config.max_grad_norm} if config.max_grad_norm else {})}
    if config.muon:
        rates["momentum"] = schedule.momentum(step, steps, values=(0.85, 0.95, 0.95), ramp=300, warmdown=1.0)
    return rates


def adapter_identity(config: FinetuneConfig, theirs: TrainableModel) -> dict[str, Any]:
    """The part of Stage.identity that all fine-tuning has."""
    lora = theirs.lora.to_dict() if theirs.lora else None
    return {"packing": None if config.packing else False, "bits": config.bits, "lora": lora}


def run(config: FinetuneConfig) -> int:
    """The command."""
    config = checked(config)
    if config.stage != "sft" or config.pref_loss != "sigmoid":
        return learn_pairs(config)
    with finetuning_context(config) as here:
        theirs = open_theirs(config, here)
        shape, say = theirs.model.shape, here.say
        data, validation = (located(names, config, here.say) for names in (config.data, config.validation))
        config = replace(config, run=config.run or run_name(config, theirs), data=data, validation=validation)
        folder, out = run_folder(config.run, "hf"), Path(config.output_dir).expanduser()
        saved = to_continue(folder, config.resume, say=say)
        config = with_attend(config, saved, "document")
        mixture = open_data(config, theirs, here)
        if config.preview:
            for text in preview_mixture(
                config.data, mixture.sources, theirs.tokenizer, config.preview, colours(sys.stdout)
            ):
                say(text)
            return 0
        split, steps = batch_and_steps(config, shape, here, mixture.per_epoch)
        check_output(config.output_dir, saved, steps)
        stage = finetune_stage(learner_of(theirs, config, here), split, steps, mixture, config, theirs)
        if not saved and mixture.validation and config.eval_every >= 0:
            say(f"held-out loss before: {first_loss(stage):.4f}")

        def add_files(run: Path) -> None:
            theirs.add_files(run)
            report_overlaps(mixture.overlaps, run, say)

        facts = {**stage.facts, "start": str(theirs.source.folder), "trained_parameters": stage.trained}
        status = train_stage(stage, here, config, folder, saved, title="finetune", facts=facts, add_files=add_files)
        if status == 0 and config.output_dir:
            write_model(theirs, folder, out, here)
        return status


def learn_pairs(config: FinetuneConfig) -> int:
    """`--stage dpo`, `orpo` or `simpo`; see preference.py."""
    for flag in flags_set(config, ("muon", "lora_dropout")):
        raise UserError(f"{flag} is for --stage sft; leave it out")
    if config.attend == "row":
        raise UserError("--attend row: the replies of a pair would see each other; leave it out")
    with finetuning_context(config) as here:
        config = replace(config, attend="document")
        if hf_source(config, here) is None and config.start and not config.lora:  # a model of our own
            for flag in flags_set(config, ("output_dir", "shard")):
                raise UserError(f"{flag} is for models of Hugging Face; leave it out")
            factor = OWN_FACTOR if config.lr_multiplier == 1.0 else config.lr_multiplier
            return train_pairs(from_checkpoint(replace(config, lr_multiplier=factor), here, "rl"), here)
        theirs = open_theirs(config, here)
        name = config.run or run_name(config, theirs)
        folder, out = run_folder(name, "hf"), Path(config.output_dir).expanduser()
        begin = with_learner(theirs, replace(config, run=name), here, name)
        status = train_pairs(begin, here, partial(pair_stage, theirs))
        if status == 0 and config.output_dir and not config.preview:
            write_model(theirs, folder, out, here)
        return status


def pair_stage(
    theirs: TrainableModel,
    method: str,
    train_model: TrainModel,
    split: Split,
    steps: int,
    mixture: PairMixture,
    tokenizer: Tokenizer,
    config: FinetuneConfig,
    origin: ModelSource,
) -> PreferenceStage:
    """Pairs, with adapters or weights that ranks share out."""
    lrs = learning_rates(config, theirs.model.shape, split.total)
    groups = adamw_groups(theirs.model, lrs["all"], config.weight_decay or 0.0)
    return PreferenceStage(
        method,
        train_model,
        split,
        steps,
        mixture,
        tokenizer,
        config,
        origin,
        optimizer=finetuning_optimizer(train_model, lrs, groups, theirs),
        identity=adapter_identity(config, theirs),
        weights=partial(trained_weights, theirs, train_model.device.dtype),
    )


def finetuning_optimizer(
    train_model: TrainModel, lrs: dict[str, float], groups: list[Group], theirs: TrainableModel
) -> Optimizer:
    """The optimizer of whole weights, or of those that ranks share out."""
    if theirs.mesh is None:
        return optimizer_for(train_model, lrs, groups)
    from ascendchat.nn.sharded import ShardedAdamW

    return ShardedAdamW(theirs.model, groups, theirs.mesh, fused=train_model.device.chip.fused_adamw)


def trained_weights(theirs: TrainableModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights for a checkpoint: of the adapters, or all. Every rank calls it."""
    model = theirs.model
    weights = adapter_weights(model) if theirs.lora else dict(model.state_dict())
    if theirs.mesh is None:
        return weights
    from ascendchat.nn.sharded import whole_weights

    return whole_weights(weights, dtype)


def checked(config: FinetuneConfig) -> FinetuneConfig:
    """Fill in the defaults that depend on other fields; refuse flags that contradict each other or mean nothing
    here."""
    if not config.start:
        raise UserError("name the model to fine-tune: --model DIR, a GGUF file, or OWNER/NAME that was fetched")
    if not config.data and config.stage != "sft":
        raise UserError("name the pairs to learn from: --data FILE with the columns prompt, chosen and rejected")
    if not config.data:
        raise UserError("name what to learn: --data FILE of conversations, or a set such as smoltalk")
    check_numbers(config)
    lora = config.lora or config.qlora or config.finetuning_type == "lora"
    bits = 4 if config.qlora else config.bits
    if bits:
        check_bits(lora, config.shard)
    lora_flags = flags_set(config, LORA_ONLY)
    if lora_flags and not lora:
        raise UserError(f"{lora_flags[0]} belongs to LoRA; add --lora, or leave it out")
    if config.bf16 and config.fp16:
        raise UserError("bf16 and fp16 exclude each other; give one of them")
    if config.muon and config.shard:
        raise UserError("--muon wants whole matrices, which --shard cuts; leave one of them out")
    if config.offload and not config.shard:
        raise UserError("--offload belongs to --shard N; give both, or leave it out")
    if config.muon and lora:
        raise UserError("--muon is for all weights; adapters are trained by AdamW: leave one of --muon and --lora out")
    usual = LORA_RATE if lora else FULL_RATE
    both = config.warmup_steps is not None and config.warmup_ratio is not None
    return replace(
        config,
        lora=lora,
        bits=bits,
        learning_rate=config.learning_rate or (usual if config.stage == "sft" else None),
        num_iterations=None if config.num_iterations == -1 else config.num_iterations,
        warmup_steps=None if both and not config.warmup_steps else config.warmup_steps,
        warmup_ratio=None if both and config.warmup_steps else config.warmup_ratio,
    )


@contextmanager
def finetuning_context(config: FinetuneConfig) -> Iterator[Context]:
    """The training context. --bf16 and --fp16 are followed where the device computes in that dtype, else a notice is
    printed; a device whose default is bfloat16 also takes float16."""
    own = pick(config.device_type, compiled=config.compile).dtype if config.bf16 or config.fp16 else None
    with training_context(config, "fp16" if config.fp16 and own is torch.bfloat16 else None) as here:
        wanted = torch.bfloat16 if config.bf16 else torch.float16 if config.fp16 else here.device.dtype
        if wanted is not here.device.dtype:
            names = [str(dtype).removeprefix("torch.") for dtype in (wanted, here.device.dtype)]
            here.say(f"{names[0]} is not used: {here.device.chip.name} computes in {names[1]}")
        yield here


def lora_settings(config: FinetuneConfig) -> LoraSettings | None:
    """Settings of the adapters; None: all weights are trained."""
    if not config.lora:
        return None
    rank = config.lora_rank or LoraSettings.rank
    return LoraSettings(
        rank=rank,
        alpha=config.lora_alpha or 2.0 * rank,
        targets=config.lora_target or ("all",),
        dropout=config.lora_dropout or 0.0,
        rslora=config.use_rslora,
        dora=config.use_dora,
    )


def open_theirs(config: FinetuneConfig, here: Context) -> TrainableModel:
    """Open the model of --model, with its adapters, on the device."""
    if config.lr_multiplier != 1.0:
        raise UserError("--lr-multiplier is of our own models (`ascendchat sft`); give --learning-rate")
    if config.bits:
        check_bits_on(here.device.chip)
        check_packing(here.place, here.device.dtype)
    theirs = from_hf(config, here, lora_settings(config))
    if theirs is None:
        raise UserError(
            f"{config.start} is no Hugging Face model; models of our own are trained by `ascendchat sft --start "
            f"{config.start}`"
        )
    if theirs.tokenizer.template is None:
        raise UserError(
            f"{theirs.source.folder} has no chat template, so nobody knows how it wants conversations written; take "
            "its Instruct version, or put a chat_template.jinja into its folder"
        )
    here.say(f"starting from {theirs.source.folder}")
    theirs = replace(theirs, tokenizer=theirs.tokenizer.thinking(config.enable_thinking))
    say_thoughts(theirs.tokenizer.template, here.say)
    say_ends(theirs.tokenizer, here.say)
    if config.max_seq_len and (most := theirs.model.shape.seq_len) < config.max_seq_len:
        here.say(f"rows of {most} tokens instead of {config.max_seq_len}: the model reads no more")
    return theirs


def say_thoughts(template: ChatTemplate | None, say: Callable[[str], None]) -> None:
    """Say what the model learns from answers without thoughts, if the chat template writes something for them."""
    if template is None or template.generation:
        return
    learned, prompted = template.around_thoughts()
    if learned.strip():
        say(
            f"an answer without thoughts is learned with the {learned.strip()!r} that the chat template writes before "
            "it, so the model learns not to think; --no-enable-thinking leaves that to prompts, if it can"
        )
    if prompted:
        say(
            f"prompts open an answer by {prompted!r}, which answers without thoughts lack: the model learns to answer "
            "without, and may do otherwise behind such a prompt"
        )


def say_ends(tokenizer: HFTokenizer, say: Callable[[str], None]) -> None:
    """Say how the end of a reply is learned, if no token of the chat template closes a turn."""
    template = tokenizer.template
    if template is None:
        return
    if template.appended is not None:
        say(
            f"the chat template closes a reply by no token of its own: {tokenizer.written(template.appended)!r} is "
            "learned as the end, behind the last reply of each conversation; ends of earlier replies are not learned"
        )
    elif not template.learns_ends():
        say(
            "the generation blocks of the chat template hold no token that ends an answer, so the model does not learn "
            "to end its answers; move what closes a turn (such as <|im_end|> or eos_token) into them"
        )


def run_name(config: FinetuneConfig, theirs: TrainableModel) -> str:
    """Default of --run."""
    if config.output_dir:
        return re.sub(r"[^\w.+=@-]+", "-", config.output_dir).strip("-.") or "finetuned"
    return f"{theirs.source.name}-{'lora' if theirs.lora else config.stage}"


def located(names: Sequence[str], config: FinetuneConfig, say: Callable[[str], None]) -> tuple[str, ...]:
    """Resolve entries of --data or --validation by the dataset_info.json of --dataset-dir, which is `data` by default,
    as in LLaMA-Factory."""
    return absolute(listed_data(names, config.dataset_dir, knows, usual=DEFAULT_DATASET_DIR, say=say))


def open_data(config: FinetuneConfig, theirs: TrainableModel, here: Context) -> ChatMixture:
    """Open the rows to train on and those to validate on."""
    seq_len, tokenizer = theirs.model.shape.seq_len, theirs.tokenizer
    mixture = open_chat_mixture(
        config.data,
        "sft",
        tokenizer,
        seq_len,
        seed=config.seed,
        source=config.source,
        find_overlaps=here.main,
        say=here.say,
        options=EntryOptions(0.0 if config.validation else config.val_size, config.max_samples),
        packing=config.packing,
    )
    mixture.validation.extend(held_out_rows(config.validation, config.source, tokenizer, seq_len, here.say))
    return mixture


def batch_and_steps(config: FinetuneConfig, shape: HFShape, here: Context, rows: int) -> tuple[Split, int]:
    """Batch and steps: `epochs` over all rows. Rows per device times micro-batches, where these are given; else as many
    rows as leave enough steps."""
    devices, total = here.world.size, config.total_batch_size
    if config.target_examples_per_step:
        total = config.target_examples_per_step * shape.seq_len
    elif not total and config.device_batch_size:
        total = config.device_batch_size * (config.gradient_accumulation_steps or 1) * devices * shape.seq_len
    usual = min(FINETUNE_ROWS, max(1, int(rows * config.epochs) // FEW_STEPS))
    flag = total_flag(config.total_batch_size, config.target_examples_per_step)
    split = share_out(config, shape, here.device, total or usual * shape.seq_len, flag=flag, layout=layout_of(config))
    per_step = split.devices * split.rows * split.accumulation
    return split, config.num_iterations or max(1, math.ceil(rows * config.epochs / per_step))


@torch.no_grad()
def first_loss(stage: RowStage) -> float:
    """Held-out loss of the model before training."""
    stage.model.eval()
    loss = stage.evaluate(0)["val_loss"]
    stage.model.train()
    return loss


def write_model(theirs: TrainableModel, folder: Path, out: Path, here: Context) -> None:
    """Write the trained model as a Hugging Face or peft folder, unless it is there already. Every rank calls it."""
    weights = trained_weights(theirs, here.device.dtype)
    if not here.main or (out.exists() and any(out.iterdir())):
        return
    try:
        if theirs.lora:
            export_adapter(folder / CONFIG_FOLDER, weights, out)
        else:
            export(theirs.model, theirs.tokenizer, out, weights)
    except (*UNWRITTEN, UserError) as error:  # the last: where a draft cannot even begin
        raise NotSaved(
            f"the model is trained and kept in {folder}, but could not be written to {out}: {error}; make room there, "
            "then run the same command again: nothing is trained twice"
        ) from error
    here.say(f"{folder} -> {out}")
