"""The named data sets (sets.yaml), and the sources of each; `ascendchat data fetch` lists them.

Sources are tried in order: Hugging Face (and its mirror), ModelScope, plain HTTP. Anything else is fetched as
`OWNER/NAME` (a data set on a hub), `models/OWNER/NAME` (a model) or a URL.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from ascendchat.config import load_yaml
from ascendchat.data.fetch.http import redact, url_hash
from ascendchat.errors import UserError, nearest


@dataclass(frozen=True)
class DataSource:
    """One place that has the set. `files`: patterns separated by commas, `*` also matches `/`."""

    hub: str  # "hf", "modelscope" or "http"
    where: str  # OWNER/NAME, or the URL of the file
    files: str = "*"
    model: bool = False


@dataclass(frozen=True)
class DataSet:
    """A named set. `shards` is the number of files fetched by default (0: all of them)."""

    name: str
    use: str  # "pretrain", "chat", "eval" or "" for what the user named
    about: str
    sources: tuple[DataSource, ...]
    shards: int = 0
    always: str = ""  # files fetched however few shards are requested: the validation shard
    size: float = 0.0  # GB to fetch, roughly; of one file where there are `shards`; 0: unknown
    tokens: float = 0.0  # millions, roughly; of one file where there are `shards`
    rows: int = 0  # of the training split


def read_sets(path: Path) -> dict[str, DataSet]:
    """Read the table in sets.yaml."""
    rows = load_yaml(path)
    for row in rows.values():
        row["sources"] = tuple(DataSource(*source) for source in row["sources"])
    return {name: DataSet(name, **row) for name, row in rows.items()}


SETS = read_sets(Path(__file__).with_name("sets.yaml"))

# Other names of a set: in folders that people share, and in older guides.
ALIASES = {
    "eval_bundle": "core",
    "smol-smoltalk": "smoltalk",
    "climbmix-400b-shuffle": "climbmix",
    "ai2_arc": "arc",
    "identity_conversations": "identity",
}


def find_set(word: str, source: str = "") -> DataSet:
    """Find a set by name, OWNER/NAME, models/OWNER/NAME or URL, cut down to a `source` (hf, modelscope, http)."""
    dataset = SETS.get(ALIASES.get(word.lower(), word.lower())) or _unnamed(word)
    if source not in ("hf", "modelscope", "http"):
        return dataset
    sources = tuple(s for s in dataset.sources if s.hub == source)
    if not sources:
        hubs = ", ".join(dict.fromkeys(s.hub for s in dataset.sources))
        raise UserError(
            f"{redact(word)} is not known on {source}; it is on: {hubs} (leave out --source to try them in order). A "
            f"copy that you know there has its own name: ascendchat data fetch OWNER/NAME --source {source}"
        )
    return replace(dataset, sources=sources)


def _unnamed(word: str) -> DataSet:
    if re.match(r"https?://", word, re.IGNORECASE):
        return _url(word)
    parts = word.split("/")
    model = parts[0] == "models"
    parts = parts[1:] if parts[0] in ("models", "datasets") else parts
    if len(parts) == 2 and all(re.fullmatch(r"[\w.-]+", p) and p.strip(".") for p in parts):
        repo = "/".join(parts)
        sources = tuple(DataSource(hub, repo, model=model) for hub in ("hf", "modelscope"))
        return DataSet(("models--" if model else "") + "--".join(parts), "", repo, sources)
    raise UserError(
        f"there is no data set {redact(word)!r}; {nearest(word, list(SETS))} (or OWNER/NAME of a hub, or a URL; "
        "`ascendchat data fetch` lists the names)"
    )


def _split(word: str) -> SplitResult:
    """Split a URL; the error for a malformed one does not repeat it, for a password may be in the wrong part."""
    try:
        url = urlsplit(word)
        complete = bool(url.hostname) and url.port != 0 and not re.search(r"[\s\x00-\x1f\x7f]", word)
    except ValueError:  # the port is not a number, or [ ] are not around an address
        complete = False
    if not complete:
        raise UserError("the URL is malformed: it needs a host, and / @ : and blanks in a password as %2F %40 %3A %20")
    return url


def _url(word: str) -> DataSet:
    url = _split(word)
    parts = [unquote(p) for p in url.path.split("/") if p]
    hub = {"huggingface.co": "hf", "hf-mirror.com": "hf", "modelscope.cn": "modelscope"}.get(
        (url.hostname or "").removeprefix("www.")
    )
    if hub and len(parts) >= 2:  # the page of a repository, as copied from a browser
        model = parts[0] != "datasets"
        repo = parts[1:3] if parts[0] in ("datasets", "models") else parts[:2]
        rest = parts[parts.index(repo[-1]) + 1 :]
        if len(repo) == 2 and (not rest or rest[0] in ("summary", "files", "tree", "resolve", "blob")):
            inside = "/".join(rest[2:])
            files = (inside if rest[0] in ("resolve", "blob") else f"{inside}/*") if inside else "*"
            name = ("models--" if model else "") + "--".join(repo)
            return DataSet(name, "", redact(word), (DataSource(hub, "/".join(repo), files, model=model),))
    name = parts[-1] if parts else ""
    if not re.fullmatch(r"[^/\\\0]+", name) or name in (".", "..", "manifest.json", ".lock"):
        raise UserError(f"{redact(word)} names no file that can be stored under its name; give the URL of a file")
    stem = re.sub(r"(\.(jsonl?|parquet|txt|csv|tsv|bin|zip|tar|gz|xz|zst))+$", "", name) or name
    return DataSet(f"{stem}-{url_hash(word)}", "", redact(word), (DataSource("http", word),))
