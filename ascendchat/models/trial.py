"""Tries a model out when it is opened: a model that our attention or our head does not fit is never a little wrong.

    check(model)          # a UserError, or model.shape has the heads and widths that its layers really have

A few rows go through transformers alone and through our attention, whole and packed. Windows are made shorter than
these rows meanwhile, on both sides: so it is seen whether both have one, however long it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ascendchat.errors import UserError
from ascendchat.models.causal_lm import ATTENTION, CausalLM
from ascendchat.nn.attention import Reference, dense, documents

PROVEN = {"llama", "mistral", "qwen2", "qwen3"}  # the tests compare these with transformers; others are tried at once
REFUSED = "final_logit_softcapping", "attn_logit_softcapping", "logit_scale", "logits_scaling"  # done by nobody here
WINDOW, LENGTHS = 6, (5, 15, 4)  # documents of one row, of which one is longer than the window
KERNEL = Reference()
TROUBLE = RuntimeError, TypeError, AttributeError, IndexError, KeyError, ValueError, AssertionError


def check(model: CausalLM) -> None:
    inner, kind = model.inner, model.shape.model_type
    config = inner.config.get_text_config()
    for name in REFUSED:
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise UserError(f"model type {kind!r} has {name}, which this engine does not compute; choose another model")
    head = inner.get_output_embeddings()
    if head is None or getattr(head, "bias", None) is not None:
        raise UserError(f"model type {kind!r} has no head of one plain matrix; choose another model")
    if kind not in PROVEN:
        with short_windows(model):
            compare(model)


@contextmanager
def short_windows(model: CausalLM) -> Iterator[None]:
    """Layers that see a window see WINDOW tokens, in transformers and here."""
    config, shape = model.inner.config.get_text_config(), model.shape
    window = getattr(config, "sliding_window", None)
    if isinstance(window, int) and window > WINDOW:
        config.sliding_window = WINDOW
        model.shape = replace(shape, layer_windows=tuple(min(layer, WINDOW) for layer in shape.layer_windows))
    try:
        yield
    finally:
        config.sliding_window = window
        model.shape = replace(model.shape, layer_windows=shape.layer_windows)


def trial_row(model: CausalLM) -> Tensor:
    """(1, T) token ids."""
    return torch.arange(3, 3 + sum(LENGTHS), device=model.head.device)[None] % model.shape.vocab


@torch.no_grad()
def compare(model: CausalLM) -> None:
    """Both must give the same logits, for a row and for a document in a packed row. What the layers hand to our
    attention says how many heads there are and how wide: a config.json may name other numbers, or none."""
    inner, row, seen = model.inner, trial_row(model), {}
    plain = dense(model, KERNEL, row.size(1))

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, *bounds: Any) -> Tensor:
        seen[layer] = q.size(2), k.size(2), q.size(3)
        return plain(layer, q, k, v, *bounds)  # type: ignore[call-arg]

    begin, end = LENGTHS[0], LENGTHS[0] + LENGTHS[1]
    try:
        ours = model(row, attend) @ model.head.t()
        known = documents(KERNEL, np.array(LENGTHS, np.int32), row, model.dtype, restarts=model.restarts)
        packed = (model(row, attend, documents=known) @ model.head.t())[:, begin:end]
        inner.set_attn_implementation("eager")
        theirs, alone = (inner(part, use_cache=False).logits for part in (row, row[:, begin:end]))
    except TROUBLE as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(
            f"model type {model.shape.model_type!r} does not run with our attention ({reason}); choose another model"
        ) from None
    finally:
        inner.set_attn_implementation(ATTENTION)
    far = max(distance(model, ours, theirs), distance(model, packed, alone))
    if len(seen) != model.shape.depth or far > tolerance(model):
        stray = getattr(inner.config.get_text_config(), "sliding_window", None)
        advice = "; transformers may ignore its sliding_window: take it out of config.json then" if stray else ""
        raise UserError(
            f"model type {model.shape.model_type!r} computes something that our attention does not ({len(seen)} of "
            f"{model.shape.depth} layers use it, logits differ by {far:.2g}); choose another model{advice}"
        )
    if len(set(seen.values())) > 1:
        raise UserError(
            f"model type {model.shape.model_type!r} has layers that differ in their heads, and the cache has room for "
            "one kind; choose another model"
        )
    heads, kv_heads, head_dim = seen[0]
    model.shape = replace(model.shape, heads=heads, kv_heads=kv_heads, head_dim=head_dim)


def distance(model: CausalLM, found: Tensor, wanted: Tensor) -> float:
    """How far the logits (..., V) of tokens are from what they should be, in units of the largest. Of 16 bits the usual
    token counts: rounding sends some to another expert, and what is computed wrongly moves most."""
    far = (found.float() - wanted.float()).abs().amax(-1) / wanted.float().abs().max().clamp_min(1e-6)
    return float(far.max() if model.dtype == torch.float32 else far.median())


def tolerance(model: CausalLM) -> float:
    return 1e-4 if model.dtype == torch.float32 else 0.1
