"""Losses on pairs on the simulated NPU: reference, loss, metrics and gradients are those of the CPU."""

from __future__ import annotations

from pathlib import Path

import hf_models
import pytest
import torch
from preference_runs import config_of, write_pairs

import cannsim
from ascendchat.device import pick
from ascendchat.models.folder import HFFolder
from ascendchat.nn.attention import kernels
from ascendchat.sizes.batch import Split
from ascendchat.tasks.pair_mixture import open_pair_mixture
from ascendchat.train.model import TrainModel
from ascendchat.train.preference import PreferenceStage

LAYERS = 2


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model and pairs."""
    folder = tmp_path_factory.mktemp("pairs")
    hf_models.save(folder / "tiny", "qwen2", num_hidden_layers=LAYERS, initializer_range=0.1)
    write_pairs(folder / "pairs.jsonl", 24)
    return folder


def stage_on(kind: str, kernel: str, place: Path, method: str) -> PreferenceStage:
    device = pick(kind, dtype="fp32", compiled=False)  # type: ignore[arg-type]
    opened, config = hf_models.opened(place / "tiny", 96), config_of(place, "x", method, pref_ftx=0.1)
    train_model = TrainModel(
        opened.model.to(device.bind(0)), kernels("npu")[kernel], device, device.bind(0), by_document=True
    )
    mixture = open_pair_mixture(config.data, opened.tokenizer, 96, say=lambda line: None)
    origin = HFFolder(place / "tiny")
    return PreferenceStage(method, train_model, Split(1, 3, 1, 192), 4, mixture, opened.tokenizer, config, origin)


@pytest.mark.parametrize("method", ["dpo", "simpo"])
def test_a_step_on_pairs_is_that_of_the_cpu(method: str, place: Path) -> None:
    cpu, npu = stage_on("cpu", "reference", place, method), stage_on("npu", "npu_fusion", place, method)
    if method == "dpo":
        tables = [stage.reference_table() for stage in (cpu, npu)]
        torch.testing.assert_close(tables[1], tables[0], atol=1e-3, rtol=1e-4)
        for stage, table in zip((cpu, npu), tables):
            stage.reference = table - torch.linspace(0, 9, table.numel()).view(table.shape)
    cannsim.reset()
    wanted, found = (stage.forward_backward(next(iter(stage.micro_batches(0))), 4.0) for stage in (cpu, npu))
    launched = sum(count for name, count in cannsim.launches().items() if "FlashAttentionVarLen" in name)
    assert launched == LAYERS, "packed attention is the fused kernel"
    assert found.value.item() == pytest.approx(wanted.value.item(), rel=1e-3)
    for name, value in wanted.metrics.items():
        assert found.metrics[name].item() == pytest.approx(value.item(), abs=1e-3), name
    for (name, mine), theirs in zip(cpu.model.named_parameters(), npu.model.parameters()):
        assert mine.grad is not None, name
        assert theirs.grad is not None, name
        assert (mine.grad - theirs.grad.cpu()).norm() <= 5e-3 * mine.grad.norm() + 1e-5, name
