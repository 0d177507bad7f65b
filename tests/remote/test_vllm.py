"""The Generator over HTTP against a stand-in for vLLM: what it finds out, interruptions, faults of every kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import engine_models as make
import pytest
from vllm_stand_in import LONG, TEXT, StandIn, ask, bodies, local, opened, scorer_of, until

from ascendchat.engine.request import Request, Sampling
from ascendchat.errors import UserError
from ascendchat.remote.vllm import VllmServer, version_of

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def server() -> Iterator[StandIn]:
    """The newest version, with the weights of model 0."""
    with StandIn(make.model(0)) as running:
        yield running


# ---- at connect --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "options", "expected"),
    [
        ("0.32.0", {}, ("float32", 1, True, True)),
        ("0.23.0", {"extended": False}, ("float32", 1, True, False)),
        ("0.18.0", {"development": False}, ("", 0, False, False)),
    ],
)
def test_what_a_server_can_do_is_found_out_at_connect(version: str, options: Any, expected: Any) -> None:
    with StandIn(make.model(0), version, **options) as server, opened(server) as remote:
        found = remote.server
        assert isinstance(found, VllmServer)
        assert found.version == version_of(version)
        assert (found.dtype, found.workers, found.controlled, found.receives) == expected
        assert (remote.elsewhere, remote.ours, remote.context, remote.version) == (True, False, 64, 0)


def test_a_server_without_development_routes_says_how_to_get_them() -> None:
    with StandIn(make.model(0), development=False) as server, opened(server) as remote:
        assert remote.alive()
        with pytest.raises(UserError, match="VLLM_SERVER_DEV_MODE=1"):
            remote.load(make.model(1).state_dict(), 1)
        assert remote.generate([Request([5], LONG)])[0].ids, "it goes on answering"


def test_versions() -> None:
    assert version_of("0.23.0+cpu") == (0, 23, 0)
    assert version_of("0.9") == (0, 9, 0)
    assert version_of("main") is None


# ---- answers -----------------------------------------------------------------------------------


def test_answers_are_those_of_the_model_with_the_stop_token_when_it_is_to_be_kept(server: StandIn) -> None:
    stops = tuple(range(100, 160))
    for keep in (True, False):
        request = Request([5, 6], Sampling(max_tokens=30, seed=3, logprobs=True, stop_tokens=stops, keep_stop=keep))
        expected = local(make.model(0), request)
        with opened(server) as remote:
            (found,) = remote.generate([request])
        assert (found.ids, found.finish_reason) == (expected.ids, "stop")
        assert (found.ids[-1] in stops) == keep
        assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


def test_an_answer_that_was_cut_is_continued_and_is_no_natural_stop(server: StandIn) -> None:
    server.faults.extend(["abort:1", "abort:0", "abort:5", "500"])
    with opened(server) as remote:
        (found,) = remote.generate([Request([5, 6], LONG)])
    assert (len(found.ids), found.finish_reason) == (40, "length")
    assert len(found.logprobs) == len(found.versions) == len(found.forced) == 40
    sent = bodies(server)
    lengths = [len(body["prompt"]) - 2 for body in sent]
    assert [body["max_tokens"] for body in sent] == [40 - length for length in lengths]
    assert [body["prompt"][2:] for body in sent] == [found.ids[:length] for length in lengths]
    assert len({tuple(body["stop_token_ids"]) for body in sent}) == 1
    seeds = {body["seed"] for body in sent}
    assert len(seeds) == len(set(lengths)), "noise is not used twice, and the same place has the same"
    expected = scorer_of(make.model(0))([5, 6, *found.ids])[1:]
    assert found.logprobs == pytest.approx(expected, abs=1e-4), "each token's is that of the whole text before it"


def test_an_answer_cut_at_its_last_token_has_its_length(server: StandIn) -> None:
    server.faults.append("abort:40")
    with opened(server) as remote:
        (found,) = remote.generate([Request([5, 6], LONG)])
    assert (len(found.ids), found.finish_reason, len(bodies(server))) == (40, "length", 1)


def test_a_server_that_cuts_everything_is_given_up(server: StandIn) -> None:
    server.faults.extend(["abort:0"] * 200)
    with opened(server, patience=0.5) as remote, pytest.raises(UserError, match="cuts every answer short"):
        remote.generate([Request([5, 6], LONG)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "said"), [("-9999", "-9999"), ("nan", "nan"), ("short", "11 log-probabilities for 12 tokens")]
)
def test_log_probabilities_that_cannot_be_learnt_from(server: StandIn, fault: str, said: str) -> None:
    asked = Request([5, 6], replace(LONG, max_tokens=12))
    server.faults.append(fault)
    with opened(server) as remote:
        (found,) = remote.generate([asked])
        assert len(bodies(server)) == 2, "it was asked for again"
        assert bodies(server)[1]["seed"] != bodies(server)[0]["seed"], "the same noise would choose the same token"
        assert len(found.logprobs) == len(found.ids) == 12
        assert min(value for value in found.logprobs if value is not None) > -100
        server.faults.extend([fault] * 3)
        with pytest.raises(UserError, match=f"cannot be learnt from: .*{said}"):
            remote.generate([asked])
        plain = Sampling(max_tokens=4, stop_tokens=(), tools=False)
        server.faults.append(fault)
        assert len(remote.generate([Request([5], plain)])[0].ids) == 4, "who does not ask for them does not mind"


def test_a_hung_answer_is_asked_for_again_when_the_server_cannot_write_a_token(
    server: StandIn, monkeypatch: Any
) -> None:
    monkeypatch.setattr("ascendchat.remote.client.PULSE", 0.3)
    server.faults.extend(["hang", "hang"])  # the answer, and the token by which its health is tried
    with opened(server, pulse_every=0.2) as remote:
        (found,) = remote.generate([Request([5, 6], LONG)])
        assert found.finish_reason == "length"
        server.faults.append("hang")
        assert not remote.alive(0.3)
        assert remote.alive()
    tried = [body["max_tokens"] for body in bodies(server)]
    assert tried[:3] == [40, 1, 40]


def test_a_server_dies_and_comes_back(server: StandIn) -> None:
    server.pace = 0.01
    with opened(server) as remote:
        thread, found = ask(remote, Request([5, 6], LONG), Request([7], LONG))
        until(lambda: server.under_way() == 2)
        server.die()
        assert not remote.alive(5.0)
        server.pace = 0.0
        server.revive()
        thread.join(60)
        assert [len(answer.ids) for answer in found] == [40, 40]
        assert {answer.finish_reason for answer in found} == {"length"}


def test_a_token_that_would_kill_the_server_is_not_sent(server: StandIn) -> None:
    with opened(server) as remote:
        with pytest.raises(ValueError, match="token ids end at"):
            remote.generate([Request([TEXT.vocab_size], LONG)])
        assert not bodies(server)
        assert remote.alive()


def test_log_probabilities_are_those_of_what_was_drawn_from() -> None:
    warm = Sampling(max_tokens=6, temperature=0.5, logprobs=True, stop_tokens=(), tools=False)
    with StandIn(make.model(0)) as server, opened(server) as remote:
        with pytest.raises(UserError, match="--logprobs-mode processed_logprobs"):
            remote.generate([Request([5], warm)])
    with StandIn(make.model(0), processed=True) as server, opened(server) as remote:
        (found,) = remote.generate([Request([5, 6], warm)])
        rows = [make.logits_of(make.model(0), [5, 6, *found.ids[:i]], 64) / 0.5 for i in range(6)]
        expected = [row.log_softmax(-1)[token].item() for row, token in zip(rows, found.ids)]
        assert found.logprobs == pytest.approx(expected, abs=1e-4)
