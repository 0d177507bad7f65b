"""What is tried when a model is opened: heads, windows longer than any trial, packed rows, cache and sampling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hf_models
import numpy as np
import pytest
import torch
from test_hf_engine import PROMPTS, engine, generated, greedy

from ascendchat.engine.cache import KVCache
from ascendchat.engine.open import check_engine
from ascendchat.engine.request import Request
from ascendchat.errors import UserError
from ascendchat.models.folder import LoadedModel, find
from ascendchat.nn.attention import KERNELS, dense, documents

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = [7, 30, 11]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "values narrower than queries (V2)": ("deepseek_v2", {}),
    "values narrower than queries (V3)": ("deepseek_v3", {}),
    "heads that nobody reads": ("gpt2", {"num_key_value_heads": 2}),
    "a window that nobody reads": ("llama", {"sliding_window": 6}),
    "layers that nobody reads": ("llama", {"sliding_window": 6, "layer_types": ["sliding_attention"] * 3}),
}


def opened(folder: Path, **named: Any) -> LoadedModel:
    """As every command opens it. `named`: what config.json says besides."""
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **named}))
    found = find(folder)
    assert found is not None
    model = found.load(torch.float32)
    check_engine(model)
    return model


def made(kind: str, folder: Path, **sizes: Any) -> Any:
    return hf_models.save(folder, kind, num_hidden_layers=3, initializer_range=0.1, **sizes)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_a_model_whose_config_says_something_else_answers_and_is_packed_as_transformers_would(
    case: str, tmp_path: Path
) -> None:
    kind, more = CASES[case]
    theirs = made(kind, tmp_path)
    found = opened(tmp_path, **more)
    answers = engine(found).generate([Request(prompt, greedy()) for prompt in PROMPTS])
    assert [answer.ids for answer in answers] == [generated(theirs, prompt)[0] for prompt in PROMPTS]
    model, row = found.model, torch.arange(3, 3 + sum(LENGTHS))[None]
    alone = [theirs(part).logits for part in row.split(LENGTHS, dim=1)]
    for kernel in (KERNELS[name] for name in ("sdpa", "eager", "reference")):
        for per_document in (True, False):
            bounds = documents(kernel, np.array(LENGTHS, np.int32), row, torch.float32, restarts=True)
            if not per_document:
                masked = kernel.bounds(np.array(LENGTHS, np.int32), 1, False, lambda tensor: tensor)
                bounds = bounds._replace(bounds=masked)
            logits = model(row, dense(model, kernel), documents=bounds) @ model.head.t()
            torch.testing.assert_close(logits, torch.cat(alone, dim=1), atol=1e-4, rtol=1e-3)


def test_a_window_that_is_longer_than_the_trial_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An OLMo 2 has none, whatever its config.json says; a Mixtral has one."""
    sizes = {name: hf_models.config("llama").to_dict()[name] for name in ("hidden_size", "vocab_size")}
    hf_models.save(tmp_path / "olmo2")
    olmo = hf_models.library().Olmo2Config(
        **sizes, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0
    )
    hf_models.library().AutoModelForCausalLM.from_config(olmo).save_pretrained(tmp_path / "olmo2")
    opened(tmp_path / "olmo2")
    with pytest.raises(UserError, match=r"transformers may ignore its sliding_window: take it out of config.json then"):
        opened(tmp_path / "olmo2", sliding_window=200)
    made("mixtral", tmp_path / "mixtral", sliding_window=200)
    assert opened(tmp_path / "mixtral").model.shape.windows(240) == (200,) * 3
    monkeypatch.setattr("ascendchat.models.shape.windows_of", lambda _, depth: (0,) * depth)
    with pytest.raises(UserError, match=r"computes something that our attention does not"):
        opened(tmp_path / "mixtral")


def test_a_cache_that_does_not_fit_is_a_sentence_when_the_model_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made("mixtral", tmp_path)
    opened(tmp_path)
    put = KVCache.put_tokens

    def late(self: KVCache, layer: int, rows: Any, position: Any, k: Any, v: Any) -> None:
        put(self, layer, rows, position, k, v * 2.0)

    monkeypatch.setattr(KVCache, "put_tokens", late)
    with pytest.raises(UserError, match=r"cannot be generated with: .*log-probabilities differ by .*; choose"):
        opened(tmp_path)
    monkeypatch.setattr("ascendchat.engine.engine.Engine.generate", lambda *_: [][0])
    with pytest.raises(UserError, match=r"do not fit our cache \(list index out of range\); choose another model"):
        opened(tmp_path)


def test_layers_with_heads_of_different_widths_are_refused_in_a_sentence(tmp_path: Path) -> None:
    if not hasattr(hf_models.library(), "Gemma4TextConfig"):
        pytest.skip("this transformers has no Gemma 4")
    made_layers = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
    made("gemma4_text", tmp_path, head_dim=8, global_head_dim=16, num_global_key_value_heads=1, **made_layers)
    with pytest.raises(UserError, match=r"'gemma4_text' has layers that differ in their sizes.*; choose another model"):
        opened(tmp_path)
