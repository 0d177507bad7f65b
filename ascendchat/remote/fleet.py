"""A pool of replicas as one Generator: `ascendchat rl --rollouts http://a:8000,http://b:8000`.

    with ReplicaPool.open(["http://a:8000", "http://b:8000"], api_key=key, tokenizer=tokenizer) as generator:
        answers = generator.generate(requests)         # the samples of one prompt go to one replica, for its cache
        generator.load(weights, version=12)            # every replica that answers from now on has these

Retry: HTTPClient repeats a request that failed for RETRY_SECONDS. Mark down: a replica that still fails, hangs, answers
with old weights or does not take new ones is out of service; its requests go to another, with the same seeds.
Recovery: a thread per replica probes it until it generates a token, then it gets the current weights, verified as
`RemoteGenerator.load` does it, and only then requests. Replicas in service are probed when they are silent for long.
After `patience` seconds without any replica in service there is a UserError that names the reason of each.

client.py is one replica, routing.py chooses between them, rollouts.py opens a pool for a trainer.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import socket
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ascendchat.checkpoint import Damaged, read_file, write_weights
from ascendchat.data.tokenizer.tokenizer import Tokenizer
from ascendchat.engine.request import Completion, Piece, Request, Sampling, Weights
from ascendchat.errors import UserError
from ascendchat.remote.client import RemoteGenerator
from ascendchat.remote.http import NoAnswer
from ascendchat.remote.routing import Candidate, blocks_of, choose, remember
from ascendchat.remote.weights import Scorer, remembered

RETRY_SECONDS = 5.0  # for which a request to a busy or missing replica is repeated before it is marked down
MIN_TOGETHER = 8  # requests of single prompts that are handed over together
MAX_TOGETHER = 16  # samples of a prompt that are handed over together: more are divided
MAX_THREADS = 64  # that wait for answers
SLOTS = 64  # assumed of a replica: for its cache's sake it may have a quarter of them more to do than another
MAX_ATTEMPTS = 12  # replicas that may fail over one request before it is given up
CHECK_EVERY = 0.5  # seconds
MAX_SILENCE = 10.0  # seconds without an answer after which a replica without work is probed

FAILURES = (UserError, OSError, Damaged, CancelledError)  # of a replica, not of a request


@dataclass
class _Replica:
    """One server, in service or not."""

    url: str
    remote: RemoteGenerator | None = None  # None: out of service
    reason: str = "it has not been tried yet"  # why it is out of service
    load: int = 0  # requests under way
    answered: float = 0.0  # time of its last answer, on the monotonic clock
    blocks: OrderedDict[int, None] = field(
        default_factory=OrderedDict
    )  # hashes of the prompts in its cache, see routing.py


def batches(requests: Sequence[Request]) -> list[list[int]]:
    """Divide requests, by index, into those that are asked together: all samples of a prompt, unless they are very
    many; single ones in their order."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, request in enumerate(requests):
        groups.setdefault(tuple(request.prompt), []).append(index)
    batches: list[list[int]] = []
    for group in groups.values():
        if batches and len(batches[-1]) + len(group) <= MIN_TOGETHER:
            batches[-1] += group
        else:
            batches += [group[at : at + MAX_TOGETHER] for at in range(0, len(group), MAX_TOGETHER)]
    return batches


def address_of(url: str) -> tuple[str, int]:
    """Host and port of a URL."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


class ReplicaPool:
    """Several servers as one Generator. Several threads may use it.

    `pushes`: False on ranks that only ask; another rank loads weights and tells this one by `renew`. `timeout`: seconds
    for an answer. `patience`: seconds without any replica. `hang`: seconds in which a replica that has work, or is
    probed, must generate something. `store`: folder for weights. `more`: settings of RemoteGenerator; its `scorer` is
    called with the weights of `load`.
    """

    elsewhere = True

    def __init__(
        self,
        urls: Sequence[str],
        *,
        api_key: str = "",
        tokenizer: Tokenizer | None = None,
        concurrency: int = 256,
        timeout: float = 900.0,
        patience: float = 300.0,
        hang: float = 300.0,
        store: Path | None = None,
        pushes: bool = True,
        say: Callable[[str], None] = print,
        **more: Any,
    ) -> None:
        own = {"api_key": api_key, "tokenizer": tokenizer, "concurrency": concurrency, "patience": RETRY_SECONDS}
        self.settings: dict[str, Any] = {**own, **more}
        self.timeout, self.patience, self.hang, self.pushes, self.say = timeout, patience, hang, pushes, say
        self.replicas = [_Replica(url) for url in urls]
        self.version, self.context = 0, 0
        self._own = store is None
        self.store = Path(tempfile.mkdtemp(prefix="ascendchat-fleet-")) if store is None else store
        self._weights: Path | None = None  # file with the weights in use
        self._scorer: Scorer | None = None  # remembers their log-probabilities of the probe
        self._numbers = itertools.count()
        self._changed = threading.Condition()  # guards the replicas
        self._sync = threading.Lock()  # one change of weights at a time
        self._syncs = 0  # begun or ended so far: odd while one is under way
        self._closing = threading.Event()

    @classmethod
    def open(cls, urls: Sequence[str], **settings: object) -> ReplicaPool:
        """Connect to all; a replica that does not answer within `patience` is a UserError."""
        pool = cls(urls, **settings)  # type: ignore[arg-type]
        try:
            end = time.monotonic() + pool.patience
            for replica in pool.replicas:
                pool._put_in_service(replica, pool._connect_first(replica.url, end))
            pool.context = min(replica.remote.context for replica in pool.replicas if replica.remote)
        except BaseException:
            pool.close()
            raise
        for replica in pool.replicas:
            threading.Thread(target=pool._watch, args=(replica,), name=f"watch {replica.url}", daemon=True).start()
        return pool

    def _connect_first(self, url: str, end: float) -> RemoteGenerator:
        """The connection to a server that may still be starting, or die meanwhile: it listens when it is ready."""
        address, waited = address_of(url), False
        while time.monotonic() < end:
            try:
                socket.create_connection(address, timeout=10.0).close()
                return self._connect(url)
            except (OSError, NoAnswer) as error:
                if not waited:
                    self.say(f"rollouts: waiting for {url}, {self.patience:.0f} s at most ({error})")
            waited = True
            self._closing.wait(CHECK_EVERY)
        return self._connect(url)

    def __enter__(self) -> ReplicaPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every request under way. The servers go on."""
        self._closing.set()
        for replica in self.replicas:
            if replica.remote is not None:
                self.mark_down(replica, replica.remote, "closed")
        if self._own:
            shutil.rmtree(self.store, ignore_errors=True)

    # ---- the Generator -------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """All answers, in the order of the requests."""
        parts = batches(requests)
        if len(parts) == 1:  # in this thread
            return self._ask([requests[index] for index in parts[0]])
        threads = ThreadPoolExecutor(min(MAX_THREADS, max(1, len(parts))), "replicas")
        try:
            answers: dict[int, Completion] = {}
            for part, own in zip(parts, threads.map(lambda part: self._ask([requests[i] for i in part]), parts)):
                answers |= zip(part, own)
            return [answers[index] for index in range(len(requests))]
        finally:  # after an error or Ctrl-C nobody waits for the others
            threads.shutdown(wait=False, cancel_futures=True)

    def stream(self, request: Request) -> _PoolStream:
        """One answer as it comes; until its first piece another replica may take over."""
        return _PoolStream(self, request)

    def load(self, weights: Weights, version: int, *, interrupt: bool = False) -> None:
        """Answer with these weights from now on; see Generator.load. A replica that does not take them is marked
        down. When none takes them, or one says that they do not fit, all keep the old ones."""
        file = self.store / f"weights-{next(self._numbers)}.safetensors"
        self.store.mkdir(parents=True, exist_ok=True)
        write_weights(file, weights)
        how, end = {"interrupt": True} if interrupt else {}, time.monotonic() + self.patience
        probed = any(replica.remote is None or not replica.remote.ours for replica in self.replicas)
        score = (self._scorer if version == self.version else None) or (remembered(self.settings) if probed else None)
        try:
            while not self._load_all(file, version, how, score):
                if time.monotonic() > end:
                    raise UserError(f"no server took the weights of version {version}: {self._reasons()}")
                self.release(self.acquire([Request([0])])[0], 1)  # wait for a replica in service
        except BaseException:
            file.unlink(missing_ok=True)
            raise

    def renew(self, version: int) -> None:
        """Another rank has loaded new weights, on every server that is in service there."""
        with self._changed:
            self.version = version
            for replica in self.replicas:
                if replica.remote is not None:
                    replica.remote.version = version

    # ---- requests ------------------------------------------------------------------------------

    def _ask(self, requests: Sequence[Request]) -> list[Completion]:
        """Answers of one replica; if it fails, of another."""
        problem = ""
        for _ in range(MAX_ATTEMPTS):
            if self._closing.is_set():
                raise UserError("the connection to the servers for rollouts was closed")
            version, (replica, remote) = self.version, self.acquire(requests)
            try:
                answers = remote.generate(requests)
                oldest = min((own for answer in answers for own in answer.versions), default=version)
                if oldest >= version:
                    replica.answered = time.monotonic()
                    return answers
                problem = f"it answered with the weights of version {oldest} instead of {version}"
            except FAILURES as error:
                problem = str(error) or "the connection was closed"
            except RuntimeError:  # a connection that was closed before it was used
                if replica.remote is remote:
                    raise
                continue
            finally:
                self.release(replica, len(requests))
            self.mark_down(replica, remote, problem)
        raise UserError(f"{len(requests)} answers were given up after {MAX_ATTEMPTS} tries: {problem}")

    def acquire(self, requests: Sequence[Request]) -> tuple[_Replica, RemoteGenerator]:
        """The best replica for these requests, once one is in service; they count as its load until `release`."""
        blocks, end = blocks_of(requests[0].prompt), time.monotonic() + self.patience
        with self._changed:
            while not (there := [replica for replica in self.replicas if replica.remote is not None]):
                if not self._changed.wait(max(0.0, end - time.monotonic())) and time.monotonic() >= end:
                    raise UserError(f"no server for rollouts answers: {self._reasons()}")
                if self._closing.is_set():
                    raise UserError("the connection to the servers for rollouts was closed")
            replica = there[choose([Candidate(one.load, SLOTS, one.blocks) for one in there], blocks)]
            if not replica.load:
                replica.answered = time.monotonic()
            replica.load += len(requests)
            remember(replica.blocks, blocks)
            assert replica.remote is not None
            return replica, replica.remote

    def release(self, replica: _Replica, count: int) -> None:
        """`count` requests are no longer under way there."""
        with self._changed:
            replica.load -= count

    def _reasons(self) -> str:
        return "; ".join(f"{replica.url}: {replica.reason}" for replica in self.replicas)

    # ---- in and out of service -----------------------------------------------------------------

    def _connect(self, url: str, timeout: float | None = None) -> RemoteGenerator:
        return RemoteGenerator.open(url, timeout=timeout or self.timeout, **{**self.settings, "scorer": self._scorer})

    def _put_in_service(self, replica: _Replica, remote: RemoteGenerator) -> None:
        with self._changed:
            replica.remote, replica.reason, replica.answered = remote, "", time.monotonic()
            self._changed.notify_all()

    def mark_down(self, replica: _Replica, remote: RemoteGenerator, reason: str) -> None:
        """Take a replica out of service: its connection is closed, and what waits for its answers goes to another."""
        with self._changed:
            if replica.remote is not remote:
                return
            replica.remote, replica.reason = None, reason
            replica.blocks.clear()
            self._changed.notify_all()
        if not self._closing.is_set():
            self.say(f"rollouts: {replica.url} is out of service: {reason}")
        remote.close()

    def _watch(self, replica: _Replica) -> None:
        """A thread: recover a replica that is down, probe one that was silent for long."""
        while not self._closing.wait(CHECK_EVERY):
            remote, silent = replica.remote, time.monotonic() - replica.answered
            if remote is None:
                self._recover(replica)
            elif silent > (self.hang if replica.load else MAX_SILENCE):
                self._check(replica, remote)

    def _check(self, replica: _Replica, remote: RemoteGenerator) -> None:
        """Probe a replica in service, and mark it down if it fails."""
        before, wanted = self._syncs, self.version
        try:
            version = self._probe(replica.url)
            problem = "" if version >= wanted else f"it has the weights of version {version} instead of {wanted}"
        except FAILURES as error:
            problem = f"it generates nothing: {error}"
        if not problem:
            replica.answered = time.monotonic()
        elif before == self._syncs and not before % 2:  # else it may have been paused for new weights
            self.mark_down(replica, remote, problem)

    def _probe(self, url: str) -> int:
        """Generate one token, since a server that accepts connections may still hang. The version of its weights, or
        ours where servers do not say it."""
        with self._connect(url, self.hang) as remote:
            probe = Request([0], Sampling(max_tokens=1, temperature=0.0, stop_tokens=()))
            answer = remote.generate([probe])[0]
            return answer.version if remote.ours else self.version

    def _recover(self, replica: _Replica) -> None:
        """Put a replica back into service, with the weights of the others."""
        try:
            self._probe(replica.url)
            with self._changing(), contextlib.ExitStack() as undo:
                remote = undo.enter_context(self._connect(replica.url))
                if self._weights is not None:
                    remote.load(read_file(self._weights), self.version)
                elif not self.pushes and remote.version != self.version:
                    raise UserError(f"it has the weights of version {remote.version} instead of {self.version}")
                undo.pop_all()
                self._put_in_service(replica, remote)
        except (*FAILURES, ValueError) as error:
            replica.reason = str(error)
            return
        self.say(f"rollouts: {replica.url} is in service again, with version {self.version}")

    # ---- weights -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        with self._sync:
            self._syncs += 1
            try:
                yield
            finally:
                self._syncs += 1

    def _load_all(self, file: Path, version: int, how: dict[str, bool], score: Scorer | None) -> bool:
        """Load weights into every replica in service, or mark it down. False: none took them, and all is as before."""
        weights = read_file(file)

        def one(pair: tuple[_Replica, RemoteGenerator]) -> Exception | None:
            pair[1].scorer = score
            try:
                pair[1].load(weights, version, **how)
            except (*FAILURES, ValueError) as error:
                return error
            return None

        with self._changing():
            there = [(replica, replica.remote) for replica in self.replicas if replica.remote is not None]
            with ThreadPoolExecutor(max(1, len(there))) as threads:
                outcomes = list(zip(there, threads.map(one, there)))
            refusals = [(replica.url, error) for (replica, _), error in outcomes if isinstance(error, ValueError)]
            for (replica, remote), error in outcomes:
                if error is None and refusals:  # it would answer with what the others do not have
                    self._restore(replica, remote)
                elif error is not None and not isinstance(error, ValueError):
                    self.mark_down(replica, remote, str(error) or "the connection was closed")
            if refusals:
                raise ValueError("; ".join(f"{url}: {error}" for url, error in refusals))
            if took := any(error is None for _, error in outcomes):
                old, self._weights, self.version, self._scorer = self._weights, file, version, score
                if old is not None:
                    old.unlink(missing_ok=True)
            return took

    def _restore(self, replica: _Replica, remote: RemoteGenerator) -> None:
        """Load the weights from before."""
        if self._weights is None:
            return self.mark_down(
                replica, remote, "it has weights that others refused, and those before are not known here"
            )
        remote.scorer = self._scorer
        try:
            remote.load(read_file(self._weights), self.version)
        except (*FAILURES, ValueError) as error:
            self.mark_down(replica, remote, str(error))


class _PoolStream:
    """One answer as it comes. Until its first piece another replica may take over."""

    def __init__(self, pool: ReplicaPool, request: Request) -> None:
        self._pool, self._request = pool, request
        self._attempts, self._read, self._counted = 0, False, False
        self._begin()

    def _begin(self) -> None:
        self._attempts += 1
        self._replica, remote = self._pool.acquire([self._request])
        self._remote, self._counted = remote, True
        self._stream = remote.stream(self._request)

    @property
    def completion(self) -> Completion:
        return self._stream.completion

    def __iter__(self) -> _PoolStream:
        return self

    def __next__(self) -> Piece:
        while True:
            try:
                piece = next(self._stream)
            except (UserError, OSError, CancelledError) as error:
                self._end()
                self._pool.mark_down(self._replica, self._remote, str(error) or "the connection was closed")
                if self._read or self._attempts == MAX_ATTEMPTS:
                    raise
                self._begin()
            except BaseException:
                self._end()
                raise
            else:
                self._read = True
                return piece

    def _end(self) -> None:
        """It no longer counts as under way there."""
        if self._counted:
            self._counted = False
            self._pool.release(self._replica, 1)

    def close(self) -> None:
        self._stream.close()
        self._end()


Fleet = ReplicaPool  # its former name, which programs of users import
