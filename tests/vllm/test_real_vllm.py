"""Generation and weight sync against a real vLLM server on a CPU: `make vllm-test`; docs/log.md has a run of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from real_vllm import PYTHON, Served, open_qwen2, qwen2, scorer_of

from ascendchat.engine.request import Completion, Request, Sampling
from ascendchat.errors import UserError
from ascendchat.remote import vllm
from ascendchat.remote.client import RemoteGenerator, WeightsLost
from ascendchat.remote.vllm import VllmServer
from ascendchat.remote.weights import compare

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON, reason="needs a virtual environment with vLLM: make vllm-test"),
]

MAX_GAP = 1e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen2."""
    return qwen2(tmp_path_factory.mktemp("qwen2") / "model")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Served]:
    """vLLM with this model."""
    with Served(folder, folder.parent) as running:
        yield running


@pytest.fixture
def model(folder: Path) -> Any:
    """The model in this process."""
    return open_qwen2(folder)


@pytest.fixture
def remote(server: Served, model: Any) -> Iterator[RemoteGenerator]:
    """Every test begins and ends with the weights of the start, as version 0."""
    with RemoteGenerator.open(server.url, scorer=scorer_of(model), timeout=300.0, patience=60.0) as opened:
        opened.load(model.state_dict(), 0)
        yield opened


def asked(tokens: int = 24, temperature: float = 1.0, count: int = 8) -> list[Request]:
    return [
        Request([3 + i, 9, 4 * i], Sampling(tokens, temperature, seed=i, logprobs=True, stop_tokens=()))
        for i in range(count)
    ]


def gap(request: Request, answer: Completion, model: Any, temperature: float = 1.0) -> float:
    """The largest difference between the server's log-probabilities and those of a forward pass here."""
    own = scorer_of(model, temperature)([*request.prompt, *answer.ids])[len(request.prompt) - 1 :]
    return max(abs(a - b) for a, b in zip(own, answer.logprobs, strict=True))  # type: ignore[operator]


def changed(model: Any, seed: int) -> dict[str, torch.Tensor]:
    """A training step of a kind."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape, generator=noise) * 0.02
    return dict(model.state_dict())


def test_what_is_found_out(remote: RemoteGenerator) -> None:
    server = remote.server
    assert isinstance(server, VllmServer)
    found = (server.dtype, server.workers, server.controlled, server.receives)
    assert found == ("float32", 1, True, True)
    assert remote.alive()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_are_those_of_a_forward_pass(remote: RemoteGenerator, model: Any, temperature: float) -> None:
    requests = asked(temperature=temperature)
    answers = remote.generate(requests)
    gaps = [gap(request, answer, model, temperature) for request, answer in zip(requests, answers)]
    print(f"largest gap at temperature {temperature}: {max(gaps):.2g}")
    assert max(gaps) < MAX_GAP
    assert remote.generate(requests)[0].ids == answers[0].ids, "the same seed, the same tokens"


@pytest.mark.parametrize("in_place", [True, False])
def test_weights_are_equal_after_every_sync(remote: RemoteGenerator, model: Any, in_place: bool) -> None:
    server = remote.server
    assert isinstance(server, VllmServer)
    server.receives = in_place
    before = remote.generate(asked())
    for version in range(1, 6):
        weights = changed(model, version)
        began = time.monotonic()
        remote.load(weights, version, interrupt=version % 2 == 0)
        took = time.monotonic() - began
        requests = asked()
        answers = remote.generate(requests)
        worst = max(gap(request, answer, model) for request, answer in zip(requests, answers))
        told = remote._wait(server.http.command("POST", "/weight_checker", json={"action": "checksum"}))["checksums"]
        wrong, unknown = compare(told, weights)
        print(f"version {version}: {took:.2f} s, gap {worst:.2g}, {unknown} of {len(told)} weights not by digest")
        assert worst < MAX_GAP
        assert (wrong, remote.version) == ([], version)
        assert len(told) - unknown >= 9, "embedding, head, norms and biases; the others are packed for a kernel of CPUs"
        assert {number for answer in answers for number in answer.versions} == {version}
        assert [answer.ids for answer in answers] != [answer.ids for answer in before]
        assert remote._wait(server.http.probe("/weight_info")) == {"weight_version": str(version)}


def test_interrupted_answers_go_on_with_the_new_weights(remote: RemoteGenerator, model: Any, folder: Path) -> None:
    old, weights, requests = open_qwen2(folder), changed(model, 1), asked(240, count=4)
    for delay in [0.2, 0.1, 0.4, 0.05, 0.8] * 3:  # until an answer was caught in the middle, on a machine of any speed
        found: list[Completion] = []
        thread = threading.Thread(target=lambda into=found: into.extend(remote.generate(requests)), daemon=True)
        thread.start()
        time.sleep(delay)
        remote.scorer = scorer_of(model)
        remote.load(weights, 7, interrupt=True)
        thread.join(300)
        assert [len(answer.ids) for answer in found] == [240] * 4
        if any(set(answer.versions) == {0, 7} for answer in found):
            break
        remote.scorer = scorer_of(old)
        remote.load(dict(old.state_dict()), 0)
    else:
        pytest.fail("none was interrupted")
    for request, answer in zip(requests, found):
        whole = [*request.prompt, *answer.ids]
        scores = {0: scorer_of(old)(whole)[2:], 7: scorer_of(model)(whole)[2:]}
        worst = max(
            abs(scores[version][i] - value)  # type: ignore[operator]
            for i, (version, value) in enumerate(zip(answer.versions, answer.logprobs, strict=True))
        )
        assert worst < MAX_GAP, "each token is the work of the weights it names"


def test_a_reload_that_fails_is_mended_by_the_next(remote: RemoteGenerator, model: Any, monkeypatch: Any) -> None:
    """vLLM is then without weights, and an answer would kill its engine."""
    server = remote.server
    assert isinstance(server, VllmServer)
    server.receives = False
    weights = changed(model, 1)
    with monkeypatch.context() as patch:
        patch.setattr(vllm, "write_weights", lambda path, weights: None)
        with pytest.raises(UserError, match="has not taken version 1"):
            remote.load(weights, 1)
    with pytest.raises(WeightsLost):
        remote.generate(asked())
    remote.load(weights, 1)
    requests = asked()
    assert max(gap(*pair, model) for pair in zip(requests, remote.generate(requests))) < MAX_GAP


def test_a_killed_server_comes_back_without_its_weights_and_gets_them_again(
    remote: RemoteGenerator, server: Served, model: Any
) -> None:
    weights = changed(model, 1)
    remote.load(weights, 3)
    requests, found = asked(240, count=4), list[Any]()

    def ask() -> None:
        try:
            found.extend(remote.generate(requests))
        except UserError as error:
            found.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    time.sleep(1.0)
    server.kill()
    thread.join(300)
    assert isinstance(found[0], UserError), "nobody answers, and it is said"
    server.start()
    with pytest.raises(WeightsLost, match="started anew"):
        remote.generate(asked())
    remote.load(weights, 3)
    requests = asked()
    assert max(gap(*pair, model) for pair in zip(requests, remote.generate(requests))) < MAX_GAP
