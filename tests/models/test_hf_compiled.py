"""The layers of a Hugging Face model, compiled for training: one graph for all, and the numbers of the eager ones."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import hf_models
import numpy as np
import pytest
import torch

from ascendchat.data.loader import MicroBatch
from ascendchat.device import pick
from ascendchat.engine.engine import Engine
from ascendchat.engine.request import Request, Sampling
from ascendchat.models.causal_lm import run
from ascendchat.models.lora import LoraSettings, add_lora
from ascendchat.nn.attention import KERNELS, Attention, Sdpa
from ascendchat.train.model import TrainModel

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
LENGTH = 32
LENGTHS = [[7, 15, 1, 9, 32], [32, 32], [32, 3, 3, 3, 23]]  # documents of the two rows of each micro-batch
Open = Callable[..., Any]


class Compiler:
    """torch.compile for the layers only, which counts graphs; gradients as a compiler sees them, but no kernels."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, fn: Any, **options: Any) -> Any:
        return torch.compile(fn, backend=self.backend, **options) if fn is run else fn

    def backend(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)  # type: ignore[no-any-return]


class Broken(Compiler):
    def backend(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1
        raise RuntimeError("no such instruction\nand a page of it")


class Breaking(Sdpa):
    """Attention that no graph can go through."""

    def _rows(self, *args: Any) -> torch.Tensor:
        torch._dynamo.graph_break()
        return super()._rows(*args)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """What the device compiles with."""
    return installed(Compiler(), monkeypatch)


def installed(made: Compiler, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    torch.compiler.reset()
    monkeypatch.setattr("ascendchat.device.cpu.compiled", made)
    return made


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Open:
    """Opens a tiny model of some kind and number of layers, in training mode."""

    @cache
    def saved(kind: str, layers: int) -> Path:
        folder = tmp_path_factory.mktemp("compiled") / kind
        hf_models.save(folder, kind, num_hidden_layers=layers)
        return folder

    def open_it(kind: str = "llama", layers: int = 1) -> Any:
        found = hf_models.opened(saved(kind, layers), LENGTH)
        found.model.train()
        return found

    return open_it


def train_model(
    model: Any, *, compiled: bool, by_document: bool = True, kernel: Attention = KERNELS["sdpa"]
) -> TrainModel:
    device = pick("cpu", dtype="fp32", compiled=compiled)
    return TrainModel(model, kernel, device, CPU, by_document=by_document)


def batch(number: int) -> MicroBatch:
    rows = torch.randint(0, 300, (2, LENGTH + 1), generator=torch.Generator().manual_seed(number))
    inputs, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    return MicroBatch(inputs, targets, np.array(LENGTHS[number % 3], np.int32), targets.numel())


def trained(taught: TrainModel, steps: int = 1) -> tuple[list[float], list[torch.Tensor]]:
    """The loss of each micro-batch, of which a step has two, and all gradients, of plain gradient descent."""
    losses, gradients = [], []
    learns = [parameter for parameter in taught.model.parameters() if parameter.requires_grad]
    for step in range(steps):
        for part in range(2):
            loss = taught.loss(batch(2 * step + part), torch.tensor(1 / 256))
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(float(loss.detach()))
        for parameter in learns:
            assert parameter.grad is not None
            gradients.append(parameter.grad.clone())
            parameter.data.sub_(parameter.grad, alpha=1e-3)
            parameter.grad = None
    return losses, gradients


def agree(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(found[0], wanted[0], rtol=1e-5)
    for mine, theirs in zip(found[1], wanted[1], strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layers", "by_document", "graphs"), [("llama", 2, False, 1), ("qwen2", 3, True, 2)]
)  # of the second model the first layer has no window, the two others have one
def test_equal_layers_are_one_graph_and_losses_and_gradients_stay(
    kind: str, layers: int, by_document: bool, graphs: int, compiler: Compiler, opened: Open
) -> None:
    eager, fast = (opened(kind, layers).model for _ in range(2))
    wanted = trained(train_model(eager, compiled=False, by_document=by_document), 2)
    assert not compiler.graphs
    names = list(fast.state_dict())
    agree(trained(train_model(fast, compiled=True, by_document=by_document), 2), wanted)
    assert compiler.graphs == graphs
    assert list(fast.state_dict()) == names


@pytest.mark.long(short="test_equal_layers_are_one_graph_and_losses_and_gradients_stay")
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral"])
def test_kernels_of_the_compiler_give_the_numbers_of_eager_layers(kind: str, opened: Open) -> None:
    torch.compiler.reset()
    eager, fast = (opened(kind, 2).model for _ in range(2))
    agree(trained(train_model(fast, compiled=True), 3), trained(train_model(eager, compiled=False), 3))


@pytest.mark.slow
@pytest.mark.parametrize(("change", "graphs"), [("checkpointing", 1), ("adapters", 2)])
def test_recomputed_activations_and_adapters_are_compiled_too(
    change: str, graphs: int, compiler: Compiler, opened: Open
) -> None:
    models = [opened(layers=2).model for _ in range(2)]
    for model in models:
        if change == "adapters":  # what comes into the first layer learns nothing: it has a graph of its own
            add_lora(model, LoraSettings(rank=4, alpha=8.0))
            model.train()
        else:
            model.checkpoint_activations()
    wanted = trained(train_model(models[0], compiled=False))
    agree(trained(train_model(models[1], compiled=True)), wanted)
    assert compiler.graphs == graphs


def test_answers_and_scores_between_steps_compile_nothing(compiler: Compiler, opened: Open) -> None:
    found, plain = opened(), opened()
    taught = train_model(found.model, compiled=True)
    trained(taught)
    trained(train_model(plain.model, compiled=False))
    prompts = [[5, 6, 7], [9] * 10, list(range(40, 61))]
    asked = [Request(prompt, Sampling(max_tokens=4, temperature=0.0, stop_tokens=())) for prompt in prompts]
    answers = []
    for each in (found, plain):
        each.model.eval()
        device = pick("cpu", dtype="fp32")
        engine = Engine(each.model, KERNELS["sdpa"], each.tokenizer, device, CPU, slots=2, context=LENGTH)
        answers.append([answer.ids for answer in engine.generate(asked)])
    assert answers[0] == answers[1]
    with torch.no_grad():
        rows = batch(0)
        taught.nats(MicroBatch(rows.inputs.numpy(), rows.targets.numpy(), rows.lengths, 1))  # type: ignore[arg-type]
    found.model.train()
    trained(taught)
    assert compiler.graphs == 1


def test_the_last_and_smaller_batch_of_an_evaluation_is_not_compiled(compiler: Compiler, opened: Open) -> None:
    taught = train_model(opened().model, compiled=True, by_document=False)
    rows = batch(0).inputs
    with torch.no_grad():
        whole = taught.hidden(rows, None)
        last = taught.hidden(rows[:1], None)
    assert compiler.graphs == 1
    torch.testing.assert_close(last, whole[:1])
    taught.hidden(rows[:1], None)  # steps of fewer rows, after memory ran out
    assert compiler.graphs == 2
    with torch.no_grad():
        taught.hidden(rows[:1], None)
    assert compiler.graphs == 3


def test_more_sizes_than_the_compiler_keeps_do_not_end_training(
    compiler: Compiler, opened: Open, capsys: pytest.CaptureFixture[str]
) -> None:
    taught = train_model(opened().model, compiled=True, by_document=False)
    with torch._dynamo.config.patch(recompile_limit=2):
        for rows in range(1, 5):
            taught.hidden(batch(0).inputs[:1].expand(rows, -1).contiguous(), None).sum().backward()
    assert compiler.graphs == 2
    said = capsys.readouterr().out
    assert said.startswith("the layers of the model are not compiled: FailOnRecompileLimitHit: ")
    assert said.count("\n") == 1


def test_a_compiler_that_fails_is_named_once_and_training_goes_on(
    opened: Open, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = installed(Broken(), monkeypatch)
    eager, fast = (opened().model for _ in range(2))
    fast.checkpoint_activations()
    agree(trained(train_model(fast, compiled=True)), trained(train_model(eager, compiled=False)))
    assert broken.graphs == 1
    said = capsys.readouterr().out
    assert said == "the layers of the model are not compiled: RuntimeError: no such instruction\n"


def test_a_layer_that_is_no_single_graph_runs_as_it_is(
    compiler: Compiler, opened: Open, capsys: pytest.CaptureFixture[str]
) -> None:
    eager, fast = (opened().model for _ in range(2))
    agree(trained(train_model(fast, compiled=True, kernel=Breaking())), trained(train_model(eager, compiled=False)))
    assert not compiler.graphs
    assert capsys.readouterr().out.startswith("the layers of the model are not compiled: Unsupported: ")


def test_nothing_is_compiled_where_it_is_not_sound(compiler: Compiler, opened: Open) -> None:
    class Unpacked(Sdpa):
        compiles_packed = False

    model = opened().model
    trained(train_model(model, compiled=True, kernel=Unpacked()))
    trained(train_model(model, compiled=False))
    model.compiles_layers = False  # 4 bits, shared out weights, fused operators: train/start.py
    trained(train_model(model, compiled=True))
    assert not compiler.graphs


@pytest.mark.slow
def test_a_copy_of_a_compiled_model_runs_its_own_weights(compiler: Compiler, opened: Open) -> None:
    model = opened().model
    taught = train_model(model, compiled=True)
    copied = deepcopy(taught.model).requires_grad_(False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    known = taught.documents(batch(0).inputs, batch(0).lengths)
    assert not taught.hidden(batch(0).inputs, known).any()
    wanted = train_model(opened().model, compiled=False).hidden(batch(0).inputs, known)
    for found in (
        train_model(copied, compiled=True).hidden(batch(0).inputs, known),
        copied(batch(0).inputs, taught.attend, documents=known),
    ):
        torch.testing.assert_close(found, wanted.detach(), atol=1e-5, rtol=1e-5)
