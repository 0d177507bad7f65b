"""Opens a model to generate with: loads it (models/open.py), tries it where no test knows its type, and makes its
engine.

    opened = open_for_generation(here, config, config.stage)
    engine = engine_for(opened, slots=16)

The trial runs a few tokens through cache and sampling: a model that cannot be generated with is refused at once.
"""

from __future__ import annotations

import torch

from ascendchat.config.generate import EvalBaseConfig, EvalChatConfig, ModelConfig
from ascendchat.device import pick
from ascendchat.device.cpu import prefer_plain_products
from ascendchat.engine.engine import Engine
from ascendchat.engine.request import Request, Sampling
from ascendchat.errors import UserError
from ascendchat.models.folder import OpenedFolder
from ascendchat.models.open import Opened, open_model
from ascendchat.models.trial import KERNEL, PROVEN, TROUBLE, distance, short_windows, tolerance, trial_row
from ascendchat.nn.attention import dense
from ascendchat.nn.logprobs import Readout
from ascendchat.parallel.context import Context


def open_for_generation(
    here: Context, config: ModelConfig | EvalChatConfig | EvalBaseConfig, stage: str | None
) -> Opened:
    """Find, verify, load and try what the flags name; everything that does not fit is a UserError."""
    return open_model(here, config, stage, trial=try_engine)


def engine_for(
    opened: Opened,
    slots: int,
    context: int | None = None,
    *,
    compiled: bool = False,
    cache_dtype: torch.dtype | None = None,
    readout: Readout | None = None,
) -> Engine:
    """An engine for `slots` rows of up to `context` tokens, by default as many as in training; `cache_dtype`: the dtype
    of its KV cache, if not the model's; `readout`: see Decoder."""
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
def try_engine(opened: OpenedFolder) -> None:
    """A few tokens through cache and sampling, of a model that no test knows: a UserError if the answer does not have
    the probabilities of the row that it makes. Windows are shorter than the row meanwhile, as in models/trial.py."""
    model, trouble = opened.model, None
    if model.shape.model_type in PROVEN:
        return
    prompt, width = trial_row(model)[0, :-4].tolist(), len(trial_row(model)[0])
    try:
        with short_windows(model):
            device, host = pick("cpu", dtype="fp32", compiled=False), torch.device("cpu")
            engine = Engine(model, KERNEL, opened.tokenizer, device, host, slots=2, context=width + 1, graphs=False)
            sampling = Sampling(max_tokens=4, temperature=0.0, logprobs=True, stop_tokens=())
            (answer,) = engine.generate([Request(prompt, sampling)])
            row = torch.tensor([[*prompt, *answer.ids]])
            logits = model.cap(model(row, dense(model, KERNEL, width)) @ model.head.t())[0, len(prompt) - 1 : -1]
            logprobs = logits[:, : model.shape.vocab].log_softmax(-1).gather(-1, row[0, len(prompt) :, None])[:, 0]
            gap = distance(model, logits + (logprobs - torch.tensor(answer.logprobs))[:, None], logits)
            trouble = f"log-probabilities differ by {gap:.2g}" if gap > tolerance(model) else None
    except TROUBLE as error:
        trouble = str(error).splitlines()[0] if str(error) else type(error).__name__
    if trouble:
        raise UserError(
            f"model type {model.shape.model_type!r} cannot be generated with: its keys and values do not fit our cache "
            f"({trouble}); choose another model"
        )
