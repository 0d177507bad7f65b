"""Fetch data sets from hubs, mirrors, URLs or a local folder, verified, once for all processes of a machine.

    ascendchat data fetch climbmix --shards 16
    ascendchat data fetch gsm8k --source /mnt/usb/data --offline

Code that needs a set calls `fetch("gsm8k")` on every rank and gets its folder: one process downloads, the others wait.
A set lives in $ASCENDCHAT_HOME/data/NAME (of a URL: NAME-HASH) with a manifest.json: sizes, sha256, and the requests
that its files answered; `ascendchat data verify` compares.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascendchat.config.data import DataFetchConfig
from ascendchat.data.fetch import request as hubs
from ascendchat.data.fetch.download import RemoteFile, digests, disk_error, download
from ascendchat.data.fetch.folder import copy_from
from ascendchat.data.fetch.http import Policy, SourceFailed, Web, host_of, redact
from ascendchat.data.fetch.lock import DownloadProgress, Lock, notify, readable_size
from ascendchat.data.fetch.request import HUBS, FetchRequest, endpoints, missing_files, remote_files
from ascendchat.data.fetch.sources import SETS, DataSet, DataSource, find_set
from ascendchat.data.verify import read_manifest, verify_folders, write_manifest
from ascendchat.errors import UserError, home

MIN_FREE_BYTES = 64 << 20  # left on the disk


@dataclass(frozen=True)
class _Fetched:
    """Result of a request. `confirmed`: the source was asked if these files are still its files."""

    folder: Path
    files: dict[str, str]  # name -> sha256
    confirmed: bool


def folder_of(word: str) -> Path:
    """Folder in which a set is, or will be."""
    return home() / "data" / _set(word, "").name


def _set(word: str, source: str) -> DataSet:
    if source and source not in HUBS and re.fullmatch(r"[\w.-]*\w[\w.-]*", word) and word.lower() not in SETS:
        try:
            return find_set(word)
        except UserError:  # a local folder may hold a set of any name
            return DataSet(word, "", word, ())
    return find_set(word, source)


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
    """Return the folder with the files of a set, fetched if need be. Safe to call from every rank at once.

    Files that answered the same request before are taken as they are, without a network. With `check` their
    checksums are compared and the source is asked again: damaged files, and files that the source has changed, are
    fetched anew.
    """
    request = _request(name, files, shards, source, workers, str(out))
    return _fetch(request, offline, check, policy or Policy()).folder


def _request(word: str, files: str, shards: int | None, source: str, workers: int, out: str) -> FetchRequest:
    if shards is not None and shards < 0:
        raise UserError(f"--shards {shards}: give a number of files, or 0 for all of them")
    if workers < 1:
        raise UserError(f"--workers {workers}: at least one connection is needed")
    return FetchRequest(word, files, shards, source, workers, out, _set(word, source))


def _fetch(request: FetchRequest, offline: bool, check: bool, policy: Policy) -> _Fetched:
    folder = request.folder
    offline = offline or os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    if not check and (have := request.complete(folder, _manifest(folder))):  # no lock: it may be shared and read-only
        return _Fetched(folder, have, False)
    if offline and not request.from_folder:
        return _Fetched(folder, _offline(folder, request, check), False)
    with Lock(folder, request.dataset.name) as lock:
        have = request.complete(folder, _manifest(folder))
        if have and (not check or lock.waited):
            return _Fetched(folder, have, lock.waited)
        return _ask_sources(folder, request, lock, policy, check, have)


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = read_manifest(folder)
        requests = manifest.get("requests", {}).items() if manifest else ()
        if any(len(json.loads(key)) != 4 or not isinstance(files, dict) for key, files in requests):
            raise ValueError("it does not say what its files were fetched for")
        return manifest
    except (ValueError, TypeError, AttributeError, OSError) as error:
        notify(f"{folder / 'manifest.json'}: {error}; the files are compared with the source again")
        return {}


def _damaged(folder: Path, files: Iterable[str]) -> list[str]:
    """List the existing files that differ from the manifest."""
    faults = [fault for verdict in verify_folders([folder], only=files) for fault in verdict.faults]
    return [fault.file.relative_to(folder).as_posix() for fault in faults if fault.file.exists()]


def _offline(folder: Path, request: FetchRequest, check: bool) -> dict[str, str]:
    """Return the files on disk, if they are all there; else the error says what is missing."""
    manifest = _manifest(folder)
    files = next(request.answers(manifest), {}) or request.part_of_larger(manifest)
    remedy = f"where there is a network run: {request.command}; or copy from a folder: {request.command} --source DIR"
    if not files:
        raise UserError(
            f"offline, and {folder} does not have the files of {request.safe_word} that are asked for; {remedy}"
        )
    files = request.complete(folder, manifest) or files
    missing = missing_files(folder, files, manifest)
    damaged = _damaged(folder, files) if check and not missing else []
    if missing or damaged:
        shown = ", ".join((missing or damaged)[:5]) + (", ..." if len(missing or damaged) > 5 else "")
        raise UserError(
            f"offline, and {len(missing or damaged)} of {len(files)} files of {request.safe_word} are "
            f"{'missing' if missing else 'damaged'} in {folder}: {shown}; {remedy}"
        )
    return files


def _ask_sources(
    folder: Path, request: FetchRequest, lock: Lock, policy: Policy, check: bool, have: dict[str, str]
) -> _Fetched:
    """Ask the sources in turn. `have`: complete files from earlier, which stay if no source answers."""
    name = request.dataset.name
    manifest = {"set": name, "source": "", "files": {}, "requests": {}, **_manifest(folder)}
    manifest["mend"] = request.repair_command
    if request.from_folder:
        files = copy_from(Path(request.source).expanduser(), request, folder, manifest)
        manifest["requests"][request.key] = files
        write_manifest(folder, manifest)
        return _Fetched(folder, files, True)
    failures: list[str] = []
    servers = [(source, endpoint) for source in request.dataset.sources for endpoint in endpoints(source)]
    origins_of_have = {manifest["files"][file].get("from") for file in have}
    for source, endpoint in sorted(servers, key=lambda server: _origin(server[0]) not in origins_of_have):
        try:
            with Web(policy, request.workers) as web:
                _from_source(source, endpoint, web, folder, request, manifest, check, lock)
            return _Fetched(folder, manifest["requests"][request.key], True)
        except SourceFailed as error:
            failures.append(str(error))
            notify(f"{name}: {error}")
    if have and not _damaged(folder, have):
        return _Fetched(folder, have, False)
    raise UserError(f"{name} could not be fetched: {'; '.join(dict.fromkeys(failures))}. {_advice(request)}")


def _advice(request: FetchRequest) -> str:
    """Tell what to do when no source answered; nothing that was tried already."""
    hints = []
    tried = [endpoint for source in request.dataset.sources for endpoint in endpoints(source)]
    if proxy := next((n for n in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy") if os.environ.get(n)), ""):
        hints.append(f"{proxy} is set: check that this proxy works")
    else:
        hints.append("behind a proxy set HTTPS_PROXY")
    hf = any(source.hub == "hf" for source in request.dataset.sources)
    if hf and not any(host_of(hubs.MIRROR) == host_of(endpoint) for endpoint in tried if endpoint):
        hints.append(
            f"only the mirror in HF_ENDPOINT was asked; to ask another: HF_ENDPOINT={hubs.MIRROR} {request.command}"
        )
    hints.append(f"or copy the files and run: {request.command} --source DIR")
    return f"What to do: {'; '.join(hints)}. What was downloaded is kept, the next run continues"


def _origin(source: DataSource) -> str:
    return f"{source.hub}:{redact(source.where)}"


def _from_source(
    source: DataSource,
    endpoint: str,
    web: Web,
    folder: Path,
    request: FetchRequest,
    manifest: dict[str, Any],
    check: bool,
    lock: Lock,
) -> None:
    offered = {remote.name: remote for remote in remote_files(source, endpoint, web, request.files)}
    chosen = [offered[name] for name in request.select(list(offered), 0 if request.files else request.dataset.shards)]
    bad = _damaged(folder, [remote.name for remote in chosen if remote.name in manifest["files"]]) if check else []
    for name in bad:
        notify(f"{request.dataset.name}: {name} is damaged; fetching it again")
    pending = [r for r in chosen if r.name in bad or not _have(folder, r, manifest, _origin(source), web)]
    need = sum(remote.bytes or 0 for remote in pending)
    check_space(folder, need - sum(_allocated(folder / r.name) for r in pending), request)
    new = {remote.name for remote in pending}
    checksums = {r.name: "" if r.name in new else manifest["files"][r.name]["sha256"] for r in chosen}
    manifest["requests"][request.key] = checksums
    manifest["source"] = _origin(source) + (f" at {redact(endpoint)}" if endpoint else "")
    write_manifest(folder, manifest)
    if not pending:
        return
    notify(
        f"{request.dataset.name}: {len(pending)} of {len(chosen)} files, "
        f"{readable_size(need) if need else 'unknown size'}, from {endpoint or source.where}"
    )
    writing = threading.Lock()

    def done(remote: RemoteFile, count: int, sha: str, tag: str) -> None:
        with writing:
            manifest["files"][remote.name] = {"bytes": count, "sha256": sha, "from": _origin(source), "tag": tag}
            checksums[remote.name] = sha
            write_manifest(folder, manifest)

    with DownloadProgress(request.dataset.name, len(pending), need, lock) as progress:
        download(pending, folder, web, workers=request.workers, done=done, show=progress.show)


def _have(folder: Path, remote: RemoteFile, manifest: dict[str, Any], origin: str, web: Web) -> bool:
    """True if the file is there and is the one that the source offers. A file that is not in the manifest is added to
    it when its checksum is right."""
    path, entry = folder / remote.name, manifest["files"].get(remote.name)
    if not path.is_file() or remote.bytes not in (None, path.stat().st_size):
        return False
    complete = entry is not None and path.stat().st_size == entry["bytes"]
    if complete and remote.sha256 == entry["sha256"]:
        return True
    if not remote.digest:  # without a checksum only the server can say whether it is still the same
        same = complete and entry.get("from") == origin and entry.get("tag")
        if same and web.validator(remote.url, remote.headers) == entry["tag"]:
            return True
        if complete:
            notify(f"{path}: the source may have changed it; fetching it again")
        return False
    count, sha, git = digests(path, bool(remote.git))
    if (remote.sha256 and sha != remote.sha256) or (remote.git and git != remote.git):
        notify(f"{path}: checksum differs from the source; fetching it again")
        return False
    manifest["files"][remote.name] = {"bytes": count, "sha256": sha, "from": origin, "tag": ""}
    return True


def _allocated(path: Path) -> int:
    """Bytes that an unfinished download already takes on the disk."""
    part = path.with_name(path.name + ".part")
    return part.stat().st_blocks * 512 if part.exists() else 0


def check_space(folder: Path, need: int, request: FetchRequest) -> None:
    """Refuse before the first byte when the disk is too small."""
    free = shutil.disk_usage(folder).free
    if need > 0 and need + MIN_FREE_BYTES > free:
        raise UserError(
            f"{request.safe_word} needs {readable_size(need)} and {folder} has {readable_size(free)} free; take fewer "
            "files with --shards, free some space (ascendchat clean), or choose another disk with --out or "
            "ASCENDCHAT_HOME"
        )


def table_of_sets() -> str:
    """Format the named sets for people."""
    lines = ["names for `ascendchat data fetch NAME` (also OWNER/NAME of a hub, models/OWNER/NAME, or a URL):"]
    for use, title in (("pretrain", "text for pretraining"), ("chat", "conversations"), ("eval", "evaluation")):
        lines += ["", f"{title}:"]
        for s in (s for s in SETS.values() if s.use == use):
            some = f" [{s.shards} by default]" if s.shards else ""
            lines.append(f"  {s.name:<20} {s.about}{some}")
            lines.append(f"  {'':<20} {', '.join(f'{p.hub}:{p.where}' for p in s.sources)}")
    return "\n".join(lines)


def run(config: DataFetchConfig) -> int:
    """Run `ascendchat data fetch NAME ...`: after one that fails, the others are still fetched."""
    if not config.names:
        print(table_of_sets())
        return 0
    failed: list[str] = []
    for name in config.names:
        try:
            _run_one(name, config)
        except UserError as error:
            if len(config.names) == 1:
                raise
            failed.append(redact(name))
            print(f"error: {error}", file=sys.stderr, flush=True)
    if failed:
        raise UserError(
            f"{len(failed)} of {len(config.names)} could not be fetched: {', '.join(failed)}; the reasons are above, "
            "the others are there; run the same command again to fetch what is missing"
        )
    return 0


def _run_one(name: str, config: DataFetchConfig) -> None:
    request = _request(name, config.files, config.shards, config.source, config.workers, config.out)
    try:
        fetched = _fetch(request, config.offline, True, Policy())
    except OSError as error:
        raise disk_error(error, request.folder) from None
    entries = read_manifest(fetched.folder)["files"]
    total = readable_size(sum(entries[file]["bytes"] for file in fetched.files))
    state = "verified" if fetched.confirmed else "unchanged since they were fetched (the source was not asked)"
    print(f"{request.safe_word}: {len(fetched.files)} files, {total}, {state}, in {fetched.folder}")
    if others := len(entries) - len(fetched.files):
        print(f"  {others} more files there were fetched by other commands")
