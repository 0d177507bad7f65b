"""Data sets that a `dataset_info.json` describes, as LLaMA-Factory has it: `--data NAME --dataset-dir DIR`.

    listed_data(("alpaca_en_demo=2", "toyworld"), "data", knows)      # ("/path/of/data/alpaca_en_demo=2", "toyworld")
    find_listed(Path("data/alpaca_en_demo"))      # the one set; None where nothing lists it
    find_listed(Path("data"), ranking=True)       # of a folder with that file: all sets of pairs in it

A folder without that file works too: names are then those of its files, with or without their endings.

These keys of an entry are used: file_name (a file or a folder beside the registry, compressed or not), formatting
(alpaca, sharegpt, openai), columns, tags, ranking, num_samples (the first so many rows of all its files), hf_hub_url
and ms_hub_url once they are fetched, with folder. Nothing is downloaded here. Sets with images, sounds or films, KTO
labels or scripts are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ascendchat.data.chat.tables import TableRow
from ascendchat.data.chat.turns import CALLS, LEARNT, THOUGHTS, parse_list
from ascendchat.data.fetch import SETS, folder_of
from ascendchat.data.mixture import entry_text, parse_entry
from ascendchat.data.read import COMPRESSIONS, format_of
from ascendchat.errors import UserError, nearest

INFO = "dataset_info.json"
DEFAULT_DATASET_DIR = "data"  # in which LLaMA-Factory looks for it
HUBS = "hf_hub_url", "ms_hub_url"
NOT_TEXT = "images", "videos", "audios"
ENTRY_TYPES = {"columns": dict, "tags": dict, "formatting": str, "num_samples": int}  # key of an entry -> type
TAGS = {  # tag of LLaMA-Factory -> (its default, speaker as our readers call it)
    "user_tag": ("human", "human"),
    "assistant_tag": ("gpt", "gpt"),
    "observation_tag": ("observation", "observation"),
    "function_tag": ("function_call", "function_call"),
    "system_tag": ("system", "system"),
}
MapRow = Callable[[TableRow], TableRow]


@dataclass(frozen=True)
class ListedDataset:
    """A data set that a registry describes."""

    name: str
    path: Path  # a file, or a folder of files
    ranking: bool  # it holds pairs
    map_row: MapRow | None  # gives a row the columns that the readers know
    limit: int | None  # rows to read


def read_registry(folder: Path) -> dict[str, dict[str, Any]]:
    """Read the entries of a folder's registry."""
    path = folder / INFO
    entries = read_json(path)
    if not all(isinstance(entry, dict) for entry in entries.values()):
        raise _no_registry(path)
    for name, entry in entries.items():
        for part, kind in ENTRY_TYPES.items():
            if not isinstance(entry.get(part), (kind, type(None))):
                expected = {dict: "an object", int: "a whole number", str: "a text"}[kind]
                raise UserError(f"{path}: {part} of {name} must be {expected}; mend it")
    return entries


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a dataset_info.json."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}); --dataset-dir is the folder of such a file"
        ) from None
    except RecursionError:
        raise _no_registry(path) from None
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}); mend it") from None
    if not isinstance(content, dict):
        raise _no_registry(path)
    return content


def _no_registry(path: Path) -> UserError:
    return UserError(f'{path} must hold an object for every name, like {{"mine": {{"file_name": "mine.json"}}}}')


def listed_data(
    data: Sequence[str],
    dataset_dir: str,
    knows: Callable[[str], bool],
    *,
    usual: str = "",
    say: Callable[[str], None] = print,
) -> tuple[str, ...]:
    """Resolve the entries of --data: those that a registry lists become DIR/NAME, files of `dataset_dir` their
    paths, so that both are found from any directory. `knows` tells names of other data; with a `dataset_dir`, a
    name that is none of these and no file is an error. Without one it is the folder `usual` if there is a
    registry in it. A line is printed where a name could mean two sets."""
    if not dataset_dir and usual and is_registry(Path(usual)):
        dataset_dir = usual
    if not dataset_dir:
        for name in (name for name, _ in map(parse_entry, data) if usual and _is_chat_set(name)):
            say(f"{name}: the set of `ascendchat data fetch {name}`; that of LLaMA-Factory: --dataset-dir DIR")
        return tuple(_entry(name, weight, Path(name).expanduser()) for name, weight in map(parse_entry, data))
    folder, resolved = Path(dataset_dir).expanduser(), []
    if not folder.is_dir():
        raise UserError(f"--dataset-dir {folder} is not a folder; give the one that holds the data")
    registry = read_registry(folder) if (folder / INFO).is_file() else {}
    for name, weight in map(parse_entry, data):
        files = (folder / f"{name}{end}{packed}" for end in ("", ".json", ".jsonl") for packed in ("", *COMPRESSIONS))
        path = folder / name if name in registry else next((path for path in files if path.exists()), None)
        path = path or Path(name).expanduser()
        if not knows(name) and not path.exists() and not is_listed(path):
            names = [*registry, *(p.name for p in sorted(folder.iterdir()) if format_of(p.name)[0] and p.name != INFO)]
            raise UserError(f"--dataset-dir {folder} has no {name!r}; {nearest(name, names)}")
        if name in registry and knows(name):
            say(f"{name}: as {folder / INFO} has it, not the set of `ascendchat data fetch {name}`")
        resolved.append(_entry(name, weight, path))
    return tuple(resolved)


def is_registry(folder: Path) -> bool:
    """True if the folder has a registry, and not the file of that name which the package `datasets` writes."""
    path = folder / INFO
    written = {"features", "splits", "builder_name"}, {"features", "citation"}  # by older and newer versions
    return path.is_file() and not any(keys <= read_json(path).keys() for keys in written)


def _is_chat_set(name: str) -> bool:
    """True for a named set of ours with conversations, unless a file of this name is here."""
    return name in SETS and SETS[name].use == "chat" and not Path(name).exists()


def _entry(name: str, weight: float | None, path: Path) -> str:
    """Write an entry of --data, with the path if that exists or is listed."""
    name = str(path.absolute()) if path.exists() or is_listed(path) else name
    return entry_text(name, weight)


def find_listed(path: Path, *, ranking: bool = False) -> list[ListedDataset] | None:
    """Find the sets of a path: the one at DIR/NAME, or all in a folder that hold what is wanted (pairs, or
    conversations) and have their files there; None where no registry is involved."""
    if path.is_dir() and is_registry(path):
        entries = read_registry(path)
        names = [name for name, entry in entries.items() if bool(entry.get("ranking")) == ranking]
        local = [name for name in names if local_file(path, entries[name]) is not None and is_text(entries[name])]
        if not local:
            kind = "pairs (ranking)" if ranking else "conversations"
            raise UserError(f"{path / INFO} lists no {kind} whose files are in {path}; name one: --data NAME")
        return [describe(path, name, entries[name]) for name in local]
    if not is_listed(path):
        return None
    folder = path.parent
    entries = read_registry(folder)
    if path.name not in entries:
        raise UserError(f"{folder / INFO} lists no {path.name!r}; {nearest(path.name, list(entries))}")
    return [describe(folder, path.name, entries[path.name])]


def is_listed(path: Path) -> bool:
    """True for DIR/NAME where DIR has a registry; such a path does not exist itself. A bare name belongs to the current
    directory only if its registry lists it."""
    if path.exists() or not (path.parent / INFO).is_file():
        return False
    return path.parent != Path() or path.name in read_registry(path.parent)


def local_file(folder: Path, entry: Mapping[str, Any]) -> Path | None:
    """Find the file or folder of an entry, compressed or not; None if it is not there."""
    if not entry.get("file_name"):
        return None
    path = folder / str(entry["file_name"])
    return next(
        (candidate for end in ("", *COMPRESSIONS) if (candidate := path.with_name(path.name + end)).exists()), None
    )


def is_text(entry: Mapping[str, Any]) -> bool:
    columns = entry.get("columns") or {}
    return not any(columns.get(name) for name in (*NOT_TEXT, "kto_tag"))


def describe(folder: Path, name: str, entry: Mapping[str, Any]) -> ListedDataset:
    """Build the data set of one entry; a feature that is not supported is a UserError."""
    where, columns = f"{folder / INFO}: {name}", entry.get("columns") or {}
    for column in (*NOT_TEXT, "kto_tag"):
        if columns.get(column):
            raise UserError(f"{where} has the column {column}, and only text and pairs are trained on; leave it out")
    formatting = entry.get("formatting", "alpaca")
    if formatting not in RENAMERS:
        raise UserError(f"{where} has the formatting {formatting!r}; {nearest(str(formatting), list(RENAMERS))}")
    map_row: MapRow | None = None
    if columns or entry.get("tags") or formatting == "openai":
        map_row = RENAMERS[formatting](columns, entry.get("tags") or {}, bool(entry.get("ranking")))
    samples = entry.get("num_samples")
    path = rows_path(folder, where, entry)
    return ListedDataset(name, path, bool(entry.get("ranking")), map_row, samples)


def rows_path(folder: Path, where: str, entry: Mapping[str, Any]) -> Path:
    """Find the rows of an entry on this machine."""
    if (path := local_file(folder, entry)) is not None:
        return path
    hub = next((str(entry[name]) for name in HUBS if entry.get(name)), "")
    if hub:
        path = folder_of(hub)
        if not path.is_dir():
            raise UserError(f"{where} is on a hub; fetch it first: ascendchat data fetch {hub}")
        return path / str(entry["folder"]) if entry.get("folder") else path
    if entry.get("file_name"):
        raise UserError(f"{where} names the file {folder / str(entry['file_name'])}, which is not there; put it there")
    raise UserError(f"{where} names no file_name, hf_hub_url or ms_hub_url; download the data and give its file_name")


def alpaca_renamer(columns: Mapping[str, str], tags: Mapping[str, str], ranking: bool) -> MapRow:
    """Map columns by LLaMA-Factory's names for them; with `columns`, one that is not named there is not used."""
    sources = {"instruction": columns.get("prompt", "instruction"), "input": columns.get("query")}
    sources |= {name: columns.get(name) for name in ("system", "tools", "history")}
    replies = ("chosen", "rejected") if ranking else ()
    output_columns = {"output": columns.get("response", "output"), "label": "label"}
    sources |= {name: columns.get(name, name) for name in replies} or output_columns
    return lambda row: rename_columns(row, sources, ("instruction", *replies))


def turns_renamer(
    default: tuple[str, str, str], columns: Mapping[str, str], tags: Mapping[str, str], ranking: bool
) -> MapRow:
    """Map turns in one list, each with a speaker and a text under the names of `tags`, or of `default`: list,
    speaker, text."""
    column, speaker, text = default
    role, content = tags.get("role_tag", speaker), tags.get("content_tag", text)
    speakers = {tags.get(tag, default_tag): ours for tag, (default_tag, ours) in TAGS.items()}
    sources: dict[str, str | None] = {column: columns.get("messages", column)}
    sources |= {name: columns.get(name) for name in ("system", "tools")}
    sources |= {name: columns.get(name, name) for name in (("chosen", "rejected") if ranking else ("label",))}

    def turn(entry: Any) -> Any:
        if not isinstance(entry, dict):
            return entry
        calls = {name: entry[name] for name in CALLS if entry.get(name)}
        words = {} if calls and content not in entry else {text: entry[content]}
        flags = {name: entry[name] for name in (*LEARNT, *THOUGHTS, "tool_call_id") if name in entry}
        return {speaker: speakers.get(entry[role], entry[role]), **words, **calls, **flags}

    def map_row(row: TableRow) -> TableRow:
        named = rename_columns(row, sources, (column,))
        named[column] = [turn(entry) for entry in parse_list(named[column], "messages")]
        return {name: turn(value) if name in ("chosen", "rejected") else value for name, value in named.items()}

    return map_row


RENAMERS: dict[str, Callable[[Mapping[str, str], Mapping[str, str], bool], MapRow]] = {
    "alpaca": alpaca_renamer,
    "sharegpt": partial(turns_renamer, ("conversations", "from", "value")),
    "openai": partial(turns_renamer, ("messages", "role", "content")),
}


def rename_columns(row: TableRow, sources: Mapping[str, str | None], needed: Sequence[str]) -> TableRow:
    """The row under our names; a required column that is missing is a KeyError."""
    named = {ours: row[theirs] for ours, theirs in sources.items() if theirs and (theirs in row or ours in needed)}
    return {name: value for name, value in named.items() if value is not None or name in needed}
