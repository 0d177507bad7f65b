"""The engine as a Generator: streams end and free their slots, new weights answer. A generator that is asked over HTTP
gives the same: tests/serve/test_remote_generator.py."""

from __future__ import annotations

import io
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import engine_models as make
import pytest
import torch

from ascendchat.config.infer import ChatConfig
from ascendchat.data.chat import Conversation, render_prompt
from ascendchat.device import pick
from ascendchat.eval.examine import Examiner, GeneratorChooser, ModelChooser, examine
from ascendchat.infer.engine import Engine
from ascendchat.infer.request import Request, Sampling
from ascendchat.infer.stream import EngineStream
from ascendchat.nn.attention import Sdpa
from ascendchat.nn.gpt import GPT
from ascendchat.serve.terminal import Chat
from ascendchat.tasks.base import Task

pytestmark = pytest.mark.usefixtures("one_thread")

TEXT = make.tokenizer()
START = TEXT.specials["<|assistant_start|>"]
CONTEXT = 160
LONG = 4096  # tokens: an answer that is not ended takes long


def local(made: GPT, slots: int = 3, context: int = CONTEXT, kernel: Any = None) -> Engine:
    return make.engine(made, pick("cpu", compiled=False), kernel or Sdpa(), slots=slots, context=context)


def endless(kernel: Any = None) -> Engine:
    """One slot, and a model that says "ababab" for ever."""
    made = make.scripted(make.script([START, ord("a"), ord("b"), ord("a")]), seq_len=LONG)
    return local(made, slots=1, context=LONG, kernel=kernel)


def stream_of(engine: Engine) -> EngineStream:
    return engine.stream(Request([START], Sampling(temperature=0.0, max_tokens=LONG - 2)))


def assert_free(engine: Engine) -> None:
    """The slot is free, and the next one is answered as the first would be."""
    assert engine.running == [None]
    assert engine.generate([Request([START], Sampling(temperature=0.0, max_tokens=3))])[0].text == "aba"


def greedy_requests(count: int = 4, tokens: int = 8) -> list[Request]:
    prompts = [render_prompt(TEXT, [{"role": "user", "content": f"hello {i} 你好" * (i + 1)}]) for i in range(count)]
    return [Request(prompt, Sampling(max_tokens=tokens, temperature=0.0, stop_tokens=())) for prompt in prompts]


class Quiz(Task):
    """Two to five letters to choose from; some prompts are longer than the context."""

    name, kind, baseline = "quiz", "choice", 0.25

    def __len__(self) -> int:
        return 12

    def prompt(self, index: int) -> Conversation:
        return [{"role": "user", "content": f"Question {index}?" * (1 + 2 * index)}]

    def letters(self, index: int) -> Sequence[str]:
        return "ABCDE"[: 2 + index % 4]

    def answer(self, index: int) -> int:
        return index % 2


def test_a_generator_chooses_what_the_model_chooses() -> None:
    made = make.model(3)
    engine = local(made)
    choosers = (
        GeneratorChooser(engine),
        ModelChooser(made, Sdpa(), torch.device("cpu"), max_tokens=2000, max_len=CONTEXT),
    )
    slow, fast = (examine(Quiz(), Examiner(TEXT, chooser, engine)) for chooser in choosers)
    assert slow.right == fast.right
    assert 0 < sum(fast.right) < 12
    assert slow.cropped > 0, "a prompt that fills the context leaves no room for the letter"


class Interrupting(Sdpa):
    """Ctrl-C is pressed in the middle of a step."""

    steps = 0

    def cached(self, *inputs: Any) -> torch.Tensor:
        self.steps += 1
        if self.steps == 4:
            signal.raise_signal(signal.SIGINT)
        return super().cached(*inputs)


def test_ctrl_c_ends_an_answer_behind_the_step_under_way_and_frees_its_slot() -> None:
    kernel, out = Interrupting(), io.StringIO()
    engine = endless(kernel)
    talk = Chat(engine, TEXT, ChatConfig(temperature=0.0, max_tokens=50), True, out, colour=False)
    assert not talk.answer("hi")
    assert (out.getvalue(), kernel.steps) == ("ababa\n", 4), "the token of the step under way is still shown"
    assert talk.messages[-1]["content"] == "ababa", "what was shown is what was said"
    assert_free(engine)
    assert talk.answer("hi"), "and the conversation goes on"


def test_a_closed_stream_frees_its_slot_and_can_be_read_to_its_end() -> None:
    engine = endless()
    stream, waiting = stream_of(engine), stream_of(engine)
    text = next(stream).text
    waiting.close()  # it has not begun
    stream.close()
    text += "".join(piece.text for piece in stream)
    assert (stream.completion.text, stream.completion.finish_reason) == (text, "cancelled")
    assert text.startswith("ab")
    assert len(stream.completion.ids) < LONG // 2
    assert (list(waiting), waiting.completion.ids, waiting.completion.finish_reason) == ([], [], "cancelled")
    stream.close()  # once more: nothing happens
    assert_free(engine)


@pytest.mark.parametrize(
    "then", [Engine.step, lambda engine: engine.load(dict(engine.decoder.model.state_dict()), 2)], ids=["step", "load"]
)
def test_a_forgotten_stream_frees_its_slot_and_new_weights_do_not_wait_for_it(then: Callable[[Engine], None]) -> None:
    engine = endless()
    for _piece in stream_of(engine):
        break
    (job,) = [job for job in engine.running if job is not None]
    then(engine)
    assert len(job.completion.ids) < LONG // 2
    assert_free(engine)


def test_a_stream_that_the_garbage_collector_takes_during_a_step_loses_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = endless()
    streams, enter = [stream_of(engine)], engine.reading.enter

    def forget_and_enter(*arguments: Any) -> None:
        streams.clear()
        enter(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(engine.reading, "enter", forget_and_enter)
        for _ in range(3):
            engine.step()
    assert_free(engine)


def test_new_weights_answer_like_an_engine_built_with_them() -> None:
    requests, later = greedy_requests(), make.model(6)
    expected = local(later).generate(requests)
    generator = local(make.model(5))
    before = generator.generate(requests)
    weights = {name: tensor.clone() for name, tensor in later.state_dict().items()}
    generator.load(weights, 12)
    after = generator.generate(requests)
    assert (generator.version, {one.version for one in before}, {one.version for one in after}) == (12, {0}, {12})
    assert [one.ids for one in after] == [one.ids for one in expected]
    assert all(one.ids != other.ids for one, other in zip(after, before))
    for tensor in weights.values():
        tensor.zero_()  # they were copied: the caller may go on with his
    assert [one.ids for one in generator.generate(requests)] == [one.ids for one in expected]


def test_weights_may_be_numbered_by_the_clock() -> None:
    """POST /update_weights takes any version; one that an engine cannot write down would end its worker."""
    engine = local(make.model())
    engine.renew(20261117230000)
    (answer,) = engine.generate([Request([1, 2, 3], Sampling(max_tokens=4, stop_tokens=()))])
    assert answer.versions == [20261117230000] * 4


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"smear": None}, "smear is missing"),
        ({"optim.step": torch.zeros(1)}, "optim.step is unknown"),
        ({"smear": torch.zeros(2)}, r"smear is \(2,\) instead of \(1,\)"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(change: dict[str, torch.Tensor | None], says: str) -> None:
    generator, requests = local(make.model(5)), greedy_requests(2)
    before = generator.generate(requests)
    weights = {name: tensor for name, tensor in {**make.model(6).state_dict(), **change}.items() if tensor is not None}
    with pytest.raises(ValueError, match=says):
        generator.load(weights, 4)
    assert generator.version == 0
    after = [replace(answer, cached_tokens=0) for answer in generator.generate(requests)]  # now the prompts are there
    assert after == before


def test_float32_weights_are_rounded_to_what_the_engine_computes_in() -> None:
    device, requests = pick("cpu", dtype="bf16", compiled=False), greedy_requests(4)
    engines = [make.engine(make.model(n).to_compute(torch.bfloat16), device, Sdpa(), context=CONTEXT) for n in (5, 6)]
    engines[0].load(make.model(6).state_dict(), 1)
    assert [one.ids for one in engines[0].generate(requests)] == [one.ids for one in engines[1].generate(requests)]


def test_one_request_that_cannot_be_answered_begins_none() -> None:
    generator, good = local(make.model(5)), greedy_requests(1)[0]
    for bad in (Request([-1]), Request([0], Sampling(allowed_tokens=(5, 100_000)))):
        with pytest.raises(ValueError, match="between 0 and"):
            generator.generate([good, bad])
    assert generator.running == [None] * 3
    assert not generator.waiting
