"""Servers for the rollouts of `ascendchat rl`: those of the user, or started by the trainer.

    with open_rollouts(config, tokenizer, origin.folder, here.say, here=here, ...) as generator:
        ...                                            # a ReplicaPool, on every rank

`--rollouts URL,URL`: servers that somebody else has started, ours or vLLM's. `--rollout-devices N`: rank 0 starts one
of ours, `ascendchat serve --weight-updates`, on the N devices behind those of the trainer (on a CPU: N processes). It
listens on this machine only, with a key of its own in a file that only its user can read; it is started again when it
dies, and it ends with the trainer, even with `kill -9` of it (processes.py). With a block `inference_engine:` it is
vLLM, started by `ascendchat rollout-server`.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from ascendchat.config.rl import RlConfig, vllm_settings
from ascendchat.data.tokenizer.tokenizer import Tokenizer
from ascendchat.device.env import devices_behind, without_own_settings
from ascendchat.errors import UserError, rank_error
from ascendchat.parallel import collectives
from ascendchat.parallel.context import Context
from ascendchat.processes import ChildProcess, free_port
from ascendchat.remote.fleet import ReplicaPool
from ascendchat.remote.vllm_server import first_key
from ascendchat.remote.weights import Scorer

READY = re.compile(r"ready: (http://\S+)")
MAX_START_SECONDS = 900.0  # seconds until a server must be ready: it opens the model, and may compile
ENDING = 20.0  # seconds that it gets to end
MAX_EARLY_DEATHS = 3  # in a row, before it was ready
REQUEST_SHARE = 0.9  # of --rollout-timeout: then a server hands over what it has written, before the trainer gives up


def check_addresses(addresses: Sequence[str]) -> None:
    """Refuse what cannot be the address of a server, before waiting for it."""
    for text in addresses:
        try:
            parts = urlsplit(text if "://" in text else f"http://{text}")
            valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (bool(parts.port) or "://" in text)
        except ValueError:  # a port that is no number, or too large; half an IPv6 address
            valid = False
        if text == "local" and len(addresses) > 1:
            raise UserError("--rollouts: local and addresses exclude each other; leave one of them out")
        if text != "local" and not valid:
            raise UserError(f"--rollouts: {text!r} is no address of a server; write http://HOST:PORT, or local")
        if addresses.count(text) > 1:
            raise UserError(f"--rollouts names {text} twice")


class ServerSizes(NamedTuple):
    """The room that the servers must have."""

    slots: int  # answers at the same time, over all devices
    context: int  # tokens of prompt and answer


class OwnServer:
    """A server that this process has started: `command` gets the port; it must say `ready: URL`."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        say: Callable[[str], None] = print,
        longest_start: float = MAX_START_SECONDS,
    ) -> None:
        self.command, self.environment, self.log, self.say = list(command), dict(environment), log, say
        self.longest_start = longest_start
        self.port, self.url = free_port(), ""
        self._closing = threading.Event()
        self.killed = False  # by a signal, before it was ready
        self._child: ChildProcess | None = None
        self._watcher: threading.Thread | None = None

    def start(self) -> str:
        """Its address, when it is ready; from then on it is started again whenever it ends. What somebody has killed
        before it was ready is tried again: it is not to blame."""
        for attempt in range(1, MAX_EARLY_DEATHS + 1):
            try:
                self._begin()
                break
            except UserError as error:
                if attempt == MAX_EARLY_DEATHS or not self.killed:
                    raise
                self.say(str(error))
        self._watcher = threading.Thread(target=self._watch, name="rollout server", daemon=True)
        self._watcher.start()
        return self.url

    def _begin(self) -> None:
        words = [*self.command, "--port", str(self.port)]
        self._child = child = ChildProcess.start(words, log=self.log, tied=True, env=self.environment)
        ready = child.wait_ready(READY, self.longest_start, self._closing.is_set)
        if ready is None:
            status = child.poll()
            self.killed = status is not None and not 0 <= status <= 128
            how = f"took longer than {self.longest_start:.0f} s" if status is None else f"ended with {status}"
            child.end(0.0)  # there is nothing in it to be saved
            last = (child.output().strip().splitlines() or ["it said nothing"])[-1]
            raise UserError(f"the server for rollouts {how} before it was ready: {last} (log: {self.log})")
        self.url = ready[1]

    def _watch(self) -> None:
        """A thread: when it dies, it gets a successor on the same port."""
        early = 0
        while early < MAX_EARLY_DEATHS:
            assert self._child is not None
            status = self._child.wait()
            if self._closing.is_set():
                return
            self.say(f"the server for rollouts has ended with status {status}; it is started again")
            try:
                self._begin()
                early = 0
            except UserError as error:
                if self._closing.is_set():
                    return
                early += 1
                self.say(str(error))
        self.say(f"the server for rollouts cannot be started again; see {self.log}")

    def give_up(self) -> None:
        """One that is not ready yet is ended by the thread that starts it."""
        self._closing.set()

    def close(self) -> None:
        """End it."""
        self._closing.set()
        if self._child is not None:
            self._child.end(ENDING)
        if self._watcher is not None:
            self._watcher.join(ENDING)


@contextlib.contextmanager
def open_rollouts(
    config: RlConfig,
    tokenizer: Tokenizer,
    weights_folder: Path,
    say: Callable[[str], None] = print,
    *,
    here: Context,
    folder: Path,
    sizes: ServerSizes,
    scorer: Scorer | None = None,
) -> Iterator[ReplicaPool]:
    """The servers, on every rank; rank 0 starts them and sends them weights. `weights_folder`: a checkpoint, the first.
    `folder`: for logs, key and weights. `scorer`: the trainer's, by which a vLLM is verified whose checksums do not say
    it all."""
    with contextlib.ExitStack() as stack:
        urls, key = list(config.rollouts), first_key(config.rollout_key_file, os.environ, "--rollout-key-file")
        if config.rollouts == ("local",):
            urls, key = start_servers(config, weights_folder, say, here, folder, sizes, stack)
        pool = ReplicaPool.open(
            urls,
            api_key=key,
            tokenizer=tokenizer,
            timeout=config.rollout_timeout,
            patience=config.rollout_patience,
            store=folder,
            pushes=here.main,
            say=say,
            scorer=scorer,
        )
        with pool:
            say_late(pool, config.rollout_timeout, say)
            if pool.context < sizes.context:
                raise UserError(
                    f"the servers for rollouts have a context of {pool.context} tokens and the rows of training "
                    f"{sizes.context}; start them with a longer one, or train with a smaller --max-seq-len"
                )
            yield pool


def say_late(pool: ReplicaPool, timeout: float, say: Callable[[str], None]) -> None:
    """Warn of servers whose --request-timeout is longer than --rollout-timeout: what they wrote by then is lost."""
    for url, remote in [(replica.url, replica.remote) for replica in pool.replicas]:
        limit = remote.server.request_timeout if remote else 0.0
        if limit >= timeout:
            say(
                f"{url} ends an answer after {limit:g} s (--request-timeout); by then --rollout-timeout, "
                f"{timeout:g} s, has given it up, and what was written is lost: give the server less, or the run more"
            )


def start_servers(
    config: RlConfig,
    weights_folder: Path,
    say: Callable[[str], None],
    here: Context,
    folder: Path,
    sizes: ServerSizes,
    stack: contextlib.ExitStack,
) -> tuple[list[str], str]:
    """Start our own servers on rank 0; their addresses and key on every rank, or the error."""
    started: tuple[list[str], str] = [], ""
    own: Exception | None = None
    if here.main:
        try:
            key = private_key(folder / "key")
            commands = commands_of(config, weights_folder, here, folder / "key", sizes)
            servers = [
                OwnServer(words, environment, folder / f"server-{number}.log", say)
                for number, (words, environment) in enumerate(commands)
            ]
            for server in servers:
                stack.callback(server.close)
            say(f"starting {len(servers)} server(s) for rollouts; logs: {folder / 'server-*.log'}")
            with ThreadPoolExecutor(len(servers)) as threads:
                try:
                    started = list(threads.map(OwnServer.start, servers)), key
                except BaseException:  # Ctrl-C too: the pool would wait until all are ready
                    for server in servers:
                        server.give_up()
                    raise
        except Exception as error:  # noqa: BLE001 (whatever it is, the other ranks wait)
            own = error
    started, problem = collectives.broadcast_object((started, own and rank_error(own, here.world.rank)))
    if problem:
        raise own or problem
    return started


def private_key(path: Path) -> str:
    """A new key, in a file that nobody else can read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    key = secrets.token_urlsafe(32)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(key + "\n")
    return key


def commands_of(
    config: RlConfig, weights_folder: Path, here: Context, key: Path, sizes: ServerSizes
) -> list[tuple[list[str], dict[str, str]]]:
    """Command and environment of each server: one of ours for all devices, or one vLLM for as many as share a model."""
    world, device = here.world, here.device
    if world.nodes > 1:
        raise UserError(
            "--rollout-devices starts a server on one node, which the others cannot reach; start servers with "
            "`ascendchat serve --weight-updates` and name them: --rollouts http://HOST:PORT"
        )
    together, count, settings = config.rollout_devices, 1, None
    if config.inference_engine:
        settings = vllm_settings(config.inference_engine)
        together = int(settings.get("tensor_parallel_size", 1))
        count, over = divmod(config.rollout_devices or together, together)
        if over:
            raise UserError(f"--rollout-devices must be a multiple of tensor_parallel_size, which is {together}")
    devices_behind(device.type, world.local_size, together * count, device.count(), os.environ)  # all are there
    commands = []
    for number in range(count):
        first = world.local_size + number * together
        visible = devices_behind(device.type, first, together, device.count(), os.environ)
        if settings is None:
            words = serve_command(config, weights_folder, here, key, sizes)
        else:
            words = vllm_command(settings, weights_folder, here, key, sizes)
        commands.append((words, {**without_own_settings(os.environ), **visible}))
    return commands


def serve_command(config: RlConfig, weights_folder: Path, here: Context, key: Path, sizes: ServerSizes) -> list[str]:
    """`ascendchat serve` for one trainer: nobody else asks, and it may ask for as much as it likes."""
    settings = {
        "checkpoint": weights_folder,
        "device-type": here.device.type,
        "devices": config.rollout_devices,
        "host": "127.0.0.1",
        "slots": -(-sizes.slots // config.rollout_devices),
        "context": sizes.context,
        "api-key-file": key,
        "access-log": os.devnull,
        "max-queue": 1000000,
        "max-connections": 100000,
        "queue-timeout": 1000000,
        "request-timeout": REQUEST_SHARE * config.rollout_timeout,
        "client-timeout": config.rollout_timeout,
        "drain": 1,
    }
    settings |= {"tokenizer": config.tokenizer} if config.tokenizer else {}
    settings |= {"attention": config.attention} if config.attention else {}
    flags = [f"--{name}={value}" for name, value in settings.items()]
    return [sys.executable, "-m", "ascendchat", "serve", "--weight-updates", "--no-web", *flags]


def vllm_command(
    settings: Mapping[str, Any], weights_folder: Path, here: Context, key: Path, sizes: ServerSizes
) -> list[str]:
    """`ascendchat rollout-server`, which finds vLLM and checks that it fits."""
    if not (weights_folder / "config.json").is_file():
        raise UserError(
            f"inference_engine: vLLM opens models of Hugging Face, and {weights_folder} is one of ascendchat's own; "
            "leave inference_engine out, and give --rollout-devices"
        )
    usual = {"device": here.device.type, "max_num_seqs": sizes.slots, "max_model_len": sizes.context}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in {**usual, **settings}.items()]
    own = [f"--model={weights_folder}", f"--api-key-file={key}"]
    return [sys.executable, "-m", "ascendchat", "rollout-server", *own, *flags]
