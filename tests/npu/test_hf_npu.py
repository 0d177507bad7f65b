"""Hugging Face models on the simulated NPU: our fused attention runs inside them, with the numbers of the CPU."""

from __future__ import annotations

from pathlib import Path

import hf_models
import numpy as np
import torch

import cannsim
from ascendchat.device import pick
from ascendchat.engine.engine import Engine
from ascendchat.engine.request import Request, Sampling
from ascendchat.models.fused import fuse
from ascendchat.nn.attention import Reference, dense, documents, kernels
from ascendchat.nn.loss import head_loss

LENGTHS = np.array([7, 25, 32, 64], np.int32)
LAYERS = 2


def launched(word: str, *without: str) -> int:
    found = cannsim.launches().items()
    return sum(count for name, count in found if word in name and not any(each in name for each in without))


def test_packed_losses_and_gradients_are_those_of_the_cpu(tmp_path: Path) -> None:
    kind = "qwen3"  # with norms of queries and keys; Qwen2: test_finetune_npu.py
    hf_models.save(tmp_path / kind, kind, num_hidden_layers=LAYERS)
    tokens = torch.randint(0, 300, (2, 65), generator=torch.Generator().manual_seed(0))
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for place, kernel in (("cpu", Reference()), ("npu", kernels("npu")["npu_fusion"])):
        device = pick(place, dtype="fp32", compiled=False)
        where = device.bind(0)
        model = hf_models.opened(tmp_path / kind).model.to(where)
        names = fuse(model, device.operators(), where)
        assert len(names) == (3 if place == "npu" else 0), names
        cannsim.reset()
        inputs, targets = tokens[:, :-1].to(where), tokens[:, 1:].to(where)
        known = documents(kernel, LENGTHS, inputs, torch.float32, restarts=True)
        hidden = model(inputs, dense(model, kernel, 64), documents=known)
        loss = head_loss(hidden, model.head, targets, model.shape.vocab, scorer=model.score)
        loss.backward()
        if place == "npu":
            assert launched("FlashAttentionVarLen", "Grad") == LAYERS
            assert [launched(name) for name in ("RmsNormGrad", "SwiGluGrad")] == [4 * LAYERS + 1, LAYERS]
            assert launched("RotaryPositionEmbeddingGrad") == 2 * LAYERS
        gradient = model.head.grad
        assert gradient is not None
        found[place] = loss.detach().cpu(), gradient.cpu()
    torch.testing.assert_close(found["npu"][0], found["cpu"][0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found["npu"][1], found["cpu"][1], atol=1e-4, rtol=1e-3)


def test_answers_in_bf16_are_as_likely_as_the_cpu_finds_them(tmp_path: Path) -> None:
    theirs = hf_models.save(tmp_path / "m", "llama", num_hidden_layers=LAYERS)
    device = pick("npu", dtype="bf16", compiled=False)
    opened = hf_models.opened(tmp_path / "m")
    model = opened.model.to_compute(torch.bfloat16).to(device.bind(0))
    kernel = kernels("npu")["npu_fusion"]
    engine = Engine(model, kernel, opened.tokenizer, device, device.bind(0), slots=2, context=64)
    sampling = Sampling(8, 0.0, stop_tokens=(), logprobs=True)
    prompts = [[5, 6, 7], [9] * 20, [11, 12]]
    cannsim.reset()
    answers = engine.generate([Request(prompt, sampling) for prompt in prompts])
    assert launched("FusedInferAttentionScore") > 0
    for prompt, answer in zip(prompts, answers):
        row = torch.tensor([[*prompt, *answer.ids]])
        with torch.no_grad():
            logprobs = theirs(row).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        wanted = logprobs.gather(-1, row[0, len(prompt) :, None])[:, 0]
        assert (torch.tensor(answer.logprobs) - wanted).abs().mean() < 0.15
