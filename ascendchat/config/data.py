"""Configs of the commands around data: data fetch, verify and prepare, tokenizer train and eval."""

from __future__ import annotations

from dataclasses import dataclass

from ascendchat.config.flags import option

HUGGING_FACE = "https://huggingface.co"
MIRROR = "https://hf-mirror.com"  # a mirror of Hugging Face


@dataclass(frozen=True)
class TokenizerTrainConfig:
    """Learn a vocabulary: byte-level BPE, saved for ascendchat and for Hugging Face tokenizers."""

    paths: tuple[str, ...] = option((), words="each")
    "files or folders of text (jsonl, parquet, txt, compressed or not); by default the embedded corpus"
    source: tuple[str, ...] = ()
    "files or folders of text as a flag: --source A B or --source A,B; read before the others"
    vocab_size: int | None = option(None, least=1, most=1e7)
    "ids, special tokens included; by default near the square root of the text's bytes, 1024 to 32768 (embedded: 32768)"
    out: str = ""
    "folder to write; by default $ASCENDCHAT_HOME/tokenizer"
    max_chars: int | None = option(None, least=1, most=1e15)
    "stop after so many characters, read source after source (with --mix: side by side); Chinese needs 80 bytes each"
    mix: tuple[float, ...] = option((), above=0, most=1e9)
    "one weight per source, its share of the bytes (1,1 is half and half); ends when one source is used up"


@dataclass(frozen=True)
class TokenizerEvalConfig:
    """Bytes per token of a tokenizer on files or folders, beside GPT-2, Qwen or any other tokenizer.json."""

    paths: tuple[str, ...] = option((), words="each")
    "files or folders of text; each is measured on its own"
    source: tuple[str, ...] = ()
    "files or folders of text as a flag"
    tokenizer: str = ""
    "folder of the tokenizer; by default $ASCENDCHAT_HOME/tokenizer"
    against: tuple[str, ...] = ()
    "tokenizers to compare with, as NAME=PATH of a tokenizer.json (or its folder), or names of the hub: gpt2,qwen"
    max_chars: int | None = option(None, least=1, most=1e15)
    "maximum number of characters read from each source"
    json: bool = False
    "print JSON"


@dataclass(frozen=True)
class DataPrepareConfig:
    """Turn documents into token shards that training maps into memory; a killed run continues."""

    paths: tuple[str, ...] = option((), words="each")
    "files, folders, patterns or names of fetched sets; `toyworld` is the embedded corpus"
    source: tuple[str, ...] = ()
    "documents as a flag: --source A.jsonl.xz B/ or --source A.jsonl.xz,B/"
    tokenizer: str = ""
    "folder of the tokenizer; by default $ASCENDCHAT_HOME/tokenizer"
    out: str = ""
    "folder to write, which then holds the sources of this command only; by default $ASCENDCHAT_HOME/data/prepared"
    field: str = "text"
    "name of the field or column that holds the text"
    val_fraction: float | None = option(None, least=0, below=1)
    """share of the documents, chosen by their hash, kept for validation; by default 0.01, and none of a set that has a
    validation file (climbmix), which is never trained on"""
    val_source: tuple[str, ...] = ()
    "validation documents from these files instead; nothing is taken from the sources then"
    weights: tuple[float, ...] = option((), above=0, most=1e9)
    "one weight per source, its share of the training tokens; by default sources add up, each counts by its size"
    workers: int | None = option(None, least=1, most=1000)
    "processes that encode; by default one per core"


@dataclass(frozen=True)
class DataFetchConfig:
    """Bring data sets to this machine: resumed, verified, once for all processes. Without a name, list the names."""

    names: tuple[str, ...] = option((), words="each")
    "names of sets, OWNER/NAME of a hub (models/OWNER/NAME for a model), or URLs"
    files: str = ""
    "only files that match these patterns, separated by commas: 'data/train-*.parquet'"
    shards: int | None = option(None, least=0, most=1e6)
    "fetch the first N files (0: all); by default a number that suits the set; a validation file always comes along"
    out: str = ""
    "folder that gets one folder per set; by default $ASCENDCHAT_HOME/data"
    source: str = ""
    "hf, modelscope, http, or a local folder that has the files; by default the hubs in order"
    offline: bool = False
    "use only what is on disk and say what is missing (also HF_HUB_OFFLINE=1)"
    workers: int = option(8, least=1, most=1000)
    "connections at the same time"


@dataclass(frozen=True)
class DataVerifyConfig:
    """Compare everything stored with its recorded size and sha256; name what is damaged and how to mend it."""

    names: tuple[str, ...] = option((), words="each")
    "names of sets or folders; by default everything under $ASCENDCHAT_HOME"
    json: bool = False
    "print one JSON object"
    workers: int = option(0, least=0, most=1000)
    "files compared at the same time; 0: one per core"
