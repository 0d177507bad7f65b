"""Prepared text in an object store: `ascendchat base --data s3://bucket/prepared`. The only importer of fsspec.

    store = Store("s3://bucket/prepared", manifest["files"])
    tokens = store.array("train-00.tokens", np.dtype("<u2"))     # tokens[5:900] reads only the blocks that hold these
    store.fetch([(tokens, 5, 900), ...])                          # the same blocks, many at a time

A block (256 KiB) is compared with its checksum in the manifest when it arrives and whenever it is read from the local
cache, which all processes of a machine share. A file without checksums of its blocks (prepared by an older version) is
one block, compared with the file's sha256.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from ascendchat.data.fetch.http import redact
from ascendchat.errors import UserError, home

BLOCK_BYTES = 1 << 18  # bytes that are read at once; a multiple of every token's size
CHECKSUM_DIGITS = 16  # hex digits, of a block
MAX_BLOCKS_IN_MEMORY = 256  # per process
MAX_CONCURRENT_READS = 16
MAX_ATTEMPTS = 4
CACHE_VARIABLE = "ASCENDCHAT_DATA_CACHE_GB"
DEFAULT_CACHE_GB = 50.0


def is_remote(name: str | Path) -> bool:
    """True if an entry of --data is an address: s3://..., obs://..., memory://..."""
    return "://" in str(name)


def block_checksums(data: bytes) -> str:
    """Checksums of a file's blocks, one after the other, as the manifest stores them."""
    return "".join(_checksum(data[begin : begin + BLOCK_BYTES]) for begin in range(0, len(data), BLOCK_BYTES))


def _checksum(block: bytes) -> str:
    return hashlib.blake2b(block, digest_size=CHECKSUM_DIGITS // 2).hexdigest()


def _open(url: str) -> tuple[Any, str]:
    """Open an address with fsspec: (file system, path in it)."""
    if urlsplit(url).password is not None:
        raise UserError(
            f"{redact(url)} has a password in it, which every record of the run would keep; leave it out and give it "
            "to fsspec: in the variables that the store reads, or in ~/.config/fsspec/conf.json"
        )
    try:
        core = importlib.import_module("fsspec.core")
    except ImportError:
        raise UserError(f"reading {url} needs fsspec: pip install fsspec, and for s3:// also s3fs") from None
    try:
        fs, path = core.url_to_fs(url)
    except Exception as error:  # noqa: BLE001 (of any store; a missing package is named in it)
        raise UserError(f"{url} cannot be read: {error}; install what it names, or copy the folder to a disk") from None
    return fs, str(path).rstrip("/")


def read_remote(url: str, name: str) -> bytes | None:
    """Read a small file of a folder in a store; None when it is not there."""
    fs, root = _open(url)
    return _read(fs, f"{root}/{name}", url, None)


def _read(fs: Any, path: str, url: str, part: tuple[int, int] | None) -> bytes | None:
    """Read a file, or bytes begin .. end - 1 of it, and retry when the network fails; None when it is not there."""
    begin, end = part or (None, None)
    for attempt in range(MAX_ATTEMPTS):
        try:
            return bytes(fs.cat_file(path, start=begin, end=end))
        except FileNotFoundError:
            return None
        except Exception as error:  # noqa: BLE001 (each store has errors of its own, such as NoCredentialsError)
            passing = isinstance(error, (OSError, TimeoutError)) and not isinstance(error, PermissionError)
            if attempt + 1 == MAX_ATTEMPTS or not passing:
                raise UserError(
                    f"{path} of {url} cannot be read: {error or type(error).__name__}; check the address and the "
                    "credentials that the store wants, then run the same command again"
                ) from None
            time.sleep(0.5 * 2**attempt)
    return None


class _Key(NamedTuple):
    """One block of one file."""

    name: str
    number: int


class _RemoteArray:
    """A remote file as an array of numbers; a slice reads only the blocks that hold it."""

    def __init__(self, store: Store, name: str, dtype: np.dtype[Any]) -> None:
        self.store, self.name, self.dtype = store, name, dtype

    def __len__(self) -> int:
        return int(self.store.files[self.name]["bytes"]) // self.dtype.itemsize

    def __getitem__(self, part: slice) -> NDArray[Any]:
        begin, end, _ = part.indices(len(self))
        size = self.dtype.itemsize
        return np.frombuffer(self.store.read(self.name, begin * size, end * size), dtype=self.dtype)


class BlockCache:
    """Blocks on the local disk, at most `limit` bytes and at most half of the free space, which checkpoints need too;
    least recently used blocks are evicted first."""

    def __init__(self, folder: Path, limit: float) -> None:
        self.folder, self.limit, self._lock = folder, limit, threading.Lock()
        self._grown = limit  # bytes added since the last scan; so much that the first block starts one
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, key: str) -> bytes | None:
        try:
            path = self.folder / key
            data = path.read_bytes()
            os.utime(path)  # used now
        except FileNotFoundError:  # another process may have removed it
            return None
        return data

    def put(self, key: str, data: bytes) -> None:
        """Write a block without flushing it to the disk: a damaged one is noticed by its checksum. A full disk is no
        error: the block is read from the store again."""
        beside = self.folder / f".{key}.{os.getpid()}.{threading.get_ident()}.tmp"
        try:
            beside.write_bytes(data)
            os.replace(beside, self.folder / key)
        except OSError:
            beside.unlink(missing_ok=True)
        with self._lock:
            self._grown += len(data)
            if self._grown < self.limit / 16:  # a scan costs a stat per block; other processes add blocks too
                return
            self._grown = 0
            self._shrink(keep=key)

    def _shrink(self, keep: str) -> None:
        """Evict the least recently used blocks, but never the one that was just written."""
        blocks = []
        for entry in os.scandir(self.folder):
            try:
                about = entry.stat()
            except FileNotFoundError:
                continue
            blocks.append((about.st_mtime, about.st_size, entry.name))
        total = sum(size for _, size, _ in blocks)
        self.limit = min(self.limit, (total + shutil.disk_usage(self.folder).free) / 2)
        for _, size, name in sorted(blocks):  # oldest use first
            if total <= self.limit * 15 / 16:  # room for the blocks until the next scan
                break
            if name != keep:
                (self.folder / name).unlink(missing_ok=True)
                total -= size


def cache_limit() -> float:
    """Read $ASCENDCHAT_DATA_CACHE_GB, in bytes."""
    text = os.environ.get(CACHE_VARIABLE, "")
    try:
        limit = float(text or DEFAULT_CACHE_GB)
    except ValueError:
        limit = 0.0
    if not 0 < limit < float("inf"):
        raise UserError(f"{CACHE_VARIABLE}={text!r} is not a size; give gigabytes, for example {CACHE_VARIABLE}=50")
    return limit * 1e9


class Store:
    """The files of a prepared folder in an object store, by the sizes and checksums of its manifest."""

    def __init__(self, url: str, files: Mapping[str, Mapping[str, Any]], cache: BlockCache | None = None) -> None:
        self.url, self.files = url, files
        self.fs, self.root = _open(url)
        self.cache = cache or BlockCache(home() / "data" / ".blocks", cache_limit())
        self._blocks: OrderedDict[_Key, bytes] = OrderedDict()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(MAX_CONCURRENT_READS, thread_name_prefix="store")

    def array(self, name: str, dtype: np.dtype[Any]) -> _RemoteArray:
        """Open a file as an array of numbers."""
        return _RemoteArray(self, name, dtype)

    def whole(self, name: str, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Read all of a file."""
        return self.array(name, dtype)[:]

    def fetch(self, parts: Iterable[tuple[_RemoteArray, int, int]]) -> None:
        """Read the blocks of many slices, several at a time; at most as many as stay in memory."""
        keys: dict[_Key, None] = {}
        for array, begin, end in parts:
            size = array.dtype.itemsize
            keys |= dict.fromkeys(self._keys(array.name, begin * size, end * size))
        with self._lock:
            missing = [key for key in keys if key not in self._blocks][:MAX_BLOCKS_IN_MEMORY]
        list(self._pool.map(self.block, missing))

    def read(self, name: str, begin: int, end: int) -> bytes:
        """Read bytes begin .. end - 1 of a file."""
        if begin >= end:
            return b""
        size = self._block_size(name)
        keys = self._keys(name, begin, end)
        data = b"".join(self.block(key) for key in keys)
        first = keys[0].number * size
        return data[begin - first : end - first]

    def _block_size(self, name: str) -> int:
        about = self.files[name]
        return BLOCK_BYTES if about.get("blocks") else max(1, int(about["bytes"]))

    def _keys(self, name: str, begin: int, end: int) -> list[_Key]:
        size = self._block_size(name)
        return [_Key(name, number) for number in range(begin // size, -(-end // size))]

    def block(self, key: _Key) -> bytes:
        """Get one block, from memory, the local cache or the store."""
        with self._lock:
            if key in self._blocks:
                self._blocks.move_to_end(key)
                return self._blocks[key]
        about = self.files[key.name]
        stored = f"{about['sha256'][:32]}-{key.number}"
        data = self.cache.get(stored)
        if data is None or not self._is_intact(key, data):
            data = self._download(key)
            self.cache.put(stored, data)
        with self._lock:
            self._blocks[key] = data
            while len(self._blocks) > MAX_BLOCKS_IN_MEMORY:
                self._blocks.popitem(last=False)
        return data

    def _is_intact(self, key: _Key, data: bytes) -> bool:
        about, at = self.files[key.name], key.number * CHECKSUM_DIGITS
        if about.get("blocks"):
            return _checksum(data) == about["blocks"][at : at + CHECKSUM_DIGITS]
        return hashlib.sha256(data).hexdigest() == about["sha256"]

    def _download(self, key: _Key) -> bytes:
        size, total = self._block_size(key.name), int(self.files[key.name]["bytes"])
        part = (key.number * size, min(total, (key.number + 1) * size))
        for _ in range(2):  # a transfer may be damaged once; what is stored wrong stays wrong
            data = _read(self.fs, f"{self.root}/{key.name}", self.url, part)
            if data is None:
                raise UserError(
                    f"{self.url} has no {key.name}, which its manifest lists; copy the prepared folder again"
                )
            if self._is_intact(key, data):
                return data
        raise UserError(
            f"{self.url}/{key.name} is damaged: bytes {part[0]} to {part[1]} have another checksum than the manifest; "
            "copy that file again from the folder that `ascendchat data prepare` wrote"
        )
