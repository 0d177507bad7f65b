"""Each addition is made in the files that docs/en/architecture.md names. A chip is added in device/test_toy_chip.py."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ascendchat.checkpoint import Shard
from ascendchat.cli import main
from ascendchat.data.chat import formats
from ascendchat.data.chat.render import Conversation
from ascendchat.data.chat.tables import TableRow
from ascendchat.doctor import explain, explain_rules
from ascendchat.rl.rewards import Judge, JudgeRequest
from ascendchat.tasks import by_name
from ascendchat.tasks.task import Task
from ascendchat.train import chat


def test_a_data_format_is_a_function_and_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def riddle(row: TableRow) -> Iterator[Conversation]:
        if not row["riddle"]:
            raise ValueError("there is no riddle")
        yield [{"role": "user", "content": row["riddle"]}, {"role": "assistant", "content": row["solution"]}]

    monkeypatch.setattr(formats, "READERS", ((riddle, ("riddle", "solution")), *formats.READERS))
    rows = [{"riddle": f"What is {n}?", "solution": str(n)} for n in range(3)] + [{"riddle": "", "solution": "x"}]
    file, said = tmp_path / "riddles.jsonl", list[str]()
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    talks = list(formats.conversations(file, say=said.append))
    assert [talk[-1]["content"] for talk in talks] == ["0", "1", "2"]
    assert "there is no riddle" in " ".join(said)


class Parity(Task):
    """A reward: is a number even?"""

    name, kind, language = "parity", "reply", "en"

    def __len__(self) -> int:
        return 10

    def example(self, index: int) -> Conversation:
        right = "odd" if index % 2 else "even"
        return [
            {"role": "user", "content": f"Is {index} even or odd?"},
            {"role": "assistant", "content": right},
        ]

    def correct(self, index: int, reply: str) -> bool:
        return reply.strip() == self.example(index)[-1]["content"]


def test_a_reward_is_a_task_and_a_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    load = by_name.load
    monkeypatch.setattr(by_name, "load", lambda name, *more: Parity() if name == "parity" else load(name, *more))
    task = by_name.load("parity")
    judge = Judge()
    try:
        verdicts = judge.verdicts(
            [JudgeRequest(task, 3, "odd"), JudgeRequest(task, 3, "even"), JudgeRequest(task, 4, " even ")]
        )
    finally:
        judge.close()
    assert [verdict.reward for verdict in verdicts] == [1.0, 0.0, 1.0]
    assert [len(talk) for talk in task] == [2] * 10, "mid and sft learn from it too"


RULE = """
- id: toy-overheats
  level: cause
  patterns:
    - 'TOY_E(?P<code>\\d+): core too hot'
  title: {en: The toy is too hot, zh: 玩具过热}
  cause: {en: 'Error {code} of its sensor.', zh: '传感器报错 {code}。'}
  check:
    - {en: 'Is the fan on?', zh: '风扇开着吗？'}
  commands:
    - cat toy.log
"""


def test_an_error_explanation_is_an_entry_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "rules"
    shutil.copytree(explain_rules.FOLDER, folder)
    (folder / "15_toy.yaml").write_text(RULE, encoding="utf-8")
    caches = explain_rules.all_rules, explain_rules.matchers
    monkeypatch.setattr(explain_rules, "FOLDER", folder)
    for cached in caches:
        cached.cache_clear()
    try:
        for lang, title in (("en", "The toy is too hot"), ("zh", "玩具过热")):
            (found,) = explain.explain("step 3\nRuntimeError: TOY_E42: core too hot\n", lang)
            assert (found.rule, found.title) == ("toy-overheats", title)
            assert "42" in found.cause
    finally:
        for cached in caches:
            cached.cache_clear()


class Sgd:
    """An optimizer of one rule: the methods of `train.stage.Optimizer`, and nothing of ours."""

    def __init__(self, model: torch.nn.Module, lr: float) -> None:
        self.parameters, self.lr, self.steps_done = dict(model.named_parameters()), lr, 0

    def gradients(self) -> list[Tensor]:
        return [weight.grad for weight in self.parameters.values() if weight.grad is not None]

    def zero_grad(self) -> None:
        for weight in self.parameters.values():
            weight.grad = None

    @property
    def step(self) -> Callable[..., Tensor]:
        return self._step

    @torch.no_grad()
    def _step(self, *, loss_scale: float, lr_scale: float, **_: float) -> Tensor:
        squares = torch.stack([(gradient / loss_scale).square().sum() for gradient in self.gradients()]).sum()
        for weight in self.parameters.values():
            if weight.grad is not None:
                weight -= self.lr * lr_scale / loss_scale * weight.grad
        self.zero_grad()
        self.steps_done += 1
        return squares

    def shards(self) -> dict[str, Tensor]:
        weights = self.parameters.items()
        return {Shard(name, "weight", 0, weight.numel()).key(): weight.detach().flatten() for name, weight in weights}

    @torch.no_grad()
    def load(self, read: Callable[[Shard], Tensor], steps_done: int) -> None:
        for name, weight in self.parameters.items():
            weight.copy_(read(Shard(name, "weight", 0, weight.numel())).view_as(weight))
        self.steps_done = steps_done


def test_an_optimizer_is_a_class_that_a_stage_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It trains, and continues bit for bit from a checkpoint."""
    monkeypatch.setenv("ASCENDCHAT_HOME", str(tmp_path))
    tiny = "--depth 1 --dim 64 --head-dim 32 --max-seq-len 128 --num-iterations 1 --sample-every 0 --eval-every -1"
    common = ["--device-type", "cpu", "--device-batch-size", "2", "--total-batch-size", "256", "--data", "toyworld"]
    assert main(["base", *tiny.split(), *common, "--run", "x"]) == 0
    monkeypatch.setattr(chat, "optimizer_for", lambda train_model, lrs: Sgd(train_model.model, 0.02))
    sft = ["sft", "--run", "x", *common, "--num-iterations", "4", "--save-every", "2", "--keep", "9"]
    sft += ["--sample-every", "0", "--log-every", "1", "--lr-multiplier", "0.1"]
    assert main(sft) == 0
    folder = tmp_path / "runs/x/sft"
    weights = (folder / "step_000004/model.safetensors").read_bytes()
    assert weights != (folder / "step_000002/model.safetensors").read_bytes()
    assert json.loads((folder / "step_000004/state.json").read_text(encoding="utf-8"))["updates"] == 4
    shutil.rmtree(folder / "step_000004")
    capsys.readouterr()
    assert main(sft) == 0
    assert "step 2" in capsys.readouterr().out
    assert (folder / "step_000004/model.safetensors").read_bytes() == weights
