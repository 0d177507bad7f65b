"""One Generator: evaluation, samples and chat get the same tokens from an engine here and one in another process."""

from __future__ import annotations

import io
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import engine_models as make
import pytest
import torch
from remote_generator import Remote, serve

from ascendchat import tasks
from ascendchat.config.infer import ChatConfig
from ascendchat.data.chat import Conversation, render_prompt
from ascendchat.device import pick
from ascendchat.eval.examine import Examiner, GeneratorChooser, ModelChooser, Outcome, examine
from ascendchat.infer.engine import Engine
from ascendchat.infer.generator import Generator
from ascendchat.infer.request import Completion, Request, Sampling
from ascendchat.nn.attention import Sdpa
from ascendchat.nn.gpt import GPT
from ascendchat.serve.terminal import Chat
from ascendchat.tasks.base import Task

pytestmark = pytest.mark.usefixtures("one_thread")

TEXT = make.tokenizer()
START = TEXT.specials["<|assistant_start|>"]
CONTEXT = 160
ENDLESS = make.script([START, ord("a"), ord("b"), ord("a")])
LONG = 16384  # tokens: what the other process can send unread is a small part of it


@pytest.fixture(scope="module")
def connection() -> Iterator[Connection]:
    """To the other process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    yield ours
    ours.send(("end",))
    process.join(60)
    assert process.exitcode == 0


def local(made: GPT, slots: int = 3, context: int = CONTEXT) -> Engine:
    return make.engine(made, pick("cpu", compiled=False), Sdpa(), slots=slots, context=context)


Open = Callable[..., Any]


@pytest.fixture(params=["local", "remote"])
def opened(request: pytest.FixtureRequest) -> Open:
    """Makes a Generator of a model, here or there."""
    if request.param == "local":
        return local
    there: Connection = request.getfixturevalue("connection")
    return lambda made, slots=3, context=CONTEXT: Remote(there, made, slots=slots, context=context)


def both(connection: Connection, made: GPT) -> list[Generator]:
    return [local(made), Remote(connection, made, slots=3, context=CONTEXT)]


def busy(generator: Any) -> int:
    """Slots in use."""
    return generator.busy() if isinstance(generator, Remote) else sum(job is not None for job in generator.running)


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


class Recorder:
    """A Generator that remembers what another one answered."""

    def __init__(self, generator: Generator) -> None:
        self.generator, self.answers = generator, list[Completion]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.generator, name)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        found = self.generator.generate(requests)
        self.answers += found
        return found


@pytest.mark.slow
def test_eval_chat_gives_the_same_tokens_from_another_process(connection: Connection) -> None:
    made = make.model(3)
    examined = [tasks.load(name) for name in ("toy_fact_en", "toy_arithmetic_zh", "toy_choice_en")]
    found: list[tuple[list[Completion], list[tuple[Any, ...]]]] = []
    for generator in both(connection, made):
        recorder = Recorder(generator)
        asking = Examiner(TEXT, GeneratorChooser(recorder), recorder, max_tokens=8, samples=2, temperature=0.8)
        outcomes = [examine(task, replace(asking, max_rows=2)) for task in examined] + [examine(Quiz(), asking)]
        found.append((recorder.answers, [(one.right, one.cropped) for one in outcomes]))
    (here, results), (there, same) = found
    assert len(here) == 3 * 2 * 2 + 12
    assert len({tuple(answer.ids) for answer in here}) > 12, (
        "the model says many things: the comparison means something"
    )
    assert there == here, "ids, texts, endings and version"
    assert same == results


def test_a_generator_chooses_what_the_model_chooses() -> None:
    made = make.model(3)
    engine = local(made)

    def outcome(chooser: Any) -> Outcome:
        return examine(Quiz(), Examiner(TEXT, chooser, engine))

    slow = outcome(GeneratorChooser(engine))
    fast = outcome(ModelChooser(made, Sdpa(), torch.device("cpu"), max_tokens=2000, max_len=CONTEXT))
    assert slow.right == fast.right
    assert 0 < sum(fast.right) < 12
    assert slow.cropped > 0, "a prompt that fills the context leaves no room for the letter"


def test_samples_of_a_training_are_the_same_tokens_from_another_process(connection: Connection) -> None:
    made, requests = make.model(4), greedy_requests()
    here, there = (generator.generate(requests) for generator in both(connection, made))
    assert there == here
    assert [one.ids for one in here] == [make.greedy(made, r.prompt, 8, CONTEXT) for r in requests]


def test_chat_shows_and_remembers_the_same_through_another_process(connection: Connection) -> None:
    seen = []
    for made in (make.scripted(make.calculator_script()[0]), make.model(5)):
        for generator in both(connection, made):
            out = io.StringIO()
            talk = Chat(generator, TEXT, ChatConfig(temperature=0.9, seed=7, max_tokens=20), True, out, colour=True)
            assert all([talk.answer("17+25?"), talk.answer("and again?")])
            seen.append((out.getvalue(), talk.messages))
    assert seen[0] == seen[1]
    assert seen[2] == seen[3]
    assert seen[0][0].endswith("你好!\n")
    assert seen[2][0] != seen[0][0]


def test_pieces_are_the_same_and_add_up_to_the_completion(connection: Connection) -> None:
    made = make.scripted(make.calculator_script()[0])
    request = Request([0, START], Sampling(temperature=0.0, logprobs=True))
    streams = [generator.stream(request) for generator in both(connection, made)]
    pieces = [list(stream) for stream in streams]
    assert pieces[0] == pieces[1]
    assert streams[0].completion == streams[1].completion
    assert "".join(piece.text for piece in pieces[0] if piece.kind == "text") == streams[0].completion.text == "你好!"


class Interrupted(io.StringIO):
    """Ctrl-C is pressed when something has been shown."""

    def write(self, text: str) -> int:
        if "ab" in text and "ab" not in self.getvalue():
            signal.raise_signal(signal.SIGINT)
        return super().write(text)


def test_ctrl_c_ends_an_answer_and_frees_its_slot(opened: Open) -> None:
    generator, out = opened(make.scripted(ENDLESS, seq_len=LONG), slots=1, context=LONG), Interrupted()
    talk = Chat(generator, TEXT, ChatConfig(temperature=0.0, max_tokens=LONG // 2), True, out, colour=False)
    assert not talk.answer("go on")
    assert busy(generator) == 0
    shown = out.getvalue()
    assert shown.startswith("ab")
    assert len(shown) < LONG // 2, "it did not run to its end"
    assert talk.messages[-1]["content"] == shown.rstrip("\n"), "what was shown is what was said"
    assert generator.generate([Request([START], Sampling(temperature=0.0, max_tokens=3))])[0].text == "aba"


class Interrupting(Sdpa):
    """Ctrl-C is pressed in the middle of a step."""

    steps = 0

    def cached(self, *inputs: Any) -> torch.Tensor:
        self.steps += 1
        if self.steps == 4:
            signal.raise_signal(signal.SIGINT)
        return super().cached(*inputs)


def test_ctrl_c_in_the_middle_of_a_step_waits_for_its_end() -> None:
    kernel, out = Interrupting(), io.StringIO()
    made = make.scripted(ENDLESS)
    engine = make.engine(made, pick("cpu", compiled=False), kernel, slots=1, context=64)
    talk = Chat(engine, TEXT, ChatConfig(temperature=0.0, max_tokens=50), True, out, colour=False)
    assert not talk.answer("hi")
    assert (out.getvalue(), kernel.steps) == ("ababa\n", 4), "the token of the step under way is still shown"
    assert talk.answer("hi"), "and the engine goes on"


def test_a_closed_stream_frees_its_slot_and_can_be_read_to_its_end(opened: Open) -> None:
    generator = opened(make.scripted(ENDLESS, seq_len=LONG), slots=1, context=LONG)
    request = Request([START], Sampling(temperature=0.0, max_tokens=LONG - 1))
    stream = generator.stream(request)
    text = next(stream).text
    waiting = generator.stream(request)  # never begins
    waiting.close()
    stream.close()
    text += "".join(piece.text for piece in stream)
    assert (stream.completion.text, stream.completion.finish_reason) == (text, "cancelled")
    assert len(stream.completion.ids) < LONG - 1
    assert (list(waiting), waiting.completion.ids, waiting.completion.finish_reason) == ([], [], "cancelled")
    assert busy(generator) == 0
    stream.close()  # once more: nothing happens
    assert generator.generate([Request([START], Sampling(temperature=0.0, max_tokens=3))])[0].text == "aba"


def test_a_forgotten_stream_frees_its_slot() -> None:
    engine = local(make.scripted(ENDLESS), slots=1)
    for _piece in engine.stream(Request([START], Sampling(temperature=0.0, max_tokens=99))):
        break
    engine.step()
    assert engine.running == [None]


def test_a_stream_that_the_garbage_collector_takes_during_a_step_loses_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = local(make.scripted(ENDLESS), slots=1)
    streams, enter = [engine.stream(Request([START], Sampling(temperature=0.0, max_tokens=99)))], engine.reading.enter

    def forget_and_enter(*arguments: Any) -> None:
        streams.clear()
        enter(*arguments)

    monkeypatch.setattr(engine.reading, "enter", forget_and_enter)
    for _ in range(3):
        engine.step()
    assert engine.running == [None]


def test_new_weights_do_not_wait_for_a_forgotten_stream() -> None:
    model = make.scripted(ENDLESS, seq_len=LONG)
    engine = local(model, slots=1, context=LONG)
    for _piece in engine.stream(Request([START], Sampling(temperature=0.0, max_tokens=LONG - 2))):
        break
    (job,) = [job for job in engine.running if job is not None]
    engine.load(dict(model.state_dict()), 2)
    assert engine.running == [None]
    assert len(job.completion.ids) < LONG // 2


def test_new_weights_answer_like_an_engine_built_with_them(opened: Open) -> None:
    requests, later = greedy_requests(), make.model(6)
    expected = local(later).generate(requests)
    generator = opened(make.model(5))
    before = generator.generate(requests)
    weights = {name: tensor.clone() for name, tensor in later.state_dict().items()}
    generator.load(weights, 12)
    after = generator.generate(requests)
    assert (generator.version, {one.version for one in before}, {one.version for one in after}) == (12, {0}, {12})
    assert [one.ids for one in after] == [one.ids for one in expected]
    assert all(one.ids != other.ids for one, other in zip(after, before))
    for tensor in weights.values():
        tensor.zero_()  # they were copied: the caller may go on with his
    assert generator.generate(requests) == after


def test_weights_may_be_numbered_by_the_clock() -> None:
    """POST /update_weights takes any version; one that an engine cannot write down would end its worker."""
    engine = make.engine(make.model(), pick("cpu", compiled=False))
    engine.renew(20261117230000)
    (answer,) = engine.generate([Request([1, 2, 3], Sampling(max_tokens=4, stop_tokens=()))])
    assert answer.versions == [20261117230000] * 4


def test_answers_under_way_are_finished_by_the_old_weights_and_waiting_ones_written_by_the_new(opened: Open) -> None:
    first, second = greedy_requests(2, tokens=20)
    old, new = make.model(5), make.model(6)
    expected = local(old).generate([first]) + local(new).generate([second])
    generator = opened(make.model(5), slots=1)
    streams = [generator.stream(first), generator.stream(second)]
    next(streams[0])
    generator.load(new.state_dict(), 3)
    for stream, answer in zip(streams, expected):
        list(stream)
        assert stream.completion.ids == answer.ids
    assert [stream.completion.version for stream in streams] == [0, 3]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"smear": None}, "smear is missing"),
        ({"optim.step": torch.zeros(1)}, "optim.step is unknown"),
        ({"smear": torch.zeros(2)}, r"smear is \(2,\) instead of \(1,\)"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(
    opened: Open, change: dict[str, torch.Tensor | None], says: str
) -> None:
    generator, requests = opened(make.model(5)), greedy_requests(2)
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


def test_one_request_that_cannot_be_answered_begins_none(opened: Open) -> None:
    generator, good = opened(make.model(5)), greedy_requests(1)[0]
    for bad in (Request([-1]), Request([0], Sampling(allowed_tokens=(5, 100_000)))):
        with pytest.raises(ValueError, match="between 0 and"):
            generator.generate([good, bad])
    assert busy(generator) == 0
    if isinstance(generator, Engine):
        assert not generator.waiting
