"""Files that are never seen half-written, and their checksums: everything that is stored goes through here."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
import threading
import time
from pathlib import Path

from ascendchat.errors import UserError

ABANDONED = 3600.0  # seconds since anything was written to a draft: its process is dead


def flush(path: Path) -> None:
    """Make a file, or the entries of a folder, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_folder(folder: Path) -> None:
    """Refuse a folder that cannot be made or written, before hours of work begin. Leaves nothing behind."""
    there = folder
    if any(part.endswith(":") for part in folder.parts):  # s3://bucket/x, which Path has taken a slash from
        address = str(folder).replace(":/", "://", 1)
        raise UserError(f"{address} is an address, and only a folder can be written; write one, then copy it there")
    try:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not there.is_dir():
            raise UserError(f"{there} is a file, and a folder is needed there; give another --out")
        with tempfile.TemporaryFile(dir=there):
            pass  # only a try tells: rights say nothing to root, and nothing of file systems like /proc
    except OSError as error:
        raise UserError(
            f"{there} cannot be written: {error.strerror}; give another --out, or set ASCENDCHAT_HOME to a writable "
            "folder"
        ) from None


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace a file so that a reader, or a crash, sees the old content or the new one, never a half."""
    beside = path.with_name(f".{path.name}.{os.getpid()}{threading.get_ident()}.tmp")
    _tidy(path)
    try:
        with beside.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError:  # the disk is full, or `path` is a folder
        beside.unlink(missing_ok=True)
        raise
    flush(path.parent)  # the rename itself


def _tidy(path: Path) -> None:
    """Take away what kills have left of this file: drafts so old that nobody can be writing them."""
    with contextlib.suppress(OSError):
        with os.scandir(path.parent) as entries:
            drafts = [e for e in entries if e.name.startswith(f".{path.name}.") and e.name.endswith(".tmp")]
        for draft in drafts:
            if draft.stat().st_mtime < time.time() - ABANDONED:
                os.unlink(draft.path)


def usual_mode(path: Path) -> None:
    """Give a file or folder the rights that one made beside it gets. A library that writes to a temporary file and
    renames it (safetensors) leaves those of that: nobody but the owner could read a model that is meant for all."""
    probe = path.with_name(f".{path.name}.{os.getpid()}.mode")
    folder = path.is_dir()
    with contextlib.suppress(OSError):  # some file systems of a network know no rights
        probe.mkdir() if folder else probe.touch()
        try:
            os.chmod(path, stat.S_IMODE(probe.stat().st_mode))
        finally:
            probe.rmdir() if folder else probe.unlink()


def sha256(path: Path) -> str:
    """Checksum of a file: the one that was begun, unless the file has changed since."""
    begun = _begun.pop(path, None)
    if begun is not None:
        begun.join()
        if begun.digest and begun.file == _identity(path):
            return begun.digest
    return _sha256(path)


def begin_sha256(path: Path) -> None:
    """Let a thread begin the checksum that `sha256` will be asked for."""
    begun = _Begun(path)
    begun.start()
    _begun[path] = begun


def _sha256(path: Path) -> str:
    """Read in pieces (hashing leaves the interpreter free, so threads run in parallel)."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(4 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _identity(path: Path) -> tuple[int, ...]:
    facts = path.stat()
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns


class _Begun(threading.Thread):
    """A checksum under way; `file` is what the file was when it began."""

    def __init__(self, path: Path) -> None:
        super().__init__(daemon=True)  # a command that ends does not wait for it
        self.path, self.file, self.digest = path, _identity(path), ""

    def run(self) -> None:
        with contextlib.suppress(OSError):  # who asks for it reads the file again, and says what is wrong
            self.digest = _sha256(self.path)


_begun: dict[Path, _Begun] = {}
