"""One request to `ascendchat data fetch`, and the check that a folder has exactly the requested files.

The manifest of a set stores, for every request, the sha256 of each file that answered it:
{"requests": {'["gsm8k", "", null, "hf"]': {"main/train.parquet": "3f2a..."}}}. So files of another request, or files
that another source has replaced since, are never taken for the answer to this one.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote, unquote, urlencode, urlsplit

from ascendchat.config.data import HUGGING_FACE, MIRROR
from ascendchat.data.fetch.download import RemoteFile
from ascendchat.data.fetch.http import SourceFailed, Web, redact
from ascendchat.data.fetch.sources import SETS, DataSet, DataSource, find_set
from ascendchat.errors import home

HUBS = ("hf", "modelscope", "http")


@dataclass(frozen=True)
class FetchRequest:
    """The arguments of one request."""

    word: str
    files: str
    shards: int | None
    source: str
    workers: int
    out: str
    dataset: DataSet

    @property
    def folder(self) -> Path:
        """Folder in which its files are, or will be."""
        return Path(self.out or home() / "data").expanduser() / self.dataset.name

    @property
    def from_folder(self) -> bool:
        return bool(self.source) and self.source not in HUBS

    @property
    def safe_word(self) -> str:
        """The word as it may be printed."""
        return redact(self.word)

    @property
    def patterns(self) -> str:
        """Patterns of the requested files; "" for those that the table of named sets gives."""
        named = self.dataset.name in SETS or not self.dataset.sources
        return self.files or ("" if named else self.dataset.sources[0].files)

    @property
    def key_without_source(self) -> list[Any]:
        """Part of the key that does not depend on the choice of a source."""
        name = self.dataset.name
        if self.dataset.sources and self.dataset.sources[0].hub != "http" and name not in SETS:
            name = ",".join(f"{source.hub}:{source.where}" for source in find_set(self.word).sources)
        return [name, self.patterns, self.shards]

    @property
    def key(self) -> str:
        """Key of the files in the manifest, so that the next call needs no network."""
        source = f"folder:{Path(self.source).expanduser().resolve()}" if self.from_folder else self.source
        return json.dumps([*self.key_without_source, source], ensure_ascii=False)

    @property
    def command(self) -> str:
        words = ["ascendchat", "data", "fetch", self.safe_word]
        words += ["--files", self.files] if self.files else []
        words += ["--shards", str(self.shards)] if self.shards is not None else []
        words += ["--out", self.out] if self.out else []
        return shlex.join(words)

    @property
    def repair_command(self) -> str:
        """The command with its source: it restores exactly these files."""
        return self.command + (f" --source {shlex.quote(self.source)}" if self.source else "")

    def select(self, names: list[str], by_default: int) -> list[str]:
        """Select the first files, as many as were requested, and the validation file whatever the number."""
        return _first(names, self.shards if self.shards is not None else by_default, self.dataset.always)

    def answers(self, manifest: Mapping[str, Any]) -> Iterator[dict[str, str]]:
        """File names and checksums that answered this request before; without a source, those from any source do."""
        requests: dict[str, dict[str, str]] = manifest.get("requests", {})
        if self.key in requests:
            yield requests[self.key]
        for key, files in requests.items():
            if not self.source and json.loads(key)[:-1] == self.key_without_source and key != self.key:
                yield files

    def complete(self, folder: Path, manifest: Mapping[str, Any]) -> dict[str, str]:
        """The files that answer the request if all are there in their full size, else {}."""
        for files in self.answers(manifest):
            if files and not missing_files(folder, files, manifest):
                return files
        return {}

    def part_of_larger(self, manifest: Mapping[str, Any]) -> dict[str, str]:
        """Files of an earlier, larger request that contains this one: `--shards 4` after `--shards 16`."""
        count = self.shards if self.shards is not None else (0 if self.files else self.dataset.shards)
        for key, files in manifest.get("requests", {}).items():
            name, patterns, shards, source = json.loads(key)
            takes_all = patterns not in ("", "*") or source.startswith(
                "folder:"
            )  # there, no number of shards means all
            earlier_shards = shards if shards is not None else (0 if takes_all else self.dataset.shards)
            same = patterns == self.patterns and (not earlier_shards or 0 < count <= earlier_shards)
            if (
                name != self.key_without_source[0]
                or self.source
                or not (same or (patterns in ("", "*") and not earlier_shards))
            ):
                continue
            names = [name for name in files if same or matches(name, self.patterns or "*")]
            if chosen := _first(names, count, self.dataset.always):
                return {name: files[name] for name in chosen}
        return {}


def _first(names: list[str], count: int, always: str) -> list[str]:
    if not count:
        return names
    always_fetched = [name for name in names if always and matches(name, always)]
    return [name for name in names if name not in always_fetched][:count] + always_fetched


def missing_files(folder: Path, files: Mapping[str, str], manifest: Mapping[str, Any]) -> list[str]:
    """List the files that are not in the folder, have another size, or have another checksum in the manifest."""
    entries = manifest.get("files", {})
    return [name for name, sha in files.items() if not sha or not _present(folder / name, entries.get(name), sha)]


def _present(path: Path, entry: Mapping[str, Any] | None, sha: str) -> bool:
    return bool(entry and entry["sha256"] == sha and path.is_file() and path.stat().st_size == entry["bytes"])


# Listings of a hub: names, sizes and checksums of a data set's files. Used by `ascendchat data fetch`.
#
# Hugging Face: /api/datasets/REPO/revision/main pins a commit, /tree lists it in pages, /resolve serves the files.
# ModelScope: /api/v1/datasets/REPO/repo/tree lists, /repo?FilePath= serves. HF_ENDPOINT, HF_TOKEN and
# MODELSCOPE_DOMAIN are respected.

PAGE = 200  # files per page of a ModelScope listing


def hf_endpoints() -> list[str]:
    """$HF_ENDPOINT alone when it is set; else the hub, and its mirror for when the hub cannot be reached."""
    chosen = os.environ.get("HF_ENDPOINT", "").strip().rstrip("/")
    if not chosen:
        return [HUGGING_FACE, MIRROR]
    return [chosen if "://" in chosen else f"https://{chosen}"]


def hf_headers(endpoint: str) -> dict[str, str]:
    """Headers with the token, for the hub and the endpoint the user chose, never for a mirror chosen by us."""
    token = os.environ.get("HF_TOKEN", "").strip()
    if token and (endpoint == HUGGING_FACE or os.environ.get("HF_ENDPOINT")):
        return {"Authorization": f"Bearer {token}"}
    return {}


def modelscope_endpoint() -> str:
    chosen = os.environ.get("MODELSCOPE_DOMAIN", "").strip().rstrip("/") or "www.modelscope.cn"
    return chosen if "://" in chosen else f"https://{chosen}"


def endpoints(source: DataSource) -> list[str]:
    """List the servers that can be asked for a source, in order."""
    if source.hub == "hf":
        return hf_endpoints()
    return [modelscope_endpoint()] if source.hub == "modelscope" else [""]


def matches(name: str, patterns: str) -> bool:
    return any(fnmatch.fnmatchcase(name, p.strip()) for p in patterns.split(",") if p.strip())


def fixed_folder(patterns: str) -> str:
    """The folder that all patterns lie in ("sample/10BT/*.parquet" -> "sample/10BT"), so that only it is listed."""
    folders = set()
    for pattern in patterns.split(","):
        parts = pattern.strip().split("/")[:-1]
        fixed = [p for i, p in enumerate(parts) if not any(re.search(r"[*?\[]", q) for q in parts[: i + 1])]
        folders.add("/".join(fixed))
    return folders.pop() if len(folders) == 1 else ""


def is_safe_name(name: str) -> bool:
    """False for a file of our own; raises for a name outside the folder of the set."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name or not path.parts:
        raise SourceFailed(f"the hub lists a file with the unsafe name {name!r}")
    return name not in ("manifest.json", ".lock", ".gitattributes") and not name.endswith(".part")


def remote_files(source: DataSource, endpoint: str, web: Web, files: str = "") -> list[RemoteFile]:
    """List every file of the source that matches, sorted by name."""
    patterns = files or source.files
    if source.hub == "http":
        return [RemoteFile(unquote(urlsplit(source.where).path.rsplit("/", 1)[-1]), source.where)]
    listed = (_hugging_face if source.hub == "hf" else _modelscope)(source, endpoint, web, patterns)
    matching = {
        remote.name: remote for remote in listed if is_safe_name(remote.name) and matches(remote.name, patterns)
    }
    if not matching:
        raise SourceFailed(f"{source.where} on {endpoint} has no file that matches {patterns}")
    return [matching[name] for name in sorted(matching)]


def _hugging_face(source: DataSource, endpoint: str, web: Web, patterns: str) -> Iterator[RemoteFile]:
    kind = "models" if source.model else "datasets"
    page = "" if source.model else "datasets/"
    headers = hf_headers(endpoint)
    answer, _ = web.json(f"{endpoint}/api/{kind}/{source.where}/revision/main", headers)
    commit = answer.get("sha", "") if isinstance(answer, dict) else ""
    if not re.fullmatch(r"[0-9a-f]{40}", str(commit)):
        commit = "main"  # an endpoint that does not say; checksums still hold the content
    folder = fixed_folder(patterns)
    url = f"{endpoint}/api/{kind}/{source.where}/tree/{commit}{'/' + quote(folder) if folder else ''}?recursive=true"
    while url:
        entries, url = web.json(url, headers)
        if url and urlsplit(url).netloc != urlsplit(endpoint).netloc:  # a mirror that passes on the hub's own links
            url = endpoint + url[url.index("/api/") :] if "/api/" in url else ""
        if not isinstance(entries, list):
            raise SourceFailed(f"{endpoint} lists {source.where} in a form that is not understood")
        for entry in entries:
            if entry.get("type") != "file":
                continue
            large = entry.get("lfs") or {}
            yield RemoteFile(
                entry["path"],
                f"{endpoint}/{page}{source.where}/resolve/{commit}/{quote(entry['path'])}",
                bytes=int(large.get("size", entry["size"])),
                sha256=str(large.get("oid", "")).removeprefix("sha256:"),
                git="" if large else str(entry.get("oid", "")),
                headers=headers,
            )


def _modelscope(source: DataSource, endpoint: str, web: Web, patterns: str) -> Iterator[RemoteFile]:
    kind, verb = ("models", "files") if source.model else ("datasets", "tree")
    base = f"{endpoint}/api/v1/{kind}/{source.where}/repo"
    folders, seen = [fixed_folder(patterns)], set()
    while folders:
        folder = folders.pop()
        below: set[str] = set()
        trees: list[str] = []
        number = 1
        while True:
            query = {"Revision": "master", "Recursive": "True", "Root": folder, "PageNumber": number, "PageSize": PAGE}
            answer, _ = web.json(f"{base}/{verb}?{urlencode(query)}")
            data = answer.get("Data") if isinstance(answer, dict) else None
            if not isinstance(data, dict):
                message = answer.get("Message", "") if isinstance(answer, dict) else ""
                raise SourceFailed(f"{endpoint} does not list {source.where}: {message or 'no such repository'}")
            entries = data.get("Files") or []
            fresh = [e for e in entries if e["Path"] not in seen]
            for entry in fresh:
                seen.add(entry["Path"])
                if entry.get("Type") == "tree":
                    trees.append(entry["Path"])
                    continue
                below.add(entry["Path"])
                query = {"Source": "SDK", "Revision": "master", "FilePath": entry["Path"]}
                sha = str(entry.get("Sha256") or "").lower()
                yield RemoteFile(
                    entry["Path"],
                    f"{base}?{urlencode(query)}",
                    bytes=int(entry["Size"]) if entry.get("Size") else None,
                    sha256=sha if re.fullmatch(r"[0-9a-f]{64}", sha) else "",
                )
            if len(entries) < PAGE or not fresh:  # models come in one page whatever page is requested
                break
            number += 1
        # Where the listing was not recursive, each folder is listed by itself.
        folders += [t for t in trees if not any(name.startswith(t + "/") for name in below)]
