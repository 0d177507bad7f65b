"""What a hub has of a data set: names, sizes and checksums. Used by `ascendchat data fetch`.

Hugging Face: /api/datasets/REPO/revision/main pins a commit, /tree lists it in pages, /resolve serves the files.
ModelScope: /api/v1/datasets/REPO/repo/tree lists, /repo?FilePath= serves. HF_ENDPOINT, HF_TOKEN and
MODELSCOPE_DOMAIN are respected.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from urllib.parse import quote, unquote, urlencode, urlsplit

from ascendchat.config.data import HUGGING_FACE, MIRROR
from ascendchat.data.fetch.sources import DataSource
from ascendchat.data.fetch.transfer import Remote
from ascendchat.data.fetch.web import SourceFailed, Web

PAGE = 200  # files per page of a ModelScope listing


def hf_endpoints() -> list[str]:
    """$HF_ENDPOINT alone when it is set; else the hub, and its mirror for when the hub cannot be reached."""
    chosen = os.environ.get("HF_ENDPOINT", "").strip().rstrip("/")
    if not chosen:
        return [HUGGING_FACE, MIRROR]
    return [chosen if "://" in chosen else f"https://{chosen}"]


def hf_headers(endpoint: str) -> dict[str, str]:
    """The token goes to the hub and to the endpoint the user chose, never to a mirror chosen by us."""
    token = os.environ.get("HF_TOKEN", "").strip()
    if token and (endpoint == HUGGING_FACE or os.environ.get("HF_ENDPOINT")):
        return {"Authorization": f"Bearer {token}"}
    return {}


def modelscope_endpoint() -> str:
    chosen = os.environ.get("MODELSCOPE_DOMAIN", "").strip().rstrip("/") or "www.modelscope.cn"
    return chosen if "://" in chosen else f"https://{chosen}"


def endpoints(source: DataSource) -> list[str]:
    """The servers that can be asked for a source, in order."""
    if source.hub == "hf":
        return hf_endpoints()
    return [modelscope_endpoint()] if source.hub == "modelscope" else [""]


def matches(name: str, patterns: str) -> bool:
    return any(fnmatch.fnmatchcase(name, p.strip()) for p in patterns.split(",") if p.strip())


def fixed_folder(patterns: str) -> str:
    """The folder all patterns lie in ("sample/10BT/*.parquet" -> "sample/10BT"), so that only it is listed."""
    folders = set()
    for pattern in patterns.split(","):
        parts = pattern.strip().split("/")[:-1]
        fixed = [p for i, p in enumerate(parts) if not any(re.search(r"[*?\[]", q) for q in parts[: i + 1])]
        folders.add("/".join(fixed))
    return folders.pop() if len(folders) == 1 else ""


def safe(name: str) -> bool:
    """A listing may not name a file outside the folder of the set, nor one of our own."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name or not path.parts:
        raise SourceFailed(f"the hub lists a file with the unsafe name {name!r}")
    return name not in ("manifest.json", ".lock", ".gitattributes") and not name.endswith(".part")


def remote_files(source: DataSource, endpoint: str, web: Web, files: str = "") -> list[Remote]:
    """Every file of the source that matches, sorted by name."""
    patterns = files or source.files
    if source.hub == "http":
        return [Remote(unquote(urlsplit(source.where).path.rsplit("/", 1)[-1]), source.where)]
    listed = (_hugging_face if source.hub == "hf" else _modelscope)(source, endpoint, web, patterns)
    matching = {remote.name: remote for remote in listed if safe(remote.name) and matches(remote.name, patterns)}
    if not matching:
        raise SourceFailed(f"{source.where} on {endpoint} has no file that matches {patterns}")
    return [matching[name] for name in sorted(matching)]


def _hugging_face(source: DataSource, endpoint: str, web: Web, patterns: str) -> Iterator[Remote]:
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
            yield Remote(
                entry["path"],
                f"{endpoint}/{page}{source.where}/resolve/{commit}/{quote(entry['path'])}",
                bytes=int(large.get("size", entry["size"])),
                sha256=str(large.get("oid", "")).removeprefix("sha256:"),
                git="" if large else str(entry.get("oid", "")),
                headers=headers,
            )


def _modelscope(source: DataSource, endpoint: str, web: Web, patterns: str) -> Iterator[Remote]:
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
                said = answer.get("Message", "") if isinstance(answer, dict) else ""
                raise SourceFailed(f"{endpoint} does not list {source.where}: {said or 'no such repository'}")
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
                yield Remote(
                    entry["Path"],
                    f"{base}?{urlencode(query)}",
                    bytes=int(entry["Size"]) if entry.get("Size") else None,
                    sha256=sha if re.fullmatch(r"[0-9a-f]{64}", sha) else "",
                )
            if len(entries) < PAGE or not fresh:  # models come in one page whatever is asked for
                break
            number += 1
        # Where the listing was not recursive, each folder is asked for by itself.
        folders += [t for t in trees if not any(name.startswith(t + "/") for name in below)]
