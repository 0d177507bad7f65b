"""One request to `ascendchat data fetch`, and whether a folder has exactly what it asks for.

The manifest of a set keeps, for every request, the sha256 of each file that answered it:
{"requests": {'["gsm8k", "", null, "hf"]': {"main/train.parquet": "3f2a..."}}}. So files of another request, or files
that another source has replaced since, are never taken for the answer to this one.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ascendchat.config import home
from ascendchat.data.fetch.http import redact
from ascendchat.data.fetch.hubs import matches
from ascendchat.data.fetch.sources import SETS, DataSet, find_set

HUBS = ("hf", "modelscope", "http")


@dataclass(frozen=True)
class FetchRequest:
    """What the caller asked for."""

    word: str
    files: str
    shards: int | None
    source: str
    workers: int
    out: str
    dataset: DataSet

    @property
    def folder(self) -> Path:
        """Where its files are, or will be."""
        return Path(self.out or home() / "data").expanduser() / self.dataset.name

    @property
    def from_folder(self) -> bool:
        return bool(self.source) and self.source not in HUBS

    @property
    def shown(self) -> str:
        """The word as it may be printed."""
        return redact(self.word)

    @property
    def patterns(self) -> str:
        """Patterns of the files that were asked for; "" for those that the table of named sets gives."""
        named = self.dataset.name in SETS or not self.dataset.sources
        return self.files or ("" if named else self.dataset.sources[0].files)

    @property
    def what(self) -> list[Any]:
        """The part of the key that no choice of a source changes."""
        name = self.dataset.name
        if self.dataset.sources and self.dataset.sources[0].hub != "http" and name not in SETS:
            name = ",".join(f"{source.hub}:{source.where}" for source in find_set(self.word).sources)
        return [name, self.patterns, self.shards]

    @property
    def key(self) -> str:
        """The key under which the manifest remembers the files, so that the next call needs no network."""
        source = f"folder:{Path(self.source).expanduser().resolve()}" if self.from_folder else self.source
        return json.dumps([*self.what, source], ensure_ascii=False)

    @property
    def command(self) -> str:
        words = ["ascendchat", "data", "fetch", self.shown]
        words += ["--files", self.files] if self.files else []
        words += ["--shards", str(self.shards)] if self.shards is not None else []
        words += ["--out", self.out] if self.out else []
        return shlex.join(words)

    @property
    def mend(self) -> str:
        """The command with its source: it brings exactly these files back."""
        return self.command + (f" --source {shlex.quote(self.source)}" if self.source else "")

    def chosen(self, names: list[str], by_default: int) -> list[str]:
        """The first files, as many as were asked for, and the validation file whatever the number."""
        return _first(names, self.shards if self.shards is not None else by_default, self.dataset.always)

    def answers(self, manifest: Mapping[str, Any]) -> Iterator[dict[str, str]]:
        """File names and checksums that answered this request before; without a source, those from any source do."""
        requests: dict[str, dict[str, str]] = manifest.get("requests", {})
        if self.key in requests:
            yield requests[self.key]
        for key, files in requests.items():
            if not self.source and json.loads(key)[:-1] == self.what and key != self.key:
                yield files

    def complete(self, folder: Path, manifest: Mapping[str, Any]) -> dict[str, str]:
        """The files that answer the request if all are there in their full size, else {}."""
        for files in self.answers(manifest):
            if files and not missing_files(folder, files, manifest):
                return files
        return {}

    def contained(self, manifest: Mapping[str, Any]) -> dict[str, str]:
        """Files of an earlier, larger request in which this one is contained: `--shards 4` after `--shards 16`."""
        count = self.shards if self.shards is not None else (0 if self.files else self.dataset.shards)
        for key, files in manifest.get("requests", {}).items():
            name, patterns, shards, source = json.loads(key)
            every = patterns not in ("", "*") or source.startswith("folder:")  # there, no number of shards means all
            had = shards if shards is not None else (0 if every else self.dataset.shards)
            same = patterns == self.patterns and (not had or 0 < count <= had)
            if name != self.what[0] or self.source or not (same or (patterns in ("", "*") and not had)):
                continue
            names = [name for name in files if same or matches(name, self.patterns or "*")]
            if chosen := _first(names, count, self.dataset.always):
                return {name: files[name] for name in chosen}
        return {}


def _first(names: list[str], count: int, always: str) -> list[str]:
    if not count:
        return names
    kept = [name for name in names if always and matches(name, always)]
    return [name for name in names if name not in kept][:count] + kept


def missing_files(folder: Path, files: Mapping[str, str], manifest: Mapping[str, Any]) -> list[str]:
    """The files that are not in the folder, have another size, or have another checksum in the manifest."""
    entries = manifest.get("files", {})
    return [name for name, sha in files.items() if not sha or not _present(folder / name, entries.get(name), sha)]


def _present(path: Path, entry: Mapping[str, Any] | None, sha: str) -> bool:
    return bool(entry and entry["sha256"] == sha and path.is_file() and path.stat().st_size == entry["bytes"])
