"""A local folder as a source: `ascendchat data fetch gsm8k --source /mnt/usb/data`.

The files of set NAME are looked for in DIR/NAME/, as DIR/NAME.* and, by the names they have on the hub, in DIR itself.
They are copied, never linked: what happens to the set must not happen to the folder it came from. Checksums of a
manifest there are compared. A folder that already is $ASCENDCHAT_HOME/data/NAME is taken as it is.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

from ascendchat.config import UserError
from ascendchat.data.fetch.content import disk_error, not_data
from ascendchat.data.fetch.hubs import matches
from ascendchat.data.fetch.lock import say
from ascendchat.data.fetch.partfile import PIECE
from ascendchat.data.fetch.sources import ALSO, DataSet
from ascendchat.data.verify import read_manifest, write_manifest
from ascendchat.files import sha256


def find(root: Path, dataset: DataSet, files: str) -> tuple[Path, list[str]]:
    """Where the files of a set are below `root`, and their names from there."""
    if not root.is_dir():
        raise UserError(f"--source {root} is neither hf, modelscope, http nor a folder")
    names = [dataset.name, *(other for other, name in ALSO.items() if name == dataset.name)]
    for name in names:
        for folder in (child for child in sorted(root.iterdir()) if child.is_dir()):
            if folder.name.lower() == name and (found := _below(folder, files or "*")):
                return folder, found
    starts = tuple(f"{name}." for name in names)
    beside = [
        child.name for child in sorted(root.iterdir()) if child.is_file() and child.name.lower().startswith(starts)
    ]
    if beside := [n for n in beside if matches(n, files or "*") and not n.endswith(".part")]:
        return root, beside
    patterns = files or ",".join(dict.fromkeys(s.files for s in dataset.sources if s.hub != "http"))
    if root.name.lower() in names:
        patterns = files or "*"
    if found := _below(root, patterns):
        return root, found
    raise UserError(
        f"{root} has no files of {dataset.name}: looked for a folder {dataset.name}/, for {dataset.name}.* and for "
        f"{patterns or 'nothing else'}; name the files with --files 'PATTERN'"
    )


def _below(folder: Path, patterns: str) -> list[str]:
    paths = (p for p in sorted(folder.rglob("*")) if p.is_file() and not p.name.startswith("."))
    names = [p.relative_to(folder).as_posix() for p in paths]
    return [n for n in names if matches(n, patterns) and n != "manifest.json" and not n.endswith((".part", ".tmp"))]


def copy_from(
    root: Path, dataset: DataSet, files: str, shards: int | None, folder: Path, manifest: dict[str, Any]
) -> list[str]:
    """Copy the files into `folder`, verified; returns their names."""
    place, names = find(root, dataset, files)
    count = shards if shards is not None else 0
    always = [n for n in names if dataset.always and matches(n, dataset.always)]
    names = [n for n in names if n not in always][:count] + always if count else names
    try:
        known = read_manifest(place).get("files", {})
    except ValueError as error:
        raise UserError(f"{place / 'manifest.json'} is damaged: {error}; remove it to copy without checksums") from None
    manifest["source"] = f"folder:{place}"
    for name in names:
        expected = known.get(name, {}).get("sha256", "")
        entry = manifest["files"].get(name)
        final = folder / name
        same = entry and final.is_file() and expected in ("", entry["sha256"])
        if same and final.stat().st_size == entry["bytes"] and sha256(final) == entry["sha256"]:
            continue
        size, sha = _take(place / name, final)
        if expected and sha != expected:
            _part(final).unlink(missing_ok=True)
            raise UserError(
                f"{place / name} is damaged: its sha256 is {sha[:12]}..., the manifest beside it says "
                f"{expected[:12]}...; copy it again from where it came"
            )
        if _part(final).exists() and not expected and (why := not_data(_part(final), name)):
            _part(final).unlink()
            raise UserError(f"{place / name} is damaged: {why}; copy it again from where it came")
        manifest["files"][name] = {"bytes": size, "sha256": sha}
        write_manifest(folder, manifest)
        if _part(final).exists():
            os.replace(_part(final), final)
    say(f"{dataset.name}: {len(names)} files from {place}")
    return names


def _part(final: Path) -> Path:
    return final.with_name(final.name + ".part")


def _take(origin: Path, final: Path) -> tuple[int, str]:
    """Copy a file to FINAL.part; its size and sha256."""
    part = _part(final)
    final.parent.mkdir(parents=True, exist_ok=True)
    if final.exists() and final.resolve() == origin.resolve():  # the folder is the set itself: only the manifest is new
        return final.stat().st_size, sha256(final)
    part.unlink(missing_ok=True)
    if origin.stat().st_size > shutil.disk_usage(final.parent).free:
        raise disk_error(OSError(errno.ENOSPC, "no space"), part)
    digest, count = hashlib.sha256(), 0
    try:
        with origin.open("rb") as source, part.open("wb") as target:
            while piece := source.read(PIECE):
                digest.update(piece)
                count += len(piece)
                target.write(piece)
            target.flush()
            os.fsync(target.fileno())
    except OSError as error:
        raise disk_error(error, part) from None
    return count, digest.hexdigest()
