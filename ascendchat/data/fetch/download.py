"""Download files for `ascendchat data fetch`: many ranges at once, resumed, verified, published complete.

In order: checks of a received file (checksums, its first bytes, errors of the disk), the downloader, and the part file
of a download that is under way.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import threading
import time
import zlib
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from ascendchat.data.fetch.http import SourceFailed, TransientFailure, Web, redact, version
from ascendchat.errors import UserError
from ascendchat.files import flush


def digests(path: Path, git: bool) -> tuple[int, str, str]:
    """Size, sha256 and (if asked for) the git blob SHA-1 of a file, in one reading."""
    size = path.stat().st_size
    sha, blob = hashlib.sha256(), hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as stream:
        while piece := stream.read(READ_BYTES):
            sha.update(piece)
            if git:
                blob.update(piece)
    return size, sha.hexdigest(), blob.hexdigest() if git else ""


MAGIC = {".gz": b"\x1f\x8b", ".zip": b"PK", ".xz": b"\xfd7zXZ", ".zst": b"\x28\xb5\x2f\xfd", ".parquet": b"PAR1"}


def not_data(path: Path, name: str) -> str:
    """Reason why a file without a published checksum cannot be what its name says; "" when it can."""
    with path.open("rb") as stream:
        head = stream.read(512)
        stream.seek(max(0, path.stat().st_size - 4))
        tail = stream.read(4)
    page = head.lstrip().lower()
    if page.startswith((b"<!doctype html", b"<html")) and not name.endswith((".html", ".htm")):
        return "it is a web page: a login page or a proxy answered instead of the server"
    ending = PurePosixPath(name).suffix
    if not head.startswith(MAGIC.get(ending, b"")) or (ending == ".parquet" and tail != b"PAR1"):
        return f"it is not a whole {ending[1:]} file"
    return ""


def disk_error(error: OSError, path: Path) -> Exception:
    """Build the error of a full or broken disk, which the user must mend; no other source will help."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(
            f"the disk with {path.parent} is full; free some space (ascendchat clean), or choose another folder with "
            "--out or ASCENDCHAT_HOME; what was downloaded is kept"
        )
    return UserError(f"cannot write {path}: {error.strerror or error}; check the folder, or choose one with --out")


# The downloader of `ascendchat data fetch`: many files and ranges at once, resumed, verified, published complete.
#
#     download([RemoteFile("a.parquet", url, bytes=n, sha256=h)], folder, web, workers=8, done=record_in_manifest)
#
# No server is trusted: ranges, lengths, validators and content are all checked. A file that is wrong is fetched again,
# a limited number of times. A file gets its final name only after it was verified.


@dataclass(frozen=True)
class RemoteFile:
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
    """The content of this file was thrown away; threads that still fetch parts of it stop."""


def range_answer(text: str) -> tuple[int, int | None] | None:
    """Parse Content-Range: bytes 0-99/1000 -> (0, 1000); the total is None when the server does not say."""
    match = re.fullmatch(r"bytes\s+(\d+)-(\d+)/(\d+|\*)", text.strip(), re.IGNORECASE)
    return (int(match[1]), None if match[3] == "*" else int(match[3])) if match else None


class FileDownload:
    """State of one file. `lock` guards the part file; the downloader's condition guards everything else."""

    def __init__(self, remote: RemoteFile, folder: Path) -> None:
        self.remote = remote
        self.part = PartFile(folder / remote.name)
        self.lock = threading.Lock()
        self.state = "new"  # new -> opening (one request alone) -> ready (ranges in parallel) -> done
        self.generation = 0  # goes up when the content is thrown away
        self.pending: list[tuple[int, int]] = []
        self.in_flight = 0
        self.streaming = False  # the server serves no ranges: one request for the whole file
        self.trust_tag = True
        self.restarts = 0
        self.received = 0  # bytes counted in the progress


class Downloader:
    """Threads that take ranges of files until every file is published."""

    def __init__(self, files: list[FileDownload], web: Web, done: Callable[[RemoteFile, int, str, str], None]) -> None:
        self.files = files
        self.active = list(files)  # not yet published
        self.web = web
        self.policy = web.policy
        self.done = done
        self.finished = 0
        self.publishing = 0
        self.error: BaseException | None = None
        self.change = threading.Condition()

    @property
    def received(self) -> int:
        return sum(file.received for file in self.files)

    def work(self) -> None:
        """Run one thread: take a range, fetch it, publish the file when it was the last one."""
        try:
            while (task := self._next()) is not None:
                file, generation, span = task
                try:
                    self._fetch(file, generation, span)
                except Restarted:
                    continue
                with self.change:
                    if file.generation != generation:
                        continue
                    file.in_flight -= 1
                    last = not file.pending and not file.in_flight and file.state == "ready"
                    if last:
                        file.state = "checking"
                        self.publishing += 1
                    self.change.notify_all()
                if last:
                    try:
                        self._publish(file)
                    finally:
                        with self.change:
                            self.publishing -= 1
                            self.change.notify_all()
        except OSError as error:
            self._fail(disk_error(error, self.files[0].part.path))
        except BaseException as error:  # noqa: BLE001 (carried to the caller's thread, which raises it)
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self.change:
            self.error = self.error or error
            self.web.stopped.set()
            self.change.notify_all()

    def _next(self) -> tuple[FileDownload, int, tuple[int, int] | None] | None:
        with self.change:
            while True:
                if self.error or self.web.stopped.is_set() or not self.active:
                    return None
                for file in self.active:
                    if file.state == "new":
                        file.state, file.in_flight = "opening", 1
                        return file, file.generation, None
                    if file.state == "ready" and file.pending:
                        file.in_flight += 1
                        return file, file.generation, file.pending.pop(0)
                self.change.wait(1.0)

    def _fetch(self, file: FileDownload, generation: int, span: tuple[int, int] | None) -> None:
        if span is not None:
            return self._range(file, generation, *span)
        remote = file.remote
        if file.restarts == 0:
            file.part.open(remote.digest, redact(remote.url))
            if file.part.size is not None and remote.bytes not in (None, file.part.size):
                file.part.reset()
        if remote.bytes == 0:
            file.part.begin(0, remote.digest, redact(remote.url), "")
        if file.part.size is None:
            # Nothing known from earlier: the first range alone, to learn whether and how the server serves ranges.
            size = remote.bytes
            end = self.policy.chunk if size is None else min(self.policy.chunk, size)
            return self._range(file, generation, 0, end)
        gaps = file.part.gaps(self.policy.chunk)
        file.received = file.part.size - sum(end - start for start, end in gaps)
        if not gaps:
            return self._opened(file, generation, [])
        file.pending = gaps[1:]
        return self._range(file, generation, *gaps[0])

    def _opened(self, file: FileDownload, generation: int, pending: list[tuple[int, int]]) -> None:
        with self.change:
            if file.state == "opening" and file.generation == generation:
                file.state, file.pending = "ready", pending
                self.change.notify_all()

    def _range(self, file: FileDownload, generation: int, start: int, end: int) -> None:
        """Fetch [start, end) and commit it to the journal; after a broken connection, continue where it broke."""
        position, crc, failures, rounds = start, 0, 0, 0
        while position < end:
            before = position
            try:
                with contextlib.closing(self._stream(file, generation, position, end)) as pieces:
                    for piece in pieces:
                        with file.lock:
                            if file.generation != generation or self.web.stopped.is_set():
                                raise Restarted
                            file.part.write(position, piece)
                            file.received += len(piece)
                        crc = zlib.crc32(piece, crc)
                        position += len(piece)
                if file.streaming:
                    end = position
                elif file.part.size is not None:  # the first range was asked for before the size was known
                    end = min(end, file.part.size)
                if position < end:
                    raise TransientFailure(f"{file.remote.name}: the connection ended early")
            except TransientFailure as error:
                with file.lock:
                    if file.generation != generation:
                        raise Restarted from None
                    if file.streaming:  # no ranges: only from the start again
                        file.received, position, crc = 0, 0, 0
                failures, rounds = (1 if position > before else failures + 1), rounds + 1
                limit = self.policy.connect_attempts if error.unreachable else self.policy.attempts
                if failures >= limit or rounds >= 10 * limit:
                    raise SourceFailed(f"{file.remote.name}: {error} (gave up after {rounds} attempts)") from None
                self.web.wait(error.after or self.policy.delay(failures))
            if self.web.stopped.is_set():
                raise Restarted
        self._commit(file, generation, start, end, crc)

    def _commit(self, file: FileDownload, generation: int, start: int, end: int, crc: int) -> None:
        file.part.flush()
        with file.lock:
            if file.generation != generation or self.web.stopped.is_set():
                raise Restarted
            if file.streaming:
                file.part.begin(end, file.remote.digest, redact(file.remote.url), file.part.tag)
            file.part.commit(start, end, crc)
        if file.streaming:
            self._opened(file, generation, [])

    def _stream(self, file: FileDownload, generation: int, start: int, end: int) -> Generator[bytes, None, None]:
        """Yield the bytes [start, end) (all of them when streaming), from one request."""
        headers = dict(file.remote.headers)
        if not file.streaming:
            headers["Range"] = f"bytes={start}-{end - 1}"
            tag = file.part.tag
            if tag and file.trust_tag and not tag.startswith("W/"):  # If-Range takes strong validators only
                headers["If-Range"] = tag
        with self.web.get(file.remote.url, headers) as response:
            self._accept(file, generation, response, start)
            left = None if file.streaming else end - start
            mark, since = time.monotonic(), 0
            for piece in response.iter_raw():
                if left is not None:
                    piece, left = piece[:left], left - len(piece)
                if piece:
                    yield piece
                since += len(piece)
                if left is not None and left < 0:
                    return  # a longer body than requested: the rest belongs to another range
                if (passed := time.monotonic() - mark) > self.web.timeout:
                    if since < self.policy.min_rate * passed:
                        raise TransientFailure(f"{file.remote.name}: only {since} bytes in {passed:.0f} s")
                    mark, since = time.monotonic(), 0

    def _accept(self, file: FileDownload, generation: int, response: Any, start: int) -> None:
        """Decide from the headers if this body is what was asked for. The lock is held meanwhile: a late response
        to an abandoned generation must not decide about the new one."""
        with file.lock:
            if file.generation != generation or self.web.stopped.is_set():
                raise Restarted
            why, streaming = self._judge(file, response, start)
        if why:
            self._restart(file, generation, why, streaming)
        if not file.streaming:
            self._opened(file, generation, file.pending)

    def _judge(self, file: FileDownload, response: Any, start: int) -> tuple[str, bool]:
        """Judge a response under the file's lock: ("", False) to go on, or (reason to start anew, without ranges)."""
        tag = version(response)
        expected = file.part.size if file.part.size is not None else file.remote.bytes
        if file.part.tag and tag and tag != file.part.tag and file.trust_tag:
            return "it changed on the server", False
        if response.status_code == 416:
            return "the server has fewer bytes than expected", expected is None
        if response.status_code == 206 and file.streaming:
            raise TransientFailure(f"{file.remote.name}: the server sent a part when asked for the whole file")
        if response.status_code == 206:
            answer = range_answer(response.headers.get("content-range", ""))
            if answer is None or answer[0] != start or answer[1] is None:
                return "the server sends other ranges than asked for", True
            if expected is not None and answer[1] != expected:
                return f"the server has {answer[1]} bytes, expected {expected}", False
            if file.part.size is None:
                self._learn(file, answer[1], tag)
            return "", False
        if not file.streaming and (start > 0 or file.part.ranges or file.state != "opening"):
            return "the server changed it, or stopped serving ranges", False
        file.streaming = True
        length = response.headers.get("content-length", "")
        if length.isdigit() and file.remote.bytes not in (None, int(length)):
            raise TransientFailure(
                f"{file.remote.name}: the server announces {length} bytes, expected {file.remote.bytes}"
            )
        file.part.begin(None, file.remote.digest, redact(file.remote.url), tag)
        return "", False

    def _learn(self, file: FileDownload, size: int, tag: str) -> None:
        """Take size and validator from the first answer."""
        disk = os.statvfs(file.part.final.parent)
        if file.remote.bytes is None and size > disk.f_bavail * disk.f_frsize:
            raise disk_error(OSError(errno.ENOSPC, "too large"), file.part.path)
        file.part.begin(size, file.remote.digest, redact(file.remote.url), tag)
        file.pending = file.part.gaps(self.policy.chunk)[1:]

    def _restart(self, file: FileDownload, generation: int, why: str, streaming: bool = False) -> None:
        """Throw the content away and fetch the file anew; too often is an error."""
        with self.change:
            if file.generation != generation:
                raise Restarted
            file.restarts += 1
            if file.restarts > self.policy.restarts:
                raise SourceFailed(f"{file.remote.name}: {why}, {file.restarts} times in a row")
            # Mirrors behind one name may disagree about the validator; where a checksum is known it decides alone.
            file.trust_tag = not (file.remote.digest and file.restarts >= 2)
            with file.lock:
                file.generation += 1
                file.part.reset()
                file.received = 0
            file.state, file.pending, file.in_flight, file.streaming = "new", [], 0, streaming or file.streaming
            self.change.notify_all()
        raise Restarted

    def settle(self) -> None:
        """Wait, after a stop, until no thread writes or publishes any more."""
        with self.change:
            while self.publishing:
                self.change.wait(0.2)
            self.change.notify_all()
        for file in self.files:
            with file.lock:
                pass

    def _publish(self, file: FileDownload) -> None:
        """Verify the complete file; record it, then give it its name. A wrong one is fetched again."""
        remote, problem = file.remote, ""
        size, sha, git = digests(file.part.path, bool(remote.git))
        if remote.bytes is not None and size != remote.bytes:
            problem = f"{size} bytes, expected {remote.bytes}"
        elif remote.sha256 and sha != remote.sha256:
            problem = f"sha256 {sha[:12]}..., expected {remote.sha256[:12]}..."
        elif remote.git and git != remote.git:
            problem = f"git checksum {git[:12]}..., expected {remote.git[:12]}..."
        elif not remote.digest:
            problem = not_data(file.part.path, remote.name)
        if problem:
            with contextlib.suppress(Restarted):
                self._restart(file, file.generation, f"the file received is corrupt ({problem})")
            return
        # The manifest comes first, so that no file without a checksum is ever visible. Before it, the old file is
        # removed: a run killed between the two leaves no file, instead of an old file with a new checksum.
        file.part.final.unlink(missing_ok=True)
        self.done(remote, size, sha, file.part.tag)
        file.part.publish()
        with self.change:
            file.state, file.received = "done", size
            self.active.remove(file)
            self.finished += 1
            self.change.notify_all()


def download(
    remotes: list[RemoteFile],
    folder: Path,
    web: Web,
    *,
    workers: int,
    done: Callable[[RemoteFile, int, str, str], None],
    show: Callable[[int, int], None],
) -> None:
    """Download all files into `folder`. `done(remote, bytes, sha256, tag)` records a verified file; `show(bytes,
    files)` is called a few times a second from this thread. Raises SourceFailed (another source may help) or
    UserError."""
    files = [FileDownload(remote, folder) for remote in remotes]
    downloader = Downloader(files, web, done)
    threads = [threading.Thread(target=downloader.work, daemon=True, name=f"fetch-{i}") for i in range(max(1, workers))]
    for thread in threads:
        thread.start()
    try:
        while not downloader.error and downloader.finished < len(files):
            show(downloader.received, downloader.finished)
            with downloader.change:
                if not downloader.error and downloader.finished < len(files):
                    downloader.change.wait(0.2)
    finally:
        web.stopped.set()
        downloader.settle()
        deadline = time.monotonic() + 1.0
        for thread in threads:  # a thread that waits for a silent server ends later, and writes nothing any more
            thread.join(timeout=max(0.0, deadline - time.monotonic()))
        if not any(thread.is_alive() for thread in threads):
            for file in files:
                file.part.leave()
    show(downloader.received, downloader.finished)
    if downloader.error:
        raise downloader.error


# The part file of a download: `NAME.part` holds the bytes, `NAME.part.part` is the journal of verified ranges.
#
# Used by `ascendchat data fetch`. A range is written, flushed to disk, and only then named in the journal, so after
# `kill -9` or a power cut the journal never claims bytes that are not there. Each line carries a CRC, which is compared
# when the download is taken up again. The final name appears once, by rename, when everything has been verified.

READ_BYTES = 1 << 20  # read at once


class PartFile:
    """The bytes of one unfinished download. It has no lock: the caller serialises `write` and `commit`."""

    def __init__(self, final: Path) -> None:
        self.final = final
        self.path = final.with_name(final.name + ".part")
        self.journal = final.with_name(final.name + ".part.part")  # no file of a hub is called NAME.part
        self.size: int | None = None
        self.tag = ""  # ETag or Last-Modified under which the bytes were served
        self.ranges: list[tuple[int, int]] = []  # [start, end) on disk and journalled
        self._data = -1
        self._log = -1

    def open(self, digest: str, url: str) -> None:
        """Continue with the bytes of an earlier run if they are surely of the same content, else start empty."""
        self.final.parent.mkdir(parents=True, exist_ok=True)
        head, ranges = self._read_journal()
        same = head.get("digest") == digest if digest else (head.get("url") == url and head.get("tag"))
        if not (same and isinstance(head.get("bytes"), int)):
            head, ranges = {}, []
        self._data = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._log = os.open(self.journal, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        intact = [(start, end) for start, end, crc in ranges if self._crc(start, end) == crc]
        if not intact:
            self.reset()
            return
        self.size, self.tag = head["bytes"], head["tag"]
        os.ftruncate(self._data, self.size or 0)
        if len(intact) != len(ranges):  # a wrong or torn line must not reach the next run either
            self._rewrite(head, [r for r in ranges if (r[0], r[1]) in intact])
        else:
            os.lseek(self._log, 0, os.SEEK_END)
        self.ranges = intact

    def _read_journal(self) -> tuple[dict, list[tuple[int, int, int]]]:
        try:
            lines = self.journal.read_text(encoding="utf-8").split("\n")
            head = json.loads(lines[0])
            if not self.path.is_file() or not isinstance(head, dict):
                return {}, []
        except (OSError, ValueError):
            return {}, []
        ranges = []
        for line in lines[1:-1]:  # what follows the last newline was torn by the kill
            fields = line.split()
            if len(fields) == 3 and all(f.isdigit() for f in fields):
                ranges.append((int(fields[0]), int(fields[1]), int(fields[2])))
        return head, ranges

    def _crc(self, start: int, end: int) -> int:
        crc = 0
        while start < end:
            piece = os.pread(self._data, min(READ_BYTES, end - start), start)
            if not piece:
                return -1
            crc = zlib.crc32(piece, crc)
            start += len(piece)
        return crc

    def begin(self, size: int | None, digest: str, url: str, tag: str) -> None:
        """Start the journal after the server's answer: the size is known (None: only at the end)."""
        self.size, self.tag = size, tag
        if size is not None:
            os.ftruncate(self._data, size)
        self._rewrite({"bytes": size, "digest": digest, "url": url, "tag": tag}, [])

    def _rewrite(self, head: dict, ranges: list[tuple[int, int, int]]) -> None:
        os.ftruncate(self._log, 0)
        os.lseek(self._log, 0, os.SEEK_SET)
        text = json.dumps(head) + "\n" + "".join(f"{a} {b} {c}\n" for a, b, c in ranges)
        os.write(self._log, text.encode())
        os.fsync(self._log)

    def reset(self) -> None:
        """Drop all bytes and the journal's content."""
        self.ranges, self.size, self.tag = [], None, ""
        os.ftruncate(self._log, 0)
        os.lseek(self._log, 0, os.SEEK_SET)
        os.ftruncate(self._data, 0)

    def write(self, offset: int, data: bytes) -> None:
        view = memoryview(data)
        while view:
            written = os.pwrite(self._data, view, offset)
            view, offset = view[written:], offset + written

    def flush(self) -> None:
        """Flush the bytes to disk, before the journal names them."""
        os.fsync(self._data)

    def commit(self, start: int, end: int, crc: int) -> None:
        """Journal a range, after `flush`: from here on these bytes are never fetched again."""
        os.write(self._log, f"{start} {end} {crc}\n".encode())
        os.fsync(self._log)
        self.ranges.append((start, end))

    def gaps(self, chunk: int) -> list[tuple[int, int]]:
        """List the missing ranges, in pieces of at most `chunk` bytes."""
        assert self.size is not None
        missing, at = [], 0
        for start, end in [*sorted(self.ranges), (self.size, self.size)]:
            while at < start:
                missing.append((at, min(at + chunk, start)))
                at = missing[-1][1]
            at = max(at, end)
        return missing

    def publish(self) -> None:
        """Give the verified file its final name, then drop the journal."""
        os.fsync(self._data)
        self.close()
        os.replace(self.path, self.final)
        flush(self.final.parent)
        self.journal.unlink(missing_ok=True)

    def leave(self) -> None:
        """Stop without the file: bytes in the journal stay for the next run, files that hold nothing are removed."""
        if self._data >= 0 and not self.ranges:
            self.path.unlink(missing_ok=True)
            self.journal.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        for handle in (self._data, self._log):
            if handle >= 0:
                os.close(handle)
        self._data = self._log = -1
