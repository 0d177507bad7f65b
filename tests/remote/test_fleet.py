"""Two real servers as one Generator: the same tokens, also when one is killed, hangs, or has other weights."""

from __future__ import annotations

import json
import signal
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from running_server import make, save
from server_process import KEY, ServerProcess, wait_until

from ascendchat.device import pick
from ascendchat.engine.request import Completion, Request, Sampling
from ascendchat.errors import UserError
from ascendchat.nn.attention import Sdpa
from ascendchat.nn.gpt import GPT
from ascendchat.remote.client import RemoteGenerator
from ascendchat.remote.fleet import ReplicaPool, batches

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

TEXT = make.tokenizer()
CONTEXT = 160
SETTINGS: dict[str, Any] = {"api_key": KEY, "tokenizer": TEXT, "patience": 120.0}


def requests(prompts: int = 6, samples: int = 4, tokens: int = 12) -> list[Request]:
    asked = [[0, *TEXT.encode(f"question {i} " * 3)] for i in range(prompts)]
    sampling = {"max_tokens": tokens, "stop_tokens": (), "logprobs": True}
    return [Request(p, Sampling(seed=100 * i + s, **sampling)) for i, p in enumerate(asked) for s in range(samples)]


def expected(model: GPT, asked: Sequence[Request]) -> list[list[int]]:
    engine = make.engine(model, pick("cpu", compiled=False), Sdpa(), slots=4, context=CONTEXT)
    return [answer.ids for answer in engine.generate(asked)]


def ids(answers: Sequence[Completion]) -> list[list[int]]:
    return [answer.ids for answer in answers]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServerProcess]]:
    """Two servers of a model with random weights; a test may kill them."""
    home = tmp_path_factory.mktemp("fleet")
    save(home, make.model(3))
    made = [ServerProcess(home, "--slots", "2", "--context", str(CONTEXT)).start() for _ in range(2)]
    try:
        yield [server.ready() for server in made]
    finally:
        for server in made:
            server.kill()


@pytest.fixture
def said() -> list[str]:
    """What the fleet has said."""
    return []


@pytest.fixture
def fleet(servers: list[ServerProcess], said: list[str]) -> Iterator[ReplicaPool]:
    """Both servers, alive, with the weights of model 3 as version 1."""
    for server in servers:
        server.signal(signal.SIGCONT)
        if server.process.poll() is not None:
            server.start().ready()
    with ReplicaPool.open([server.url for server in servers], say=said.append, hang=120.0, **SETTINGS) as opened:
        opened.load(make.model(3).state_dict(), 1)
        yield opened


def asked_of(server: ServerProcess, path: str) -> dict[str, Any]:
    request = urllib.request.Request(server.url + path, headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


def in_service(fleet: ReplicaPool) -> list[bool]:
    return [replica.remote is not None for replica in fleet.replicas]


def test_the_samples_of_a_prompt_stay_together() -> None:
    groups = batches(requests(prompts=3, samples=16))
    assert groups == [list(range(i * 16, i * 16 + 16)) for i in range(3)]
    assert [len(part) for part in batches(requests(prompts=1, samples=40))] == [16, 16, 8]
    assert [len(part) for part in batches(requests(prompts=20, samples=1))] == [8, 8, 4]
    mixed = [request for pair in zip(requests(2, 9)[:9], requests(2, 9)[9:]) for request in pair]
    assert batches(mixed) == [list(range(0, 18, 2)), list(range(1, 18, 2))]
    assert batches([]) == []


def test_two_servers_answer_as_one_engine_does(fleet: ReplicaPool, servers: list[ServerProcess]) -> None:
    asked, before = requests(samples=3), [server.asked() for server in servers]
    answers = fleet.generate(asked)
    assert ids(answers) == expected(make.model(3), asked)
    assert {answer.version for answer in answers} == {1}
    assert fleet.generate([]) == []
    assert all(server.asked() > count + 3 for server, count in zip(servers, before)), "each had its share"
    stream = fleet.stream(asked[0])
    assert "".join(piece.text for piece in stream) == stream.completion.text == answers[0].text
    assert [replica.load for replica in fleet.replicas] == [0, 0]


def test_weights_go_to_servers_that_have_others_by_the_same_number(fleet: ReplicaPool) -> None:
    """As after a run of another trainer, or with a server of another stage: both begin with version 0."""
    asked, other = requests(prompts=2), make.model(5)
    with ReplicaPool.open([fleet.replicas[0].url], say=print, **SETTINGS) as second:
        second.load(other.state_dict(), 1)
        assert ids(second.generate(asked)) == expected(other, asked)
        assert second.version == 1


def test_a_server_that_is_killed_loses_nothing_and_comes_back_with_the_current_weights(
    fleet: ReplicaPool, servers: list[ServerProcess], said: list[str]
) -> None:
    new, asked = make.model(6), requests(prompts=6, tokens=40)
    answers: list[Completion] = []
    asking = threading.Thread(target=lambda: answers.extend(fleet.generate(asked)))
    asking.start()
    wait_until(lambda: all(replica.load for replica in fleet.replicas))
    servers[0].kill()
    asking.join(180)
    assert ids(answers) == expected(make.model(3), asked), "each answer once, in its place, with the tokens of its seed"
    assert {answer.version for answer in answers} == {1}
    wait_until(lambda: in_service(fleet) == [False, True])
    assert any(servers[0].url in line and "out of service" in line for line in said)
    fleet.load(new.state_dict(), 7)
    assert ids(fleet.generate(asked[:4])) == expected(new, asked[:4])
    servers[0].start()  # it opens the weights of model 3
    wait_until(lambda: in_service(fleet) == [True, True], "its return")
    found = [asked_of(server, "/weights") for server in servers]
    assert [one["version"] for one in found] == [7, 7]
    assert found[0]["checksum"] == found[1]["checksum"] is not None


def test_a_server_whose_weights_somebody_else_replaced_is_not_believed(
    fleet: ReplicaPool, servers: list[ServerProcess], said: list[str]
) -> None:
    with RemoteGenerator.open(servers[0].url, api_key=KEY) as stranger:
        stranger.load(make.model(9).state_dict(), 0)
    asked = requests(samples=1)
    assert ids(fleet.generate(asked)) == expected(make.model(3), asked)
    assert any("version 0 instead of 1" in line for line in said)
    wait_until(lambda: all(in_service(fleet)), "its return")


def test_a_server_that_hangs_is_left_and_its_answers_are_asked_elsewhere(
    fleet: ReplicaPool, servers: list[ServerProcess], said: list[str]
) -> None:
    fleet.hang = 10.0
    asked = requests(tokens=24)
    answers: list[Completion] = []
    asking = threading.Thread(target=lambda: answers.extend(fleet.generate(asked)))
    servers[0].signal(signal.SIGSTOP)
    asking.start()
    asking.join(180)
    servers[0].signal(signal.SIGCONT)
    assert ids(answers) == expected(make.model(3), asked)
    assert any("generates nothing" in line for line in said)
    wait_until(lambda: all(in_service(fleet)), "its return")


def test_no_server_at_all_is_a_sentence_after_a_while(servers: list[ServerProcess], fleet: ReplicaPool) -> None:
    for server in servers:
        server.kill()
    fleet.patience = 2.0
    with pytest.raises(UserError, match="no server for rollouts answers") as caught:
        fleet.generate(requests(prompts=1))
    assert all(server.url in str(caught.value) for server in servers)
    with pytest.raises(UserError):
        fleet.load(make.model(4).state_dict(), 3)
    assert fleet.version == 1, "nothing was changed"
    with pytest.raises(UserError, match="no answer from"):
        ReplicaPool.open([servers[0].url], **{**SETTINGS, "patience": 1.0})
