"""Is a received file what it should be? Checksums, a look at its first bytes, and errors of the disk.

Used by `ascendchat data fetch` before a file gets its final name.
"""

from __future__ import annotations

import errno
import hashlib
from pathlib import Path, PurePosixPath

from ascendchat.config import UserError
from ascendchat.data.fetch.partfile import PIECE


def digests(path: Path, git: bool) -> tuple[int, str, str]:
    """Size, sha256 and (if asked for) the git blob SHA-1 of a file, in one reading."""
    size = path.stat().st_size
    sha, blob = hashlib.sha256(), hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as stream:
        while piece := stream.read(PIECE):
            sha.update(piece)
            if git:
                blob.update(piece)
    return size, sha.hexdigest(), blob.hexdigest() if git else ""


MAGIC = {".gz": b"\x1f\x8b", ".zip": b"PK", ".xz": b"\xfd7zXZ", ".zst": b"\x28\xb5\x2f\xfd", ".parquet": b"PAR1"}


def not_data(path: Path, name: str) -> str:
    """Why a file without a published checksum cannot be what its name says; "" when it can."""
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
    """A full or broken disk is the user's to mend; no other source will help."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(
            f"the disk with {path.parent} is full; free some space (ascendchat clean), or choose another folder with "
            "--out or ASCENDCHAT_HOME; what was downloaded is kept"
        )
    return UserError(f"cannot write {path}: {error.strerror or error}; check the folder, or choose one with --out")
