"""`finetune --lora --bits 4`: the packed base computes what its unpacked weights do, stays as it is, and adapters on it
take the steps of a plain loop of peft; what does not go with it is refused before a model is read."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import hf_models
import pytest
import torch
from test_finetune import LAYERS, LENGTH, STEPS, TOKENS, logits_of, our_losses, place, plain_losses, words

from ascendchat.checkpoint import newest
from ascendchat.chips import find
from ascendchat.cli import main
from ascendchat.config import parse
from ascendchat.config.finetune import FinetuneConfig
from ascendchat.errors import UserError, home
from ascendchat.models.lora import LoraSettings, add_lora
from ascendchat.models.quantize import check_packing, pack, packed_bytes
from ascendchat.nn.attention import KERNELS, dense
from ascendchat.sizes.hf import PACKED_BYTES, check_bits_on
from ascendchat.train.finetune import checked

__all__ = ["place"]  # a fixture
pytestmark = pytest.mark.usefixtures("one_thread")
packs = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None,
    reason="bitsandbytes is not installed: pip install -e '.[qlora]' to run this test",
)
CPU = torch.device("cpu")


def packed_layers(model: Any) -> dict[str, Any]:
    import bitsandbytes

    found = {name: m for name, m in model.named_modules() if isinstance(m, bitsandbytes.nn.Linear4bit)}
    assert len(found) == LAYERS * 7
    return found


@torch.no_grad()
def unpacked(layer: Any) -> torch.Tensor:
    import bitsandbytes

    found: torch.Tensor = bitsandbytes.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    return found


def with_unpacked_weights(plain: Any, layers: dict[str, Any]) -> Any:
    """`plain` with the numbers that the packed layers stand for."""
    with torch.no_grad():
        for name, layer in layers.items():
            plain.get_submodule(name.replace(".base_layer", "")).weight.copy_(unpacked(layer))
    return plain


@packs
@pytest.mark.parametrize(("kind", "dtype"), [("qwen2", torch.float32), ("llama", torch.bfloat16)])
def test_a_packed_model_computes_what_its_unpacked_weights_do(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    hf_models.save(tmp_path / "tiny", kind, num_hidden_layers=LAYERS)
    model, plain = (hf_models.opened(tmp_path / "tiny").model.to_compute(dtype) for _ in range(2))
    before = logits_of(model)
    assert "14 linear layers are held in 4 bits (nf4, bitsandbytes" in pack(model, CPU)
    with_unpacked_weights(plain, packed_layers(model))
    assert torch.equal(logits_of(model), logits_of(plain))
    assert not torch.equal(logits_of(model), before)

    gradients = []
    for each in (model, plain):
        add_lora(each, LoraSettings(rank=4), seed=1)
        with torch.no_grad():  # peft begins with an output of 0
            for name, parameter in each.named_parameters():
                if "lora_B" in name:
                    parameter.fill_(0.02)
        assert {p.dtype for p in each.parameters() if p.requires_grad} == {dtype}
        hidden = each.train()(TOKENS, dense(each, KERNELS["sdpa"]))
        (hidden.float() ** 2).mean().backward()
        gradients.append({name: p.grad for name, p in each.named_parameters() if p.grad is not None})
    assert len(gradients[0]) == 2 * 7 * LAYERS
    assert all(torch.equal(gradients[0][name], gradient) for name, gradient in gradients[1].items())


@packs
@pytest.mark.parametrize("kind", ["qwen2", "llama"])  # with a head that is the table of tokens, and without
def test_linear_layers_and_nothing_else_take_the_memory_that_is_planned_and_stay_near(
    tmp_path: Path, kind: str
) -> None:
    hf_models.save(tmp_path / "tiny", kind, num_hidden_layers=LAYERS, hidden_size=128, intermediate_size=256)
    model, plain = (hf_models.opened(tmp_path / "tiny").model for _ in range(2))
    pack(model, CPU)
    layers = packed_layers(model)
    for name, layer in layers.items():
        weights = layer.in_features * layer.out_features
        assert layer.weight.dtype == torch.uint8
        assert layer.weight.nbytes == weights // 2
        tables = 4 * (16 + 256 + 1)  # levels of a weight, of a scale, and the mean of the scales
        assert packed_bytes(layer) - tables == pytest.approx(weights * PACKED_BYTES, abs=4)
        weight, found = plain.get_submodule(name).weight, unpacked(layer)
        assert max(len(block.unique()) for block in found.view(-1, 64)) == 16
        assert (found - weight).norm() < 0.11 * weight.norm()  # 0.09 of normal numbers
    held = sum(layer.in_features * layer.out_features for layer in layers.values())
    assert held == model.shape.counted.packed_parameters
    assert model.shape.total_parameters == plain.shape.total_parameters
    for name, parameter in model.named_parameters():
        if name.removesuffix(".weight") not in layers:
            assert torch.equal(parameter, dict(plain.named_parameters())[name]), name


@packs
def test_a_validation_leaves_the_gradients_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPUs that multiply bf16 bitsandbytes packs anew when it validates, into a form without gradients."""
    from bitsandbytes.nn import modules

    monkeypatch.setattr(modules, "has_avx512bf16", lambda: True)
    hf_models.save(tmp_path / "tiny", num_hidden_layers=LAYERS)
    model = hf_models.opened(tmp_path / "tiny").model
    pack(model, CPU)
    add_lora(model, LoraSettings(rank=4))
    bits = {name: layer.weight.clone() for name, layer in packed_layers(model).items()}
    logits_of(model.eval())
    model.train()(TOKENS, dense(model, KERNELS["sdpa"])).square().mean().backward()
    learns = {name: p for name, p in model.named_parameters() if "lora_B" in name}
    assert len(learns) == 7 * LAYERS
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in learns.values())
    assert all(torch.equal(bits[name], layer.weight) for name, layer in packed_layers(model).items())


@packs
@pytest.mark.parametrize("more", [(), ("--use-dora", "--activation-checkpointing")], ids=["lora", "dora"])
def test_a_run_takes_the_steps_of_a_plain_loop_and_leaves_the_base_as_it_is(
    place: Path, more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import peft

    trained: list[Any] = []
    monkeypatch.setattr("ascendchat.models.open.pack", lambda model, at: (trained.append(model), pack(model, at))[1])
    assert main(words(place, "four", "--lora", "--bits", "4", "--lora-rank", "4", *more)) == 0
    said = capsys.readouterr().out
    assert "14 linear layers are held in 4 bits" in said

    fresh = hf_models.opened(place / "tiny", LENGTH).model
    pack(fresh, CPU)
    layers, after = packed_layers(fresh), packed_layers(trained[0])
    for name, layer in layers.items():
        held = after[f"{name}.base_layer"]
        assert held.weight.dtype == torch.uint8
        assert not held.weight.requires_grad
        assert torch.equal(held.weight, layer.weight)
        assert torch.equal(unpacked(held), unpacked(layer))

    base = hf_models.library().AutoModelForCausalLM.from_pretrained(place / "tiny", dtype=torch.float32)
    settings = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules="all-linear", use_dora=bool(more), task_type="CAUSAL_LM"
    )
    torch.manual_seed(0)
    model = peft.get_peft_model(with_unpacked_weights(base, layers), settings).train()
    losses = our_losses("four")
    assert losses == pytest.approx(plain_losses(place, model, 0.0), rel=2e-4)
    assert losses[-1] < losses[0]
    validated = float(said.split("held-out loss before: ")[1].split()[0])
    assert validated > losses[-1]


@packs
def test_export_adds_the_adapters_to_the_base_as_it_was(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import peft

    out = place / "adapter-at-the-end"
    assert main(words(place, "out", "--qlora", "--lora-rank", "4", "--output-dir", str(out))) == 0
    merged = place / "merged"
    assert main(["export", "--run", "out", "--out", str(merged), "--device-type", "cpu"]) == 0
    assert "quantization_config" not in json.loads((merged / "config.json").read_text())
    load = hf_models.library().AutoModelForCausalLM.from_pretrained
    plain, alone = (load(folder, dtype=torch.float32).eval() for folder in (merged, place / "tiny"))
    adapted = peft.PeftModel.from_pretrained(load(place / "tiny", dtype=torch.float32), out).eval()
    with torch.no_grad():
        found, wanted, before = plain(TOKENS).logits, adapted(TOKENS).logits, alone(TOKENS).logits
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    assert (found - before).abs().max() > 0.1
    weights = alone.state_dict()
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, weights[name]) == ("_proj.weight" not in name), name
    capsys.readouterr()
    chat = ["chat", "-p", "What is 3 plus 4?", "-t", "0", "--max-tokens", "8", "--device-type", "cpu"]
    assert main([*chat, "--run", "out"]) == 0
    of_the_run = capsys.readouterr().out
    assert main([*chat, "--model", str(merged)]) == 0
    assert capsys.readouterr().out == of_the_run


@packs
def test_a_run_goes_on_to_the_same_bytes_and_other_bits_are_another_run(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = words(place, "twice", "--data", f"{place / 'sums.jsonl'}=1", "--lora", "--lora-dropout", "0.2")
    assert main([*asked, "--bits", "4"]) == 0
    whole = newest(home() / "runs" / "twice" / "hf")
    assert whole is not None
    file = whole.folder / "model.safetensors"
    wanted = file.read_bytes()
    assert all("lora_" in name for name in whole.model())
    shutil.rmtree(whole.folder)
    capsys.readouterr()
    assert main([*asked, "--bits", "4"]) == 0
    assert "continuing after step 2" in capsys.readouterr().out
    assert file.read_bytes() == wanted
    assert main(asked) == 2
    assert "was written with bits 4, this command has None" in capsys.readouterr().err


@packs
def test_pairs_are_learnt_on_a_packed_base(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = words(place, "pairs", "--data", str(place / "pairs.jsonl"), "--stage", "dpo", "--max-seq-len", "128")
    assert main([*asked, "--lora", "--steps", "1"]) == 0  # leaves what its reference says
    assert main([*asked, "--qlora", "--resume", "never"]) == 0
    losses = our_losses("pairs")[-STEPS:]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-5)  # here the reference is the packed base
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("lines", "bits"),
    [
        ("finetuning_type: lora\nquantization_bit: 4\nquantization_method: bnb", 4),
        ("load_in_4bit: true\nbnb_4bit_quant_type: nf4", 4),
        ("qlora: true", 4),
        ("use_qlora: true\nlora: true", 4),
        ("lora: true\nquantization_bit: null\nload_in_4bit: false\nload_in_8bit: false", None),
    ],
)
def test_names_of_llama_factory_and_of_small_guides_mean_the_same(tmp_path: Path, lines: str, bits: int | None) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"model_name_or_path: x\ndataset: y\n{lines}\n", encoding="utf-8")
    config = checked(parse(FinetuneConfig, [str(file)]))
    assert (config.lora, config.bits, config.learning_rate) == (True, bits, 1e-4)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--bits", "4"), "--bits 4 holds the frozen base of adapters; add --lora"),
        (("--bits", "4", "--stage", "dpo"), "holds the frozen base of adapters; add --lora"),
        (("--lora", "--bits", "4", "--shard", "2"), "--shard cuts weights, and those of --bits 4 are packed"),
        (("--qlora", "--shard", "2", "--offload"), "leave one of the two out"),
        (("--lora", "--bits", "8"), "--bits: '8' is not a valid value; choose from: 4"),
        (("--load-in-8bit",), "a base is held in 4 bits (--lora --bits 4), or as it computes; leave it out"),
        (("--lora", "--bits", "4"), "--bits 4 needs bitsandbytes (import of bitsandbytes halted"),
    ],
)
def test_what_cannot_be_packed_is_refused_before_a_model_is_read(
    place: Path,
    more: tuple[str, ...],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # as if it were not installed
    monkeypatch.setattr("ascendchat.train.start.open_for_training", None)  # nobody gets as far as that
    assert main([*words(place, "never"), *more]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert "leave" in said or "choose" in said


@pytest.mark.parametrize(("chip", "title"), [("Ascend910B3", "Ascend NPU"), ("Apple M1", "Apple GPU")])
def test_chips_without_bitsandbytes_are_named(chip: str, title: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=f"used on CUDA and CPU and not on {title}; leave it out: LoRA keeps the base"):
        check_bits_on(find(chip))
    check_bits_on(find("H200"))
    check_bits_on(find("cpu"))


@packs
def test_a_bitsandbytes_that_does_not_run_here_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import bitsandbytes

    check_packing(CPU, torch.float32)
    check_packing(CPU, torch.bfloat16)

    def broken(*_: Any) -> None:
        raise RuntimeError("no kernel image is available\nand more")

    layer = bitsandbytes.nn.Linear4bit
    monkeypatch.setattr(layer, "forward", broken)
    with pytest.raises(UserError, match=r"not run on cpu \(no kernel image is available\); install another one"):
        check_packing(CPU, torch.float32)
    monkeypatch.setattr(layer, "forward", lambda self, x: 2 * x)
    with pytest.raises(UserError, match="something else than it should on cpu; install another one, or leave --bits"):
        check_packing(CPU, torch.float32)
