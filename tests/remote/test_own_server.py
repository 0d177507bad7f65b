"""Servers of `ascendchat rl`: addresses that are none, and one of its own that ends before it is ready."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from warm_process import Popen

from ascendchat.config.rl import RlConfig
from ascendchat.device import pick
from ascendchat.errors import UserError
from ascendchat.parallel.collectives import World
from ascendchat.parallel.context import Context
from ascendchat.remote import fleet
from ascendchat.remote.http import NoAnswer
from ascendchat.remote.rollouts import OwnServer, ServerSizes, check_addresses, say_late, serve_command
from ascendchat.remote.servers import Server
from ascendchat.serve.app import model_card

PROGRAM = """
import os, pathlib, signal, sys, time
count = pathlib.Path(sys.argv[1])
count.write_text(count.read_text() + "." if count.exists() else ".")
if len(count.read_text()) <= int(sys.argv[2]):
    print(sys.argv[3], flush=True)
    os.kill(os.getpid(), signal.SIGKILL) if sys.argv[3] == "killed" else sys.exit(2)
print("ready: http://127.0.0.1:" + sys.argv[-1], flush=True)
time.sleep(600)
"""

SLOW = """
import os, pathlib, signal, sys, time
if sys.argv[1].endswith("busy"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as one that is busy importing
pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
time.sleep(300)
print("ready: http://127.0.0.1:" + sys.argv[-1], flush=True)
time.sleep(600)
"""
TRAINER = """
import contextlib, os, pathlib, sys
from ascendchat.config.rl import RlConfig
from ascendchat.device import pick
from ascendchat.parallel.context import joined
from ascendchat.remote import rollouts

program, folder = sys.argv[1], pathlib.Path(sys.argv[2])
command = [sys.executable, "-c", program, str(folder / sys.argv[3])]
rollouts.commands_of = lambda *_: [(command, dict(os.environ))]
with joined(pick("cpu")) as here, contextlib.ExitStack() as stack:
    rollouts.start_servers(RlConfig(), folder, print, here, folder, rollouts.ServerSizes(1, 8), stack)
"""


def server(folder: Path, deaths: int, how: str, said: list[str]) -> OwnServer:
    """One that ends so many times before it is ready."""
    command = [sys.executable, "-c", PROGRAM, str(folder / "starts"), str(deaths), how]
    return OwnServer(command, os.environ, folder / "log", said.append)


def alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def starts(folder: Path) -> int:
    return len((folder / "starts").read_text())


def test_a_server_hands_over_what_it_has_before_the_trainer_gives_up() -> None:
    here = Context(pick("cpu"), World(), torch.device("cpu"), print)
    config = RlConfig(rollout_devices=1, rollout_timeout=100.0)
    words = serve_command(config, Path("weights"), here, Path("key"), ServerSizes(1, 8))
    (limit,) = [word.partition("=")[2] for word in words if word.startswith("--request-timeout=")]
    assert 0 < float(limit) < config.rollout_timeout


@pytest.mark.parametrize(("limit", "lines"), [(600.0, 0), (899.0, 0), (900.0, 1), (1200.0, 1), (None, 0)])
def test_a_server_that_would_hand_over_too_late_is_named(limit: float | None, lines: int) -> None:
    config = SimpleNamespace(request_timeout=limit, devices=1, temperature=1.0, top_k=0, max_tokens=9)
    about = SimpleNamespace(context=64, device="cpu")
    card = model_card(SimpleNamespace(config=config, about=about, facts={}, version=0, name="m", created=0))  # type: ignore[arg-type]
    remote = SimpleNamespace(server=Server(SimpleNamespace(url="here"), card))  # type: ignore[arg-type]
    replicas = [SimpleNamespace(url="http://a", remote=remote), SimpleNamespace(url="http://b", remote=None)]
    said: list[str] = []
    say_late(SimpleNamespace(replicas=replicas), 900.0, said.append)  # type: ignore[arg-type]
    assert len(said) == lines
    assert all("http://a ends an answer after" in line for line in said)


def test_one_that_was_killed_before_it_was_ready_is_started_again(tmp_path: Path) -> None:
    said: list[str] = []
    own = server(tmp_path, 2, "killed", said)
    try:
        assert own.start() == f"http://127.0.0.1:{own.port}"
    finally:
        own.close()
    assert starts(tmp_path) == 3
    assert [line.partition(" (log")[0] for line in said] == [
        "the server for rollouts ended with 137 before it was ready: killed"
    ] * 2


def test_one_that_is_always_killed_or_says_what_is_wrong_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="ended with 137 before it was ready"):
        server(tmp_path, 9, "killed", []).start()
    assert starts(tmp_path) == 3
    with pytest.raises(UserError, match="ended with 2 before it was ready: unknown flag"):
        server(tmp_path, 9, "unknown flag", []).start()
    assert starts(tmp_path) == 4


@pytest.mark.slow
@pytest.mark.parametrize(("number", "name"), [(signal.SIGINT, "busy"), (signal.SIGKILL, "idle")])
def test_a_server_that_starts_ends_with_its_trainer(tmp_path: Path, number: signal.Signals, name: str) -> None:
    """On Ctrl-C nobody waits until it is ready."""
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    pid, words = tmp_path / name, ["-c", TRAINER, SLOW, str(tmp_path), name]
    trainer = Popen([sys.executable, *words], env=environment)
    try:
        while not pid.exists() or not pid.read_text():
            assert trainer.poll() is None
            time.sleep(0.05)
        trainer.send_signal(number)
        assert trainer.wait(120) != 0
    finally:
        trainer.kill()
    assert "ready" not in (tmp_path / "server-0.log").read_text()
    end = time.monotonic() + 60
    while alive(int(pid.read_text())):
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["nonsense"], "'nonsense' is no address"),
        (["ftp://there:80"], "is no address"),
        (["http://[::1"], "is no address"),
        (["http://127.0.0.1:99999"], "is no address"),
        (["http://"], "is no address"),
        (["local", "http://there:80"], "local and addresses exclude each other"),
        (["http://a:1", "http://b:1", "http://a:1"], "names http://a:1 twice"),
    ],
)
def test_what_is_no_address_is_said_at_once(given: list[str], says: str) -> None:
    with pytest.raises(UserError, match=says):
        check_addresses(given)
    check_addresses(["local"])
    check_addresses(["http://127.0.0.1:8001", "there:8000", "https://there", "http://[::1]:80/v1"])


def test_a_server_that_dies_while_it_is_connected_to_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It listened, and was killed before it answered."""
    found, outcomes = object(), iter([NoAnswer("no answer"), NoAnswer("no answer")])

    def connect(self: fleet.ReplicaPool, url: str) -> object:
        for error in outcomes:
            raise error
        return found

    monkeypatch.setattr(fleet.ReplicaPool, "_connect", connect)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        opened = fleet.ReplicaPool([], say=lambda text: None)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        assert opened._connect_first(url, time.monotonic() + 60) is found
        opened.close()
