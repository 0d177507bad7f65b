"""A vLLM server: abilities of its version, and weight updates. Nothing here imports vllm.

    server = await find_out(http, folder="")            # which server answers there; client.py has it
    await server.pause("abort"); await server.push(weights, 7); await server.resume(); await server.verify(...)

Weights, by their names in a Hugging Face checkpoint, go over in one of two ways:
  in place   a collective of torch.distributed to its workers, where they have our receiver (vllm_worker.py)
  by disk    a folder with model.safetensors that the server reads: /collective_rpc reload_weights
Both need VLLM_SERVER_DEV_MODE=1. Versions: weights can be replaced, and /pause has modes, since 0.16; /weight_info is
there since 0.27; /weight_checker and /update_weight_version are in 0.32.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import shutil
import tempfile
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ascendchat.checkpoint import write_weights
from ascendchat.engine.request import Weights
from ascendchat.errors import UserError
from ascendchat.files import give_default_mode
from ascendchat.remote import weights as transfer
from ascendchat.remote.http import ATTEMPT_ERRORS, HTTPClient, NoRoute, RetryLater
from ascendchat.remote.servers import OurServer, PauseMode, Server
from ascendchat.remote.weights import Scorer, Scores, compare, judge

OLDEST = (0, 12, 0)  # with /pause
WEIGHTS_SINCE = (0, 16, 0)
JOIN = 60.0  # seconds for the workers to meet the trainer


async def find_out(http: HTTPClient, folder: str) -> Server:
    """Ask a server who it is. `folder`: where weights are written for it to read."""
    try:
        first = (await http.retry(lambda: http.ask("GET", "/v1/models")))["data"][0]
        card = {**first, "id": first["id"]}
    except (NoRoute, LookupError, TypeError, ValueError):
        raise UserError(
            f"{http.url} is no server with OpenAI's API: it has no list of models; start one with: ascendchat serve "
            "--weight-updates, or ascendchat rollout-server"
        ) from None
    if "ascendchat" in card:
        return OurServer(http, card)
    reply = await http.retry(lambda: http.probe("/version"))
    version = version_of(reply.get("version")) if isinstance(reply, dict) else None
    if version is None:
        return Server(http, card)
    server = VllmServer(http, card, version, folder)
    await http.retry(server.find_routes)
    return server


def version_of(text: Any) -> tuple[int, ...] | None:
    """ "0.23.0+cpu" -> (0, 23, 0)"""
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", str(text))
    return tuple(int(part or 0) for part in match.groups()) if match else None


class VllmServer(Server):
    """One server of vLLM or vllm-ascend."""

    def __init__(self, http: HTTPClient, card: dict[str, Any], version: tuple[int, ...], folder: str) -> None:
        super().__init__(http, card)
        self.version, self.folder = version, folder
        self.dtype = ""  # in which it calculates; unknown without the development routes
        self.workers = 0  # processes that have the model; 0: unknown
        self.controlled = False  # whether it can be paused
        self.receives = False  # whether its workers have our receiver
        self.processed: bool | None = None  # log-probabilities after temperature, top-k and so on; None: not known yet
        self.checks = version >= WEIGHTS_SINCE  # until it says that it has no /weight_checker
        self._sent: dict[str, torch.Tensor] = {}  # weights in its dtype, from `push` to `verify`
        self._born = ""  # when it was started, at the last sync; "": none yet
        self._group: transfer.TransferGroup | None = None
        self._written: Path | None = None
        self._before: Scores | None = None  # of the version that answered before

    @property
    def name(self) -> str:
        return f"vLLM {'.'.join(map(str, self.version))}"

    async def find_routes(self) -> None:
        """Find out which routes it has."""
        probe = self.http.probe
        self.controlled = self.version >= OLDEST and await probe("/is_paused") is not None
        if not self.controlled:
            return
        self.workers = int(((await probe("/get_world_size")) or {}).get("world_size") or 0)
        version = str(
            (await probe("/weight_info") or {}).get("weight_version", "") if self.version >= (0, 27, 0) else ""
        )
        self.weight_version = int(version) if version.isdigit() else 0
        dtype = re.search(r"\bdtype=torch\.(\w+)", str((await probe("/server_info") or {}).get("vllm_config", "")))
        self.dtype = dtype[1] if dtype else ""
        try:
            await self._rpc("ascendchat_leave")
            self.receives = self.workers > 0
        except (RetryLater, NoRoute):  # an unknown method is a 500
            self.receives = False

    # ---- commands ------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode) -> None:
        """`wait` lets answers finish, `abort` ends them as they are; prefixes of old weights are forgotten."""
        self._controls()
        await self.http.command("POST", f"/pause?mode={mode}", self.http.timeout)

    async def resume(self) -> None:
        self._controls()
        await self.http.retry(lambda: self.http.command("POST", "/resume"))

    def _controls(self) -> None:
        if not self.controlled:
            raise UserError(
                f"{self.http.url} is {self.name} without the routes to pause it and replace its weights; start it with "
                "VLLM_SERVER_DEV_MODE=1 (ascendchat rollout-server does)"
            )
        if self.version < WEIGHTS_SINCE:
            raise UserError(f"{self.http.url} is {self.name}, whose weights cannot be replaced; use 0.16 or newer")

    async def _rpc(self, method: str, *args: str, seconds: float = 60.0, **kwargs: str) -> Any:
        """Call a method of every worker."""
        body = {"method": method, "args": list(args), "kwargs": kwargs}
        return await self.http.command("POST", "/collective_rpc", seconds, json=body)

    # ---- weights -------------------------------------------------------------------------------

    async def push(self, weights: Weights, version: int) -> None:
        """In place where that works, else by disk. What breaks off in place has changed nothing."""
        self._controls()
        sent = await asyncio.to_thread(self._in_its_dtype, weights)
        problem = ""
        if self.receives:
            try:
                await self._push_in_place(sent)
            except (*ATTEMPT_ERRORS, RuntimeError, OSError) as error:
                problem = first_line(error)
                await self._leave()
        if not self.receives or problem:
            try:
                await self._push_by_disk(sent, version)
            except ATTEMPT_ERRORS as error:
                both = f"in place: {problem}; by disk: " if problem else ""
                raise UserError(f"{self.http.url} has not taken version {version}: {both}{first_line(error)}") from None
        await self.http.retry(lambda: self.http.command("POST", "/reset_prefix_cache"))
        await self._name_version(version)
        self._sent = sent
        self._born = await self.http.retry(self.birth)

    def _in_its_dtype(self, weights: Weights) -> dict[str, torch.Tensor]:
        """Half the bytes where the server keeps half the digits."""
        dtype = getattr(torch, self.dtype or "float32")
        casts = bool(self.dtype)
        return {
            name: tensor.detach().to(dtype) if casts and tensor.is_floating_point() else tensor.detach()
            for name, tensor in weights.items()
        }

    async def _push_in_place(self, weights: dict[str, torch.Tensor]) -> None:
        """The workers are told to receive, and a thread sends; both have a deadline."""
        if self._group is None:
            await self._join(next(iter(weights.values())).device)
        group, description = self._group, await asyncio.to_thread(transfer.described, weights)
        assert group is not None
        limit = self.http.timeout
        await together(
            self._rpc("ascendchat_receive", json.dumps(description), seconds=limit), lambda: group.send(weights), limit
        )

    async def _join(self, place: torch.device) -> None:
        """A group of this process and all workers. The library of its device, as the process group of torch knows it:
        gloo for CPUs."""
        backend = torch.distributed.get_default_backend_for_device(place)
        own = await asyncio.to_thread(transfer.address_towards, self.http.host, self.http.port)
        store = await asyncio.to_thread(transfer.listen, JOIN)
        name = uuid.uuid4().hex
        facts = {"address": own, "port": store.port, "name": name, "backend": backend}
        facts |= {"size": 1 + self.workers, "timeout": JOIN}
        groups: list[transfer.TransferGroup] = []

        def join() -> None:
            size = 1 + self.workers
            groups.append(transfer.TransferGroup(backend, store, own=own, name=name, rank=0, size=size, timeout=JOIN))

        await together(self._rpc("ascendchat_join", json.dumps(facts), seconds=2 * JOIN), join, 2 * JOIN)
        self._group = groups[0]

    async def _leave(self) -> None:
        """Forget the group; the next sync makes a new one."""
        group, self._group = self._group, None
        if group is not None:
            threading.Thread(target=group.close, name="leave a group", daemon=True).start()  # may hang, too
        try:
            await self._rpc("ascendchat_leave", seconds=JOIN)
        except ATTEMPT_ERRORS:
            self._group = None

    async def _push_by_disk(self, weights: dict[str, torch.Tensor], version: int) -> None:
        """A folder of this version, then the order to read it. The one before goes when this one is in use."""
        if not self.folder and self.http.host not in ("127.0.0.1", "localhost", "::1"):
            raise UserError("weights go to another machine by a folder that both can read, and none was named")
        folder = Path(tempfile.mkdtemp(prefix=f"weights-{version}-", dir=self.folder or None))
        try:
            if self.folder:
                give_default_mode(folder)  # the server may run as another user
            await asyncio.to_thread(write_weights, folder / "model.safetensors", weights)
            await self._rpc("reload_weights", seconds=self.http.timeout, weights_path=str(folder))
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        old, self._written = self._written, folder
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)

    async def _name_version(self, version: int) -> None:
        if self.version >= (0, 27, 0):
            try:
                await self.http.command("POST", "/update_weight_version", json={"new_version": str(version)})
            except NoRoute:
                return

    async def close(self) -> None:
        """Forget the group and what lies on disk for it."""
        if self._group is not None:
            await self._leave()
        if self._written is not None:
            shutil.rmtree(self._written, ignore_errors=True)

    # ---- verification ---------------------------------------------------------------------------

    async def birth(self) -> str:
        """The time of its start, from its metrics; "" if unknown."""
        match = re.search(r"^process_start_time_seconds (\S+)$", await self.http.text("/metrics"), flags=re.M)
        return match[1] if match else ""

    async def was_restarted(self) -> bool:
        """True if it was restarted since the last sync, and so has its first weights again."""
        if self._born and await self.birth() != self._born:
            self._group = None  # its other end is gone
            return True
        return False

    async def verify(self, weights: Weights, version: int, scorer: Scorer | None, probe: list[int]) -> None:
        sent, self._sent = self._sent, {}
        if await self._checksums_prove(sent):
            return
        if scorer is None:
            raise UserError(
                f"{self.http.url} ({self.name}) cannot say which weights it has, and there is nobody to score a probe: "
                "set Remote.scorer to a function that gives the log-probabilities of tokens"
            )
        own = await asyncio.to_thread(scorer, probe)
        now = Scores(tuple(float(value) for value in own), tuple(await self.score(probe)))
        if problem := judge(now, self._before, self.dtype):
            raise self.has_others(problem)
        self._before = now

    async def _checksums_prove(self, weights: dict[str, torch.Tensor]) -> bool:
        """True if it has checksums of all its weights and all are right; a wrong one is an error."""
        if not self.checks:
            return False
        try:
            reply = await self.http.command("POST", "/weight_checker", self.http.timeout, json={"action": "checksum"})
        except NoRoute:
            self.checks = False
            return False
        wrong, unknown = await asyncio.to_thread(compare, reply["checksums"], weights)
        if wrong:
            raise self.has_others(f"{wrong[0]} and {len(wrong) - 1} more")
        return not unknown

    async def score(self, tokens: list[int]) -> list[float]:
        """Log-probabilities of all tokens but the first, by the server."""
        body = {"model": self.model, "prompt": tokens, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        body["cache_salt"] = uuid.uuid4().hex  # what is in its cache has no log-probabilities
        reply = await self.http.retry(lambda: self.http.ask("POST", "/v1/completions", json=body))
        rows = reply["choices"][0]["prompt_logprobs"][1:]
        return [float(row[str(token)]["logprob"]) for row, token in zip(rows, tokens[1:])]

    async def reports_processed(self) -> bool:
        """True if its log-probabilities are those of the distribution that it samples from: the log-probability of the
        likeliest token then depends on the temperature."""
        if self.processed is None:
            largest = []
            body = {
                "model": self.model,
                "prompt": [1],
                "max_tokens": 1,
                "logprobs": 1,
                "return_tokens_as_token_ids": True,
            }
            for temperature in (1.0, 2.0):
                body["temperature"] = temperature
                reply = await self.http.retry(lambda: self.http.ask("POST", "/v1/completions", json=body))
                largest.append(max(reply["choices"][0]["logprobs"]["top_logprobs"][0].values()))
            self.processed = not math.isclose(*largest, abs_tol=1e-4)
        return self.processed


async def together(order: Any, work: Callable[[], None], limit: float) -> None:
    """An order to the server, and our part of a collective on a thread of its own, which nothing can end: after `limit`
    seconds, or when the order has failed, it is left behind."""
    loop, done = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def tell(error: BaseException | None) -> None:
        if not done.done():
            done.set_exception(error) if error else done.set_result(None)

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 (raised where it is waited for)
            loop.call_soon_threadsafe(tell, error)
        else:
            loop.call_soon_threadsafe(tell, None)

    threading.Thread(target=run, name="collective", daemon=True).start()
    ordered = asyncio.ensure_future(order)
    try:
        await asyncio.wait_for(asyncio.gather(ordered, done), limit)
    finally:
        ordered.cancel()
        done.cancel()


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
