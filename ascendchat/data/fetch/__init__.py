"""Brings data sets to this machine: from hubs, mirrors, URLs or a local folder, verified, once for all processes.

    ascendchat data fetch climbmix --shards 16
    ascendchat data fetch gsm8k --source /mnt/usb/data --offline

Code that needs a set calls `fetch("gsm8k")` on every rank and gets its folder: one process downloads, the others wait.
A set lives in $ASCENDCHAT_HOME/data/NAME with a manifest.json (sizes and sha256); `ascendchat data verify` compares.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascendchat.config import UserError, home
from ascendchat.config.data import DataFetchConfig
from ascendchat.data.fetch.content import digests, disk_error
from ascendchat.data.fetch.folder import copy_from
from ascendchat.data.fetch.hubs import endpoints, listing, matches
from ascendchat.data.fetch.lock import Lock, Progress, say, size
from ascendchat.data.fetch.sources import SETS, DataSet, Source, resolve
from ascendchat.data.fetch.transfer import Remote, download
from ascendchat.data.fetch.web import Policy, SourceFailed, Web
from ascendchat.data.verify import Fault, read_manifest, verify, write_manifest

__all__ = ["SETS", "Policy", "fetch", "folder_of", "run"]

HUBS = ("hf", "modelscope", "http")
SPARE = 64 << 20  # bytes left free on the disk


@dataclass(frozen=True)
class Wish:
    """What the caller asked for."""

    word: str
    files: str
    shards: int | None
    source: str
    workers: int
    out: str

    @property
    def key(self) -> str:
        """Under which the manifest remembers what was chosen, so that the next call needs no network."""
        return f"{self.files}|{'' if self.shards is None else self.shards}"

    @property
    def command(self) -> str:
        words = ["ascendchat", "data", "fetch", self.word]
        words += ["--files", self.files] if self.files else []
        words += ["--shards", str(self.shards)] if self.shards is not None else []
        words += ["--out", self.out] if self.out else []
        return shlex.join(words)


def folder_of(word: str, out: str | Path = "") -> Path:
    """Where a set is, or will be."""
    return Path(out or home() / "data").expanduser() / _set(word, "").name


def _set(word: str, source: str) -> DataSet:
    if source and source not in HUBS and re.fullmatch(r"[\w.-]*\w[\w.-]*", word) and word.lower() not in SETS:
        try:
            return resolve(word)
        except UserError:  # any name will do for what a local folder holds
            return DataSet(word, "", word, ())
    return resolve(word, source)


def fetch(
    name: str,
    *,
    files: str = "",
    shards: int | None = None,
    out: str | Path = "",
    source: str = "",
    offline: bool = False,
    workers: int = 8,
    check: bool = False,
    policy: Policy | None = None,
) -> Path:
    """The folder with the files of a set, fetched if need be. Safe to call from every rank at once.

    With `check` the checksums of files that are there already are compared too, and damaged ones fetched again."""
    wish = Wish(name, files, shards, source, workers, str(out))
    if shards is not None and shards < 0:
        raise UserError(f"--shards {shards}: give a number of files, or 0 for all of them")
    if workers < 1:
        raise UserError(f"--workers {workers}: at least one connection is needed")
    dataset = _set(name, source)
    folder = Path(out or home() / "data").expanduser() / dataset.name
    offline = offline or os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    if not check and _complete(folder, wish):  # no lock: the folder may be shared and read-only
        return folder
    if offline and (not source or source in HUBS):
        return _offline(folder, wish, dataset, check)
    with Lock(folder, dataset.name) as lock:
        if _complete(folder, wish) and (not check or lock.waited or not _damaged(folder, wish)):
            return folder
        _bring(dataset, folder, wish, lock, policy or Policy(), check and not lock.waited)
    return folder


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        return read_manifest(folder)
    except (ValueError, OSError) as error:
        say(f"{folder / 'manifest.json'}: {error}; the files are compared with the source again")
        return {}


def _complete(folder: Path, wish: Wish) -> bool:
    """True when every file chosen earlier for the same wish is there in its full size."""
    manifest = _manifest(folder)
    names = manifest.get("requests", {}).get(wish.key)
    return bool(names) and all(_present(folder, name, manifest) for name in names)


def _present(folder: Path, name: str, manifest: dict[str, Any]) -> bool:
    entry = manifest.get("files", {}).get(name)
    path = folder / name
    return entry is not None and path.is_file() and path.stat().st_size == entry["bytes"]


def _damaged(folder: Path, wish: Wish) -> list[Fault]:
    names = {folder / name for name in _manifest(folder).get("requests", {}).get(wish.key, [])}
    return [fault for verdict in verify([folder]) for fault in verdict.faults if fault.file in names]


def _offline(folder: Path, wish: Wish, dataset: DataSet, check: bool) -> Path:
    """What is on disk, if it is all there; else the error says what is missing."""
    manifest = _manifest(folder)
    names = manifest.get("requests", {}).get(wish.key)
    if names is None:  # asked for in another way: what is there may do
        patterns = wish.files or (dataset.sources[0].files if dataset.sources else "*")
        names = sorted(n for n in manifest.get("files", {}) if matches(n, patterns))
        if len(names) < (wish.shards or 1):
            raise UserError(
                f"offline, and {folder} has {len(names)} of the {wish.shards or 'needed'} files of {wish.word}; where "
                f"there is a network run: {wish.command}; or copy from a folder: {wish.command} --source DIR"
            )
    missing = [n for n in names if not _present(folder, n, manifest)]
    damaged = [f.file.name for v in verify([folder]) for f in v.faults] if check and not missing else []
    if missing or damaged:
        shown = ", ".join((missing or damaged)[:5]) + (", ..." if len(missing or damaged) > 5 else "")
        raise UserError(
            f"offline, and {len(missing or damaged)} of {len(names)} files of {wish.word} are "
            f"{'missing' if missing else 'damaged'} in {folder}: "
            f"{shown}; where there is a network run: {wish.command}; or copy from a folder: {wish.command} --source DIR"
        )
    return folder


def _bring(dataset: DataSet, folder: Path, wish: Wish, lock: Lock, policy: Policy, check: bool) -> None:
    manifest = {"set": dataset.name, "source": "", "files": {}, "requests": {}, **_manifest(folder)}
    manifest["mend"] = wish.command
    bad: set[str] = set()
    if check:
        for fault in _damaged(folder, wish):
            name = fault.file.relative_to(folder).as_posix()
            say(f"{dataset.name}: {name}: {fault.what}; fetching it again")
            bad.add(name)
    if wish.source and wish.source not in HUBS:
        names = copy_from(Path(wish.source).expanduser(), dataset, wish.files, wish.shards, folder, manifest)
        manifest["requests"][wish.key] = names
        manifest["mend"] = f"{wish.command} --source {shlex.quote(wish.source)}"
        write_manifest(folder, manifest)
        return
    failures: list[str] = []
    for source in dataset.sources:
        for endpoint in endpoints(source):
            try:
                with Web(policy, wish.workers) as web:
                    _from_source(source, endpoint, web, dataset, folder, wish, manifest, bad, lock)
                return
            except SourceFailed as error:
                failures.append(str(error))
                say(f"{dataset.name}: {error}")
    raise UserError(
        f"{dataset.name} could not be fetched: {'; '.join(dict.fromkeys(failures))}. Behind a proxy set HTTPS_PROXY; "
        f"where the hub is blocked: HF_ENDPOINT=https://hf-mirror.com {wish.command}; or copy the files and run: "
        f"{wish.command} --source DIR. What was downloaded is kept, the next run continues"
    )


def select(found: list[Remote], dataset: DataSet, files: str, shards: int | None) -> list[Remote]:
    """The first files asked for, and the validation file whatever the number."""
    count = shards if shards is not None else (0 if files else dataset.shards)
    if not count:
        return found
    always = [r for r in found if dataset.always and matches(r.name, dataset.always)]
    return [r for r in found if r not in always][:count] + always


def _from_source(
    source: Source,
    endpoint: str,
    web: Web,
    dataset: DataSet,
    folder: Path,
    wish: Wish,
    manifest: dict[str, Any],
    bad: set[str],
    lock: Lock,
) -> None:
    found = listing(source, endpoint, web, wish.files)
    chosen = select(found, dataset, wish.files, wish.shards)
    manifest["requests"][wish.key] = [remote.name for remote in chosen]
    manifest["source"] = f"{source.hub}:{source.where}" + (f" at {endpoint}" if endpoint else "")
    wanted = [r for r in chosen if r.name in bad or not _have(folder, r, manifest)]
    need = sum(remote.bytes or 0 for remote in wanted)
    room(folder, need - sum(_allocated(folder / r.name) for r in wanted), wish)
    write_manifest(folder, manifest)
    if not wanted:
        return
    say(f"{dataset.name}: {len(wanted)} of {len(chosen)} files, {size(need) if need else 'unknown size'}, from "
        f"{endpoint or source.where}")  # fmt: skip
    writing = threading.Lock()

    def done(remote: Remote, count: int, sha: str) -> None:
        with writing:
            manifest["files"][remote.name] = {"bytes": count, "sha256": sha}
            write_manifest(folder, manifest)

    with Progress(dataset.name, len(wanted), need, lock) as progress:
        download(wanted, folder, web, workers=wish.workers, done=done, show=progress.show)


def _have(folder: Path, remote: Remote, manifest: dict[str, Any]) -> bool:
    """The file is there and is the one the source offers. One that is not in the manifest is adopted if it fits."""
    path, entry = folder / remote.name, manifest["files"].get(remote.name)
    if not path.is_file() or remote.bytes not in (None, path.stat().st_size):
        return False
    if entry is not None and (remote.sha256 or entry["sha256"]) == entry["sha256"]:
        return bool(path.stat().st_size == entry["bytes"])
    if not remote.digest:
        return False
    count, sha, git = digests(path, bool(remote.git))
    if (remote.sha256 and sha != remote.sha256) or (remote.git and git != remote.git):
        say(f"{path}: checksum differs from the source; fetching it again")
        return False
    manifest["files"][remote.name] = {"bytes": count, "sha256": sha}
    return True


def _allocated(path: Path) -> int:
    """Bytes an unfinished download already takes on the disk."""
    part = path.with_name(path.name + ".part")
    return part.stat().st_blocks * 512 if part.exists() else 0


def room(folder: Path, need: int, wish: Wish) -> None:
    """Refuse before the first byte when the disk is too small."""
    free = shutil.disk_usage(folder).free
    if need > 0 and need + SPARE > free:
        raise UserError(
            f"{wish.word} needs {size(need)} and {folder} has {size(free)} free; take fewer files with --shards, free "
            "some space (ascendchat clean), or choose another disk with --out or ASCENDCHAT_HOME"
        )


def table() -> str:
    """The named sets, for people."""
    lines = ["names for `ascendchat data fetch NAME` (also OWNER/NAME of a hub, models/OWNER/NAME, or a URL):"]
    for use, title in (("pretrain", "text for pretraining"), ("chat", "conversations"), ("eval", "evaluation")):
        lines += ["", f"{title}:"]
        for s in (s for s in SETS.values() if s.use == use):
            some = f" [{s.shards} by default]" if s.shards else ""
            lines.append(f"  {s.name:<20} {s.about}{some}")
            lines.append(f"  {'':<20} {', '.join(f'{p.hub}:{p.where}' for p in s.sources)}")
    return "\n".join(lines)


def run(config: DataFetchConfig) -> int:
    """`ascendchat data fetch NAME ...`"""
    if not config.names:
        print(table())
        return 0
    for name in config.names:
        try:
            folder = fetch(
                name,
                files=config.files,
                shards=config.shards,
                out=config.out,
                source=config.source,
                offline=config.offline,
                workers=config.workers,
                check=True,
            )
        except OSError as error:
            raise disk_error(error, Path(config.out or home() / "data") / name) from None
        entries = read_manifest(folder).get("files", {})
        print(f"{name}: {len(entries)} files, {size(sum(e['bytes'] for e in entries.values()))}, verified, in {folder}")
    return 0
