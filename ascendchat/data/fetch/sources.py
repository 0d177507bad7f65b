"""The data sets that have a name, and where each can be had. `ascendchat data fetch` without a name prints this table.

Sources are tried in order: Hugging Face (and its mirror), ModelScope, plain HTTP. Anything else is fetched as
`OWNER/NAME` (a data set on a hub), `models/OWNER/NAME` (a model) or a URL.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from urllib.parse import SplitResult, unquote, urlsplit

from ascendchat.config import UserError, nearest
from ascendchat.data.fetch.redact import redact, url_hash


@dataclass(frozen=True)
class DataSource:
    """One place that has the set. `files`: patterns separated by commas, `*` also matches `/`."""

    hub: str  # "hf", "modelscope" or "http"
    where: str  # OWNER/NAME, or the URL of the file
    files: str = "*"
    model: bool = False


@dataclass(frozen=True)
class DataSet:
    """A named set. `shards` is how many files are fetched when nothing is asked for (0: all of them)."""

    name: str
    use: str  # "pretrain", "chat", "eval" or "" for what the user named
    about: str
    sources: tuple[DataSource, ...]
    shards: int = 0
    always: str = ""  # files fetched however few shards are asked for: the validation shard


def _hubs(hf: str, files: str, modelscope: str = "", modelscope_files: str = "") -> tuple[DataSource, ...]:
    other = (DataSource("modelscope", modelscope, modelscope_files or files),) if modelscope else ()
    return (DataSource("hf", hf, files), *other)


SETS: dict[str, DataSet] = {
    row.name: row
    for row in (
        DataSet(
            "climbmix",
            "pretrain",
            "English web text, 6,543 shuffled shards of 0.1 GB; the last one is for validation",
            _hubs("karpathy/climbmix-400b-shuffle", "shard_*.parquet"),
            shards=8,
            always="shard_06542.parquet",
        ),
        DataSet(
            "fineweb-edu",
            "pretrain",
            "English educational web text, the 10-billion-token sample, shards of 2 GB",
            _hubs("HuggingFaceFW/fineweb-edu", "sample/10BT/*.parquet", "AI-ModelScope/fineweb-edu"),
            shards=1,
        ),
        DataSet(
            "skypile",
            "pretrain",
            "Chinese web text, the best part (`head`) of SkyPile-150B, jsonl files of about 1.5 GB",
            _hubs("Skywork/SkyPile-150B", "data/*_zh_head_*.jsonl", "modelscope/SkyPile-150B"),
            shards=1,
        ),
        DataSet(
            "chinese-fineweb-edu",
            "pretrain",
            "Chinese educational web text, the documents with scores 4 to 5",
            _hubs("opencsg/Fineweb-Edu-Chinese-V2.1", "4_5/*.parquet", "opencsg/Fineweb-Edu-Chinese-V2.1"),
            shards=4,
        ),
        DataSet(
            "wikipedia-zh",
            "pretrain",
            "Chinese Wikipedia of November 2023, 6 files, 1.7 GB",
            _hubs("wikimedia/wikipedia", "20231101.zh/*.parquet", "AI-ModelScope/wikipedia"),
        ),
        DataSet(
            "wikipedia-en",
            "pretrain",
            "English Wikipedia of November 2023, 41 files",
            _hubs("wikimedia/wikipedia", "20231101.en/*.parquet", "AI-ModelScope/wikipedia"),
            shards=2,
        ),
        DataSet(
            "smoltalk",
            "chat",
            "460,000 English conversations for small models",
            _hubs("HuggingFaceTB/smol-smoltalk", "data/*.parquet"),
        ),
        DataSet(
            "smoltalk-chinese",
            "chat",
            "700,000 Chinese conversations",
            _hubs("opencsg/smoltalk-chinese", "*.parquet", "opencsg/smoltalk-chinese"),
        ),
        DataSet(
            "coig-cqia",
            "chat",
            "Chinese instructions chosen by people",
            _hubs("m-a-p/COIG-CQIA", "*.jsonl", "m-a-p/COIG-CQIA"),
        ),
        DataSet(
            "alpaca-zh",
            "chat",
            "52,000 Chinese instructions with GPT-4 answers",
            _hubs("shibing624/alpaca-zh", "*.json", "AI-ModelScope/alpaca-gpt4-data-zh", "*.json,*.jsonl,*.csv"),
        ),
        DataSet(
            "belle",
            "chat",
            "500,000 Chinese instructions",
            _hubs("BelleGroup/train_0.5M_CN", "*.json", "AI-ModelScope/train_0.5M_CN", "*.json,*.jsonl,*.csv"),
        ),
        DataSet(
            "identity",
            "chat",
            "1,000 made-up conversations about who the model is",
            (DataSource("http", "https://karpathy-public.s3.us-west-2.amazonaws.com/identity_conversations.jsonl"),),
        ),
        DataSet(
            "mmlu",
            "eval",
            "57 subjects, multiple choice; with the auxiliary training questions",
            _hubs("cais/mmlu", "all/*.parquet", "cais/mmlu"),
        ),
        DataSet(
            "gsm8k",
            "eval",
            "primary-school word problems, training and test",
            _hubs("openai/gsm8k", "main/*.parquet", "AI-ModelScope/gsm8k"),
        ),
        DataSet(
            "arc",
            "eval",
            "science questions, Easy and Challenge",
            _hubs("allenai/ai2_arc", "ARC-*/*.parquet", "allenai/ai2_arc"),
        ),
        DataSet(
            "ceval",
            "eval",
            "52 Chinese subjects, multiple choice",
            _hubs("ceval/ceval-exam", "*.zip,*.parquet", "evalscope/ceval", "*.zip,*.parquet,*.csv,*.jsonl"),
        ),
        DataSet(
            "cmmlu",
            "eval",
            "67 Chinese subjects, multiple choice",
            _hubs("haonan-li/cmmlu", "*.zip,*.parquet", "evalscope/cmmlu", "*.zip,*.parquet,*.csv,*.jsonl"),
        ),
        DataSet(
            "humaneval",
            "eval",
            "164 Python functions to write",
            (
                *_hubs("openai/openai_humaneval", "openai_humaneval/*.parquet", "modelscope/humaneval", "*"),
                DataSource(
                    "http", "https://raw.githubusercontent.com/openai/human-eval/master/data/HumanEval.jsonl.gz"
                ),
            ),
        ),
        DataSet(
            "core",
            "eval",
            "the bundle of 22 tasks behind the CORE score",
            (DataSource("http", "https://karpathy-public.s3.us-west-2.amazonaws.com/eval_bundle.zip"),),
        ),
    )
}

# Other names of a set: in folders that people share, and in older guides.
ALSO = {"eval_bundle": "core", "smol-smoltalk": "smoltalk", "climbmix-400b-shuffle": "climbmix", "ai2_arc": "arc"}


def find_set(word: str, source: str = "") -> DataSet:
    """A name, OWNER/NAME, models/OWNER/NAME or URL -> the set, cut down to `source` (hf, modelscope, http) if given."""
    dataset = SETS.get(ALSO.get(word.lower(), word.lower())) or _unnamed(word)
    if source not in ("hf", "modelscope", "http"):
        return dataset
    kept = tuple(s for s in dataset.sources if s.hub == source)
    if not kept:
        has = ", ".join(dict.fromkeys(s.hub for s in dataset.sources))
        raise UserError(
            f"{redact(word)} is not known on {source}; it is on: {has} (leave out --source to try them in order). A "
            f"copy that you know there has its own name: ascendchat data fetch OWNER/NAME --source {source}"
        )
    return replace(dataset, sources=kept)


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
    """The parts of a URL; the error for a malformed one does not repeat it, for a password may be in the wrong part."""
    try:
        url = urlsplit(word)
        whole = bool(url.hostname) and url.port != 0 and not re.search(r"[\s\x00-\x1f\x7f]", word)
    except ValueError:  # the port is not a number, or [ ] are not around an address
        whole = False
    if not whole:
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
