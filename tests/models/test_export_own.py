"""`ascendchat export`: what it writes and where; and plain transformers agrees, which knows nothing of ascendchat."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import engine_models
import hf_models
import nanochat_reference as nanochat
import pytest
import torch
from safetensors.torch import load_file
from test_import_nanochat import STATE, VOCAB

from ascendchat.checkpoint import Writer
from ascendchat.cli import main
from ascendchat.config.generate import ModelConfig
from ascendchat.config.serve import ServeConfig
from ascendchat.data.chat.render import render, render_prompt
from ascendchat.data.tokenizer.tokenizer import Tokenizer
from ascendchat.device import pick
from ascendchat.engine.open import engine_for, open_for_generation
from ascendchat.engine.request import Request, Sampling
from ascendchat.errors import UserError, home
from ascendchat.models.export import draft_of, export, export_adapter
from ascendchat.models.folder import describe
from ascendchat.models.open import OpenedModel
from ascendchat.nn.attention import dense
from ascendchat.parallel.context import joined
from ascendchat.serve.prompts import open_tokenizer
from ascendchat.serve.worker import open_engine

pytestmark = pytest.mark.usefixtures("one_thread")

TEXTS = ["hello he's 12345\n\n 你好", "  the cat\tsat.\n", "\U0001f600"]
TALK = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "17 + 25?"},
    {"role": "assistant", "content": [{"type": "text", "text": "see: "}, {"type": "tool", "text": "17+25"}]},
    {"role": "tool", "content": "42"},
    {"role": "assistant", "content": "it is 42"},
    {"role": "user", "content": [{"type": "text", "text": "hello"}]},
]
ROWS = torch.randint(0, 250, (2, 140), generator=torch.Generator().manual_seed(3))  # longer than a window of 128

# Run by a Python without ascendchat: it may not be imported. Writes <folder>.safetensors and <folder>.json.
PLAIN = """
import json, sys
sys.modules["torch_npu"] = sys.modules["ascendchat"] = None
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
told = json.load(sys.stdin)
for folder in told["folders"]:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = torch.tensor(told["rows"])
    with torch.no_grad():
        plain = model(rows, use_cache=False).logits
        half = model(rows[:, :70], use_cache=True)
        rest = [model(rows[:, 70:100], past_key_values=half.past_key_values)]
        rest += [model(rows[:, at : at + 1], past_key_values=half.past_key_values) for at in range(100, 140)]
        cached = torch.cat([half.logits, *(part.logits for part in rest)], 1)
        padded = torch.cat((torch.full((2, 5), 7), rows), 1)
        mask = torch.cat((torch.zeros(2, 5, dtype=torch.long), torch.ones_like(rows)), 1)
        left = model(padded, attention_mask=mask, use_cache=False).logits[:, 5:]
        loss = model(rows, labels=rows).loss
    ends = dict(max_new_tokens=8, do_sample=False, eos_token_id=None)
    written = [model.generate(rows[:1, :130], use_cache=cache, **ends)[0, 130:].tolist() for cache in (True, False)]
    beams = model.generate(rows[:1, :130], num_beams=3, **ends)[0, 130:].tolist()
    both = model.generate(padded, attention_mask=mask, **ends)[:, 145:].tolist()
    save_file({"plain": plain, "cached": cached, "left": left + 0, "loss": loss[None]}, folder + ".safetensors")
    texts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in told["texts"]]
    chats = [tokenizer.apply_chat_template(told["talk"][:end], add_generation_prompt=end != 5, tokenize=False)
             for end in (2, 5, 6)]
    found = {"written": written, "both": both, "beams": beams, "chats": chats, "vocab": len(tokenizer),
             "stop": model.generation_config.eos_token_id, "pad": tokenizer.pad_token_id}
    found["texts"] = texts
    found["learns"] = []  # the weight of the middle, by layers
    for layers in (2, 3):
        model.config.num_hidden_layers, model.config.value_layers = layers, [1]
        small = type(model)(model.config)
        small(rows[:1, :20], labels=rows[:1, :20]).loss.backward()
        found["learns"].append(small.backout.grad is not None)
    json.dump(found, open(folder + ".json", "w"))
"""


def save_run(name: str, stage: str) -> None:
    """A run with one checkpoint of a small model in which every part matters."""
    made, tokenizer = engine_models.model(kv_heads=2), engine_models.tokenizer()
    folder = home() / "runs" / name / stage
    tokenizer.save(folder / "tokenizer")
    writer = Writer(folder)
    state = {"stage": stage, "shape": made.shape.to_dict(), "tokenizer": tokenizer.fingerprint}
    writer.save(7, model=dict(made.state_dict()), shards={}, state=state)
    writer.wait()


def opened(**named: Any) -> OpenedModel:
    with joined(pick("cpu")) as here:
        return open_for_generation(here, ModelConfig(device_type="cpu", **named), None)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Our own model and one of nanochat's, exported, and what transformers makes of both."""
    place = tmp_path_factory.mktemp("exported")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASCENDCHAT_HOME", str(place / "home"))
        save_run("mine", "sft")
        config = nanochat.sizes("2026-01", VOCAB)
        nanochat.save(place / "n" / "chatsft_checkpoints" / "d4", 5, nanochat.weights("2026-01", config, 320), config)
        nanochat.write_tokenizer(place / "n" / "tokenizer", STATE)
        assert main(["import", "nanochat", str(place / "n"), "--run", "theirs"]) == 0
        for run in ("mine", "theirs"):
            asked = ["export", "--to", "hf", "--run", run, "--stage", "sft", "--out", str(place / run)]
            assert main([*asked, "--device-type", "cpu"]) == 0
    folders = {"mine": place / "mine", "theirs": place / "theirs"}
    told = {"folders": [str(path) for path in folders.values()], "rows": ROWS.tolist(), "texts": TEXTS, "talk": TALK}
    own = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(place / "cache"), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    asked = [sys.executable, "-c", PLAIN]
    done = subprocess.run(
        asked, input=json.dumps(told), text=True, env={**os.environ, **own}, cwd=place, capture_output=True, timeout=400
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {**folders, "home": place / "home"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mine", "theirs"])
def test_transformers_alone_computes_the_same_logits(
    name: str, exported: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASCENDCHAT_HOME", str(exported["home"]))
    ours = opened(run=name)
    hidden = ours.model(ROWS, dense(ours.model, ours.kernel, ROWS.size(1)))
    wanted = ours.model.cap(hidden @ ours.model.head[: ours.model.shape.vocab].t())
    assert wanted.std() > 0.5
    found = load_file(f"{exported[name]}.safetensors")
    for kind in ("plain", "cached", "left"):
        assert (found[kind] - wanted).abs().max() < 1e-4, kind
    loss = torch.nn.functional.cross_entropy(wanted[:, :-1].flatten(0, 1), ROWS[:, 1:].flatten())
    assert float(found["loss"]) == pytest.approx(float(loss), abs=1e-4)
    told = json.loads(Path(f"{exported[name]}.json").read_text())
    engine = engine_for(ours, 1, 256)
    ends = Sampling(8, 0.0, stop_tokens=(), tools=False)
    (answer,) = engine.generate([Request(ROWS[0, :130].tolist(), ends)])
    assert told["written"] == [answer.ids, answer.ids]
    assert told["both"] == [found.ids for found in engine.generate([Request(row.tolist(), ends) for row in ROWS])]
    assert len(told["beams"]) == 8
    assert told["learns"] == [False, True], "of two layers the middle is the end"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mine", "theirs"])
def test_transformers_alone_has_the_same_tokens_and_conversations(name: str, exported: dict[str, Path]) -> None:
    tokenizer = Tokenizer.load(exported[name])
    told = json.loads(Path(f"{exported[name]}.json").read_text())
    assert told["texts"] == [tokenizer.encode(text) for text in TEXTS]
    assert told["vocab"] == tokenizer.vocab_size
    assert (told["stop"], told["pad"]) == (list(tokenizer.stops), tokenizer.pad)
    wanted = [render_prompt(tokenizer, TALK[:2]), render(tokenizer, TALK[:5]).ids, render_prompt(tokenizer, TALK)]
    assert told["chats"] == [tokenizer.decode(ids) for ids in wanted]


@pytest.mark.slow
def test_chat_serve_and_eval_open_an_exported_model_as_their_own(
    exported: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(exported["mine"])
    found = opened(checkpoint=folder)
    assert (type(found.model).__name__, found.chats, found.source.step) == ("GPT", True, 7)
    assert main(["chat", "--model", folder, "-p", "hello", "--max-tokens", "5", "--device-type", "cpu"]) == 0
    asked = ["eval", "chat", "--model", folder, "--tasks", "toy_arithmetic_en", "--max-per-task", "2"]
    assert main([*asked, "--max-new-tokens", "4", "--device-type", "cpu"]) == 0
    engine, ready = open_engine(ServeConfig(checkpoint=folder, device_type="cpu", slots=1), 0)
    assert (ready.model["stage"], ready.model["chats"]) == ("sft", True)
    assert open_tokenizer(Path(ready.model["tokenizer"])).fingerprint == engine.tokenizer.fingerprint
    capsys.readouterr()
    assert main(["export", "--model", folder, "--out", f"{folder}-again", "--device-type", "cpu"]) == 0
    again = Path(f"{folder}-again")
    assert (again / "model.safetensors").read_bytes() == (exported["mine"] / "model.safetensors").read_bytes()


def test_a_model_of_ours_is_written_as_it_was_saved_with_all_that_transformers_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_run("mine", "sft")
    monkeypatch.setenv("ASCENDCHAT_DTYPE", "bf16")  # which the model would be in if it answered
    out = tmp_path / "not" / "there yet"
    assert main(["export", "--run", "mine", "--out", str(out), "--device-type", "cpu"]) == 0
    assert f"{home() / 'runs' / 'mine' / 'sft' / 'step_000007'} -> {out}" in capsys.readouterr().out
    saved, found = (load_file(path / "model.safetensors") for path in (next(home().glob("runs/mine/sft/step*")), out))
    assert saved.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in saved.items())
    code = {"configuration_ascendchat.py", "modeling_ascendchat.py"}
    assert {"config.json", "generation_config.json", "tokenizer.json", *code} <= {path.name for path in out.iterdir()}
    config = json.loads((out / "config.json").read_text())
    assert config["windows"] == [128, 128, 0], "the last layer sees all"
    assert (config["num_hidden_layers"], config["smear_gate_channels"], config["dtype"]) == (3, 24, "float32")
    assert (config["stage"], config["step"]) == ("sft", 7)
    for command in ("sft", "rl"):
        assert main([command, "--start", str(out), "--device-type", "cpu"]) == 2
        assert "train its run instead" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--to gguf --out x", "no maintained library writes GGUF for our own architecture"),
        ("", "name the folder to write: --out DIR"),
        ("--adapter --out x", "holds a whole model and no adapters; leave out --adapter"),
    ],
)
def test_what_cannot_be_exported_is_said(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    save_run("mine", "sft")
    assert main(["export", "--run", "mine", "--device-type", "cpu", *words.split()]) == 2
    assert said in capsys.readouterr().err


def test_a_folder_gets_its_name_when_it_is_complete_and_nothing_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "new" / "deep", tmp_path / "empty"):
        with draft_of(folder) as draft:
            (draft / "weights").write_text("whole")
            assert not (folder / "weights").exists()
        assert (folder / "weights").read_text() == "whole"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "new"], "no draft is left"
    for taken in (tmp_path / "empty", tmp_path / "empty" / "weights"):
        with pytest.raises(UserError, match=f"{taken.name} is not empty; name another folder"), draft_of(taken):
            pytest.fail("the work would be done first")


def test_a_model_of_hugging_face_is_written_whole_and_described_without_its_weights(tmp_path: Path) -> None:
    hf_models.save(tmp_path / "tiny")
    opened = hf_models.opened(tmp_path / "tiny")
    export(opened.model, opened.tokenizer, tmp_path / "out")
    again = hf_models.opened(tmp_path / "out")
    weights = again.model.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in opened.model.state_dict().items())
    assert again.tokenizer.fingerprint == opened.tokenizer.fingerprint
    describe(opened.model, opened.tokenizer, tmp_path / "beside")
    names = {path.name for path in (tmp_path / "beside").iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= names
    assert not list((tmp_path / "beside").glob("*.safetensors"))


def test_adapters_are_written_without_what_describes_their_base(tmp_path: Path) -> None:
    (tmp_path / "beside").mkdir()
    for name in ("adapter_config.json", "config.json", "generation_config.json", "base.json", "tokenizer.json"):
        (tmp_path / "beside" / name).write_text("{}")
    export_adapter(tmp_path / "beside", {"a": torch.ones(2)}, tmp_path / "out")
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["adapter_config.json", "adapter_model.safetensors", "tokenizer.json"]
    assert torch.equal(load_file(tmp_path / "out" / "adapter_model.safetensors")["a"], torch.ones(2))
