"""Weights for a stand-in of vLLM: in place and by disk, whole or not at all, and whether the server has them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import engine_models as make
import pytest
import torch
from vllm_stand_in import LONG, TEXT, StandIn, ask, bodies, local, opened, scorer_of, until

from ascendchat.engine.request import Request, Sampling
from ascendchat.errors import UserError
from ascendchat.nn.gpt import GPT
from ascendchat.remote.client import WeightsLost
from ascendchat.remote.fleet import ReplicaPool
from ascendchat.remote.vllm import VllmServer
from ascendchat.remote.weights import compare, probe_tokens

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@pytest.fixture
def server() -> Iterator[StandIn]:
    """The newest version, with the weights of model 0."""
    with StandIn(make.model(0)) as running:
        yield running


# ---- weights -----------------------------------------------------------------------------------


def equal(server: StandIn, model: GPT) -> bool:
    own = server.engine.decoder.model.state_dict()
    return all(torch.equal(own[name], tensor) for name, tensor in model.state_dict().items())


# In place and by checksums, by a probe where checksums do not say it all, and by disk where nothing else is there.
WAYS = [("0.32.0", {}), ("0.32.0", {"packed": True}), ("0.23.0", {"extended": False})]


@pytest.mark.parametrize(("version", "options"), WAYS)
def test_new_weights_arrive_whole_and_are_verified(version: str, options: Any) -> None:
    with StandIn(make.model(0), version, **options) as server, opened(server) as remote:
        for number in (1, 2):
            model = make.model(number)
            remote.scorer = scorer_of(model)
            remote.load(model.state_dict(), number, interrupt=number == 2)
            assert equal(server, model)
            assert (remote.version, server.engine.paused) == (number, None)
            (found,) = remote.generate([Request([5, 6], LONG)])
            assert found.ids == local(model, Request([5, 6], LONG)).ids
            assert set(found.versions) == {number}
        methods = [body["method"] for path, body in server.asked if path == "/collective_rpc"]
        in_place = options.get("extended", True)
        assert ("ascendchat_receive" in methods) == in_place
        assert ("reload_weights" in methods) == (not in_place)
        assert methods.count("ascendchat_join") == in_place, "the group stays from one sync to the next"
        if version == "0.32.0":
            assert server.weight_version == "2"


def test_fewer_digits_are_sent_to_a_server_that_keeps_fewer() -> None:
    with StandIn(make.model(0).bfloat16()) as server, opened(server) as remote:
        assert isinstance(remote.server, VllmServer)
        assert remote.server.dtype == "bfloat16"
        model = make.model(1)
        remote.load(model.state_dict(), 1)
        assert {tensor.dtype for tensor in server.received.values()} == {torch.bfloat16}
        assert equal(server, model.bfloat16())


def test_interrupted_answers_go_on_with_the_new_weights_and_say_so(server: StandIn) -> None:
    server.pace = 0.02
    new = make.model(1)
    with opened(server, scorer=scorer_of(new)) as remote:
        thread, found = ask(remote, *(Request([5, 6, i], LONG) for i in range(4)))
        until(lambda: all(job and len(job.completion.ids) > 3 for job in server.engine.running[:4]))
        remote.load(new.state_dict(), 7, interrupt=True)
        server.pace = 0.0
        thread.join(60)
        for i, answer in enumerate(found):
            switch = answer.versions.index(7)
            assert answer.versions == [0] * switch + [7] * (40 - switch)
            assert 0 < switch < 40
            assert answer.version == 0
            whole = [5, 6, i, *answer.ids]
            old_scores, new_scores = (scorer_of(model)(whole)[2:] for model in (make.model(0), new))
            expected = old_scores[:switch] + new_scores[switch:]
            assert answer.logprobs == pytest.approx(expected, abs=1e-4), "each token is the work of who it says"


def test_without_interruption_answers_are_finished_by_the_old_weights(server: StandIn) -> None:
    server.pace = 0.01
    new = make.model(1)
    with opened(server, scorer=scorer_of(new)) as remote:
        thread, found = ask(remote, Request([5, 6], LONG))
        until(lambda: server.under_way() == 1)
        remote.load(new.state_dict(), 7)
        thread.join(60)
        assert set(found[0].versions) == {0}
        assert found[0].ids == local(make.model(0), Request([5, 6], LONG)).ids
        assert set(remote.generate([Request([5, 6], LONG)])[0].versions) == {7}


@pytest.mark.parametrize(("version", "options"), [WAYS[0], WAYS[2]])
def test_a_server_that_keeps_its_old_weights_is_found_out(version: str, options: Any) -> None:
    with StandIn(make.model(0), version, **options) as server:
        server.stale = True
        new = make.model(1)
        with opened(server, scorer=scorer_of(new)) as remote:
            with pytest.raises(UserError, match="other weights than it was sent"):
                remote.load(new.state_dict(), 1)
            assert (remote.version, server.engine.paused) == (0, None), "it was not left paused"
            with pytest.raises(WeightsLost, match="load weights again"):
                remote.generate([Request([5], LONG)])
            server.stale = False
            remote.load(new.state_dict(), 1)
            assert remote.generate([Request([5], LONG)])[0].versions[0] == 1


def test_a_sync_that_breaks_leaves_nobody_in_the_middle(server: StandIn) -> None:
    """In place it fails before anything is changed, then by disk in the middle: nothing of ours is asked any more."""
    new = make.model(1)
    with opened(server, scorer=scorer_of(new)) as remote:
        server.half = True
        with pytest.raises(UserError, match=r"in place: .*; by disk: "):
            remote.load(new.state_dict(), 1)
        assert server.engine.paused is None
        before = len(bodies(server))
        with pytest.raises(WeightsLost, match="does not have the weights it was sent"):
            remote.generate([Request([5], LONG)])
        assert len(bodies(server)) == before, "an answer would kill its engine"
        server.half = False
        remote.load(new.state_dict(), 1)
        assert equal(server, new)


def test_weights_that_break_off_in_place_go_by_disk(server: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    new = make.model(1)

    def broken(told: str) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(server.worker, "ascendchat_receive", broken)
    with opened(server, scorer=scorer_of(new)) as remote:
        remote.load(new.state_dict(), 1)
        assert equal(server, new)
        methods = [body["method"] for path, body in server.asked if path == "/collective_rpc"]
        assert methods[-2:] == ["ascendchat_leave", "reload_weights"]


@pytest.mark.parametrize("busy", [True, False])
def test_a_server_that_was_started_anew_has_lost_its_weights(server: StandIn, busy: bool) -> None:
    """However fast it was: an answer of its first weights never passes for one of the last."""
    new = make.model(1)
    with opened(server, scorer=scorer_of(new)) as remote:
        remote.load(new.state_dict(), 3)
        server.pace = 0.02
        thread, found = ask(remote, *[Request([5, 6], LONG)] * busy)
        until(lambda: server.under_way() == busy)
        server.die()
        server.pace = 0.0
        server.revive()
        thread.join(60)
        if busy:
            assert isinstance(found[0], WeightsLost)
        with pytest.raises(WeightsLost, match="it was started anew"):
            remote.generate([Request([5, 6], LONG)])
        remote.load(new.state_dict(), 3)
        assert equal(server, new)
        (answer,) = remote.generate([Request([5, 6], LONG)])
        assert answer.ids == local(new, Request([5, 6], LONG)).ids


def test_a_server_comes_back_after_the_weights_of_the_trainer_have_moved_on() -> None:
    """It is verified with the weights that the others have, then with the new ones."""
    model = make.model(3)
    said: list[str] = []
    with StandIn(make.model(3), packed=True) as server:

        def say(line: str) -> None:
            said.append(line)
            if "is out of service" in line:  # not before: a server that is there again takes the new ones at once
                server.revive()

        settings: dict[str, Any] = {"tokenizer": TEXT, "patience": 60.0, "say": say}
        with ReplicaPool.open([server.url], scorer=scorer_of(model), **settings) as fleet:
            fleet.load(dict(model.state_dict()), 1)
            server.die()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.05)
            fleet.load(dict(model.state_dict()), 2)
            assert fleet.version == 2
            until(lambda: any("is in service again" in line for line in said))
            answer = fleet.generate([Request([5, 6], Sampling(4, seed=1, logprobs=True, stop_tokens=()))])[0]
            assert set(answer.versions) == {2}
            whole = scorer_of(model)([5, 6, *answer.ids])[1:]
            assert max(abs(a - b) for a, b in zip(whole, answer.logprobs, strict=True)) < 1e-4  # type: ignore[operator]


def test_without_checksums_somebody_must_score_a_probe() -> None:
    with StandIn(make.model(0), "0.23.0") as server, opened(server) as remote:
        with pytest.raises(UserError, match=r"set Remote\.scorer"):
            remote.load(make.model(1).state_dict(), 1)


def test_digests_of_a_server_name_the_weights_that_differ() -> None:
    weights = {f"l.0.{name}.weight": torch.randn(4, 3) for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    joined = torch.cat([weights[f"l.0.{name}_proj.weight"] for name in "qkv"])

    def digest(tensor: torch.Tensor) -> str:
        return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()

    told = {
        "dp0:pp0:pcp0:tp0:l.0.qkv_proj.weight": digest(joined),
        "dp0:pp0:pcp0:tp0:l.0.o_proj.weight": digest(joined),
    }
    assert compare(told, weights) == (["l.0.o_proj.weight"], 0)
    told["dp0:pp0:pcp0:tp0:rotary"] = digest(joined)
    told["dp0:pp0:pcp0:tp0:l.0.o_proj.weight"] = hashlib.sha256(b"").hexdigest()
    assert compare(told, weights) == ([], 2), "unknown, and packed for a kernel"
    assert compare({**told, "dp0:pp0:pcp0:tp1:l.0.o_proj.weight": "x"}, weights) == ([], 4)
    assert len(set(probe_tokens(512))) > 20


def test_an_embedding_has_rows_of_zeros_up_to_a_multiple_of_64_there() -> None:
    table = torch.randn(70, 4)
    kept = torch.cat([table, torch.zeros(58, 4)])
    told = {"dp0:pp0:pcp0:tp0:embed": hashlib.sha256(kept.numpy().tobytes()).hexdigest()}
    assert compare(told, {"embed": table}) == ([], 0)
    assert compare(told, {"embed": table + 1}) == (["embed"], 0)
