"""Config of `ascendchat finetune`: flags, and the same in YAML by the names that LLaMA-Factory and small guides use.

    ascendchat finetune --model Qwen2.5-0.5B-Instruct --data talk.jsonl --lora
    ascendchat finetune qwen_lora_sft.yaml

Names of LLaMA-Factory with the same meaning are aliases (`also`). A YAML file may also have the names in NOT_USED,
which have no meaning here: one line says what is done instead. REFUSED ask for something that is not done here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from ascendchat.config.flags import option
from ascendchat.config.train import ChatTrainConfig, HFTrainConfig


@dataclass(frozen=True)
class PreferenceOptions:
    """Settings of the losses on pairs of replies (`finetune --stage dpo|orpo|simpo`), by LLaMA-Factory's names."""

    "# Preference pairs (--stage dpo, orpo, simpo)"
    pref_beta: float | None = option(None, also=("dpo_beta", "orpo_beta", "simpo_beta"), above=0, most=1e3)
    "how much a difference between the two replies counts (beta of the loss); by default 0.1, simpo: 2"
    pref_loss: Literal["sigmoid", "orpo", "simpo"] = "sigmoid"
    "with --stage dpo: another loss on pairs; --stage orpo and --stage simpo say the same"
    label_smoothing: float = option(0.0, also=("dpo_label_smoothing",), least=0, below=0.5)
    "dpo and simpo: probability that the replies of a pair are labelled the wrong way round"
    simpo_gamma: float | None = option(None, least=0, most=1e3)
    "simpo: margin by which the better reply has to win; by default 0.5"
    pref_ftx: float = option(0.0, least=0, most=1e3)
    "weight of the SFT loss on the better reply, added to the loss on the pair"


_OWN = "the model's own chat template is used"
_RESUME = "a run goes on from its newest checkpoint by itself; resume: never starts anew"
_BEFORE = "data is prepared once, at the start of a run"
_ATTENTION = "the best attention kernel that runs here is chosen and named; --attention chooses another"
_LAUNCH = "`ascendchat launch --devices N finetune ...` runs on many; shard: N also shares the weights out"
_SEEN = "packed conversations never see each other"
_ADAMW = "AdamW with betas 0.9 and 0.999, fused where the device can; muon: true is the other one"
_METRICS = "metrics.jsonl in the run's folder has all; track: tensorboard, swanlab or wandb receives it too"
_EVAL = "the held-out loss is taken every eval_steps steps; -1: never"
_VERB = "this command trains; `ascendchat eval chat` and `ascendchat export` do the rest"
_WEIGHTS = "safetensors are written, which every reader takes"
_NF4 = "--bits 4 is the nf4 of bitsandbytes with double quantization, and computes in the dtype of the run"

NOT_USED: Mapping[str, str] = {
    **dict.fromkeys(("template", "default_system", "chat_template"), _OWN),
    **dict.fromkeys(("overwrite_cache", "preprocessing_num_workers", "preprocessing_batch_size", "cache_dir"), _BEFORE),
    **dict.fromkeys(("dataloader_num_workers", "dataloader_pin_memory", "tokenized_path"), _BEFORE),
    **dict.fromkeys(("group_by_length", "neat_packing"), _SEEN),
    **dict.fromkeys(("ddp_timeout", "deepspeed", "fsdp", "fsdp_config", "ddp_find_unused_parameters"), _LAUNCH),
    **dict.fromkeys(("num_gpus", "local_rank", "use_ray", "ray_run_name", "low_cpu_mem_usage", "device_map"), _LAUNCH),
    **dict.fromkeys(("plot_loss", "report_to", "run_project", "logging_dir", "logging_strategy"), _METRICS),
    **dict.fromkeys(("include_num_input_tokens_seen", "logging_first_step", "disable_tqdm"), _METRICS),
    **dict.fromkeys(("flash_attn", "attn_implementation", "enable_liger_kernel", "use_liger_kernel"), _ATTENTION),
    **dict.fromkeys(("use_unsloth", "use_v1_kernels", "use_cache", "use_flash_attention_2"), _ATTENTION),
    **dict.fromkeys(("do_train", "do_eval", "do_predict", "predict_with_generate", "compute_accuracy"), _VERB),
    **dict.fromkeys(("eval_strategy", "evaluation_strategy", "load_best_model_at_end"), _EVAL),
    **dict.fromkeys(
        ("metric_for_best_model", "greater_is_better"), "the checkpoint with the least held-out loss is kept"
    ),
    "per_device_eval_batch_size": "as many rows as in training are validated at a time",
    "eval_batch_size": "as many rows as in training are validated at a time",
    **dict.fromkeys(("optim", "optimizer", "adam_beta1", "adam_beta2", "adam_epsilon"), _ADAMW),
    **dict.fromkeys(("save_only_model", "save_strategy", "save_safetensors", "export_legacy_format"), _WEIGHTS),
    "overwrite_output_dir": "a folder that holds something is never written over; name another output_dir",
    "resume_from_checkpoint": _RESUME,
    "ignore_data_skip": _RESUME,
    "trust_remote_code": "code that comes with a model is never run",
    "tf32": "the device's own settings are used",
    "data_seed": "seed is that of weights and of data",
    "remove_unused_columns": "columns that are not needed are not read",
    "push_to_hub": "nothing is uploaded; `ascendchat export` writes a folder that can be",
    "hub_model_id": "nothing is uploaded; `ascendchat export` writes a folder that can be",
    "task_type": "causal language models are trained",
    "lora_bias": "biases stay as they are",
    "bias": "biases stay as they are",
    "assistant_only_loss": "the loss is on what the assistant says",
    "completion_only_loss": "the loss is on what the assistant says",
    **dict.fromkeys(("quantization_method", "quantization_type", "double_quantization", "bnb_4bit_quant_type"), _NF4),
    **dict.fromkeys(("bnb_4bit_use_double_quant", "bnb_4bit_compute_dtype"), _NF4),
    "image_max_pixels": "texts are trained",
    "video_max_pixels": "texts are trained",
}
_OF_OURS = "it is for models of our own (`ascendchat sft`)"
_OTHER_WAY = "choose finetuning_type full or lora"
REFUSED: Mapping[str, str] = {
    "load_in_8bit": "a base is held in 4 bits (--lora --bits 4), or as it computes",
    **dict.fromkeys(("use_galore", "use_apollo", "use_badam", "freeze_trainable_layers", "use_llama_pro"), _OTHER_WAY),
    **dict.fromkeys(("pissa_init", "loraplus_lr_ratio", "additional_target", "modules_to_save"), _OTHER_WAY),
    "train_on_prompt": "the loss is on what the assistant says; mask_history and train_on_prompt are not done here",
    "mask_history": "the loss is on what the assistant says; mask_history and train_on_prompt are not done here",
    "streaming": "data is read at the start; `max_samples` bounds it",
    "resize_vocab": "the vocabulary stays that of the model",
    "adapter_name_or_path": "merge it first: `ascendchat export`, then name that folder as the model",
    "rope_scaling": "set it in the config.json of the model",
    **dict.fromkeys(("embedding_lr", "unembedding_lr", "scalar_lr", "warmdown_ratio"), _OF_OURS),
    **dict.fromkeys(("load_optimizer", "warm_start"), _OF_OURS),
}


@dataclass(frozen=True)
class FinetuneConfig(PreferenceOptions, ChatTrainConfig, HFTrainConfig):
    """Fine-tune an existing model of Hugging Face on conversations: all weights, or LoRA adapters."""

    not_used: ClassVar[Mapping[str, str]] = NOT_USED
    refused: ClassVar[Mapping[str, str]] = REFUSED

    "# Model and data"
    start: str = option("", also=("model", "model_name_or_path", "model_name", "base_model"))
    "model to start from: folder, GGUF file, OWNER/NAME that was fetched, run or checkpoint of an earlier fine-tuning"
    data: tuple[str, ...] = option((), also=("dataset", "train_file", "data_path"))
    """training data, as NAME or NAME=WEIGHT: files and folders of conversations in any usual format, tasks (gsm8k,
    smoltalk, ...), toyworld"""
    stage: Literal["sft", "dpo", "orpo", "simpo"] = "sft"
    "sft learns replies; the others learn from pairs of a better and a worse one"
    output_dir: str = option("", also=("out",))
    """folder that receives the model at the end, in the layout of Hugging Face: all weights, or with LoRA the adapter;
    without it: `ascendchat export`"""
    max_seq_len: int | None = option(
        None, also=("cutoff_len", "max_length", "max_seq_length", "model_max_length"), least=16, most=1e6
    )
    "tokens per row; by default 2048, at most the model's own limit"
    max_samples: int | None = option(None, also=("max_train_samples",), least=1, most=1e12)
    "maximum number of conversations of each entry of --data"
    packing: bool = True
    "several conversations in a row, which do not see each other; --no-packing: one in each row"
    dataset_dir: str = option("", also=("data_dir",))
    "folder in which names of --data are looked for first; by default data, where that has a dataset_info.json"
    enable_thinking: bool | None = None
    "for a chat template that knows it (Qwen3); false leaves empty thoughts to prompts: they are not learned"

    "# Adapters (LoRA)"
    lora: bool = False
    "train adapters; the same as --finetuning-type lora"
    qlora: bool = option(False, also=("use_qlora", "load_in_4bit"))
    "train adapters on a base held in 4 bits; the same as --lora --bits 4"
    finetuning_type: Literal["full", "lora"] = "full"
    "train all weights, or adapters"
    lora_rank: int | None = option(None, also=("lora_r",), least=1, most=1e5)
    "rank of the adapters; by default 16"
    lora_alpha: float | None = option(None, above=0, most=1e6)
    "outputs of the adapters are multiplied by alpha / rank; by default twice the rank"
    lora_dropout: float | None = option(None, least=0, below=1)
    "dropout on the inputs of the adapters in training; by default 0"
    lora_target: tuple[str, ...] = option((), also=("target_modules", "lora_target_modules"))
    "linear layers that get adapters, such as q_proj,v_proj; by default all but the head"
    use_rslora: bool = option(False, also=("rslora",))
    "rsLoRA: multiply by alpha / sqrt(rank) instead"
    use_dora: bool = option(False, also=("dora",))
    "DoRA: adapters turn the weights, and their lengths are trained too; slower"
    bits: Literal[4] | None = option(None, also=("quantization_bit",))
    "with --lora: hold the frozen base in 4 bits (QLoRA), by bitsandbytes on CUDA and CPU"

    "# Preference pairs (--stage dpo, orpo, simpo)"

    "# Run"
    run: str = option("", also=("run_name",))
    "name of the run; its folder holds settings, metrics and checkpoints; by default after --output-dir, or the model"
    epochs: float = option(1.0, also=("num_train_epochs", "num_epochs"), above=0, most=1e6)
    "passes over --data; --steps wins over it"
    num_iterations: int | None = option(None, also=("steps", "max_steps"), least=1, most=1e9, besides=(-1,))
    "optimizer steps; by default (and with -1) they follow from the epochs"

    "# Optimization"
    learning_rate: float | None = option(None, also=("lr",), above=0, most=1)
    "peak learning rate; by default 1e-5, with adapters 1e-4"
    lr_scheduler_type: Literal["cosine", "linear", "constant", "constant_with_warmup"] = option(
        "cosine", also=("lr_scheduler", "scheduler")
    )
    "how the learning rate falls after the warm-up"
    weight_decay: float = option(0.0, least=0, most=10)
    "weight decay of matrices, by AdamW"
    max_grad_norm: float = option(1.0, also=("gradient_clip", "grad_clip"), least=0, most=1e9)
    "gradients are scaled down to this norm; 0: never"
    muon: bool = option(False, also=("use_muon",))
    "Muon for the matrices of the layers (rate: --matrix-lr, by default 0.001), AdamW for the rest"

    "# Batch and memory"
    device_batch_size: int | None = option(
        None, also=("per_device_train_batch_size", "batch_size", "train_batch_size"), least=1, most=1e6
    )
    "rows per device and micro-batch; by default the most that fit"
    activation_checkpointing: bool = option(False, also=("gradient_checkpointing",))
    "recompute activations in the backward pass: less memory, about a quarter slower"
    shard: int = option(0, also=("shard_devices",), least=0, most=1e5)
    """devices that hold one copy of the weights together (FSDP2), for models too large for one; fewer than all of them:
    several copies (HSDP); 0: every device holds all"""
    offload: bool = option(False, also=("cpu_offload",))
    "with --shard: weights, gradients and the optimizer's state wait in the memory of the host"

    "# Validation, checkpoints and logging"
    validation: tuple[str, ...] = option((), also=("eval_dataset", "validation_file", "eval_file"))
    "files for the held-out loss; by default a part of --data that is not trained on"
    val_size: float = option(0.02, also=("validation_split",), least=0, most=1e9)
    "size of that held-out part: a share, or from 1 on about this many conversations; 0: none"
    eval_every: int = option(100, also=("eval_steps",), least=-1, most=1e9)
    "steps between validations; 0: only at the end, -1: never"
    save_every: int = option(100, also=("save_steps",), least=-1, most=1e9)
    "steps between checkpoints; 0 and -1: only at the end"
    keep: int = option(2, also=("save_total_limit",), least=1, most=1e6)
    "checkpoints to keep, besides the best"
    log_every: int = option(10, also=("logging_steps",), least=1, most=1e9)
    "steps between lines when the output is not a terminal"

    "# Computation"
    bf16: bool | None = option(None, also=("pure_bf16",))
    "compute in bfloat16; by default the dtype that suits the device"
    fp16: bool | None = None
    "compute in float16, with a scaled loss; by default the dtype that suits the device"
