"""The life of a server as processes: its end in order, its end by force, its start that fails, and its idle hours."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import time
from pathlib import Path
from typing import Any

import engine_models as make
import pytest
import running_server as real

pytestmark = pytest.mark.slow
STOPS = make.tokenizer().stops
ENDLESS = 16000  # tokens of an answer that nobody waits for


def send(link: http.client.HTTPConnection, tokens: int, stream: bool = False) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens, "stream": stream, "seed": 1}
    body |= {"model": "tiny/sft", "temperature": 1.0, "logit_bias": dict.fromkeys(map(str, STOPS), -100)}
    link.request("POST", real.CHAT, json.dumps(body), {"Content-Type": "application/json"})


def begun(server: real.Server, tokens: int) -> http.client.HTTPResponse:
    """A stream whose first token has come."""
    link = server.link()
    send(link, tokens, stream=True)
    response = link.getresponse()
    for _ in range(4):  # the role and the token, each with an empty line
        response.readline()
    return response


def turned_away(link: http.client.HTTPConnection) -> http.client.HTTPResponse:
    """The answer of a server that has heard of its end, on a connection from before."""
    while True:
        send(link, 3)
        answer = link.getresponse()
        answer.read()
        if answer.status == 503:
            return answer


def events(response: http.client.HTTPResponse) -> list[Any]:
    """What a stream says; it must be whole."""
    lines = [line[6:] for line in response.read().decode().split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_signal_lets_running_answers_finish_and_turns_new_ones_away(tmp_path: Path) -> None:
    with real.serving(tmp_path, "--drain=120", ends=True) as server:
        idle, plain = server.link(), server.link()
        idle.request("GET", "/health")
        assert idle.getresponse().read()
        response = begun(server, 300)
        send(plain, 300)
        workers = server.workers
        server.process.send_signal(signal.SIGTERM)
        assert int(turned_away(idle).headers["Retry-After"]) >= 1
        assert events(response)[-1]["choices"][0]["finish_reason"] == "length"
        whole = json.loads(plain.getresponse().read())
        assert whole["usage"]["completion_tokens"] == 300
        assert server.process.wait(real.PATIENCE) == 0
        assert not any(map(real.running, workers))
        assert "Traceback" not in server.said


def test_answers_that_are_too_long_are_ended_with_an_error_after_the_drain(tmp_path: Path) -> None:
    with real.serving(tmp_path, "--drain=1", ends=True) as server:
        response = begun(server, ENDLESS)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(real.PATIENCE) == 0
        try:
            rest = response.read()
        except http.client.IncompleteRead as error:
            rest = error.partial
        assert b'"length"' not in rest, "it was not finished, and does not look as if"


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    with real.serving(tmp_path, "--drain=600", ends=True) as server:
        workers, idle = server.workers, server.link()
        with begun(server, ENDLESS):
            send(idle, 1)
            idle.getresponse().read()
            server.process.send_signal(signal.SIGTERM)
            turned_away(idle)  # else the two signals might arrive together, in the order of their numbers
            assert server.process.poll() is None
            server.process.send_signal(signal.SIGINT)
            assert server.process.wait(60) == 128 + signal.SIGINT
        assert not any(map(real.running, workers))


def test_a_signal_during_the_start_ends_it(tmp_path: Path) -> None:
    server = real.begin(tmp_path, "--devices=2", warm=False)
    real.wait_until(lambda: len(server.workers) == 2)
    workers = server.workers
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
    assert not any(map(real.running, workers))
    assert "Traceback" not in server.said


@pytest.mark.parametrize("doing", ["a step", "sending"])
def test_workers_do_not_survive_the_front(tmp_path: Path, doing: str) -> None:
    """Neither the one that answers, nor the one that waits for another's death."""
    with real.serving(tmp_path, ends=True) as server:
        real.wait_until(lambda: len(server.workers) == 2)
        workers = server.workers
        streams = [begun(server, ENDLESS) for _ in range(8)]
        assert len(streams) == 8
        if doing == "sending":  # the front reads no more: its socket fills up, and the worker stands still
            server.process.send_signal(signal.SIGSTOP)
            real.wait_until(lambda: quiet(workers))
        server.process.kill()
        server.process.wait()
        real.wait_until(lambda: not any(map(real.running, workers)))


def quiet(processes: list[int], seconds: float = 0.5) -> bool:
    """They do next to nothing for so long."""
    before = sum(map(real.cpu_seconds, processes))
    time.sleep(seconds)
    return sum(map(real.cpu_seconds, processes)) - before <= 0.03 * seconds


def test_a_model_that_cannot_be_opened_ends_the_command_with_the_workers_sentence(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    server = real.begin(tmp_path, "--devices=2")
    assert server.process.wait(real.PATIENCE) == 2
    assert server.said.count("\n") == 1
    assert server.said.startswith("ascendchat serve: no model in ")


def test_a_port_in_use_is_said_before_anything_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = real.begin(tmp_path, f"--port={taken.getsockname()[1]}")
        assert server.process.wait(real.PATIENCE) == 2
        assert "choose another with --host or --port" in server.said


def test_an_idle_server_costs_nothing(tmp_path: Path) -> None:
    with real.serving(tmp_path) as server:
        real.wait_until(lambda: len(server.workers) == 2)
        assert server.answers()
        real.wait_until(lambda: quiet([server.process.pid, *server.workers], 2.0))
