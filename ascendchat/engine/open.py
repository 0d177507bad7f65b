"""Opens a model to generate with: loads it by models/open.py, checks it, and makes its engine.

opened = open_for_generation(here, config, config.stage)
engine = engine_for(opened, slots=16)
"""

from __future__ import annotations

import torch

from ascendchat.config.generate import EvalBaseConfig, EvalChatConfig, ModelConfig
from ascendchat.device import pick
from ascendchat.device.cpu import prefer_plain_products
from ascendchat.engine.engine import Engine
from ascendchat.engine.request import Request, Sampling
from ascendchat.errors import UserError
from ascendchat.models.folder import LoadedModel
from ascendchat.models.open import OpenedModel, find_source, open_model
from ascendchat.models.parity import (
    KERNEL,
    MODEL_ERRORS,
    TESTED,
    first_line,
    probe_row,
    relative_error,
    short_windows,
    tolerance,
)
from ascendchat.nn.attention import dense
from ascendchat.nn.logprobs import LMHead
from ascendchat.parallel.context import Context


def open_for_generation(
    here: Context,
    config: ModelConfig | EvalChatConfig | EvalBaseConfig,
    stage: str | None,
    seq_len: int | None = None,
) -> OpenedModel:
    """Find, verify, load and try the model that the flags name; one that does not fit is a UserError. `seq_len`: tokens
    of a row, where the user named them."""
    source = find_source(config.run, stage, config.checkpoint, here.say)
    tokenizer, attention = config.tokenizer, config.attention
    return open_model(source, here, seq_len=seq_len, tokenizer=tokenizer, attention=attention, trial=check_engine)


def engine_for(
    opened: OpenedModel,
    slots: int,
    context: int | None = None,
    *,
    compiled: bool = False,
    cache_dtype: torch.dtype | None = None,
    readout: LMHead | None = None,
) -> Engine:
    """An engine with `slots` slots of up to `context` tokens, by default as many as in training. `cache_dtype`: the
    dtype of its KV cache, if not that of the model; `readout`: see Decoder."""
    device, context = opened.here.device, context or opened.model.shape.seq_len
    if device.type == "cpu" and device.dtype == torch.float32:
        prefer_plain_products()
    return Engine(
        opened.model,
        opened.kernel,
        opened.tokenizer,
        device,
        opened.here.place,
        slots=slots,
        context=context,
        compiled=compiled,
        cache_dtype=cache_dtype,
        readout=readout,
    )


@torch.no_grad()
def check_engine(loaded: LoadedModel) -> None:
    """Refuse a model whose keys and values do not fit the engine's cache. Where no test covers its type, the engine
    writes a few tokens, whose log-probabilities must be those of the whole row, with short windows as in parity.py."""
    model, problem = loaded.model, None
    if model.shape.model_type in TESTED:
        return
    prompt, width = probe_row(model)[0, :-4].tolist(), len(probe_row(model)[0])
    try:
        with short_windows(model):
            device, host = pick("cpu", dtype="fp32", compiled=False), torch.device("cpu")
            engine = Engine(model, KERNEL, loaded.tokenizer, device, host, slots=2, context=width + 1, graphs=False)
            greedy = Sampling(max_tokens=4, temperature=0.0, logprobs=True, stop_tokens=())
            (answer,) = engine.generate([Request(prompt, greedy)])
            row = torch.tensor([[*prompt, *answer.ids]])
            logits = model.cap(model(row, dense(model, KERNEL, width)) @ model.head.t())[0, len(prompt) - 1 : -1]
            expected = logits[:, : model.shape.vocab].log_softmax(-1).gather(-1, row[0, len(prompt) :, None])[:, 0]
            difference = relative_error(model, logits + (expected - torch.tensor(answer.logprobs))[:, None], logits)
            problem = f"log-probabilities differ by {difference:.2g}" if difference > tolerance(model) else None
    except MODEL_ERRORS as error:
        problem = first_line(error)
    if problem:
        raise UserError(
            f"model type {model.shape.model_type!r} cannot be generated with: its keys and values do not fit our cache "
            f"({problem}); choose another model"
        )
