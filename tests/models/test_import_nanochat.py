"""`ascendchat import nanochat`: checkpoints made by a reference of the published formulas (nanochat_reference.py)."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import nanochat_reference as nanochat
import pytest
import tiktoken
import torch

from ascendchat.checkpoint import Shard, newest
from ascendchat.cli import main
from ascendchat.config.generate import ModelConfig
from ascendchat.config.serve import ServeConfig
from ascendchat.data.chat.render import Counts, render, render_pieces, render_prompt
from ascendchat.data.tokenizer.tokenizer import Tokenizer
from ascendchat.device import pick
from ascendchat.engine.open import engine_for, open_for_generation
from ascendchat.engine.request import Request, Sampling
from ascendchat.errors import UserError, home
from ascendchat.models.nanochat import read_tokenizer
from ascendchat.nn.attention import dense
from ascendchat.parallel.context import joined
from ascendchat.serve.prompts import open_tokenizer
from ascendchat.serve.worker import open_engine

pytestmark = pytest.mark.usefixtures("one_thread")

RANKS = nanochat.ranks("the cat sat on the mat and the other cat sat there 2025 hello hello world again, my friend", 40)
STATE = {"name": "rustbpe", "pat_str": nanochat.PATTERN, "mergeable_ranks": RANKS}
STATE["special_tokens"] = nanochat.specials(len(RANKS))
VOCAB = len(RANKS) + len(nanochat.SPECIALS)  # 305, padded to 320


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of nanochat for every era: bfloat16 tables, names of a compiled model, a padded vocabulary."""
    folders = {}
    for era in nanochat.ERAS:
        folder = folders[era] = tmp_path_factory.mktemp("nanochat")
        config = nanochat.sizes(era, VOCAB)
        given = nanochat.weights(era, config, 320)
        given["transformer.wte.weight"] = given["transformer.wte.weight"].bfloat16()
        nanochat.save(folder / "base_checkpoints" / "d4", 4, given, config)  # not the last one
        nanochat.save(folder / "base_checkpoints" / "d4", 5, given, config, prefix="_orig_mod.")
        nanochat.write_tokenizer(folder / "tokenizer", STATE)
    return folders


def opened(run: str) -> Any:
    with joined(pick("cpu")) as here:
        return open_for_generation(here, ModelConfig(run=run, device_type="cpu"), None)


@pytest.mark.parametrize("era", nanochat.ERAS)
def test_the_imported_model_has_the_logits_and_answers_of_the_published_formulas(
    era: str, made: dict[str, Path]
) -> None:
    assert main(["import", "nanochat", str(made[era]), "--run", "theirs"]) == 0
    found = opened("theirs")
    assert (found.source.step, found.source.state["stage"]) == (5, "base")
    assert found.model.shape.formulas == f"nanochat-{era}"
    config = nanochat.sizes(era, VOCAB)
    given = torch.load(made[era] / "base_checkpoints" / "d4" / "model_000004.pt", weights_only=True)
    tokens = torch.randint(0, VOCAB, (2, 200), generator=torch.Generator().manual_seed(1))  # longer than a window
    hidden = found.model(tokens, dense(found.model, found.kernel, 200))
    ours = found.model.cap(hidden @ found.model.head[:VOCAB].t())
    wanted = nanochat.logits(era, config, given, tokens)
    assert wanted.std() > 0.5
    assert (ours.double() - wanted).abs().max() < 1e-4
    row, prompt = tokens[:1, :135], tokens[0, :135].tolist()  # and token by token, with the cache
    for _ in range(4):
        row = torch.cat((row, nanochat.logits(era, config, given, row)[:, -1:].argmax(-1)), 1)
    (answer,) = engine_for(found, 1, 256).generate([Request(prompt, Sampling(4, 0.0, stop_tokens=(), tools=False))])
    assert list(answer.ids)[:4] == row[0, 135:].tolist()


def test_the_tokenizer_gives_the_ids_of_the_pickled_one(made: dict[str, Path]) -> None:
    theirs = tiktoken.Encoding(**STATE)
    ours = read_tokenizer(made["2025-10"] / "tokenizer" / "tokenizer.pkl")
    for text in (
        "the cat's HELLO sat 12345\n\n there",
        "你好，世界 the\u3000cat",
        "  \n\t<|bos|>don'T",
        "\U0001f600 é",
    ):
        assert ours.encode(text) == theirs.encode_ordinary(text)
        assert ours.decode(ours.encode(text)) == text
    assert ours.vocab_size == theirs.n_vocab
    renamed = {"python": "tool"}
    for name, number in STATE["special_tokens"].items():
        word = name[2:-2].split("_")[0]
        assert ours.specials[name.replace(word, renamed.get(word, word))] == number


def test_a_file_that_tiktoken_wrote_itself_is_read_too(tmp_path: Path) -> None:
    for protocol in (2, 4, 5):
        (tmp_path / "tokenizer.pkl").write_bytes(pickle.dumps(tiktoken.Encoding(**STATE), protocol))
        assert read_tokenizer(tmp_path / "tokenizer.pkl").encode(" the cat") == [RANKS[b" the"], RANKS[b" cat"]]


def test_what_the_system_says_stands_before_the_first_words_of_the_user(made: dict[str, Path]) -> None:
    """As nanochat renders a conversation; python parts are tool parts here."""
    tokenizer = read_tokenizer(made["2025-10"] / "tokenizer" / "tokenizer.pkl")
    talk = [
        {"role": "system", "content": "sat."},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": [{"type": "tool", "text": "1+1"}, {"type": "output", "text": "2"}]},
    ]
    number = STATE["special_tokens"]
    ids = [number["<|bos|>"], number["<|user_start|>"], *tokenizer.encode("sat.\n\nhello"), number["<|user_end|>"]]
    prompt = [*ids, number["<|assistant_start|>"]]
    assert render_prompt(tokenizer, talk[:2]) == prompt
    call = [number["<|python_start|>"], *tokenizer.encode("1+1"), number["<|python_end|>"]]
    result = [number["<|output_start|>"], *tokenizer.encode("2"), number["<|output_end|>"]]
    whole = render(tokenizer, talk)
    assert whole.ids == [*prompt, *call, *result, number["<|assistant_end|>"]]
    assert whole.mask == [0] * len(prompt) + [1] * len(call) + [0] * len(result) + [1]
    assert render_prompt(tokenizer, talk[:1])[-3:] == [*tokenizer.encode("."), number["<|user_end|>"], prompt[-1]]
    later = [*talk, {"role": "user", "content": "mat"}, {"role": "assistant", "content": "cat"}]
    piece = render_pieces(tokenizer, later, 20, Counts())[-1]  # each piece is opened by the system message
    assert tokenizer.decode(piece.ids).startswith("<|bos|><|user_start|>sat.\n\nmat<|user_end|>")
    assert tokenizer.decode(render_prompt(tokenizer, later[:-1], 20)).count("sat.\n\nmat") == 1


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def test_a_pickle_that_would_run_a_program_is_refused_and_runs_nothing(
    made: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = tmp_path / "done"
    (tmp_path / "tokenizer.pkl").write_bytes(pickle.dumps(Evil(done)))
    nested = {**STATE, "special_tokens": {"<|bos|>": Evil(done)}}
    nanochat.write_tokenizer(tmp_path / "nested", nested)
    for folder in (tmp_path, tmp_path / "nested"):
        asked = ["import", "nanochat", str(made["2025-10"]), "--tokenizer", str(folder)]
        assert main([*asked, "--run", "evil"]) == 2
        assert "posix.system" in (told := capsys.readouterr().err)
        assert "nothing of it was run" in told
    model = tmp_path / "base_checkpoints" / "d4"
    nanochat.save(model, 1, {"x": Evil(done)}, nanochat.sizes("2025-10", VOCAB))  # type: ignore[dict-item]
    nanochat.write_tokenizer(tmp_path / "tokenizer", STATE)
    assert main(["import", "nanochat", str(model), "--run", "evil"]) == 2
    assert "holds more than tensors" in capsys.readouterr().err
    assert not done.exists()
    assert not (home() / "runs" / "evil" / "base" / "latest").exists()


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["import", "nanochat", *argv]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    return told


def test_what_cannot_be_imported_is_said_in_one_sentence(
    tmp_path: Path, made: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    config = nanochat.sizes("2026-03-14", VOCAB)
    given = nanochat.weights("2026-03-14", config, 320)
    base = tmp_path / "base_checkpoints"
    nanochat.write_tokenizer(tmp_path / "tokenizer", STATE)
    assert "holds no checkpoints of nanochat" in refusal(capsys, str(tmp_path / "tokenizer"))
    assert "there is no folder" in refusal(capsys, str(tmp_path / "nowhere"))
    nanochat.save(base / "d4", 1, {**given, "engram.weight": torch.zeros(2)}, config)
    assert "has engram.weight, which no version of nanochat has" in refusal(capsys, str(tmp_path))
    nanochat.save(base / "d4", 1, {k: v for k, v in given.items() if k != "smear_gate.weight"}, config)
    assert "lacks the weight smear_gate.weight" in refusal(capsys, str(tmp_path))
    nanochat.save(base / "d4", 1, given, {**config, "n_layer": 3})
    assert "which no version of nanochat has" in refusal(capsys, str(tmp_path))
    nanochat.save(base / "d4", 1, given, {**config, "n_head": 2, "n_kv_head": 2})
    assert "does not fit its meta file" in refusal(capsys, str(tmp_path))
    (base / "d4" / "meta_000001.json").unlink()
    assert "meta_000001.json is missing" in refusal(capsys, str(tmp_path))
    nanochat.save(base / "d4", 1, given, {**config, "vocab_size": 300})
    assert "has 300 tokens, its tokenizer 305" in refusal(capsys, str(tmp_path))
    (base / "d4" / "model_000001.pt").write_bytes(b"PK half a file")
    assert "cannot be read" in refusal(capsys, str(tmp_path))
    nanochat.save(base / "d12", 1, given, config)
    assert "holds the models d12, d4" in refusal(capsys, str(tmp_path))
    assert main(["import", "nanochat", str(tmp_path), "--model-tag", "d12"]) == 0
    assert "is there already; choose another name" in refusal(capsys, str(tmp_path), "--model-tag", "d12")
    assert "leave out --step" in refusal(capsys, str(tmp_path), "--model-tag", "d12", "--step", "7", "--run", "b")
    broken = {**STATE, "special_tokens": {name: n + 1 for name, n in STATE["special_tokens"].items()}}
    nanochat.write_tokenizer(tmp_path / "odd", broken)
    asked = str(tmp_path), "--model-tag", "d12", "--run", "b", "--tokenizer"
    assert "numbers its tokens otherwise" in refusal(capsys, *asked, str(tmp_path / "odd"))
    nanochat.write_tokenizer(tmp_path / "odd", "gpt2")
    assert "holds no vocabulary of its own" in refusal(capsys, *asked, str(tmp_path / "odd"))
    (tmp_path / "odd" / "tokenizer.pkl").write_bytes(b"\x80\x04nonsense")
    assert "is no whole pickle" in refusal(capsys, *asked, str(tmp_path / "odd"))
    assert "cannot be read" in refusal(capsys, *asked, str(tmp_path / "nowhere"))


def test_a_stage_that_cannot_be_read_leaves_none_of_the_others_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = nanochat.sizes("2026-03-14", VOCAB)
    given = nanochat.weights("2026-03-14", config, 320)
    for kind in ("base", "chatsft"):
        nanochat.save(tmp_path / f"{kind}_checkpoints" / "d4", 9, given, config)
    nanochat.write_tokenizer(tmp_path / "tokenizer", STATE)
    broken = tmp_path / "chatsft_checkpoints" / "d4" / "model_000009.pt"
    whole = broken.read_bytes()
    broken.write_bytes(whole[:100])
    (home() / "runs" / ".d4.importing" / "base").mkdir(parents=True)  # of one that was killed
    assert "cannot be read" in refusal(capsys, str(tmp_path))
    assert list((home() / "runs").iterdir()) == []
    broken.write_bytes(whole)
    assert main(["import", "nanochat", str(tmp_path)]) == 0
    assert sorted(path.name for path in (home() / "runs").iterdir()) == ["d4"]
    assert sorted(path.parent.name for path in (home() / "runs" / "d4").glob("*/latest")) == ["base", "sft"]
    told = capsys.readouterr().out
    assert f"{broken} -> {home() / 'runs' / 'd4' / 'sft' / 'step_000009'} (" in told
    assert ".importing" not in told


def test_stages_and_windows_are_taken_as_named(made: dict[str, Path], tmp_path: Path) -> None:
    config = nanochat.sizes("2026-03-14", VOCAB)
    given = nanochat.weights("2026-03-14", config, 320)
    for kind in ("mid", "chatsft", "chatrl"):
        nanochat.save(tmp_path / f"{kind}_checkpoints" / "d4", 9, given, config)
    nanochat.write_tokenizer(tmp_path / "tokenizer", STATE)
    assert main(["import", "nanochat", str(tmp_path), "--run", "all", "--window-pattern", "l"]) == 0
    assert sorted(path.parent.name for path in (home() / "runs" / "all").glob("*/latest")) == ["mid", "rl", "sft"]
    saved = newest(home() / "runs" / "all" / "sft", optimizer=True)
    assert saved is not None
    assert saved.state["shape"]["window_pattern"] == "L"
    assert Tokenizer.load(saved.folder.parent / "tokenizer").fingerprint == saved.state["tokenizer"]
    only = tmp_path / "chatrl_checkpoints" / "d4" / "model_000009.pt"
    assert main(["import", "nanochat", str(only), "--run", "one"]) == 0
    assert [path.parent.name for path in (home() / "runs" / "one").glob("*/latest")] == ["rl"]


def test_pretraining_does_not_go_on_from_it(
    made: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "ascendchat.data.toyworld.documents", lambda split: ["the cat sat on the mat " * 9 + split] * 20
    )
    assert main(["import", "nanochat", str(made["2025-10"]), "--run", "theirs"]) == 0
    asked = ["base", "--run", "theirs", "--data", "toyworld", "--device-type", "cpu", "--max-seq-len", "16"]
    for horizon in (["--minutes", "0.01"], ["--steps", "1"]):
        assert main([*asked, *horizon]) == 2
        assert "or --resume never" in capsys.readouterr().err


@pytest.mark.slow
def test_sft_goes_on_from_it_and_chat_answers(
    made: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "the cat sat on the mat"}]
    (tmp_path / "talk.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 40)
    assert main(["import", "nanochat", str(made["2026-03-14"]), "--run", "theirs"]) == 0
    before = opened("theirs")
    asked = ["sft", "--run", "theirs", "--data", str(tmp_path / "talk.jsonl"), "--steps", "8", "--device-type", "cpu"]
    asked += ["--total-batch-size", "512", "--device-batch-size", "2", "--lr-multiplier", "0.3"]
    assert main(asked) == 0
    rows = [json.loads(line) for line in (home() / "runs/theirs/sft/metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    wanted = render(before.tokenizer, talk)
    row = torch.tensor([wanted.ids])
    raw = before.model(row, dense(before.model, before.kernel, row.size(1))) @ before.model.head[:VOCAB].t()
    nats = torch.nn.functional.cross_entropy(before.model.cap(raw)[0, :-1], row[0, 1:], reduction="none")
    first = float((nats * torch.tensor(wanted.mask[1:])).sum() / sum(wanted.mask))
    assert losses[0] == pytest.approx(first, rel=1e-3)  # it started from the imported weights
    assert losses[-1] < 0.8 * losses[0]
    capsys.readouterr()
    assert main("chat --run theirs -p hello -t 0 --max-tokens 8 --device-type cpu".split()) == 0
    assert capsys.readouterr().out.strip()
    with pytest.raises(UserError, match="without the state of its optimizer"):
        before.source.reader()(Shard("head", "first", 0, 4))


@pytest.mark.slow
def test_serve_and_rl_work_on_it(tmp_path: Path) -> None:
    config = nanochat.sizes("2026-01", VOCAB)
    nanochat.save(tmp_path / "chatsft_checkpoints" / "d4", 9, nanochat.weights("2026-01", config, 320), config)
    nanochat.write_tokenizer(tmp_path / "tokenizer", STATE)
    assert main(["import", "nanochat", str(tmp_path)]) == 0
    engine, ready = open_engine(ServeConfig(run="d4", device_type="cpu", slots=1), 0)
    assert (ready.model["stage"], ready.model["step"], ready.model["chats"]) == ("sft", 9, True)
    assert open_tokenizer(Path(ready.model["tokenizer"])).fingerprint == engine.tokenizer.fingerprint
    asked = "rl --run d4 --data toy_arithmetic_en --steps 1 --prompts-per-step 2 --samples 2 --max-new-tokens 6"
    assert main([*asked.split(), "--eval-every", "-1", "--device-type", "cpu"]) == 0
    saved = newest(home() / "runs" / "d4" / "rl")
    assert saved is not None
    assert (saved.step, saved.state["shape"]["formulas"]) == (1, "nanochat-2026-01")
