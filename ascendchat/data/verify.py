"""Compare everything stored with its manifest: data sets, prepared corpora, tokenizers, checkpoints.

    ascendchat data verify                 # all of $ASCENDCHAT_HOME
    ascendchat data verify climbmix gsm8k  # these only; a path of a folder works too

A manifest.json lists the files beside it: {"files": {"name": {"bytes": 123, "sha256": "..."}}, "source": ...}.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ascendchat.config.data import DataVerifyConfig
from ascendchat.errors import UserError, home, nearest
from ascendchat.files import sha256, write_atomic

MANIFEST = "manifest.json"
HASH_BYTES_PER_SECOND = 400e6  # of sha256, to estimate what can be hashed before a deadline


@dataclass(frozen=True)
class _Fault:
    """A file that differs from the manifest, and the command that mends it."""

    file: Path
    what: str
    fix: str


@dataclass
class _FolderResult:
    """Result of comparing one folder with its manifest."""

    folder: Path
    files: int = 0
    bytes: int = 0
    hashed: int = 0
    faults: list[_Fault] = field(default_factory=list)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a folder, {} when there is none; a broken one raises ValueError."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    try:
        for entry in manifest["files"].values():
            int(entry["bytes"]), str(entry["sha256"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it has no list of files ({type(error).__name__})") from None
    return manifest


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Replace the manifest in one step."""
    write_atomic(folder / MANIFEST, json.dumps(manifest, indent=1, ensure_ascii=False))


def remedy(folder: Path, manifest: dict[str, Any]) -> str:
    """The command that restores a damaged folder."""
    if isinstance(command := manifest.get("mend"), str):
        return command
    where = folder.resolve()
    for part, command in (("tokenizer", "ascendchat tokenizer train"), ("runs", "")):
        if where.is_relative_to((home() / part).resolve()):
            again = f"  # then: {command}" if command else "  # training resumes from the checkpoint before it"
            return f"rm -r {shlex.quote(str(folder))}{again}"
    return f"rm -r {shlex.quote(str(folder))}  # then make it again: ascendchat data prepare"


def _compare(folder: Path, name: str, entry: dict[str, Any], deadline: float | None) -> tuple[int, bool, str]:
    """Compare one file with its entry: (bytes on disk, was it hashed, what is wrong)."""
    path = folder / name
    try:
        actual = path.stat().st_size
        if not path.is_file():
            return 0, False, "is not a file"
        if actual != int(entry["bytes"]):
            return actual, False, f"{actual} bytes, expected {entry['bytes']}"
        if deadline is not None and time.monotonic() + actual / HASH_BYTES_PER_SECOND > deadline:
            return actual, False, ""
        return actual, True, "" if sha256(path) == entry["sha256"] else "checksum differs"
    except FileNotFoundError:
        return 0, False, "missing"
    except OSError as error:
        return 0, False, f"cannot be read ({error.strerror})"


def verify_folders(
    folders: list[Path],
    *,
    only: Iterable[str] | None = None,
    workers: int = 0,
    deadline: float | None = None,
) -> list[_FolderResult]:
    """Compare folders with their manifests, files in parallel. `only` names the files to compare, by default all. After
    `deadline` (time.monotonic) only sizes are compared. Nothing is changed."""
    results, tasks = [], []
    chosen = None if only is None else set(only)
    for folder in folders:
        results.append(result := _FolderResult(folder))
        try:
            manifest = read_manifest(folder)
            if not manifest:
                raise ValueError("there is none")
            fix = remedy(folder, manifest)
            entries = {n: entry for n, entry in manifest["files"].items() if chosen is None or n in chosen}
            tasks += [(result, fix, name, entry) for name, entry in entries.items()]
        except (OSError, ValueError) as error:
            fix = remedy(folder, {})
            result.faults.append(_Fault(folder / MANIFEST, f"the manifest cannot be read: {error}", fix))
    with ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
        compared = pool.map(lambda task: _compare(task[0].folder, task[2], task[3], deadline), tasks)
        for (result, fix, name, _), (size, hashed, what) in zip(tasks, compared):
            result.files += 1
            result.bytes += size
            result.hashed += hashed
            if what:
                result.faults.append(_Fault(result.folder / name, what, fix))
    return results


def stored_folders(root: Path) -> Iterator[Path]:
    """Yield the folders under `root` that have a manifest, linked ones too, each once; those still being written (.tmp,
    .part) are left out."""
    visited: set[str] = set()
    for folder, names, files in os.walk(root, followlinks=True):
        if (real := os.path.realpath(folder)) in visited:
            names.clear()
            continue
        visited.add(real)
        names[:] = [n for n in sorted(names) if not n.endswith((".tmp", ".part"))]
        if MANIFEST in files:
            yield Path(folder)


def _named_folders(names: tuple[str, ...]) -> list[Path]:
    if not names:
        return list(stored_folders(home()))
    folders: list[Path] = []
    for name in names:
        candidates = [home() / "data" / name.replace("/", "--"), home() / name, Path(name)]
        inside = next((list(stored_folders(path)) for path in candidates if path.is_dir()), [])
        if not inside:
            stored = sorted({str(f.relative_to(home())).removeprefix("data/") for f in stored_folders(home())})
            raise UserError(
                f"nothing is stored under the name {name!r} in {home()}; "
                + (nearest(name, stored) if stored else "ascendchat data fetch NAME brings a data set")
            )
        folders += inside
    return list(dict.fromkeys(folders))


def run(config: DataVerifyConfig) -> int:
    """Run `ascendchat data verify`; exit status 0 when everything matches, 1 when not."""
    results = verify_folders(_named_folders(config.names), workers=config.workers)
    faults = [fault for result in results for fault in result.faults]
    if config.json:
        report = {
            "ok": not faults,
            "folders": [
                {
                    "folder": str(v.folder),
                    "files": v.files,
                    "bytes": v.bytes,
                    "faults": [{"file": str(f.file), "what": f.what, "fix": f.fix} for f in v.faults],
                }
                for v in results
            ],
        }
        print(json.dumps(report, indent=1, ensure_ascii=False))
        return 1 if faults else 0
    for result in results:
        state = f"{len(result.faults)} DAMAGED" if result.faults else "ok"
        print(f"{result.folder}: {result.files} files, {result.bytes / 1024**3:.2f} GiB, {state}")
        for fault in result.faults:
            print(f"  {fault.file.relative_to(result.folder)}: {fault.what}")
    for fix in dict.fromkeys(fault.fix for fault in faults):
        print(f"to mend: {fix}")
    if not results:
        print(f"nothing is stored in {home()} yet; ascendchat data fetch NAME brings a data set", file=sys.stderr)
    return 1 if faults else 0
