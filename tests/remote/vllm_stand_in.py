"""A server with the routes and shapes of vLLM 0.32, as the real one gives them, around a tiny model of ours.

with StandIn(make.model(0)) as server:
    server.faults.append("abort:3")      # of the next answer: it is cut behind three tokens
    remote = opened(server)              # what tests ask it with is at the end of this file

What it does was read off a real server (tests/vllm): requests that come during a pause wait for /resume; an unknown
method of /collective_rpc is a 500; a stop token counts to the answer; a token outside the vocabulary kills the engine;
a reload that fails leaves the model half replaced, and the next answer kills the engine.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import engine_models as make
import torch
from safetensors.torch import load_file

from ascendchat.device import pick
from ascendchat.engine.engine import Engine, RequestState
from ascendchat.engine.request import Completion, Request, Sampling
from ascendchat.nn.attention import Reference, Sdpa
from ascendchat.nn.gpt import GPT
from ascendchat.remote.client import RemoteGenerator
from ascendchat.remote.vllm_worker import WeightReceiver

NAME = "standin"
TEXT = make.tokenizer()
LONG = Sampling(max_tokens=40, seed=5, logprobs=True, stop_tokens=(), tools=False)


class Dead(Exception):
    """The engine has died; the server goes with it."""


class Worker(WeightReceiver):
    """What vLLM's worker has that our receiver uses."""

    def __init__(self, owner: StandIn) -> None:
        self.owner, self.rank, self.device = owner, 0, torch.device("cpu")
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=1, data_parallel_index=0))

    def reload_weights(self, weights_iterator: Any = None, weights_path: str = "") -> None:
        owner = self.owner
        if owner.stale:
            return
        if owner.half or (weights_iterator is None and not Path(weights_path, "model.safetensors").is_file()):
            owner.torn = True
            raise RuntimeError("Repo id must be in the form 'repo_name' or 'namespace/repo_name'")
        weights = dict(weights_iterator or load_file(Path(weights_path, "model.safetensors")))
        with owner.lock:
            owner.received = weights
            owner.engine.load(weights, 0, interrupt=True)
            owner.torn = False


class StandIn:
    """Listens on 127.0.0.1 from `with` to its end. `lock` is held by whoever touches the engine."""

    def __init__(self, model: GPT, version: str = "0.32.0", **options: Any) -> None:
        self.version, self.context = version, int(options.get("context", 64))
        self.processed = bool(options.get("processed", False))  # --logprobs-mode processed_logprobs
        self.development = bool(options.get("development", True))  # VLLM_SERVER_DEV_MODE
        self.packed = bool(options.get("packed", False))  # weights that only a kernel can read, as on CPUs
        self.extended = bool(options.get("extended", True))  # --worker-extension-cls
        self.faults: deque[str] = deque()  # of the next answers, one each
        self.stale = self.half = self.torn = False
        self.asked: list[tuple[str, Any]] = []
        self.weight_version = "default"
        self.received: dict[str, torch.Tensor] = {}
        self.model, self.lock = model, threading.RLock()
        self.engine: Engine = make.engine(model, pick("cpu", compiled=False), Sdpa(), slots=8, context=self.context)
        self._first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        self.born = 1.79e9
        self.worker = Worker(self)
        self.pace = 0.0  # seconds a token takes at least
        self.closing = threading.Event()
        self._port, self._http = 0, None
        self._links: set[socket.socket] = set()

    def __enter__(self) -> StandIn:
        self.revive()
        threading.Thread(target=self._steps, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        self.die()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def revive(self) -> None:
        """Listen again, with nothing under way and the weights of the start; at the same place as before."""
        self.born += 1.5
        self.weight_version, self.torn = "default", False
        with self.lock:
            self.engine.load(self._first, 0)
        self._http = Listener(("127.0.0.1", self._port), Handler)
        self._http.owner = self
        self._port = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def die(self) -> None:
        """As by kill -9: connections break, nothing listens."""
        http, self._http = self._http, None
        if http is None:
            return
        http.shutdown()
        http.server_close()
        for link in list(self._links):
            with contextlib.suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)
        with self.lock:
            for job in [*self.engine.waiting, *(job for job in self.engine.running if job)]:
                self.engine.cancel(job)
            self.engine.resume()

    def under_way(self) -> int:
        with self.lock:
            return len(self.engine.waiting) + sum(job is not None for job in self.engine.running)

    def _steps(self) -> None:
        while not self.closing.is_set():
            with self.lock:
                busy = bool(self.engine.waiting or any(self.engine.running)) and self.engine.paused is None
                if busy or (self.engine.paused == "wait" and any(self.engine.running)):
                    self.engine.step()
                    busy = True
            if not busy or self.pace:
                self.closing.wait(self.pace or 0.002)

    # ---- answers -------------------------------------------------------------------------------

    def complete(self, body: dict[str, Any], fault: str) -> dict[str, Any]:
        """/v1/completions"""
        prompt, most = body["prompt"], body.get("max_tokens", 16)
        if self.torn or max(prompt) >= self.engine.vocab:
            raise Dead
        if len(prompt) + most > self.context:
            raise ValueError(f"max_tokens={most} cannot be greater than max_model_len={self.context}")
        if body.get("logprobs") is not None and not body.get("return_tokens_as_token_ids"):
            raise ValueError("Unable to get tokenizer because `skip_tokenizer_init=True`")
        if body.get("temperature", 1.0) > 2:
            raise ValueError(f"temperature must be in [0, 2], got {body['temperature']}.")
        kind, _, value = fault.partition(":")
        job, cut = self._generate(prompt, body), kind == "abort"
        ids, values = list(job.completion.ids), list(job.completion.logprobs)
        reason: str = {"cancelled": "abort"}.get(job.completion.finish_reason, job.completion.finish_reason)
        if cut:
            ids, values, reason = ids[: int(value)], values[: int(value)], "abort"
        choice: dict[str, Any] = {"index": 0, "text": "", "logprobs": None, "finish_reason": reason}
        choice |= {"stop_reason": None, "token_ids": ids, "prompt_logprobs": None, "prompt_token_ids": prompt}
        if body.get("logprobs") is not None:
            choice["logprobs"] = self._logprobs(prompt, ids, values, body, kind)
        if body.get("prompt_logprobs") is not None:
            scores = self.scores(prompt, 1.0)
            choice["prompt_logprobs"] = [
                None,
                *({str(token): {"logprob": row[token].item(), "rank": 1}} for row, token in zip(scores, prompt[1:])),
            ]
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}
        return {"id": "cmpl-1", "object": "text_completion", "model": NAME, "choices": [choice], "usage": usage}

    def _generate(self, prompt: list[int], body: dict[str, Any]) -> RequestState:
        sampling = Sampling(
            max_tokens=body.get("max_tokens", 16),
            temperature=body.get("temperature", 1.0),
            seed=body.get("seed") or 0,
            stop_tokens=tuple(body.get("stop_token_ids") or ()),
            logprobs=True,
            keep_stop=True,
            tools=False,
        )
        with self.lock:
            job = self.engine.add(Request(prompt, sampling))
        while not job.done and not self.closing.is_set():
            time.sleep(0.001)
        return job

    def _logprobs(self, prompt: list[int], ids: list[int], values: list[Any], body: Any, kind: str) -> dict[str, Any]:
        rows = self.scores([*prompt, *ids], body.get("temperature", 1.0) if self.processed else 1.0)
        rows = rows[len(prompt) - 1 :]
        if self.processed:
            values = [row[token].item() for row, token in zip(rows, ids)]
        if kind in ("-9999", "nan") and values:
            values[-1] = float(kind)
        if kind == "short":
            values = values[:-1]
        tops = [{f"token_id:{token}": value} for token, value in zip(ids, values)]
        for top, row in zip(tops, rows):
            best = row.topk(max(1, body["logprobs"]))
            top |= {f"token_id:{token}": value for token, value in zip(best.indices.tolist(), best.values.tolist())}
        names = [f"token_id:{token}" for token in ids]
        return {"text_offset": [], "token_logprobs": values, "tokens": names, "top_logprobs": tops}

    @torch.no_grad()
    def scores(self, tokens: list[int], temperature: float) -> torch.Tensor:
        """(T, V): log-probabilities of what comes behind each token."""
        with self.lock:
            model = self.engine.decoder.model
            hidden = model(torch.tensor([tokens]), make.dense(model, Reference(), self.context))[0]
            logits = make.softcap(hidden @ model.head[: model.shape.vocab].t())
        return (logits.float() / temperature).log_softmax(-1)

    # ---- commands ------------------------------------------------------------------------------

    def pause(self, mode: str) -> None:
        with self.lock:
            for job in list(self.engine.waiting) if mode == "abort" else ():
                self.engine.cancel(job)
            self.engine.pause(mode)  # type: ignore[arg-type]
        while mode == "wait" and any(self.engine.running) and not self.closing.is_set():
            time.sleep(0.002)

    def rpc(self, body: dict[str, Any]) -> Any:
        method = getattr(self.worker, body["method"], None)
        if method is None or (body["method"].startswith("ascendchat") and not self.extended):
            raise RuntimeError(f"'CPUWorker' object has no attribute '{body['method']}'")
        return {"results": [method(*body.get("args", ()), **body.get("kwargs", {}))]}

    def checksums(self) -> dict[str, str]:
        found = {}
        for name, tensor in self.engine.decoder.model.state_dict().items():
            data = b"" if self.packed and tensor.dim() > 1 else tensor.contiguous().view(torch.uint8).numpy().tobytes()
            found[f"dp0:pp0:pcp0:tp0:{name}"] = hashlib.sha256(data).hexdigest()
        return found

    def newer(self, *version: int) -> bool:
        return tuple(int(part) for part in self.version.split(".")) >= version


class Listener(http.server.ThreadingHTTPServer):
    daemon_threads, block_on_close, request_queue_size, allow_reuse_address = True, False, 64, True
    owner: StandIn

    def handle_error(self, *_: Any) -> None:
        return  # clients that hang up are what these tests are about


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Listener

    def log_message(self, *_: Any) -> None:
        return

    def setup(self) -> None:
        super().setup()
        self.server.owner._links.add(self.connection)

    def finish(self) -> None:
        self.server.owner._links.discard(self.connection)
        super().finish()

    def say(self, content: Any, status: int = 200) -> None:
        text = content if isinstance(content, str) else "" if content is None else json.dumps(content)
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def fail(self, status: int, message: str, kind: str) -> None:
        self.say({"error": {"message": message, "type": kind, "param": None, "code": status}}, status)

    def do_GET(self) -> None:
        owner, path = self.server.owner, urlsplit(self.path).path
        card = {"id": NAME, "object": "model", "owned_by": "vllm", "max_model_len": owner.context}
        routes: dict[str, Any] = {
            "/v1/models": {"object": "list", "data": [card]},
            "/version": {"version": owner.version},
            "/health": None,
        }
        if owner.development:
            facts = f"model='./m', dtype=torch.{owner.model.head.dtype}".replace("torch.torch", "torch")
            routes |= {
                "/is_paused": {"is_paused": owner.engine.paused is not None},
                "/get_world_size": {"world_size": 1},
                "/server_info": {"vllm_config": facts, "vllm_env": {}},
            }
            if owner.newer(0, 27):
                routes["/weight_info"] = {"weight_version": owner.weight_version}
        if path == "/metrics":
            self.say(f"# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds {owner.born}\n")
        elif path in routes:
            self.say(routes[path])
        else:
            self.say({"detail": "Not Found"}, 404)

    def do_POST(self) -> None:
        owner, parts = self.server.owner, urlsplit(self.path)
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = json.loads(content) if content else {}
        owner.asked.append((self.path, body))
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        try:
            self.post(owner, parts.path, query, body)
        except ValueError as error:
            self.fail(400, str(error), "BadRequestError")
        except RuntimeError as error:
            message = f"Call to collective_rpc method failed: Worker failed with error '{error}'"
            self.fail(500, message, "InternalServerError")
        except Dead:
            self.fail(500, "EngineCore encountered an issue. See stack trace (above) for the root cause.", "Dead")
            threading.Thread(target=owner.die, daemon=True).start()

    def post(self, owner: StandIn, path: str, query: dict[str, str], body: Any) -> None:
        if path == "/v1/completions":
            return self.complete(owner, body)
        if not owner.development:
            return self.say({"detail": "Not Found"}, 404)
        if path == "/pause":
            owner.pause(query.get("mode", "abort"))
            return self.say({"status": "paused"})
        if path == "/resume":
            with owner.lock:
                owner.engine.resume()
            return self.say({"status": "resumed"})
        if path == "/collective_rpc":
            return self.say(owner.rpc(body))
        if path == "/reset_prefix_cache":
            return self.say({"success": True})
        if path == "/weight_checker" and owner.newer(0, 32):
            return self.say({"checksums": owner.checksums()})
        if path == "/update_weight_version" and owner.newer(0, 32):
            owner.weight_version = body["new_version"]
            return self.say({"success": True, "new_version": owner.weight_version})
        return self.say({"detail": "Not Found"}, 404)

    def complete(self, owner: StandIn, body: dict[str, Any]) -> None:
        fault = owner.faults.popleft() if owner.faults else ""
        if fault in ("500", "503"):
            return self.fail(int(fault), "the engine is not well", "InternalServerError")
        if fault == "drop":
            self.close_connection = True
            return self.connection.shutdown(socket.SHUT_RDWR)
        if fault == "hang":
            owner.closing.wait(60)
            return None
        return self.say(owner.complete(body, fault))


# ---- what tests ask it with -----------------------------------------------------------------------


def scorer_of(model: GPT) -> Callable[[list[int]], list[float]]:
    def score(tokens: list[int]) -> list[float]:
        rows = [make.logits_of(model, tokens[: i + 1], 64).log_softmax(-1) for i in range(len(tokens) - 1)]
        return [row[token].item() for row, token in zip(rows, tokens[1:])]

    return score


def opened(server: StandIn, **settings: Any) -> RemoteGenerator:
    return RemoteGenerator.open(server.url, **{"tokenizer": TEXT, "patience": 30.0, "timeout": 60.0, **settings})


def local(model: GPT, request: Request) -> Completion:
    """The answer of an engine here."""
    return make.engine(model, pick("cpu", compiled=False), Sdpa(), context=64).generate([request])[0]


def ask(remote: RemoteGenerator, *requests: Request) -> tuple[threading.Thread, list[Any]]:
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
