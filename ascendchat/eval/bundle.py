"""The CORE bundle on disk: core.yaml (tasks), eval_meta_data.csv (chance and row counts), one file of rows per task.

    tasks = load_bundle(folder)           # what `ascendchat data fetch core` stored, or `eval base --bundle DIR`

The folder may hold the bundle itself, or the archive as it was fetched, which is read in place. Files of rows may be
packed (.jsonl.xz). A task without a file, or with only a part of its rows, is kept and says so.
"""

from __future__ import annotations

import csv
import io
import json
import lzma
import random
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascendchat.config import UserError
from ascendchat.data.read import UNREADABLE, unreadable

ROW_ORDER_SEED = 1337  # part of the published rules: with --max-per-task it decides which rows are scored
TYPES = ("multiple_choice", "schema", "language_modeling")
ROWS = {"arc_challenge": 1172}  # the bundle's table repeats arc_easy's count here
AGAIN = "fetch it again: ascendchat data fetch core"

Folder = Path | zipfile.Path


@dataclass(frozen=True)
class CoreTask:
    """One task of the bundle; `rows` is empty and `missing` says why when its file is not there."""

    label: str
    kind: str  # one of TYPES
    shots: int  # demonstrations before each row
    delimiter: str  # between a question and its answer
    chance: float  # accuracy of guessing, 0 to 1
    rows: list[dict[str, Any]]  # shuffled
    expected: int  # rows of the complete task
    file: str = ""
    missing: str = ""

    @property
    def complete(self) -> bool:
        return not self.missing and len(self.rows) >= self.expected


def _places(folder: Path) -> Iterator[Folder]:
    yield folder
    yield folder / "eval_bundle"
    archives = [folder] if folder.suffix == ".zip" else sorted(folder.glob("*.zip"))
    for archive in archives:
        if archive.is_file():
            yield zipfile.Path(archive)
            yield zipfile.Path(archive) / "eval_bundle"


def find_bundle(folder: Path) -> Folder:
    """Where core.yaml is: in the folder, one below, or inside an archive."""
    try:
        for place in _places(folder):
            if (place / "core.yaml").is_file():
                return place
    except zipfile.BadZipFile as error:
        raise UserError(f"the CORE archive in {folder} is damaged ({error}); {AGAIN}") from None
    raise UserError(
        f"no CORE bundle at {folder} (core.yaml is not there); get it: ascendchat data fetch core, "
        "or give its folder: --bundle DIR"
    )


def read_rows(path: Folder) -> list[dict[str, Any]]:
    """Rows of a .jsonl or .jsonl.xz file."""
    try:
        packed = path.read_bytes()
        text = (lzma.decompress(packed) if path.name.endswith(".xz") else packed).decode("utf-8")
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    except (*UNREADABLE, ValueError) as error:
        raise unreadable(path, error, AGAIN) from None


def find_file(folder: Folder, uri: str) -> Folder | None:
    """The task's file, packed or not; else a subset of it (squad.subset1000.jsonl.xz)."""
    parent, _, name = uri.rpartition("/")
    place = folder / parent if parent else folder
    files: dict[str, Folder] = {path.name: path for path in place.iterdir()} if place.is_dir() else {}
    subset = f"{name.removesuffix('.jsonl')}.subset"
    names = [name, f"{name}.xz", *sorted(n for n in files if n.startswith(subset) and n.endswith((".jsonl", ".xz")))]
    return next((files[n] for n in names if n in files), None)


def load_bundle(folder: Path) -> list[CoreTask]:
    """All tasks of core.yaml, in its order."""
    import yaml

    bundle = find_bundle(folder)
    try:
        table = csv.DictReader(io.StringIO((bundle / "eval_meta_data.csv").read_text(encoding="utf-8")))
        facts = {row["Eval Task"]: row for row in table}
        entries = yaml.safe_load((bundle / "core.yaml").read_text(encoding="utf-8"))["icl_tasks"]
        return [_task(entry, facts, bundle / "eval_data") for entry in entries]
    except UNREADABLE as error:
        raise unreadable(f"the CORE bundle at {folder}", error, AGAIN) from None
    except (KeyError, TypeError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"the CORE bundle at {folder} is damaged ({error!r}); {AGAIN}") from None


def _task(entry: Mapping[str, Any], facts: Mapping[str, Mapping[str, str]], folder: Folder) -> CoreTask:
    label, kind = entry["label"], entry["icl_task_type"]
    if kind not in TYPES:
        raise ValueError(f"{label}: unknown type {kind}")
    path = find_file(folder, entry["dataset_uri"])
    rows = read_rows(path) if path else []
    random.Random(ROW_ORDER_SEED).shuffle(rows)
    return CoreTask(
        label=label,
        kind=kind,
        shots=int(entry["num_fewshot"][0]),
        delimiter=entry.get("continuation_delimiter", " "),
        chance=0.01 * float(facts[label]["Random baseline"]),
        rows=rows,
        expected=ROWS.get(label) or int(facts[label]["#datapoints"].replace(",", "")),
        file=path.name if path else "",
        missing="" if path else f"no file {entry['dataset_uri']}",
    )
