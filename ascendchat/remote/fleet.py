"""A Generator over several servers: `ascendchat rl --rollouts http://a:8000,http://b:8000`.

    with Fleet.open(["http://a:8000", "http://b:8000"], api_key=key, tokenizer=tokenizer) as generator:
        answers = generator.generate(requests)         # the samples of one prompt go to one server, for its cache
        generator.load(weights, version=12)            # every server that answers from now on has these

A server is in service or it is not. One that fails, hangs, answers with old weights or has not taken new ones is taken
out of service, and what it had not answered is asked elsewhere. A thread per server looks after it: in service it must
generate something from time to time; out of service it is tried until it generates, then it gets the current weights,
verified as `Remote.load` does it, and only then requests. Every wait has an end: after `patience` seconds without any
server in service there is a UserError that names the reason of each.

client.py is one server, routing.py chooses between them, rollouts.py opens a fleet for a trainer.
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
from ascendchat.remote.client import Remote
from ascendchat.remote.http import NoAnswer
from ascendchat.remote.routing import Candidate, blocks_of, choose, remember
from ascendchat.remote.weights import Scorer, remembered

RETRIES = 5.0  # seconds for which a server that is busy or gone is asked again before another one is
TOGETHER = 8  # requests that are handed over at a time at least, and a group is never divided below that
MAX_TOGETHER = 16  # and at most
THREADS = 64  # that wait for answers at a time
SLOTS = 64  # that a server is taken to have: a quarter of it is how much more one may have to do for its cache's sake
MAX_ATTEMPTS = 12  # servers that may fail over one request before it is given up
PACE = 0.5  # seconds between two looks at a server
IDLE = 10.0  # seconds without a word after which a server without work is tried

FAILURES = (UserError, OSError, Damaged, CancelledError)  # of a server, not of a request


@dataclass
class _Member:
    """One server."""

    url: str
    remote: Remote | None = None  # None: out of service
    reason: str = "it has not been tried yet"  # why it is out of service
    load: int = 0  # requests under way
    heard: float = 0.0  # time of its last answer
    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)  # of prompts that it has read


def batches(requests: Sequence[Request]) -> list[list[int]]:
    """Places of requests that are asked together: all samples of a prompt, unless they are very many; single ones in
    the order in which they came."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for place, request in enumerate(requests):
        groups.setdefault(tuple(request.prompt), []).append(place)
    found: list[list[int]] = []
    for group in groups.values():
        if found and len(found[-1]) + len(group) <= TOGETHER:
            found[-1] += group
        else:
            found += [group[at : at + MAX_TOGETHER] for at in range(0, len(group), MAX_TOGETHER)]
    return found


def address_of(url: str) -> tuple[str, int]:
    """Host and port."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


class Fleet:
    """Several servers as one Generator. Several threads may use it.

    `pushes`: False on ranks that only ask; weights come from another rank, which is told by `renew`. `timeout`: seconds
    for an answer. `patience`: for any server at all. `hang`: in which one that has work, or is tried, must generate
    something. `store`: folder for weights. `more`: settings of Remote; a `scorer` is asked of the weights in `load`.
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
        own = {"api_key": api_key, "tokenizer": tokenizer, "concurrency": concurrency, "patience": RETRIES}
        self.settings: dict[str, Any] = {**own, **more}
        self.timeout, self.patience, self.hang, self.pushes, self.say = timeout, patience, hang, pushes, say
        self.members = [_Member(url) for url in urls]
        self.version, self.context = 0, 0
        self._own = store is None
        self.store = Path(tempfile.mkdtemp(prefix="ascendchat-fleet-")) if store is None else store
        self._weights: Path | None = None  # file with those in use
        self._scorer: Scorer | None = None  # knows what they say of the probe
        self._numbers = itertools.count()
        self._changed = threading.Condition()  # guards the members
        self._sync = threading.Lock()  # one change of weights at a time
        self._syncs = 0  # begun or ended so far: odd while one is under way
        self._closing = threading.Event()

    @classmethod
    def open(cls, urls: Sequence[str], **settings: object) -> Fleet:
        """Connect to all of them; one that does not answer within `patience` is a UserError."""
        fleet = cls(urls, **settings)  # type: ignore[arg-type]
        try:
            end = time.monotonic() + fleet.patience
            for member in fleet.members:
                fleet._enter(member, fleet._first(member.url, end))
            fleet.context = min(member.remote.context for member in fleet.members if member.remote)
        except BaseException:
            fleet.close()
            raise
        for member in fleet.members:
            threading.Thread(target=fleet._watch, args=(member,), name=f"watch {member.url}", daemon=True).start()
        return fleet

    def _first(self, url: str, end: float) -> Remote:
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
            self._closing.wait(PACE)
        return self._connect(url)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every request under way. The servers go on."""
        self._closing.set()
        for member in self.members:
            if member.remote is not None:
                self.lose(member, member.remote, "closed")
        if self._own:
            shutil.rmtree(self.store, ignore_errors=True)

    # ---- the Generator -------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """All answers, in the order of the requests."""
        parts = batches(requests)
        if len(parts) == 1:  # in this thread
            return [answer for _, answer in sorted(self._ask(requests, parts[0]).items())]
        threads = ThreadPoolExecutor(min(THREADS, max(1, len(parts))), "fleet")
        try:
            answers: dict[int, Completion] = {}
            for found in threads.map(lambda part: self._ask(requests, part), parts):
                answers |= found
            return [answers[place] for place in range(len(requests))]
        finally:  # after an error or Ctrl-C nobody waits for the others
            threads.shutdown(wait=False, cancel_futures=True)

    def stream(self, request: Request) -> _FleetStream:
        """One answer as it comes; until its first piece it may be asked elsewhere."""
        return _FleetStream(self, request)

    def load(self, weights: Weights, version: int, *, interrupt: bool = False) -> None:
        """Answer with these weights from now on; see Generator.load. A server that does not take them is out of service
        until it has them. When none takes them, or one says that they do not fit, all keep the old ones."""
        file = self.store / f"weights-{next(self._numbers)}.safetensors"
        self.store.mkdir(parents=True, exist_ok=True)
        write_weights(file, weights)
        how, end = {"interrupt": True} if interrupt else {}, time.monotonic() + self.patience
        probed = any(member.remote is None or not member.remote.ours for member in self.members)
        score = (self._scorer if version == self.version else None) or (remembered(self.settings) if probed else None)
        try:
            while not self._load_all(file, version, how, score):
                if time.monotonic() > end:
                    raise UserError(f"no server took the weights of version {version}: {self._reasons()}")
                self.give(self.take([Request([0])])[0], 1)  # waits until one is back
        except BaseException:
            file.unlink(missing_ok=True)
            raise

    def renew(self, version: int) -> None:
        """Another rank has loaded new weights, on every server that is in service there."""
        with self._changed:
            self.version = version
            for member in self.members:
                if member.remote is not None:
                    member.remote.version = version

    # ---- requests ------------------------------------------------------------------------------

    def _ask(self, requests: Sequence[Request], places: Sequence[int]) -> dict[int, Completion]:
        """Answers by place. What a server failed to answer is asked again, with the same seed, of whichever is best
        then; what it did answer is kept."""
        answers: dict[int, Completion] = {}
        reason = ""
        for _ in range(MAX_ATTEMPTS):
            left = [place for place in places if place not in answers]
            if not left or self._closing.is_set():
                break
            asked, (member, remote) = self.version, self.take([requests[place] for place in left])
            try:
                found = remote.generate([requests[place] for place in left])
            except FAILURES as error:
                reason = str(error) or "the connection was closed"
                self.lose(member, remote, reason)
                continue
            except RuntimeError:  # a connection that was closed before it was used
                if member.remote is remote:
                    raise
                continue
            finally:
                self.give(member, len(left))
            if (oldest := min((version for answer in found for version in answer.versions), default=asked)) < asked:
                reason = f"it answered with the weights of version {oldest} instead of {asked}"
                self.lose(member, remote, reason)
                continue
            member.heard = time.monotonic()
            answers |= zip(left, found)
        if self._closing.is_set():
            raise UserError("the connection to the servers for rollouts was closed")
        if len(answers) < len(places):
            raise UserError(f"{len(places) - len(answers)} answers were given up after {MAX_ATTEMPTS} tries: {reason}")
        return answers

    def take(self, requests: Sequence[Request]) -> tuple[_Member, Remote]:
        """The server that is best for these requests, once there is one; they count as its load."""
        blocks, end = blocks_of(requests[0].prompt), time.monotonic() + self.patience
        with self._changed:
            while not (there := [member for member in self.members if member.remote is not None]):
                if not self._changed.wait(max(0.0, end - time.monotonic())) and time.monotonic() >= end:
                    raise UserError(f"no server for rollouts answers: {self._reasons()}")
                if self._closing.is_set():
                    raise UserError("the connection to the servers for rollouts was closed")
            member = there[choose([Candidate(one.load, SLOTS, one.blocks) for one in there], blocks)]
            if not member.load:
                member.heard = time.monotonic()
            member.load += len(requests)
            remember(member.blocks, blocks)
            assert member.remote is not None
            return member, member.remote

    def give(self, member: _Member, count: int) -> None:
        """So many requests are no longer under way there."""
        with self._changed:
            member.load -= count

    def _reasons(self) -> str:
        return "; ".join(f"{member.url}: {member.reason}" for member in self.members)

    # ---- in and out of service -----------------------------------------------------------------

    def _connect(self, url: str, timeout: float | None = None) -> Remote:
        return Remote.open(url, timeout=timeout or self.timeout, **{**self.settings, "scorer": self._scorer})

    def _enter(self, member: _Member, remote: Remote) -> None:
        with self._changed:
            member.remote, member.reason, member.heard = remote, "", time.monotonic()
            self._changed.notify_all()

    def lose(self, member: _Member, remote: Remote, reason: str) -> None:
        """Out of service; whoever waits for its answers asks elsewhere."""
        with self._changed:
            if member.remote is not remote:
                return
            member.remote, member.reason = None, reason
            member.blocks.clear()
            self._changed.notify_all()
        if not self._closing.is_set():
            self.say(f"rollouts: {member.url} is out of service: {reason}")
        remote.close()

    def _watch(self, member: _Member) -> None:
        """A thread: try a server that is out of service, or has said nothing for long."""
        while not self._closing.wait(PACE):
            remote, silent = member.remote, time.monotonic() - member.heard
            if remote is None:
                self._return(member)
            elif silent > (self.hang if member.load else IDLE):
                self._look(member, remote)

    def _look(self, member: _Member, remote: Remote) -> None:
        before, wanted = self._syncs, self.version
        try:
            found = self._try(member.url)
            problem = "" if found >= wanted else f"it has the weights of version {found} instead of {wanted}"
        except FAILURES as error:
            problem = f"it generates nothing: {error}"
        if not problem:
            member.heard = time.monotonic()
        elif before == self._syncs and not before % 2:  # else it may have been paused for new weights
            self.lose(member, remote, problem)

    def _try(self, url: str) -> int:
        """A server that accepts connections may still hang: only an answer counts. The version of its weights; where
        servers do not say it, ours."""
        with self._connect(url, self.hang) as remote:
            probe = Request([0], Sampling(max_tokens=1, temperature=0.0, stop_tokens=()))
            answer = remote.generate([probe])[0]
            return answer.version if remote.ours else self.version

    def _return(self, member: _Member) -> None:
        """Back into service, with the weights that the others have."""
        try:
            self._try(member.url)
            with self._changing(), contextlib.ExitStack() as undo:
                remote = undo.enter_context(self._connect(member.url))
                if self._weights is not None:
                    remote.load(read_file(self._weights), self.version)
                elif not self.pushes and remote.version != self.version:
                    raise UserError(f"it has the weights of version {remote.version} instead of {self.version}")
                undo.pop_all()
                self._enter(member, remote)
        except (*FAILURES, ValueError) as error:
            member.reason = str(error)
            return
        self.say(f"rollouts: {member.url} is in service again, with version {self.version}")

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
        """Every server in service takes them, or leaves it. False: none has them, and nothing is changed."""
        weights = read_file(file)

        def one(pair: tuple[_Member, Remote]) -> Exception | None:
            pair[1].scorer = score
            try:
                pair[1].load(weights, version, **how)
            except (*FAILURES, ValueError) as error:
                return error
            return None

        with self._changing():
            there = [(member, member.remote) for member in self.members if member.remote is not None]
            with ThreadPoolExecutor(max(1, len(there))) as threads:
                outcomes = list(zip(there, threads.map(one, there)))
            refusals = [(member.url, error) for (member, _), error in outcomes if isinstance(error, ValueError)]
            for (member, remote), error in outcomes:
                if error is None and refusals:  # it would answer with what the others do not have
                    self._back(member, remote)
                elif error is not None and not isinstance(error, ValueError):
                    self.lose(member, remote, str(error) or "the connection was closed")
            if refusals:
                raise ValueError("; ".join(f"{url}: {error}" for url, error in refusals))
            if took := any(error is None for _, error in outcomes):
                old, self._weights, self.version, self._scorer = self._weights, file, version, score
                if old is not None:
                    old.unlink(missing_ok=True)
            return took

    def _back(self, member: _Member, remote: Remote) -> None:
        """The weights from before."""
        if self._weights is None:
            return self.lose(member, remote, "it has weights that others refused, and those before are not known here")
        remote.scorer = self._scorer
        try:
            remote.load(read_file(self._weights), self.version)
        except (*FAILURES, ValueError) as error:
            self.lose(member, remote, str(error))


# One answer of a Fleet as it comes: `fleet.stream(request)`. Until its first piece it may be asked elsewhere.


class _FleetStream:
    """The generator.Stream of one request."""

    def __init__(self, fleet: Fleet, request: Request) -> None:
        self._fleet, self._request = fleet, request
        self._attempts, self._read, self._counted = 0, False, False
        self._begin()

    def _begin(self) -> None:
        self._attempts += 1
        self._member, remote = self._fleet.take([self._request])
        self._remote, self._counted = remote, True
        self._stream = remote.stream(self._request)

    @property
    def completion(self) -> Completion:
        return self._stream.completion

    def __iter__(self) -> _FleetStream:
        return self

    def __next__(self) -> Piece:
        while True:
            try:
                piece = next(self._stream)
            except (UserError, OSError, CancelledError) as error:
                self._end()
                self._fleet.lose(self._member, self._remote, str(error) or "the connection was closed")
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
            self._fleet.give(self._member, 1)

    def close(self) -> None:
        self._stream.close()
        self._end()
