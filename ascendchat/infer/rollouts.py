"""Where the answers of `ascendchat rl` come from when not from the trainer's own process.

    with open_rollouts(config, tokenizer, origin.folder, here.say, here=here, ...) as generator:
        ...                                            # a Fleet, on every rank

`--rollouts URL,URL`: servers that somebody else has started, ours or vLLM's. `--rollout-devices N`: rank 0 starts one
of ours, `ascendchat serve --weight-updates`, on the N devices behind those of the trainer (on a CPU: N processes). It
listens on this machine only, with a key of its own in a file that only its user can read; it is started again when it
dies, and it ends with the trainer, even with `kill -9` of it (launch/tied.py).
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from ascendchat import dist
from ascendchat.config import UserError
from ascendchat.config.rl import RlConfig
from ascendchat.data.tokenizer import Tokenizer
from ascendchat.device.env import devices_behind, without_own_settings
from ascendchat.dist.context import Context
from ascendchat.infer.fleet import Fleet
from ascendchat.launch.port import free_port

READY = re.compile(r"ready: (http://\S+)")
KEYS = "ASCENDCHAT_API_KEYS"
LONGEST_START = 900.0  # seconds until a server must be ready: it opens the model, and may compile
ENDING = 20.0  # seconds that it gets to end
MOST_EARLY_DEATHS = 3  # in a row, before it was ready
LOOK = 0.1  # seconds between two looks at a server that starts


class OwnServer:
    """A server that this process has started: `command` gets the port; it must say `ready: URL`."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        say: Callable[[str], None] = print,
        longest_start: float = LONGEST_START,
    ) -> None:
        self.command, self.environment, self.log, self.say = list(command), dict(environment), log, say
        self.longest_start = longest_start
        self.port, self.url = free_port(), ""
        self._closing = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher: threading.Thread | None = None

    def start(self) -> str:
        """Its address, when it is ready; from then on it is started again whenever it ends."""
        self._begin()
        self._watcher = threading.Thread(target=self._watch, name="rollout server", daemon=True)
        self._watcher.start()
        return self.url

    def _begin(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        begin = self.log.stat().st_size if self.log.exists() else 0
        words = [sys.executable, "-m", "ascendchat.launch.tied", *self.command, "--port", str(self.port)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                words, env=self.environment, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )
        end = time.monotonic() + self.longest_start
        while not (found := READY.search(self._said(begin))):
            if self._process.poll() is not None or time.monotonic() > end or self._closing.is_set():
                status = self._process.poll()
                how = f"took longer than {self.longest_start:.0f} s" if status is None else f"ended with {status}"
                self._end()
                last = (self._said(begin).strip().splitlines() or ["it said nothing"])[-1]
                raise UserError(f"the server for rollouts {how} before it was ready: {last} (log: {self.log})")
            time.sleep(LOOK)
        self.url = found[1]

    def _said(self, begin: int) -> str:
        with self.log.open("rb") as log:
            log.seek(begin)
            return log.read().decode("utf-8", errors="replace")

    def _watch(self) -> None:
        """A thread: when it dies, it gets a successor on the same port."""
        early = 0
        while early < MOST_EARLY_DEATHS:
            assert self._process is not None
            status = self._process.wait()
            if self._closing.is_set():
                return
            self.say(f"the server for rollouts has ended with status {status}; it is started again")
            try:
                self._begin()
                early = 0
            except UserError as error:
                early += 1
                self.say(str(error))
        self.say(f"the server for rollouts cannot be started again; see {self.log}")

    def close(self) -> None:
        """End it."""
        self._closing.set()
        self._end()
        if self._watcher is not None:
            self._watcher.join(ENDING)

    def _end(self) -> None:
        process = self._process
        if process is None or process.poll() is not None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(ENDING)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def open_rollouts(
    config: RlConfig,
    tokenizer: Tokenizer,
    weights_folder: Path,
    say: Callable[[str], None] = print,
    *,
    here: Context,
    folder: Path,
    slots: int,
    context: int,
) -> Iterator[Fleet]:
    """The servers, on every rank; rank 0 starts them and sends them weights. `weights_folder`: a checkpoint, the first.
    `folder`: for log, key and weights. `slots`: answers at the same time, over all devices. `context`: tokens."""
    with contextlib.ExitStack() as stack:
        urls, key = list(config.rollouts), first_key(config.rollout_key_file)
        if config.rollout_devices:
            urls, key = started(config, weights_folder, say, here, folder, slots, context, stack)
        fleet = Fleet.open(
            urls,
            api_key=key,
            tokenizer=tokenizer,
            timeout=config.rollout_timeout,
            patience=config.rollout_patience,
            folder=folder,
            pushes=here.main,
            say=say,
        )
        with fleet:
            if fleet.context < context:
                raise UserError(
                    f"the servers for rollouts have a context of {fleet.context} tokens and the rows of training "
                    f"{context}; start them with a longer one, or train with a smaller --max-seq-len"
                )
            yield fleet


def first_key(file: str) -> str:
    """The API key for servers that somebody else has started."""
    if not file:
        return os.environ.get(KEYS, "").split(",")[0].strip()
    try:
        return next(line.strip() for line in Path(file).read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError, StopIteration):
        raise UserError(f"--rollout-key-file {file} cannot be read, or is empty; write the key into it") from None


def started(
    config: RlConfig,
    weights_folder: Path,
    say: Callable[[str], None],
    here: Context,
    folder: Path,
    slots: int,
    context: int,
    stack: contextlib.ExitStack,
) -> tuple[list[str], str]:
    """Addresses and key of a server of our own; what rank 0 cannot start is a UserError on every rank."""
    found: tuple[str, str, str] = "", "", ""
    if here.main:
        try:
            key = private_key(folder / "key")
            words = serve_command(config, weights_folder, here, folder / "key", slots, context)
            environment = environment_of(config, here)
            server = stack.enter_context(contextlib.closing(OwnServer(words, environment, folder / "server.log", say)))
            say(f"starting a server for rollouts on {config.rollout_devices} device(s); log: {server.log}")
            found = server.start(), key, ""
        except UserError as error:
            found = "", "", str(error)
    url, key, problem = dist.broadcast_object(found)
    if problem:
        raise UserError(problem)
    return [url], key


def private_key(path: Path) -> str:
    """A new key, in a file that nobody else can read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    key = secrets.token_urlsafe(32)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(key + "\n")
    return key


def serve_command(
    config: RlConfig, weights_folder: Path, here: Context, key: Path, slots: int, context: int
) -> list[str]:
    """`ascendchat serve` for one trainer: nobody else asks, and it may ask for as much as it likes."""
    devices = config.rollout_devices
    settings = {
        "checkpoint": weights_folder,
        "tokenizer": config.tokenizer,
        "device-type": here.device.type,
        "devices": devices,
        "host": "127.0.0.1",
        "slots": -(-slots // devices),
        "context": context,
        "api-key-file": key,
        "access-log": os.devnull,
        "max-queue": 1000000,
        "max-connections": 100000,
        "queue-timeout": 1000000,
        "request-timeout": config.rollout_timeout,
        "client-timeout": config.rollout_timeout,
        "drain": 1,
    }
    if config.attention:
        settings["attention"] = config.attention
    flags = [f"--{name}={value}" for name, value in settings.items()]
    return [sys.executable, "-m", "ascendchat", "serve", "--weight-updates", "--no-web", *flags]


def environment_of(config: RlConfig, here: Context) -> dict[str, str]:
    """That of a process of its own, which sees the devices behind those of the trainer."""
    world, device = here.world, here.device
    if world.nodes > 1:
        raise UserError(
            "--rollout-devices starts a server on one node, which the others cannot reach; start servers with "
            "`ascendchat serve --weight-updates` and name them: --rollouts http://HOST:PORT"
        )
    environment = without_own_settings(os.environ)
    visible = devices_behind(device.type, world.local_size, config.rollout_devices, device.count(), os.environ)
    return {**environment, **visible}
