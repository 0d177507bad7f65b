"""The Generator over HTTP against a stand-in for vLLM: interruptions, faults, weights, whether the server has them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import engine_models as make
import pytest
import torch
from vllm_stand_in import StandIn

from ascendchat.config import UserError
from ascendchat.device import pick
from ascendchat.infer.remote import Remote
from ascendchat.infer.request import Completion, Request, Sampling
from ascendchat.infer.verify import compare, probe_tokens
from ascendchat.infer.vllm import VllmServer, version_of
from ascendchat.nn.attention import Sdpa
from ascendchat.nn.gpt import GPT

pytestmark = pytest.mark.usefixtures("one_thread")

TEXT = make.tokenizer()
LONG = Sampling(max_tokens=40, seed=5, logprobs=True, stop_tokens=(), tools=False)


def scorer_of(model: GPT) -> Callable[[list[int]], list[float]]:
    def score(tokens: list[int]) -> list[float]:
        rows = [make.logits_of(model, tokens[: i + 1], 64).log_softmax(-1) for i in range(len(tokens) - 1)]
        return [row[token].item() for row, token in zip(rows, tokens[1:])]

    return score


@pytest.fixture
def server() -> Iterator[StandIn]:
    with StandIn(make.model(0)) as running:
        yield running


def opened(server: StandIn, **settings: Any) -> Remote:
    return Remote.open(server.url, **{"tokenizer": TEXT, "patience": 30.0, "timeout": 60.0, **settings})


def local(model: GPT, request: Request) -> Completion:
    """The answer of an engine here."""
    return make.engine(model, pick("cpu", compiled=False), Sdpa(), context=64).generate([request])[0]


def ask(remote: Remote, *requests: Request) -> tuple[threading.Thread, list[Any]]:
    """Ask in a thread; what comes is put into the list."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.extend(remote.generate(list(requests)))
        except Exception as error:  # noqa: BLE001 (looked at by the test)
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)


def bodies(server: StandIn) -> list[dict[str, Any]]:
    return [body for path, body in server.asked if path == "/v1/completions"]


# ---- at connect --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "options", "expected"),
    [
        ("0.32.0", {}, ("float32", 1, True, True)),
        ("0.23.0", {}, ("float32", 1, True, True)),
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


@pytest.mark.parametrize("faults", [["abort:3"], ["abort:0", "abort:0"], ["abort:1", "abort:0", "abort:5", "500"]])
def test_an_answer_that_was_cut_is_continued_and_is_no_natural_stop(server: StandIn, faults: list[str]) -> None:
    server.faults.extend(faults)
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


@pytest.mark.parametrize(
    ("fault", "said"), [("-9999", "-9999"), ("nan", "nan"), ("short", "39 log-probabilities for 40 tokens")]
)
def test_log_probabilities_that_cannot_be_learnt_from(server: StandIn, fault: str, said: str) -> None:
    server.faults.append(fault)
    with opened(server) as remote:
        (found,) = remote.generate([Request([5, 6], LONG)])
        assert len(bodies(server)) == 2, "it was asked for again"
        assert bodies(server)[1]["seed"] != bodies(server)[0]["seed"], "the same noise would choose the same token"
        assert len(found.logprobs) == len(found.ids) == 40
        assert min(value for value in found.logprobs if value is not None) > -100
        server.faults.extend([fault] * 3)
        with pytest.raises(UserError, match=f"cannot be learnt from: .*{said}"):
            remote.generate([Request([5, 6], LONG)])
        plain = Sampling(max_tokens=4, stop_tokens=(), tools=False)
        server.faults.append(fault)
        assert len(remote.generate([Request([5], plain)])[0].ids) == 4, "who does not ask for them does not mind"


@pytest.mark.parametrize("fault", ["500", "503", "drop", "delay:0.2"])
def test_a_server_in_trouble_is_asked_again(server: StandIn, fault: str) -> None:
    server.faults.extend([fault, fault])
    with opened(server) as remote:
        (found,) = remote.generate([Request([5, 6], LONG)])
    assert found.finish_reason == "length"
    assert len(bodies(server)) == (1 if "delay" in fault else 3)


def test_a_hung_answer_is_asked_for_again_when_the_server_cannot_write_a_token(
    server: StandIn, monkeypatch: Any
) -> None:
    monkeypatch.setattr("ascendchat.infer.remote.PULSE", 0.3)
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


# ---- weights -----------------------------------------------------------------------------------


def equal(server: StandIn, model: GPT) -> bool:
    own = server.engine.decoder.model.state_dict()
    return all(torch.equal(own[name], tensor) for name, tensor in model.state_dict().items())


WAYS = [
    ("0.32.0", {}),
    ("0.32.0", {"packed": True}),
    ("0.32.0", {"extended": False}),
    ("0.23.0", {}),
    ("0.23.0", {"extended": False}),
]


@pytest.mark.parametrize(("version", "options"), WAYS)
def test_new_weights_arrive_whole_and_are_verified(version: str, options: Any) -> None:
    with StandIn(make.model(0), version, **options) as server, opened(server) as remote:
        for number in (1, 2, 3):
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
            assert server.weight_version == "3"


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


@pytest.mark.parametrize(("version", "options"), WAYS)
def test_a_server_that_keeps_its_old_weights_is_found_out(version: str, options: Any) -> None:
    with StandIn(make.model(0), version, **options) as server:
        server.stale = True
        new = make.model(1)
        with opened(server, scorer=scorer_of(new)) as remote:
            with pytest.raises(UserError, match="other weights than it was sent"):
                remote.load(new.state_dict(), 1)
            assert (remote.version, server.engine.paused) == (0, None), "it was not left paused"
            with pytest.raises(UserError, match="load weights again"):
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
        with pytest.raises(UserError, match="half of its weights"):
            remote.generate([Request([5], LONG)])
        assert len(bodies(server)) == before, "an answer would kill its engine"
        server.half = False
        remote.load(new.state_dict(), 1)
        assert equal(server, new)


def test_weights_that_break_off_in_place_go_by_disk(server: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    new = make.model(1)
    monkeypatch.setattr(server.worker, "ascendchat_receive", lambda told: 1 / 0 if told else None)

    def broken(told: str) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(server.worker, "ascendchat_receive", broken)
    with opened(server, scorer=scorer_of(new)) as remote:
        remote.load(new.state_dict(), 1)
        assert equal(server, new)
        methods = [body["method"] for path, body in server.asked if path == "/collective_rpc"]
        assert methods[-2:] == ["ascendchat_leave", "reload_weights"]


def test_without_checksums_somebody_must_score_a_probe() -> None:
    with StandIn(make.model(0), "0.23.0") as server, opened(server) as remote:
        with pytest.raises(UserError, match=r"set Remote\.scorer"):
            remote.load(make.model(1).state_dict(), 1)


def test_digests_of_a_server_name_the_weights_that_differ() -> None:
    import hashlib

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
