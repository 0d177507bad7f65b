"""Integrity of what is stored under $ASCENDCHAT_HOME: every folder with a manifest.json. For `ascendchat doctor`.

A manifest lists the files beside it: {"files": {"name": {"bytes": 123, "sha256": "..."}}}. `doctor` compares sizes
always and checksums within a few seconds; `doctor --deep` compares every checksum.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ascendchat.doctor.checks import Check, Machine, gib

BUDGET = 2.0  # seconds of hashing without --deep


@dataclass
class Verdict:
    """What comparing a folder with its manifest showed."""

    files: int = 0
    bytes: int = 0
    hashed: int = 0
    faults: list[str] = field(default_factory=list)


def sha256(path: Path) -> str:
    """Checksum of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def verify(folder: Path, deadline: float | None = None) -> Verdict:
    """Compare a folder with its manifest.json. After `deadline` (time.monotonic) only sizes are compared."""
    verdict = Verdict()
    manifest = folder / "manifest.json"
    try:
        files = json.loads(manifest.read_text(encoding="utf-8"))["files"]
        entries = [(str(name), int(entry["bytes"]), str(entry["sha256"])) for name, entry in files.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        verdict.faults.append(f"{manifest}: unreadable ({type(error).__name__}: {error})")
        return verdict
    for name, size, checksum in entries:
        path = folder / name
        verdict.files += 1
        if not path.is_file():
            verdict.faults.append(f"{path}: missing")
            continue
        actual = path.stat().st_size
        verdict.bytes += actual
        if actual != size:
            verdict.faults.append(f"{path}: {actual} bytes, expected {size}")
        elif deadline is None or time.monotonic() + actual / 500e6 < deadline:  # sha256 runs at about 0.5 GB/s
            verdict.hashed += 1
            if sha256(path) != checksum:
                verdict.faults.append(f"{path}: checksum differs")
    return verdict


def manifests(home: Path) -> Iterator[Path]:
    """Folders under `home` that have a manifest; those still being written (.tmp, .part) are left out."""
    for folder, names, files in os.walk(home):
        names[:] = [n for n in sorted(names) if not n.endswith((".tmp", ".part"))]
        if "manifest.json" in files:
            yield Path(folder)


def stored(m: Machine) -> Check:
    deadline = None if m.deep else time.monotonic() + BUDGET
    total, folders = Verdict(), 0
    damaged: list[Path] = []
    for folder in manifests(m.home):
        one = verify(folder, deadline)
        folders += 1
        damaged += [folder] if one.faults else []
        total.files += one.files
        total.bytes += one.bytes
        total.hashed += one.hashed
        total.faults += one.faults
    if not folders:
        return Check("stored data", "skip", m.say(f"nothing in {m.home} yet", f"{m.home} 中尚无数据"))
    if total.faults:
        more = f" (+{len(total.faults) - 3})" if len(total.faults) > 3 else ""
        return Check(
            "stored data",
            "fail",
            "; ".join(total.faults[:3]) + more,
            m.say(
                "a damaged shard, tokenizer or checkpoint gives wrong results or stops a run half-way",
                "损坏的分片、分词器或检查点会导致结果错误或训练中断",
            ),
            "rm -r "
            + " ".join(f"'{folder}'" for folder in damaged[:3])
            + m.say("  # then make it again", "  # 然后重新生成"),
        )
    found = m.say(
        f"{folders} folders, {total.files} files, {gib(total.bytes)}: sizes right, {total.hashed} checksums right",
        f"{folders} 个目录，{total.files} 个文件，{gib(total.bytes)}：大小正确，{total.hashed} 个校验和正确",
    )
    if total.hashed < total.files:
        found += m.say(" (all: ascendchat doctor --deep)", "（全部校验：ascendchat doctor --deep）")
    return Check("stored data", "ok", found)
