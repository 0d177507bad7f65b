"""The download engine of `ascendchat data fetch`: many files, many ranges at once, resumed, verified, published whole.

    download([Remote("a.parquet", url, bytes=n, sha256=h)], folder, web, workers=8, done=record_in_manifest)

A server is believed in nothing: ranges, lengths, validators and content are all checked, and a file that does not fit
is fetched again a bounded number of times. Nothing appears under its final name before it was verified.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import threading
import time
import zlib
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ascendchat.data.fetch.content import digests, disk_error, not_data
from ascendchat.data.fetch.partfile import PartFile
from ascendchat.data.fetch.redact import redact
from ascendchat.data.fetch.web import Retry, SourceFailed, Web, version


@dataclass(frozen=True)
class Remote:
    """One file of a source. `sha256` and `git` (the SHA-1 of a git blob) come from the hub where it gives them."""

    name: str
    url: str
    bytes: int | None = None
    sha256: str = ""
    git: str = ""
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        return self.sha256 or self.git


class Restarted(Exception):
    """The content of this file was thrown away; whoever was still fetching parts of it stops."""


def range_answer(text: str) -> tuple[int, int | None] | None:
    """Content-Range: bytes 0-99/1000 -> (0, 1000); the total is None when the server does not say."""
    found = re.fullmatch(r"bytes\s+(\d+)-(\d+)/(\d+|\*)", text.strip(), re.IGNORECASE)
    return (int(found[1]), None if found[3] == "*" else int(found[3])) if found else None


class Job:
    """The state of one file. `lock` guards the part file; everything else is guarded by the engine's condition."""

    def __init__(self, remote: Remote, folder: Path) -> None:
        self.remote = remote
        self.part = PartFile(folder / remote.name)
        self.lock = threading.Lock()
        self.state = "new"  # new -> opening (one request alone) -> ready (ranges in parallel) -> done
        self.generation = 0  # goes up when the content is thrown away
        self.pending: list[tuple[int, int]] = []
        self.flying = 0
        self.streaming = False  # the server serves no ranges: one request for the whole file
        self.trust_tag = True
        self.restarts = 0
        self.received = 0  # bytes counted in the progress


class Engine:
    """Threads that take ranges of files until every file is published."""

    def __init__(self, jobs: list[Job], web: Web, done: Callable[[Remote, int, str, str], None]) -> None:
        self.jobs = jobs
        self.active = list(jobs)  # not yet published
        self.web = web
        self.policy = web.policy
        self.done = done
        self.finished = 0
        self.publishing = 0
        self.error: BaseException | None = None
        self.change = threading.Condition()

    @property
    def received(self) -> int:
        return sum(job.received for job in self.jobs)

    def work(self) -> None:
        """One thread: take a range, fetch it, publish the file when it was the last one."""
        try:
            while (task := self._next()) is not None:
                job, generation, span = task
                try:
                    self._fetch(job, generation, span)
                except Restarted:
                    continue
                with self.change:
                    if job.generation != generation:
                        continue
                    job.flying -= 1
                    last = not job.pending and not job.flying and job.state == "ready"
                    if last:
                        job.state = "checking"
                        self.publishing += 1
                    self.change.notify_all()
                if last:
                    try:
                        self._publish(job)
                    finally:
                        with self.change:
                            self.publishing -= 1
                            self.change.notify_all()
        except OSError as error:
            self._fail(disk_error(error, self.jobs[0].part.path))
        except BaseException as error:  # noqa: BLE001 (carried to the caller's thread, which raises it)
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self.change:
            self.error = self.error or error
            self.web.stopped.set()
            self.change.notify_all()

    def _next(self) -> tuple[Job, int, tuple[int, int] | None] | None:
        with self.change:
            while True:
                if self.error or self.web.stopped.is_set() or not self.active:
                    return None
                for job in self.active:
                    if job.state == "new":
                        job.state, job.flying = "opening", 1
                        return job, job.generation, None
                    if job.state == "ready" and job.pending:
                        job.flying += 1
                        return job, job.generation, job.pending.pop(0)
                self.change.wait(1.0)

    def _fetch(self, job: Job, generation: int, span: tuple[int, int] | None) -> None:
        if span is not None:
            return self._range(job, generation, *span)
        remote = job.remote
        if job.restarts == 0:
            job.part.open(remote.digest, redact(remote.url))
            if job.part.size is not None and remote.bytes not in (None, job.part.size):
                job.part.reset()
        if remote.bytes == 0:
            job.part.begin(0, remote.digest, redact(remote.url), "")
        if job.part.size is None:
            # Nothing known from earlier: the first range alone, to learn whether and how the server serves ranges.
            size = remote.bytes
            end = self.policy.chunk if size is None else min(self.policy.chunk, size)
            return self._range(job, generation, 0, end)
        gaps = job.part.gaps(self.policy.chunk)
        job.received = job.part.size - sum(end - start for start, end in gaps)
        if not gaps:
            return self._opened(job, generation, [])
        job.pending = gaps[1:]
        return self._range(job, generation, *gaps[0])

    def _opened(self, job: Job, generation: int, pending: list[tuple[int, int]]) -> None:
        with self.change:
            if job.state == "opening" and job.generation == generation:
                job.state, job.pending = "ready", pending
                self.change.notify_all()

    def _range(self, job: Job, generation: int, start: int, end: int) -> None:
        """Fetch [start, end), taking it up where a connection broke; commit it to the journal."""
        position, crc, failures, rounds = start, 0, 0, 0
        while position < end:
            before = position
            try:
                with contextlib.closing(self._stream(job, generation, position, end)) as pieces:
                    for piece in pieces:
                        with job.lock:
                            if job.generation != generation or self.web.stopped.is_set():
                                raise Restarted
                            job.part.write(position, piece)
                            job.received += len(piece)
                        crc = zlib.crc32(piece, crc)
                        position += len(piece)
                if job.streaming:
                    end = position
                elif job.part.size is not None:  # the first range was asked for before the size was known
                    end = min(end, job.part.size)
                if position < end:
                    raise Retry(f"{job.remote.name}: the connection ended early")
            except Retry as error:
                with job.lock:
                    if job.generation != generation:
                        raise Restarted from None
                    if job.streaming:  # no ranges: only from the start again
                        job.received, position, crc = 0, 0, 0
                failures, rounds = (1 if position > before else failures + 1), rounds + 1
                most = self.policy.connect_attempts if error.unreachable else self.policy.attempts
                if failures >= most or rounds >= 10 * most:
                    raise SourceFailed(f"{job.remote.name}: {error} (gave up after {rounds} attempts)") from None
                self.web.wait(error.after or self.policy.delay(failures))
            if self.web.stopped.is_set():
                raise Restarted
        self._commit(job, generation, start, end, crc)

    def _commit(self, job: Job, generation: int, start: int, end: int, crc: int) -> None:
        job.part.flush()
        with job.lock:
            if job.generation != generation or self.web.stopped.is_set():
                raise Restarted
            if job.streaming:
                job.part.begin(end, job.remote.digest, redact(job.remote.url), job.part.tag)
            job.part.commit(start, end, crc)
        if job.streaming:
            self._opened(job, generation, [])

    def _stream(self, job: Job, generation: int, start: int, end: int) -> Generator[bytes, None, None]:
        """The bytes [start, end) (all of them when streaming), from one request."""
        headers = dict(job.remote.headers)
        if not job.streaming:
            headers["Range"] = f"bytes={start}-{end - 1}"
            tag = job.part.tag
            if tag and job.trust_tag and not tag.startswith("W/"):  # If-Range takes strong validators only
                headers["If-Range"] = tag
        with self.web.get(job.remote.url, headers) as response:
            self._accept(job, generation, response, start)
            left = None if job.streaming else end - start
            mark, since = time.monotonic(), 0
            for piece in response.iter_raw():
                if left is not None:
                    piece, left = piece[:left], left - len(piece)
                if piece:
                    yield piece
                since += len(piece)
                if left is not None and left < 0:
                    return  # a longer body than asked for: the rest is not ours
                if (passed := time.monotonic() - mark) > self.web.timeout:
                    if since < self.policy.slowest * passed:
                        raise Retry(f"{job.remote.name}: only {since} bytes in {passed:.0f} s")
                    mark, since = time.monotonic(), 0

    def _accept(self, job: Job, generation: int, response: Any, start: int) -> None:
        """Decide from the headers whether this body is what was asked for. Nothing may happen to the file between the
        question and the answer: a late response to an abandoned generation must not decide about the new one."""
        with job.lock:
            if job.generation != generation or self.web.stopped.is_set():
                raise Restarted
            why, streaming = self._judge(job, response, start)
        if why:
            self._restart(job, generation, why, streaming)
        if not job.streaming:
            self._opened(job, generation, job.pending)

    def _judge(self, job: Job, response: Any, start: int) -> tuple[str, bool]:
        """Under the job's lock: ("", False) to go on, or why to start anew, and whether without ranges."""
        tag = version(response)
        known = job.part.size if job.part.size is not None else job.remote.bytes
        if job.part.tag and tag and tag != job.part.tag and job.trust_tag:
            return "it changed on the server", False
        if response.status_code == 416:
            return "the server has fewer bytes than expected", known is None
        if response.status_code == 206 and job.streaming:
            raise Retry(f"{job.remote.name}: the server sent a part when asked for the whole file")
        if response.status_code == 206:
            answer = range_answer(response.headers.get("content-range", ""))
            if answer is None or answer[0] != start or answer[1] is None:
                return "the server sends other ranges than asked for", True
            if known is not None and answer[1] != known:
                return f"the server has {answer[1]} bytes, expected {known}", False
            if job.part.size is None:
                self._learn(job, answer[1], tag)
            return "", False
        if not job.streaming and (start > 0 or job.part.ranges or job.state != "opening"):
            return "the server changed it, or stopped serving ranges", False
        job.streaming = True
        length = response.headers.get("content-length", "")
        if length.isdigit() and job.remote.bytes not in (None, int(length)):
            raise Retry(f"{job.remote.name}: the server announces {length} bytes, expected {job.remote.bytes}")
        job.part.begin(None, job.remote.digest, redact(job.remote.url), tag)
        return "", False

    def _learn(self, job: Job, size: int, tag: str) -> None:
        """The first answer: how large the file is, and under which validator."""
        disk = os.statvfs(job.part.final.parent)
        if job.remote.bytes is None and size > disk.f_bavail * disk.f_frsize:
            raise disk_error(OSError(errno.ENOSPC, "too large"), job.part.path)
        job.part.begin(size, job.remote.digest, redact(job.remote.url), tag)
        job.pending = job.part.gaps(self.policy.chunk)[1:]

    def _restart(self, job: Job, generation: int, why: str, streaming: bool = False) -> None:
        """Throw the content away and fetch the file anew; too often is an error."""
        with self.change:
            if job.generation != generation:
                raise Restarted
            job.restarts += 1
            if job.restarts > self.policy.restarts:
                raise SourceFailed(f"{job.remote.name}: {why}, {job.restarts} times in a row")
            # Mirrors behind one name may disagree about the validator; where a checksum is known it decides alone.
            job.trust_tag = not (job.remote.digest and job.restarts >= 2)
            with job.lock:
                job.generation += 1
                job.part.reset()
                job.received = 0
            job.state, job.pending, job.flying, job.streaming = "new", [], 0, streaming or job.streaming
            self.change.notify_all()
        raise Restarted

    def settle(self) -> None:
        """After a stop: wait until nobody writes or publishes any more."""
        with self.change:
            while self.publishing:
                self.change.wait(0.2)
            self.change.notify_all()
        for job in self.jobs:
            with job.lock:
                pass

    def _publish(self, job: Job) -> None:
        """Verify the whole file; record it, then give it its name. A wrong one is fetched again."""
        remote, why = job.remote, ""
        size, sha, git = digests(job.part.path, bool(remote.git))
        if remote.bytes is not None and size != remote.bytes:
            why = f"{size} bytes, expected {remote.bytes}"
        elif remote.sha256 and sha != remote.sha256:
            why = f"sha256 {sha[:12]}..., expected {remote.sha256[:12]}..."
        elif remote.git and git != remote.git:
            why = f"git checksum {git[:12]}..., expected {remote.git[:12]}..."
        elif not remote.digest:
            why = not_data(job.part.path, remote.name)
        if why:
            with contextlib.suppress(Restarted):
                self._restart(job, job.generation, f"the file received is corrupt ({why})")
            return
        # First the manifest, so that no file without a checksum is ever visible, and before it the file that this one
        # replaces goes: killed between the two, the next run finds it missing, not an old one under a new checksum.
        job.part.final.unlink(missing_ok=True)
        self.done(remote, size, sha, job.part.tag)
        job.part.publish()
        with self.change:
            job.state, job.received = "done", size
            self.active.remove(job)
            self.finished += 1
            self.change.notify_all()


def download(
    remotes: list[Remote],
    folder: Path,
    web: Web,
    *,
    workers: int,
    done: Callable[[Remote, int, str, str], None],
    show: Callable[[int, int], None],
) -> None:
    """Bring all files into `folder`. `done(remote, bytes, sha256, tag)` records a verified file; `show(bytes, files)`
    is called a few times a second from this thread. Raises SourceFailed (another source may help) or UserError."""
    jobs = [Job(remote, folder) for remote in remotes]
    engine = Engine(jobs, web, done)
    threads = [threading.Thread(target=engine.work, daemon=True, name=f"fetch-{i}") for i in range(max(1, workers))]
    for thread in threads:
        thread.start()
    try:
        while not engine.error and engine.finished < len(jobs):
            show(engine.received, engine.finished)
            with engine.change:
                if not engine.error and engine.finished < len(jobs):
                    engine.change.wait(0.2)
    finally:
        web.stopped.set()
        engine.settle()
        patience = time.monotonic() + 1.0
        for thread in threads:  # one that waits for a silent server ends by itself, and writes nothing any more
            thread.join(timeout=max(0.0, patience - time.monotonic()))
        if not any(thread.is_alive() for thread in threads):
            for job in jobs:
                job.part.close()
    show(engine.received, engine.finished)
    if engine.error:
        raise engine.error
