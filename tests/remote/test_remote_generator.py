"""The same tokens from an engine here and from a real server over HTTP, whatever is asked, with old and new weights."""

from __future__ import annotations

import contextlib
import io
import itertools
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from running_server import endless, make, save, serving

from ascendchat.config.generate import ChatConfig
from ascendchat.data.chat.render import render_prompt
from ascendchat.device import pick
from ascendchat.engine.engine import Engine
from ascendchat.engine.request import Completion, Generator, Piece, Request, Sampling
from ascendchat.eval.chat_tasks import GeneratorChooser, TaskEvaluator, evaluate_task
from ascendchat.nn.attention import Sdpa
from ascendchat.nn.gpt import GPT
from ascendchat.remote.client import RemoteGenerator
from ascendchat.serve.terminal import Chat
from ascendchat.tasks import by_name

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

TEXT = make.tokenizer()
START = TEXT.specials["<|assistant_start|>"]
CONTEXT = 160
KEY = "a-key-of-the-tests-1234"
LONG = 16384  # tokens of an answer that takes a while


@contextlib.contextmanager
def served(folder: Path, made: GPT, *flags: str) -> Iterator[str]:
    save(folder, made)
    with serving(folder, *flags, ASCENDCHAT_API_KEYS=KEY) as server:
        yield server.url


@pytest.fixture(scope="module")
def random_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server with random weights, which can be replaced."""
    flags = ("--slots", "3", "--context", str(CONTEXT), "--weight-updates")
    with served(tmp_path_factory.mktemp("random"), make.model(3), *flags) as url:
        yield url


@pytest.fixture(scope="module")
def scripted_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Always calculates, then says hello."""
    made = make.scripted(make.calculator_script()[0])
    with served(tmp_path_factory.mktemp("scripted"), made, "--context", str(CONTEXT)) as url:
        yield url


@pytest.fixture
def remote(random_server: str) -> Iterator[RemoteGenerator]:
    """A connection to it."""
    with RemoteGenerator.open(random_server, api_key=KEY, tokenizer=TEXT) as opened:
        yield opened


def local(made: GPT, context: int = CONTEXT) -> Engine:
    return make.engine(made, pick("cpu", compiled=False), Sdpa(), slots=3, context=context)


def prompts(count: int = 4) -> list[list[int]]:
    return [render_prompt(TEXT, [{"role": "user", "content": f"hello {i} 你好" * (i + 1)}]) for i in range(count)]


def alike(answers: Sequence[Completion]) -> list[Completion]:
    """What must be equal: rounding of a log-probability and what a cache held may differ."""
    return [
        replace(
            one,
            cached_tokens=0,
            logprobs=[None if p is None else pytest.approx(p, abs=1e-4) for p in one.logprobs],
            tops=[[(token, pytest.approx(p, abs=1e-4)) for token, p in row] for row in one.tops],
        )
        for one in answers
    ]


def bare(answers: Sequence[Completion]) -> list[Completion]:
    """Answers of a server, whose cache may have held something."""
    return [replace(one, cached_tokens=0) for one in answers]


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """A server may send several tokens as one piece."""
    runs = itertools.groupby(pieces, key=lambda piece: piece.kind)
    return [Piece(kind, "".join(piece.text for piece in run)) for kind, run in runs]


STOPS = tuple(range(100, 130))
ASKED = [
    Sampling(max_tokens=40, seed=4, logprobs=True, stop_tokens=STOPS, keep_stop=True),
    Sampling(max_tokens=12, temperature=0.0, stop_tokens=()),
    Sampling(max_tokens=12, temperature=0.9, seed=11, logprobs=True),
    Sampling(
        max_tokens=20, temperature=1.3, seed=2**40, top_k=20, top_p=0.9, min_p=0.01, logprobs=True, top_logprobs=3
    ),
    Sampling(max_tokens=12, temperature=0.7, seed=4, top_k=9, logprobs=True, processed_logprobs=True),
    Sampling(max_tokens=20, seed=5, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=-0.5, tools=False),
    Sampling(max_tokens=12, seed=6, allowed_tokens=tuple(range(97, 110)), stop_tokens=(104, 105)),
    Sampling(max_tokens=30, seed=7, allowed_tokens=tuple(range(97, 103)), stop=("ab", "ca")),
    Sampling(max_tokens=9, seed=8, logit_bias=((97, 100.0), (98, 100.0))),
    Sampling(max_tokens=30, seed=3, allowed_tokens=(97, 98, 99), stop_tokens=(99,), keep_stop=True, logprobs=True),
    Sampling(max_tokens=10_000, seed=9, stop_tokens=()),  # to the end of the context
]


def test_everything_that_can_be_asked_is_answered_with_the_same_tokens(remote: RemoteGenerator) -> None:
    requests = [Request(prompt, sampling) for prompt in prompts(2) for sampling in ASKED]
    here, there = local(make.model(3)).generate(requests), remote.generate(requests)
    assert bare(there) == alike(here)
    assert {one.finish_reason for one in here} == {"stop", "length"}
    assert len({tuple(one.ids) for one in here}) >= len(here) - 2  # two may stop at once
    assert max(len(request.prompt) + len(one.ids) for request, one in zip(requests, here)) == CONTEXT


def test_streams_bring_the_same(remote: RemoteGenerator) -> None:
    engine = local(make.model(3))
    for request in [Request(prompts(1)[0], ASKED[i]) for i in (0, 3, 7)]:
        streams = [generator.stream(request) for generator in (engine, remote)]
        here, there = (joined(list(stream)) for stream in streams)
        assert there == here
        assert bare([streams[1].completion]) == alike([streams[0].completion])


def test_calculations_are_the_same_tokens_and_known_as_such(scripted_server: str) -> None:
    engine = local(make.scripted(make.calculator_script()[0]))
    requests = [Request([0, START], Sampling(temperature=0.0, logprobs=True, tools=tools)) for tools in (True, False)]
    requests.append(Request([0, START], Sampling(temperature=0.0, max_tokens=9)))  # ends within the result
    with RemoteGenerator.open(scripted_server, api_key=KEY, tokenizer=TEXT) as remote:
        here, there = engine.generate(requests), remote.generate(requests)
        assert bare(there) == alike(here)
        assert (sum(here[0].forced), here[0].text) == (4, "你好!")
        assert sum(here[1].forced) == 0
        assert here[2].forced[-1]
        stream = remote.stream(requests[0])
        assert joined(list(stream)) == joined(list(engine.stream(requests[0])))
        assert bare([stream.completion]) == alike(here[:1])


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


def test_eval_chat_gives_the_same_tokens_over_http(remote: RemoteGenerator) -> None:
    found = []
    for generator in (local(make.model(3)), remote):
        recorder = Recorder(generator)
        asking = TaskEvaluator(TEXT, GeneratorChooser(recorder), recorder, 8, samples=2, temperature=0.8, max_rows=3)
        outcome = evaluate_task(by_name.load("toy_fact_en"), asking)
        found.append((alike(recorder.answers), outcome.right, outcome.cropped))
    assert found[0] == found[1]
    assert len(found[0][0]) == 3 * 2


def test_chat_shows_and_remembers_the_same_over_http(scripted_server: str) -> None:
    seen = []
    with RemoteGenerator.open(scripted_server, api_key=KEY, tokenizer=TEXT) as remote:
        for generator in (local(make.scripted(make.calculator_script()[0])), remote):
            out = io.StringIO()
            talk = Chat(generator, TEXT, ChatConfig(temperature=0.9, seed=7, max_tokens=20), True, out, colour=True)
            assert all([talk.answer("17+25?"), talk.answer("and again?")])
            seen.append((out.getvalue(), talk.messages))
    assert seen[0] == seen[1]
    assert seen[0][0].endswith("你好!\n")


def test_a_request_that_cannot_be_answered_is_a_value_error(remote: RemoteGenerator) -> None:
    good = Request(prompts(1)[0], Sampling(max_tokens=5))
    for bad in (Request([10_000]), Request([0], Sampling(allowed_tokens=(5, 100_000)))):
        with pytest.raises(ValueError, match="token ids end at"):
            remote.generate([good, bad])
    with pytest.raises(ValueError, match="leaves no room"):
        remote.generate([Request([0] * CONTEXT)])
    assert len(remote.generate([good])[0].ids) == 5


class Interrupted(io.StringIO):
    """Ctrl-C is pressed when something has been shown."""

    def write(self, text: str) -> int:
        if text and not self.getvalue():
            signal.raise_signal(signal.SIGINT)
        return super().write(text)


def test_ctrl_c_and_close_end_an_answer_and_free_its_slot(tmp_path: Path) -> None:
    with (
        served(tmp_path, endless(LONG), "--slots", "1") as url,
        RemoteGenerator.open(url, api_key=KEY, tokenizer=TEXT) as remote,
    ):
        assert remote.context == LONG
        out = Interrupted()
        talk = Chat(remote, TEXT, ChatConfig(temperature=0.0, max_tokens=LONG // 2), True, out, colour=False)
        assert not talk.answer("go on")
        assert out.getvalue().startswith("a")  # the first token may come alone
        assert len(out.getvalue()) < LONG // 2, "it did not run to its end"
        request = Request([START], Sampling(temperature=0.0, max_tokens=LONG - 2))
        with closing(remote.stream(request)) as stream:
            first = next(stream).text
        assert first + "".join(piece.text for piece in stream) == stream.completion.text
        assert stream.completion.finish_reason == "cancelled"
        assert len(stream.completion.ids) < LONG - 2
        short = Request([START], Sampling(temperature=0.0, max_tokens=3))
        began = time.monotonic()
        assert remote.generate([short])[0].text == "aba", "there is one slot, and it is free"
        assert time.monotonic() - began < 60


def test_interrupted_answers_go_on_with_new_weights_and_every_token_names_its_own(
    remote: RemoteGenerator, random_server: str
) -> None:
    """Without a pause that lasts: the server goes on by itself, and its checksum is that of what was sent."""
    sampling = Sampling(max_tokens=90, seed=3, stop_tokens=(), logprobs=True)
    requests = [Request(prompt, sampling) for prompt in prompts(3)]
    old, new = make.model(3), make.model(6)
    try:
        for _ in range(20):  # until one was caught in the middle
            answers: list[Completion] = []
            asking = threading.Thread(target=lambda into=answers: into.extend(remote.generate(requests)), daemon=True)
            asking.start()
            time.sleep(0.05)
            remote.load(new.state_dict(), 12, interrupt=True)
            asking.join(60)
            if any(len(set(answer.versions)) == 2 for answer in answers):
                break
            remote.load(old.state_dict(), 11)
        else:
            pytest.fail("no answer was interrupted")
        for answer in answers:
            assert (answer.finish_reason, len(answer.ids)) == ("length", len(answer.versions))
            assert answer.versions == sorted(answer.versions)
        last = remote.generate(requests)  # their prompts are not behind what the old weights have cached
        assert [one.ids for one in last] == [one.ids for one in local(new).generate(requests)]
        weights = {name: tensor for name, tensor in old.state_dict().items() if name != "smear"}
        with pytest.raises(ValueError, match="smear is missing"):
            remote.load(weights, 13)
        assert remote.version == 12
        with RemoteGenerator.open(random_server, api_key=KEY, tokenizer=TEXT) as later:
            assert later.version == 12
    finally:
        remote.load(old.state_dict(), 0)
