"""AReaL's method names over a real server of ours: answers with versions, pauses, weights, episodes that fail."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running_server import make, save, wait_until
from server_process import KEY, ServerProcess

from ascendchat.compat.areal import (
    GenerationHyperparameters,
    ModelRequest,
    ModelResponse,
    VLLMRemoteEngine,
    WeightUpdateMeta,
    Workflow,
)
from ascendchat.device import pick
from ascendchat.engine.request import Request, Sampling
from ascendchat.errors import UserError
from ascendchat.nn.attention import Sdpa
from ascendchat.nn.gpt import GPT

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

TEXT = make.tokenizer()
PROMPT = [0, *TEXT.encode("hello, who are you?")]
CONTEXT = 160


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of random weights."""
    folder = tmp_path_factory.mktemp("areal")
    save(folder, make.model(3))
    return folder


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[ServerProcess]:
    """A server of this model, which takes weights."""
    made = ServerProcess(home, "--slots", "4", "--context", str(CONTEXT)).start()
    try:
        yield made.ready()
    finally:
        made.kill()


@pytest.fixture
def engine(server: ServerProcess) -> Iterator[VLLMRemoteEngine]:
    """Connected to it, with the weights of model 3 as version 1."""
    made = VLLMRemoteEngine(api_key=KEY, tokenizer=TEXT)
    made.initialize(server.url)
    made.update_weights(WeightUpdateMeta(1, make.model(3).state_dict())).result()
    yield made
    made.destroy()


def expected(model: GPT, seed: int, tokens: int = 8) -> list[int]:
    here = make.engine(model, pick("cpu", compiled=False), Sdpa(), slots=4, context=CONTEXT)
    sampling = Sampling(max_tokens=tokens, seed=seed, stop_tokens=(), tools=False)
    return here.generate([Request(PROMPT, sampling)])[0].ids


def asking(seed: int, tokens: int = 8, **more: Any) -> ModelRequest:
    settings = {"max_new_tokens": tokens, "seed": seed, "stop_token_ids": [], **more}
    return ModelRequest(PROMPT, GenerationHyperparameters(**settings))


def test_answers_have_tokens_logprobs_and_versions(engine: VLLMRemoteEngine) -> None:
    async def several() -> list[ModelResponse]:
        return await asyncio.gather(*(engine.agenerate(asking(seed)) for seed in range(6)))

    answers = asyncio.run(several())
    assert [answer.output_tokens for answer in answers] == [expected(make.model(3), seed) for seed in range(6)]
    for answer in answers:
        assert answer.input_tokens == PROMPT
        assert answer.output_versions == [1] * 8
        assert len(answer.output_logprobs) == 8
        assert max(answer.output_logprobs) <= 0
        assert answer.stop_reason == "length"
        assert answer.latency > 0
    short = asyncio.run(engine.agenerate(asking(1, max_tokens=len(PROMPT) + 3)))
    assert len(short.output_tokens) == 3
    with pytest.raises(ValueError, match="n_samples"):
        asyncio.run(engine.agenerate(asking(1, n_samples=2)))


def test_weights_come_from_tensors_and_from_checkpoints(engine: VLLMRemoteEngine, home: Path) -> None:
    assert engine.get_version() == 1
    new = make.model(5)
    engine.update_weights(WeightUpdateMeta(7, new.state_dict())).result()
    answer = asyncio.run(engine.agenerate(asking(2)))
    assert (answer.output_tokens, answer.output_versions) == (expected(new, 2), [7] * 8)
    bad = {**new.state_dict(), "odd": new.head}
    with pytest.raises(ValueError, match="odd is unknown"):
        engine.update_weights(WeightUpdateMeta(8, bad)).result()
    assert engine.get_version() == 7
    engine.update_weights(WeightUpdateMeta(9, path=str(home / "runs/tiny/sft/step_000001"))).result()
    assert asyncio.run(engine.agenerate(asking(2))).output_tokens == expected(make.model(3), 2)
    with pytest.raises(UserError, match="neither a checkpoint"):
        engine.update_weights(WeightUpdateMeta(9, path="nowhere")).result()
    assert engine.get_version() == 9


def test_paused_it_sends_nothing_and_still_takes_weights(engine: VLLMRemoteEngine) -> None:
    async def through_a_pause() -> ModelResponse:
        engine.pause()
        waiting = asyncio.ensure_future(engine.agenerate(asking(3)))
        done, _ = await asyncio.wait({waiting}, timeout=0.5)
        assert not done
        await asyncio.wrap_future(engine.update_weights(WeightUpdateMeta(4, make.model(6).state_dict())))
        engine.resume()
        return await waiting

    answer = asyncio.run(through_a_pause())
    assert (answer.output_tokens, set(answer.output_versions)) == (expected(make.model(6), 3), {4})


class Episode(Workflow):
    """Answers a row with its number as the seed; some rows are rejected, some fail."""

    async def arun_episode(self, engine: VLLMRemoteEngine, data: int) -> list[int] | None:
        if data == 100:
            raise RuntimeError("a bad row")
        answer = await engine.agenerate(asking(data))
        return None if data % 3 == 2 else answer.output_tokens


def test_episodes_are_collected_and_those_that_fail_are_counted(engine: VLLMRemoteEngine) -> None:
    batch = engine.rollout_batch([0, 1, 2, 3], Episode())
    assert batch == [expected(make.model(3), seed) if seed != 2 else None for seed in range(4)]
    with pytest.raises(RuntimeError, match="a bad row"):
        engine.rollout_batch([0, 100], Episode())
    for row in (0, 1, 2, 3, 100):
        engine.submit(row, Episode())
    found = engine.wait(3, timeout=120)
    assert sorted(found) == sorted(expected(make.model(3), seed) for seed in (0, 1, 3))
    wait_until(lambda: engine.rejected == 2)  # the rows that fail may be the last to end
    with pytest.raises(TimeoutError, match="0 of 1"):
        engine.wait(1, timeout=0.2)
    assert engine.rejected == 2


def test_it_says_when_it_is_not_connected() -> None:
    lonely = VLLMRemoteEngine()
    with pytest.raises(UserError, match="initialize"):
        asyncio.run(lonely.agenerate(asking(1)))
    with pytest.raises(UserError, match="rollout-server"):
        lonely.initialize("")
    lonely.destroy()
