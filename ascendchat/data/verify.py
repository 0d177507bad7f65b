"""Compares everything stored with its manifest: data sets, prepared corpora, tokenizers, checkpoints.

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
SPEED = 400e6  # bytes per second of sha256, to judge what fits before a deadline


@dataclass(frozen=True)
class _Fault:
    """A file that is not what the manifest says, and the command that mends it."""

    file: Path
    what: str
    fix: str


@dataclass
class _Verdict:
    """The result of comparing one folder with its manifest."""

    folder: Path
    files: int = 0
    bytes: int = 0
    hashed: int = 0
    faults: list[_Fault] = field(default_factory=list)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder, {} when there is none; a broken one raises ValueError."""
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
    """The command that brings a damaged folder back."""
    if isinstance(command := manifest.get("mend"), str):
        return command
    where = folder.resolve()
    for part, command in (("tokenizer", "ascendchat tokenizer train"), ("runs", "")):
        if where.is_relative_to((home() / part).resolve()):
            again = f"  # then: {command}" if command else "  # training resumes from the checkpoint before it"
            return f"rm -r {shlex.quote(str(folder))}{again}"
    return f"rm -r {shlex.quote(str(folder))}  # then make it again: ascendchat data prepare"


def _compare(folder: Path, name: str, entry: dict[str, Any], deadline: float | None) -> tuple[int, bool, str]:
    """One file: (bytes on disk, was it hashed, what is wrong)."""
    path = folder / name
    try:
        actual = path.stat().st_size
        if not path.is_file():
            return 0, False, "is not a file"
        if actual != int(entry["bytes"]):
            return actual, False, f"{actual} bytes, expected {entry['bytes']}"
        if deadline is not None and time.monotonic() + actual / SPEED > deadline:
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
) -> list[_Verdict]:
    """Compare folders with their manifests, files in parallel. `only` names the files to compare, by default all. After
    `deadline` (time.monotonic) only sizes are compared. Nothing is changed."""
    verdicts, tasks = [], []
    chosen = None if only is None else set(only)
    for folder in folders:
        verdicts.append(verdict := _Verdict(folder))
        try:
            manifest = read_manifest(folder)
            if not manifest:
                raise ValueError("there is none")
            fix = remedy(folder, manifest)
            entries = {n: entry for n, entry in manifest["files"].items() if chosen is None or n in chosen}
            tasks += [(verdict, fix, name, entry) for name, entry in entries.items()]
        except (OSError, ValueError) as error:
            fix = remedy(folder, {})
            verdict.faults.append(_Fault(folder / MANIFEST, f"the manifest cannot be read: {error}", fix))
    with ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
        results = pool.map(lambda task: _compare(task[0].folder, task[2], task[3], deadline), tasks)
        for (verdict, fix, name, _), (size, hashed, what) in zip(tasks, results):
            verdict.files += 1
            verdict.bytes += size
            verdict.hashed += hashed
            if what:
                verdict.faults.append(_Fault(verdict.folder / name, what, fix))
    return verdicts


def stored_folders(root: Path) -> Iterator[Path]:
    """Folders under `root` that have a manifest, those that links reach too, each once; those still being written
    (.tmp, .part) are left out."""
    seen: set[str] = set()
    for folder, names, files in os.walk(root, followlinks=True):
        if (real := os.path.realpath(folder)) in seen:
            names.clear()
            continue
        seen.add(real)
        names[:] = [n for n in sorted(names) if not n.endswith((".tmp", ".part"))]
        if MANIFEST in files:
            yield Path(folder)


def _chosen(names: tuple[str, ...]) -> list[Path]:
    if not names:
        return list(stored_folders(home()))
    chosen: list[Path] = []
    for name in names:
        candidates = [home() / "data" / name.replace("/", "--"), home() / name, Path(name)]
        folders = next((list(stored_folders(path)) for path in candidates if path.is_dir()), [])
        if not folders:
            have = sorted({str(f.relative_to(home())).removeprefix("data/") for f in stored_folders(home())})
            raise UserError(
                f"nothing is stored under the name {name!r} in {home()}; "
                + (nearest(name, have) if have else "ascendchat data fetch NAME brings a data set")
            )
        chosen += folders
    return list(dict.fromkeys(chosen))


def run(config: DataVerifyConfig) -> int:
    """`ascendchat data verify`: 0 when everything is as recorded, 1 when not."""
    verdicts = verify_folders(_chosen(config.names), workers=config.workers)
    faults = [fault for verdict in verdicts for fault in verdict.faults]
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
                for v in verdicts
            ],
        }
        print(json.dumps(report, indent=1, ensure_ascii=False))
        return 1 if faults else 0
    for verdict in verdicts:
        state = f"{len(verdict.faults)} DAMAGED" if verdict.faults else "ok"
        print(f"{verdict.folder}: {verdict.files} files, {verdict.bytes / 1024**3:.2f} GiB, {state}")
        for fault in verdict.faults:
            print(f"  {fault.file.relative_to(verdict.folder)}: {fault.what}")
    for fix in dict.fromkeys(fault.fix for fault in faults):
        print(f"to mend: {fix}")
    if not verdicts:
        print(f"nothing is stored in {home()} yet; ascendchat data fetch NAME brings a data set", file=sys.stderr)
    return 1 if faults else 0
