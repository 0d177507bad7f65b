"""Compares an opened model with transformers, so that one which our attention or head does not fit is refused.

    check_parity(model)      # a UserError, or model.shape has the heads and widths that its layers really have

A few rows go through transformers alone and through our attention, whole and packed. Meanwhile attention windows are
shorter than these rows, on both sides: a window that only one side applies then changes its logits, however long the
window of the model is.
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

TESTED = {"llama", "mistral", "qwen2", "qwen3"}  # our tests compare these with transformers; others are compared here
UNSUPPORTED = "final_logit_softcapping", "attn_logit_softcapping", "logit_scale", "logits_scaling"
WINDOW, LENGTHS = 6, (5, 15, 4)  # tokens; documents of one row, of which one is longer than the window
KERNEL = Reference()
MODEL_ERRORS = RuntimeError, TypeError, AttributeError, IndexError, KeyError, ValueError, AssertionError


def check_parity(model: CausalLM) -> None:
    """Refuse a model that computes something which we do not; one of a type that no test covers is compared."""
    inner, kind = model.inner, model.shape.model_type
    config = inner.config.get_text_config()
    for name in UNSUPPORTED:
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise UserError(f"model type {kind!r} has {name}, which this engine does not compute; choose another model")
    head = inner.get_output_embeddings()
    if head is None or getattr(head, "bias", None) is not None:
        raise UserError(f"model type {kind!r} has no head of one plain matrix; choose another model")
    if kind not in TESTED:
        with short_windows(model):
            _compare(model)


@contextmanager
def short_windows(model: CausalLM) -> Iterator[None]:
    """Shorten all attention windows to WINDOW tokens, in transformers and here."""
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


def probe_row(model: CausalLM) -> Tensor:
    """(1, T) token ids."""
    return torch.arange(3, 3 + sum(LENGTHS), device=model.head.device)[None] % model.shape.vocab


@torch.no_grad()
def _compare(model: CausalLM) -> None:
    """Refuse a model unless both sides give the same logits, for a row and for a document in a packed row. The tensors
    that its layers hand to our attention say how many heads there are and how wide: a config.json may be wrong."""
    inner, row, heads_of = model.inner, probe_row(model), {}
    plain = dense(model, KERNEL, row.size(1))

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, *bounds: Any) -> Tensor:
        heads_of[layer] = q.size(2), k.size(2), q.size(3)
        return plain(layer, q, k, v, *bounds)  # type: ignore[call-arg]

    begin, end = LENGTHS[0], LENGTHS[0] + LENGTHS[1]
    try:
        ours = model(row, attend) @ model.head.t()
        packing = documents(KERNEL, np.array(LENGTHS, np.int32), row, model.dtype, restarts=model.restarts)
        packed = (model(row, attend, documents=packing) @ model.head.t())[:, begin:end]
        inner.set_attn_implementation("eager")
        theirs, alone = (inner(part, use_cache=False).logits for part in (row, row[:, begin:end]))
    except MODEL_ERRORS as error:
        raise UserError(
            f"model type {model.shape.model_type!r} does not run with our attention ({first_line(error)}); choose "
            "another model"
        ) from None
    finally:
        inner.set_attn_implementation(ATTENTION)
    difference = max(relative_error(model, ours, theirs), relative_error(model, packed, alone))
    if len(heads_of) != model.shape.depth or difference > tolerance(model):
        window = getattr(inner.config.get_text_config(), "sliding_window", None)
        advice = "; transformers may ignore its sliding_window: take it out of config.json then" if window else ""
        raise UserError(
            f"model type {model.shape.model_type!r} computes something that our attention does not ({len(heads_of)} of "
            f"{model.shape.depth} layers use it, logits differ by {difference:.2g}); choose another model{advice}"
        )
    if len(set(heads_of.values())) > 1:
        raise UserError(
            f"model type {model.shape.model_type!r} has layers that differ in their heads, and the cache has room for "
            "one kind; choose another model"
        )
    heads, kv_heads, head_dim = heads_of[0]
    model.shape = replace(model.shape, heads=heads, kv_heads=kv_heads, head_dim=head_dim)


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def relative_error(model: CausalLM, logits: Tensor, expected: Tensor) -> float:
    """The difference of logits (..., V), in units of the largest: of the worst token in float32. In 16 bits it is that
    of the median token, since rounding sends some tokens to another expert; a wrong computation moves most of them."""
    error = (logits.float() - expected.float()).abs().amax(-1) / expected.float().abs().max().clamp_min(1e-6)
    return float(error.max() if model.dtype == torch.float32 else error.median())


def tolerance(model: CausalLM) -> float:
    """The largest relative error of a model that computes the same."""
    return 1e-4 if model.dtype == torch.float32 else 0.1
