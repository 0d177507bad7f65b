"""A local folder as a source: `ascendchat data fetch gsm8k --source /mnt/usb/data`.

The files of set NAME are looked for in DIR/NAME/, as DIR/NAME.* and, by the names under which they are published, in
DIR/REPOSITORY/ and in DIR itself.
They are copied, never linked: a change of the set must not change the folder it came from. Where that folder has a
manifest, checksums are compared. A folder that already is $ASCENDCHAT_HOME/data/NAME is taken as it is.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ascendchat.data.fetch.download import READ_BYTES, disk_error, not_data
from ascendchat.data.fetch.lock import notify
from ascendchat.data.fetch.request import FetchRequest, matches
from ascendchat.data.fetch.sources import ALIASES, SETS, DataSet
from ascendchat.data.read import files_in, may_be_data
from ascendchat.data.verify import read_manifest, write_manifest
from ascendchat.errors import UserError
from ascendchat.files import sha256


def find_set_files(root: Path, dataset: DataSet, files: str) -> tuple[Path, list[str]]:
    """Find the files of a set below `root`: (their folder, their names from there)."""
    if not root.is_dir():
        raise UserError(f"--source {root} is neither hf, modelscope, http nor a folder")
    names = [dataset.name, *(other for other, name in ALIASES.items() if name == dataset.name)]
    for name in names:
        for folder in (child for child in sorted(root.iterdir()) if child.is_dir()):
            if folder.name.lower() == name and (inside := _below(folder, files or "*")):
                return folder, inside
    starts = tuple(f"{name}." for name in names)
    beside = [
        child.name for child in sorted(root.iterdir()) if child.is_file() and child.name.lower().startswith(starts)
    ]
    if beside := [n for n in beside if matches(n, files or "*") and n != "manifest.json" and not n.endswith(".part")]:
        return root, beside
    sources = [source for source in dataset.sources if source.hub != "http"]
    patterns = files or ",".join(dict.fromkeys(source.files for source in sources if source.files != "*"))
    for source in sources:
        repository = root / source.where.rpartition("/")[2]
        if repository.is_dir() and (inside := _below(repository, patterns or "*")):
            return repository, inside
    holds_set = root.name.lower() in names or any(source.files == "*" for source in sources)
    for pattern in (patterns, "*" if holds_set and not files else ""):
        if inside := _below(root, pattern):
            return root, inside
    raise UserError(
        f"{root} has no files of {dataset.name}: looked for a folder {dataset.name}/, for {dataset.name}.* and for "
        f"{patterns or 'nothing else'}; name the files with --files 'PATTERN'"
    )


def validation_files(files: Sequence[Path]) -> set[Path]:
    """Select the files that the fetched set in their folder reserves for validation."""
    by_folder: dict[Path, list[Path]] = {}
    for file in files:
        by_folder.setdefault(file.parent, []).append(file)
    held_out: set[Path] = set()
    for folder, inside in by_folder.items():
        name = ""
        with contextlib.suppress(ValueError, OSError, AttributeError):  # a manifest of somebody else
            name = str(read_manifest(folder).get("set"))
        for dataset in SETS.values():
            if dataset.always and name in (dataset.name, *(s.where.replace("/", "--") for s in dataset.sources)):
                held_out |= {file for file in inside if matches(file.name, dataset.always)}
    return held_out


def _below(folder: Path, patterns: str) -> list[str]:
    def needed(path: Path) -> bool:
        named = patterns != "*" and matches(path.relative_to(folder).as_posix(), patterns)
        return named or may_be_data(path)

    names = [p.relative_to(folder).as_posix() for p in files_in(folder, needed)]
    return [n for n in names if matches(n, patterns) and n != "manifest.json" and not n.endswith((".part", ".tmp"))]


def copy_from(root: Path, request: FetchRequest, folder: Path, manifest: dict[str, Any]) -> dict[str, str]:
    """Copy the files of a set from `root` into `folder` and verify them; returns names and checksums. A file that is
    there with the same content is not written again."""
    origin_folder, names = find_set_files(root, request.dataset, request.files)
    try:
        checksums = read_manifest(origin_folder).get("files", {})
    except ValueError as error:
        raise UserError(
            f"{origin_folder / 'manifest.json'} is damaged: {error}; remove it to copy without checksums"
        ) from None
    origin = f"folder:{origin_folder.resolve()}"
    manifest["source"] = origin
    names = request.select(names, 0)
    for name in names:
        final, entry = folder / name, manifest["files"].get(name)
        final.parent.mkdir(parents=True, exist_ok=True)
        in_place = final.exists() and final.samefile(origin_folder / name)  # the folder is the set itself
        if not in_place and entry and _same(origin_folder / name, final, entry):
            continue
        size, sha = (final.stat().st_size, sha256(final)) if in_place else _copy(origin_folder / name, final)
        expected = checksums.get(name, {}).get("sha256", "")
        problem = (
            f"its sha256 is {sha[:12]}..., the manifest beside it says {expected[:12]}..." if sha != expected else ""
        )
        if not expected:
            problem = not_data(final if in_place else _part(final), name)
        if problem:
            _part(final).unlink(missing_ok=True)
            raise UserError(f"{origin_folder / name} is damaged: {problem}; copy it again from where it came")
        if not in_place:
            final.unlink(missing_ok=True)  # killed before the new one has its name, the next run finds none
        manifest["files"][name] = {"bytes": size, "sha256": sha, "from": origin, "tag": ""}
        write_manifest(folder, manifest)
        if not in_place:
            os.replace(_part(final), final)
    notify(f"{request.dataset.name}: {len(names)} files from {origin_folder}")
    return {name: manifest["files"][name]["sha256"] for name in names}


def _same(origin: Path, final: Path, entry: dict[str, Any]) -> bool:
    """True if both files have the size and checksum in the manifest."""
    sizes = {path.stat().st_size if path.is_file() else -1 for path in (origin, final)}
    return sizes == {entry["bytes"]} and sha256(final) == sha256(origin) == entry["sha256"]


def _part(final: Path) -> Path:
    return final.with_name(final.name + ".part")


def _copy(origin: Path, final: Path) -> tuple[int, str]:
    """Copy a file to FINAL.part; returns its size and sha256."""
    part = _part(final)
    part.unlink(missing_ok=True)
    if origin.stat().st_size > shutil.disk_usage(final.parent).free:
        raise disk_error(OSError(errno.ENOSPC, "no space"), part)
    digest, count = hashlib.sha256(), 0
    try:
        with origin.open("rb") as source, part.open("wb") as target:
            while piece := source.read(READ_BYTES):
                digest.update(piece)
                count += len(piece)
                target.write(piece)
            target.flush()
            os.fsync(target.fileno())
    except OSError as error:
        raise disk_error(error, part) from None
    return count, digest.hexdigest()
