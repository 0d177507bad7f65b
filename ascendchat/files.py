"""Atomic writes and checksums: files that are never seen half-written. Everything stored goes through here."""

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

MAX_DRAFT_AGE = 3600.0  # seconds since anything was written to a draft: its process is dead


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
    if any(part.endswith(":") for part in folder.parts):  # s3://bucket/x, from which Path dropped a slash
        address = str(folder).replace(":/", "://", 1)
        raise UserError(f"{address} is an address, and only a folder can be written; write one, then copy it there")
    try:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not there.is_dir():
            raise UserError(f"{there} is a file, and a folder is needed there; give another --out")
        with tempfile.TemporaryFile(dir=there):
            pass  # only an attempt tells: root may ignore rights, and file systems like /proc ignore them
    except OSError as error:
        raise UserError(
            f"{there} cannot be written: {error.strerror}; give another --out, or set ASCENDCHAT_HOME to a writable "
            "folder"
        ) from None


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace a file so that a reader, or a crash, sees the old content or the new one, never a half."""
    draft = path.with_name(f".{path.name}.{os.getpid()}{threading.get_ident()}.tmp")
    _tidy(path)
    try:
        with draft.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError:  # the disk is full, or `path` is a folder
        draft.unlink(missing_ok=True)
        raise
    flush(path.parent)  # the rename itself


def _tidy(path: Path) -> None:
    """Remove drafts of this file that killed processes left: so old that no process can be writing them."""
    with contextlib.suppress(OSError):
        with os.scandir(path.parent) as entries:
            drafts = [e for e in entries if e.name.startswith(f".{path.name}.") and e.name.endswith(".tmp")]
        for draft in drafts:
            if draft.stat().st_mtime < time.time() - MAX_DRAFT_AGE:
                os.unlink(draft.path)


def give_default_mode(path: Path) -> None:
    """Give a file or folder the rights that one made beside it gets. A library that writes to a temporary file and
    renames it (safetensors) leaves the rights of that: only the owner could read a model that is meant for all."""
    probe = path.with_name(f".{path.name}.{os.getpid()}.mode")
    folder = path.is_dir()
    with contextlib.suppress(OSError):  # some file systems of a network know no rights
        probe.mkdir() if folder else probe.touch()
        try:
            os.chmod(path, stat.S_IMODE(probe.stat().st_mode))
        finally:
            probe.rmdir() if folder else probe.unlink()


def sha256(path: Path) -> str:
    """Checksum of a file: the one begun by `begin_sha256`, unless the file has changed since."""
    checksum = _background.pop(path, None)
    if checksum is not None:
        checksum.join()
        if checksum.digest and checksum.file == _identity(path):
            return checksum.digest
    return _sha256(path)


def begin_sha256(path: Path) -> None:
    """Let a thread begin the checksum that `sha256` will return."""
    checksum = _BackgroundChecksum(path)
    checksum.start()
    _background[path] = checksum


def _sha256(path: Path) -> str:
    """Hash a file in pieces (hashing leaves the interpreter free, so threads run in parallel)."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(4 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _identity(path: Path) -> tuple[int, ...]:
    facts = path.stat()
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns


class _BackgroundChecksum(threading.Thread):
    """A checksum being computed; `file` identifies the file as it was at the start."""

    def __init__(self, path: Path) -> None:
        super().__init__(daemon=True)  # a command that ends does not wait for it
        self.path, self.file, self.digest = path, _identity(path), ""

    def run(self) -> None:
        with contextlib.suppress(OSError):  # `sha256` reads the file again, and raises
            self.digest = _sha256(self.path)


_background: dict[Path, _BackgroundChecksum] = {}
