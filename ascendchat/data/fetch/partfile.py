"""A file that is being downloaded: `NAME.part` holds the bytes, `NAME.part.part` says which of them can be trusted.

Used by `ascendchat data fetch`. A range is written, flushed to disk, and only then named in the journal, so after
`kill -9` or a power cut the journal never claims bytes that are not there. Each line carries a CRC, which is compared
when the download is taken up again. The final name appears once, by rename, when everything has been verified.
"""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path

from ascendchat.files import flush

PIECE = 1 << 20  # bytes read at once


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
        kept = [(start, end) for start, end, crc in ranges if self._crc(start, end) == crc]
        if not kept:
            self.reset()
            return
        self.size, self.tag = head["bytes"], head["tag"]
        os.ftruncate(self._data, self.size or 0)
        if len(kept) != len(ranges):  # a wrong or torn line must not reach the next run either
            self._rewrite(head, [r for r in ranges if (r[0], r[1]) in kept])
        else:
            os.lseek(self._log, 0, os.SEEK_END)
        self.ranges = kept

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
            piece = os.pread(self._data, min(PIECE, end - start), start)
            if not piece:
                return -1
            crc = zlib.crc32(piece, crc)
            start += len(piece)
        return crc

    def begin(self, size: int | None, digest: str, url: str, tag: str) -> None:
        """The server has answered: the size is known (None: only at the end), ranges can be journalled."""
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
        """Forget everything."""
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
        """Bytes on disk, before the journal names them."""
        os.fsync(self._data)

    def commit(self, start: int, end: int, crc: int) -> None:
        """Call after `flush`: from here on these bytes are never fetched again."""
        os.write(self._log, f"{start} {end} {crc}\n".encode())
        os.fsync(self._log)
        self.ranges.append((start, end))

    def gaps(self, chunk: int) -> list[tuple[int, int]]:
        """What is missing, in pieces of at most `chunk` bytes."""
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
        """End without the file: what the journal names is kept for the next run, files that hold nothing else go."""
        if self._data >= 0 and not self.ranges:
            self.path.unlink(missing_ok=True)
            self.journal.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        for handle in (self._data, self._log):
            if handle >= 0:
                os.close(handle)
        self._data = self._log = -1
