"""Folders that we write, as transformers 4.57.6, the pinned transformers 5 and a real vLLM read them: `make exports`.

$ASCENDCHAT_EXPORT_PYTHONS are the Pythons of environments with one transformers each, $ASCENDCHAT_VLLM_PYTHON is that
of one with vLLM. None of them knows ascendchat, none has torch_npu."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import hf_models
import pytest
import torch
from open_export import IDS, TALK, TEXT

from ascendchat.models.export import export
from ascendchat.models.import_transformers import library
from ascendchat.sizes.hf import FAMILIES

pytestmark = pytest.mark.exports

PYTHONS = os.environ.get("ASCENDCHAT_EXPORT_PYTHONS", "").split()
VLLM = os.environ.get("ASCENDCHAT_VLLM_PYTHON", "")
SCRIPT = Path(__file__).with_name("open_export.py")

SIZES = {"hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
IDS_OF = {"eos_token_id": 303, "bos_token_id": 300, "pad_token_id": 301, "initializer_range": 0.1}
KNOWN = {**SIZES, **IDS_OF, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
THETA = {"rope_type": "default", "rope_theta": 3e6}  # no default of anybody's
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 64}
BY_LAYER = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 3e6}}
BY_LAYER |= {"sliding_attention": {"rope_type": "default", "rope_theta": 2e4}}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 64}}),
    "mistral": ("MistralConfig", {"sliding_window": 12}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2Config", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "qwen2_moe": ("Qwen2MoeConfig", {**EXPERTS, "shared_expert_intermediate_size": 32}),
    "qwen3": ("Qwen3Config", {}),
    "qwen3_moe": ("Qwen3MoeConfig", EXPERTS),
    "gemma3": ("Gemma3TextConfig", {"rope_parameters": BY_LAYER, "sliding_window": 12, "num_hidden_layers": 7}),
    "glm4": ("Glm4Config", {"rope_parameters": {**THETA, "partial_rotary_factor": 0.25}}),
    "gpt_neox": ("GPTNeoXConfig", {"rope_parameters": {**THETA, "partial_rotary_factor": 0.5}}),
}
FOR_VLLM = "qwen2", "qwen3", "qwen3_moe", "llama", "gemma3"


def make(kind: str, folder: Path) -> dict[str, Any]:
    """A random model, opened and exported by us; what it says by itself."""
    made, more = MODELS[kind]
    transformers = library()
    vocab = hf_models.texts().vocab_size + 5
    torch.manual_seed(0)
    config = getattr(transformers, made)(**{**KNOWN, "rope_parameters": THETA, "vocab_size": vocab, **more})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    start = folder / "start" / kind
    hf_models.save(start)
    model.save_pretrained(start)
    opened = hf_models.opened(start)
    export(opened.model, opened.tokenizer, folder / kind)
    inner = opened.tokenizer.inner
    with torch.no_grad():
        logprobs = model(torch.tensor([IDS])).logits[0].log_softmax(-1)
    return {"logprobs": logprobs, "ids": inner(TEXT).input_ids, "talk": inner.apply_chat_template(TALK, tokenize=False)}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """One per family that sizes/hf.py counts, and some with a rotation of their own."""
    assert set(FAMILIES) <= set(MODELS)
    folder = tmp_path_factory.mktemp("exports")
    return folder, {kind: make(kind, folder) for kind in MODELS}


def read(python: str, reader: str, folders: list[Path], out: Path) -> dict[str, Any]:
    plain = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CANNSIM_HOME")}
    plain |= {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    command = [python, str(SCRIPT), reader, str(out), *map(str, folders)]
    ended = subprocess.run(command, env=plain, capture_output=True, text=True, check=False)
    assert out.is_file(), ended.stderr[-4000:]  # written last; a vLLM on a CPU may still abort while Python ends
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.skipif(not PYTHONS, reason="needs environments with other transformers: make exports")
@pytest.mark.parametrize("python", PYTHONS)
def test_transformers_reads_what_we_have_written(
    python: str, models: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, wanted = models
    found = read(python, "transformers", [folder / kind for kind in MODELS], tmp_path / "read.json")
    for kind, known in wanted.items():
        torch.testing.assert_close(
            torch.tensor(found[kind]["logprobs"]), known["logprobs"], atol=1e-5, rtol=1e-5, msg=kind
        )
        assert {name: found[kind][name] for name in ("ids", "talk")} == {name: known[name] for name in ("ids", "talk")}


@pytest.mark.skipif(not VLLM, reason="needs a virtual environment with vLLM: make exports")
@pytest.mark.parametrize("kind", FOR_VLLM)
def test_vllm_reads_what_we_have_written(kind: str, models: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, wanted = models
    found = read(VLLM, "vllm", [folder / kind], tmp_path / "read.json")[kind]["of_ids"]
    known = wanted[kind]["logprobs"][:-1].gather(-1, torch.tensor(IDS[1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(found), known, atol=1e-4, rtol=1e-4)
