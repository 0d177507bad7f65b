"""Weights replaced while real workers answer: all or none, one version per answer, versions and numbers that fit."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import running_pool as real
import running_server as served
import torch
from safetensors.torch import save, save_file

from ascendchat.device import pick
from ascendchat.engine.request import Completion
from ascendchat.errors import UserError
from ascendchat.nn.gpt import GPT
from ascendchat.serve.pool import AnswerFailed, WorkerPool
from ascendchat.serve.weights import NAME
from ascendchat.serve.worker_messages import Chunk

pytestmark = pytest.mark.slow

CONTEXT = 512
LAST = 5  # version of the weights, one after the other
KEY = "a-key-for-the-trainer"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model of random weights, for the workers of this test."""
    monkeypatch.setenv("ASCENDCHAT_HOME", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    served.save(tmp_path, model(0))
    return tmp_path


def model(seed: int) -> GPT:
    return served.make.model(seed, seq_len=CONTEXT)


def folder(home: Path, seed: int) -> str:
    return str(served.save(home, model(seed), run=f"trainer{seed}"))


def file(home: Path, seed: int) -> str:
    path = home / f"{seed}.safetensors"
    save_file(dict(model(seed).state_dict()), path)
    return str(path)


def reference(seed: int, request: Any) -> Completion:
    """The answer of an engine of this process."""
    engine = served.make.engine(model(seed), pick("cpu"), context=CONTEXT)
    return engine.generate([request])[0]


def same(answer: Chunk, expected: Completion) -> bool:
    close = torch.allclose(torch.tensor(answer.logprobs), torch.tensor(expected.logprobs), atol=1e-4)
    return answer.ids == expected.ids and close


def test_replacements_under_load_never_mix_versions(home: Path) -> None:
    """Two workers, one of them killed; what an answer says of its version is true to the last digit."""
    asked = real.request(24, (5, 6, 7), logprobs=True)
    expected = {seed: reference(seed, asked) for seed in range(3)}
    sources = {seed: folder(home, seed) if seed else file(home, seed) for seed in range(3)}
    answers: list[Chunk] = []

    async def client(pool: WorkerPool, streams: bool) -> None:
        while True:
            outcome = await real.outcome(pool.submit(asked, streams=streams))
            if isinstance(outcome, Chunk):
                answers.append(outcome)

    async def update(pool: WorkerPool, version: int) -> None:
        for _ in range(100):
            try:
                await pool.load(sources[version % 3], version)
                break
            except AnswerFailed:  # a worker that was killed meanwhile
                await asyncio.sleep(0.2)
        await real.until(lambda: any(answer.versions[0] == version for answer in answers))

    async def test() -> None:
        async with real.pool(home, devices=2, slots=2) as pool:
            clients = [asyncio.ensure_future(client(pool, bool(n % 2))) for n in range(6)]
            await real.until(lambda: bool(answers))
            for version in range(1, LAST + 1):
                if version == 3:
                    os.kill(real.pid(pool.processes[1]), signal.SIGKILL)
                await update(pool, version)
            await real.until(lambda: len(pool.ready) == 2)
            assert {process.loaded.version for process in pool.processes if process.loaded} == {LAST}
            assert len({process.checksum for process in pool.processes}) == 1
            for task in clients:
                task.cancel()

    real.run(test)
    for answer in answers:
        (version,) = set(answer.versions)
        assert len(answer.versions) == len(answer.ids) == 24
        assert same(answer, expected[version % 3]), version
    assert {answer.versions[0] for answer in answers} == set(range(LAST + 1))


def test_pausing_keeps_finishes_or_ends_what_is_under_way(home: Path) -> None:
    other = file(home, 1)
    fresh = {seed: reference(seed, real.request(10)) for seed in range(2)}

    async def test() -> None:
        async with real.pool(home, slots=2) as pool:
            kept = pool.submit(real.request(60), streams=True)
            first = await kept.__anext__()
            await pool.pause("keep")
            queued = pool.submit(real.request(10), streams=False)
            await pool.load(other, 1)
            assert pool.paused == "keep"
            assert not queued.begun
            await pool.resume()
            rest = await real.whole(kept)
            versions = first.versions + rest.versions
            assert len(versions) == 60
            assert set(versions) == {0, 1}
            assert versions == sorted(versions)
            answer = await real.whole(queued)
            assert (answer.ids, set(answer.versions)) == (fresh[1].ids, {1})

            finished, behind = pool.submit(real.request(60), streams=True), pool.submit(real.request(10), streams=True)
            await finished.__anext__()
            await behind.__anext__()
            third = pool.submit(real.request(10), streams=True)
            await pool.pause("wait")
            assert finished.closed
            assert behind.closed
            assert not third.closed
            await pool.load(folder(home, 0), 2)
            await pool.resume()
            assert set((await real.whole(finished)).versions) <= {1}
            assert (await real.whole(third)).ids == fresh[0].ids

            ended = pool.submit(real.request(4000), streams=True)
            await ended.__anext__()
            await pool.pause("abort")
            rest = await real.whole(ended)
            assert rest.finish_reason == "cancelled"
            assert len(rest.ids) < 4000
            await pool.resume()

            for end in (lambda: pool.pause("abort"), pool.resume):  # hastened, or taken back
                ended = pool.submit(real.request(4000), streams=True)
                await ended.__anext__()
                waiting = asyncio.ensure_future(pool.pause("wait"))
                await real.until(lambda: pool.paused == "wait")
                assert not waiting.done()
                await end()
                await waiting
                ended.cancel()
                await pool.resume()
            await pool.resume()
            assert (await real.whole(pool.submit(real.request(10), streams=False))).ids == fresh[0].ids

    real.run(test)


def broken(home: Path) -> Iterator[tuple[str, str]]:
    """Sources that no worker may take, and what is said of them."""
    weights = dict(model(3).state_dict())
    save_file({name: tensor for name, tensor in weights.items() if name != "smear"}, home / "missing")
    yield str(home / "missing"), "smear is missing"
    save_file({**weights, "smear": torch.full_like(weights["smear"], float("nan"))}, home / "nan")
    yield str(home / "nan"), "not finite, in smear"
    save_file({**weights, "smear": torch.full_like(weights["smear"], 1e200, dtype=torch.float64)}, home / "large")
    yield str(home / "large"), "not finite, in smear as torch.float32"
    save_file({**weights, "smear": torch.zeros_like(weights["smear"], dtype=torch.int64)}, home / "whole")
    yield str(home / "whole"), "smear is torch.int64"
    (home / "cut").write_bytes(save(weights)[:-100])
    yield str(home / "cut"), "not a whole safetensors file"
    yield str(served.save(home, served.make.model(1, seq_len=64), run="short")), "a model of another shape"
    damaged = Path(folder(home, 4))
    (damaged / "state.json").write_text("{}")
    yield str(damaged), "state.json"


def test_weights_that_do_not_fit_change_nothing_anywhere(home: Path) -> None:
    expected = reference(0, real.request(10))

    async def test() -> None:
        async with real.pool(home, devices=2) as pool:
            before = [process.checksum for process in pool.processes]
            for source, says in broken(home):
                with pytest.raises(UserError, match=says):
                    await pool.load(source, 5)
            os.kill(real.pid(pool.processes[1]), signal.SIGSTOP)  # one cannot even look at them
            loading = asyncio.ensure_future(pool.load(file(home, 1), 5))
            await asyncio.sleep(0.1)
            os.kill(real.pid(pool.processes[1]), signal.SIGKILL)
            with pytest.raises(AnswerFailed, match="worker 1 has died"):
                await loading
            await real.until(lambda: len(pool.ready) == 2)
            assert (pool.version, [process.checksum for process in pool.processes]) == (0, before)
            answers = await real.gather(*(real.whole(pool.submit(real.request(10), streams=False)) for _ in range(4)))
            assert all(answer.ids == expected.ids and set(answer.versions) == {0} for answer in answers)

    real.run(test)


def test_a_version_in_use_takes_only_the_weights_it_has(home: Path) -> None:
    """Else an answer's version would not say which weights wrote it."""

    async def test() -> None:
        async with real.pool(home) as pool:
            await pool.load(file(home, 1), 5)
            before = pool.processes[0].checksum
            for other in (file(home, 2), folder(home, 2)):
                with pytest.raises(UserError, match="version 5 is in use with other weights"):
                    await pool.load(other, 5)
            await pool.load(folder(home, 1), 5)
            assert (pool.version, pool.processes[0].checksum) == (5, before)
            await pool.load(file(home, 2), 0)  # no answer has this version any more
            assert pool.version == 0

    real.run(test)


# ---- over HTTP -----------------------------------------------------------------------------------


def ask(server: served.Server, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    kind = "application/octet-stream" if isinstance(body, bytes) else "application/json"
    answer = server.ask(method, path, body, Content_Type=kind, Authorization=f"Bearer {KEY}")
    return answer.status, answer.json


def card(server: served.Server) -> dict[str, Any]:
    """What /v1/models says of the weights."""
    own = ask(server, "GET", "/v1/models")[1]["data"][0]["ascendchat"]
    return {name: own[name] for name in ("stage", "step", "chats", "version")}


ROUTES = ["POST /pause", "POST /resume", "GET /is_paused", "POST /update_weights", "GET /weights"]


def test_without_the_flag_there_are_no_such_routes(home: Path) -> None:
    with served.serving(home, ASCENDCHAT_API_KEYS=KEY) as server:
        assert {ask(server, *route.split())[0] for route in ROUTES} == {404}


def test_a_trainer_replaces_weights_over_http(home: Path) -> None:
    left = Path(tempfile.mkdtemp(prefix=f"{NAME}99999999-"))  # by a server that was killed
    with served.serving(home, "--weight-updates", "--devices=2", ends=True, ASCENDCHAT_API_KEYS=KEY) as server:
        start = ask(server, "GET", "/weights")[1]
        assert card(server) == {"stage": "sft", "step": 1, "chats": True, "version": 0}
        assert (start["version"], len(start["workers"])) == (0, 2)
        assert ask(server, "GET", "/is_paused") == (200, {"is_paused": False})
        assert ask(server, "POST", "/pause?mode=never")[0] == 400
        assert ask(server, "POST", "/pause?mode=keep") == (200, {"status": "paused", "mode": "keep"})
        assert ask(server, "GET", "/is_paused")[1] == {"is_paused": True}
        status, loaded = ask(server, "POST", "/update_weights?version=7", save(dict(model(1).state_dict())))
        assert (status, loaded["version"]) == (200, 7), loaded
        assert loaded["checksum"] not in (None, start["checksum"])
        assert card(server) == {"stage": None, "step": None, "chats": True, "version": 7}, "a file says no more"
        assert ask(server, "POST", "/resume") == (200, {"status": "resumed"})
        assert not left.exists()

        source = str(served.save(home, model(2), run="trainer", step=9))
        status, second = ask(server, "POST", "/update_weights", {"folder": source, "version": 8})
        assert (status, second["version"]) == (200, 8), second
        assert card(server) == {"stage": "sft", "step": 9, "chats": True, "version": 8}
        shutil.rmtree(source)
        for worker in server.workers[:2]:
            os.kill(worker, signal.SIGKILL)
        served.wait_until(lambda: ask(server, "GET", "/weights")[1]["checksum"] is None)
        served.wait_until(lambda: {"status": "loaded", **ask(server, "GET", "/weights")[1]} == second)
        assert card(server)["step"] == 9
        for path, body, says in [
            ("/update_weights", {"folder": source, "version": 9}, "no checkpoint folder on the server"),
            ("/update_weights", {"folder": source, "version": 2**63}, "version must be a whole number"),
            ("/update_weights", {"version": 9}, "send {"),
            ("/update_weights?version=9", b"no weights", "not a whole safetensors file"),
            ("/update_weights?version=9", bytes(1 << 25), "bytes are not the weights of this model"),
        ]:
            status, answer = ask(server, "POST", path, body)
            assert (status, says in answer["error"]["message"]) == (400, True), answer
        assert ask(server, "GET", "/weights")[1]["version"] == 8
        mine = list(Path(tempfile.gettempdir()).glob(f"{NAME}{server.process.pid}-*"))
        assert len(mine) == 1
        assert len(list(mine[0].iterdir())) == 1
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(served.PATIENCE) == 0
        assert not mine[0].exists()
