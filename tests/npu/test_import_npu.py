"""A checkpoint that nanochat saved from an NPU is imported, and the NPU computes what the published formulas say."""

from __future__ import annotations

from pathlib import Path

import nanochat_reference as nanochat
import pytest
import torch

import cannsim
from ascendchat.cli import main
from ascendchat.config.generate import ModelConfig
from ascendchat.device import pick
from ascendchat.engine.open import open_for_generation
from ascendchat.nn.attention import dense, kernels
from ascendchat.parallel.context import joined

RANKS = {bytes([value]): value for value in range(256)}
STATE = {"name": "x", "pat_str": nanochat.PATTERN, "mergeable_ranks": RANKS, "special_tokens": nanochat.specials(256)}


def test_logits_on_the_npu_are_those_of_the_published_formulas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    era = "2026-03-14"
    monkeypatch.setenv("ASCENDCHAT_DTYPE", "fp32")
    config = nanochat.sizes(era, 265, sequence_len=128, n_layer=3)
    given = nanochat.weights(era, config, 320)
    on_npu = {name: tensor.to("npu:0") for name, tensor in given.items()}
    nanochat.save(tmp_path / "base_checkpoints" / "d3", 5, on_npu, config)
    nanochat.write_tokenizer(tmp_path / "tokenizer", STATE)
    assert main(["import", "nanochat", str(tmp_path), "--run", f"from-{era}"]) == 0
    with joined(pick("npu")) as here:
        found = open_for_generation(here, ModelConfig(run=f"from-{era}", device_type="npu"), None)
    assert found.kernel.name == "sdpa"  # the fused kernels do not generate in float32
    tokens = torch.randint(0, 265, (2, 100), generator=torch.Generator().manual_seed(1))
    cannsim.reset()
    hidden = found.model(tokens.to("npu:0"), dense(found.model, kernels("npu")["npu_fusion"], 100))
    assert cannsim.launches()["aclnnFlashAttentionScore"] == 3
    ours = found.model.cap(hidden @ found.model.head[:265].t()).cpu()
    assert (ours.double() - nanochat.logits(era, config, given, tokens)).abs().max() < 1e-3
