"""The life of a server as processes: its end in order, its end by force, its start that fails, and its idle hours."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import engine_models as make
import pytest
import running_server as real

pytestmark = pytest.mark.slow
STOPS = make.tokenizer().stops


def send(link: http.client.HTTPConnection, tokens: int, stream: bool = False) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens, "stream": stream, "seed": 1}
    body |= {"model": "tiny/sft", "temperature": 1.0, "logit_bias": dict.fromkeys(map(str, STOPS), -100)}
    link.request("POST", real.CHAT, json.dumps(body), {"Content-Type": "application/json"})


def events(response: http.client.HTTPResponse) -> list[Any]:
    """What a stream says; it must be whole."""
    lines = [line[6:] for line in response.read().decode().split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_running_answers_finish_and_turns_new_ones_away(tmp_path: Path, number: int) -> None:
    with real.serving(tmp_path, "--drain=120", ends=True) as server:
        idle, streaming, plain = server.link(), server.link(), server.link()
        idle.request("GET", "/health")
        assert idle.getresponse().read()
        send(streaming, 300, stream=True)
        send(plain, 300)
        response = streaming.getresponse()
        for _ in range(4):  # the role and the first token, each with an empty line
            response.readline()
        workers = server.workers
        server.process.send_signal(number)
        while True:
            send(idle, 3)
            answer = idle.getresponse()
            answer.read()
            if answer.status == 503:
                break
        assert int(answer.headers["Retry-After"]) >= 1
        rest = events(response)
        assert rest[-1]["choices"][0]["finish_reason"] == "length"
        whole = json.loads(plain.getresponse().read())
        assert whole["usage"]["completion_tokens"] == 300
        assert server.process.wait(real.PATIENCE) == 0
        assert not any(map(real.running, workers))
        assert "Traceback" not in server.said


def test_answers_that_are_too_long_are_ended_with_an_error_after_the_drain(tmp_path: Path) -> None:
    with real.serving(tmp_path, "--drain=1", ends=True) as server:
        streaming = server.link()
        send(streaming, 16000, stream=True)
        response = streaming.getresponse()
        for _ in range(4):
            response.readline()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(real.PATIENCE) == 0
        try:
            rest = response.read()
        except http.client.IncompleteRead as error:
            rest = error.partial
        assert b'"length"' not in rest, "it was not finished, and does not look as if"


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    with real.serving(tmp_path, "--drain=600", ends=True) as server:
        streaming = server.link()
        send(streaming, 16000, stream=True)
        streaming.getresponse().readline()
        workers = server.workers
        idle = server.link()
        server.process.send_signal(signal.SIGTERM)
        status = 200
        while status != 503:  # else the two signals might arrive together, in the order of their numbers
            send(idle, 3)
            answer = idle.getresponse()
            answer.read()
            status = answer.status
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


@pytest.mark.parametrize("doing", ["nothing", "a step", "sending"])
def test_workers_do_not_survive_the_front(tmp_path: Path, doing: str) -> None:
    with real.serving(tmp_path, "--devices=2", ends=True, warm=doing != "nothing") as server:
        real.wait_until(lambda: len(server.workers) == 3)  # two, and the one that waits
        workers = server.workers
        links = [server.link() for _ in range(8 if doing != "nothing" else 0)]
        for link in links:
            send(link, 16000, stream=True)
            link.getresponse().readline()
        if doing == "sending":  # the front reads no more: the sockets fill up
            server.process.send_signal(signal.SIGSTOP)
            time.sleep(3)
        server.process.kill()
        server.process.wait()
        real.wait_until(lambda: not any(map(real.running, workers)))


def test_the_end_of_a_worker_leaves_no_zombie(tmp_path: Path) -> None:
    with real.serving(tmp_path, warm=False) as server:
        real.wait_until(lambda: len(server.workers) == 2)
        for _ in range(2):
            before = server.workers
            os.kill(before[0], signal.SIGKILL)
            real.wait_until(lambda old=before[0]: old not in server.workers and len(server.workers) == 2)
            link = server.link()
            send(link, 3)
            assert link.getresponse().status == 200
        assert all(map(real.running, server.workers))


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


def test_weight_updates_need_a_key(tmp_path: Path) -> None:
    server = real.begin(tmp_path, "--weight-updates", ASCENDCHAT_API_KEYS=" , ")
    assert server.process.wait(real.PATIENCE) == 2
    assert "--weight-updates needs an API key" in server.said


def test_an_idle_server_costs_nothing(tmp_path: Path) -> None:
    with real.serving(tmp_path) as server:
        real.wait_until(lambda: len(server.workers) == 2)
        link = server.link()
        send(link, 3)
        assert link.getresponse().read()
        everyone = [server.process.pid, *server.workers]

        def used() -> float:
            return sum(map(real.cpu_seconds, everyone))

        real.wait_until(lambda: _quiet(used))  # the process that waits has imported torch
        before, began = used(), time.monotonic()
        time.sleep(5)
        assert used() - before <= 0.03 * (time.monotonic() - began)


def _quiet(used: Any) -> bool:
    before = used()
    time.sleep(1)
    return used() - before <= 0.05


def test_a_client_that_reads_nothing_stalls_nobody(tmp_path: Path) -> None:
    with real.serving(tmp_path, "--slots=4") as server:
        lazy = [server.link() for _ in range(2)]
        for link in lazy:
            link.connect()
            link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            send(link, 12000, stream=True)
        done: list[int] = []

        def ask() -> None:
            link = server.link()
            send(link, 50, stream=True)
            done.append(len(events(link.getresponse())))

        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(real.PATIENCE)
        assert len(done) == 6
        for link in lazy:
            link.close()
