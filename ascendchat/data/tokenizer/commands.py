"""The commands `ascendchat tokenizer train` and `ascendchat tokenizer eval`."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ascendchat.data.read import format_of, read_documents, source_files, unpack
from ascendchat.data.tokenizer.bpe import MAX_COUNTED_BYTES, MAX_VOCAB, vocab_for
from ascendchat.errors import UserError, home
from ascendchat.files import check_folder

if TYPE_CHECKING:
    from ascendchat.config.data import TokenizerEvalConfig, TokenizerTrainConfig

HUB_NAMES = {"gpt2": "openai-community/gpt2", "qwen": "Qwen/Qwen2.5-0.5B", "qwen2.5": "Qwen/Qwen2.5-0.5B"}
BATCH = 256  # documents encoded at once


def interleave(streams: Sequence[Iterator[str]], weights: Sequence[float]) -> Iterator[str]:
    """Interleave the documents of several sources, their UTF-8 bytes in the ratio of the weights; ends when one
    source is used up."""
    byte_counts = [0.0] * len(streams)
    while True:
        number = min(range(len(streams)), key=lambda i: byte_counts[i] / weights[i])
        try:
            text = next(streams[number])
        except StopIteration:
            return
        byte_counts[number] += len(text.encode("utf-8", "replace"))
        yield text


def first_chars(texts: Iterable[str], limit: int | None) -> Iterator[str]:
    """Yield the first `limit` characters; the last document is cut."""
    left = sys.maxsize if limit is None else limit
    for text in texts:
        if left <= 0:
            return
        yield text[:left]
        left -= len(text)


class _TextCounter:
    """Passes texts through, and counts documents and characters."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts, self.documents, self.chars = texts, 0, 0

    def __iter__(self) -> Iterator[str]:
        for text in self.texts:
            self.documents += 1
            self.chars += len(text)
            yield text


def count_bytes(texts: Iterable[str]) -> int:
    """Count the UTF-8 bytes of the texts; reads on only while they can change `vocab_for`."""
    count = 0
    for text in texts:
        count += len(text.encode())
        if count >= MAX_COUNTED_BYTES:
            break
    return count


def is_embedded(sources: Sequence[str]) -> bool:
    """True if the sources mean the embedded corpus."""
    return not sources or list(sources) == ["toyworld"]


def training_texts(sources: Sequence[str], mix: Sequence[float], max_chars: int | None, out: Path) -> Iterator[str]:
    """Yield the training texts that a command names, without what lies in `out`; without sources, the embedded
    corpus."""
    if mix and (len(mix) != len(sources) or min(mix) <= 0):
        raise UserError(f"--mix needs one positive weight per source: {len(sources)} sources, {len(mix)} weights")
    if is_embedded(sources):
        from ascendchat.data import toyworld

        return first_chars(toyworld.texts(), max_chars)
    if mix:
        return first_chars(
            interleave([read_documents(training_files([source], out)) for source in sources], mix), max_chars
        )
    return first_chars(read_documents(training_files(sources, out)), max_chars)


def training_files(sources: Sequence[str], out: Path) -> list[Path]:
    """List the files to learn from: not those in `out`, nor the validation file of a set that was fetched."""
    from ascendchat.data.fetch.folder import validation_files  # slow to import, and only training needs it

    files = source_files(sources, [out])
    held_out = validation_files(files) - {Path(source) for source in sources}
    return [file for file in files if file not in held_out]


def choose_size(config: TokenizerTrainConfig, sources: Sequence[str], out: Path) -> tuple[int, str]:
    """(ids to learn, their reason in the words of the printed line); reads the text once to count it."""
    if config.vocab_size is not None:
        return config.vocab_size, "from"
    if is_embedded(sources):
        return MAX_VOCAB, "from"
    texts = training_texts(sources, config.mix, config.max_chars, out)
    for path in training_files(sources, out):
        if not path.is_file():
            raise UserError(f"{path} is a pipe: its text cannot be counted before it is used; give --vocab-size N")
    count = count_bytes(texts)
    amount = f"{count / 1e6:.1f}" if count < MAX_COUNTED_BYTES else f"over {MAX_COUNTED_BYTES // 10**6}"
    return vocab_for(count), f"for {amount} MB of text,"


def train_command(config: TokenizerTrainConfig) -> int:
    """Run `ascendchat tokenizer train`: learn a vocabulary and write its folder."""
    from ascendchat.data.tokenizer.tokenizer import train_tokenizer

    sources = (*config.source, *config.paths)  # the order in which `--source A B` was written
    out = Path(config.out) if config.out else home() / "tokenizer"
    check_folder(out)
    started = time.monotonic()
    size, reason = choose_size(config, sources, out)
    meter = _TextCounter(training_texts(sources, config.mix, config.max_chars, out))
    tokenizer = train_tokenizer(meter, size)
    if not meter.chars:
        raise UserError("the sources hold no text; give other files with --source")
    tokenizer.save(out, _command(config, size, sources, out))
    print(
        f"{out}: {tokenizer.vocab_size} ids {reason} {meter.documents} documents, {meter.chars / 1e6:.1f} million "
        f"characters, {time.monotonic() - started:.1f} s; fingerprint {tokenizer.fingerprint[:12]}"
    )
    if tokenizer.vocab_size < size:
        print(
            f"notice: the texts hold too few repeated pairs for {size} ids; the vocabulary has {tokenizer.vocab_size}",
            file=sys.stderr,
        )
    return 0


def _command(config: TokenizerTrainConfig, size: int, sources: Sequence[str], out: Path) -> str:
    """The command that makes the folder again; stored in its manifest."""
    words = ["ascendchat", "tokenizer", "train", *(str(Path(source).absolute()) for source in sources)]
    words += ["--vocab-size", str(size), "--out", str(out.absolute())]
    if config.mix:
        words += ["--mix", ",".join(map(str, config.mix))]
    if config.max_chars is not None:
        words += ["--max-chars", str(config.max_chars)]
    return shlex.join(words)


Count = Callable[[list[str]], int]  # texts -> number of tokens


def other_tokenizer(spec: str) -> tuple[str, int, Count]:
    """Open `name=PATH` of a tokenizer.json (compressed or not) or its folder, or a name of the hub: (name, ids,
    counter)."""
    from tokenizers import Tokenizer

    name, equals, where = spec.partition("=")
    path = Path(where if equals else spec)
    if path.is_dir():
        files = sorted(path.glob("tokenizer.json*"))
        if not files:
            raise UserError(f"the folder {path} holds no tokenizer.json; name another one with --against NAME=PATH")
        path = files[0]
    if path.is_file():
        name = name if equals else path.parent.name
        try:
            with path.open("rb") as file:
                other = Tokenizer.from_str(unpack(file, format_of(path.name)[1]).read().decode())
        except Exception as error:  # noqa: BLE001 (the tokenizers library raises bare Exception)
            raise UserError(f"{path} cannot be read as a tokenizer.json: {error}; fetch it again") from None
    elif equals:
        raise UserError(f"there is no file {path}; --against {name}=PATH needs a tokenizer.json or its folder")
    else:
        try:
            other = Tokenizer.from_pretrained(HUB_NAMES.get(spec.lower(), spec))
        except Exception as error:  # noqa: BLE001 (as above; also every network error)
            short = " ".join(str(error).split())[:200]
            raise UserError(f"cannot fetch {spec} ({short}); give its file: --against {spec}=PATH") from None
    other.no_truncation()
    other.encode_special_tokens = True  # count look-alikes of special tokens as text, as we do
    return (
        name,
        other.get_vocab_size(with_added_tokens=True),
        lambda texts: sum(len(row.ids) for row in other.encode_batch_fast(texts, add_special_tokens=False)),
    )


def _label(source: str) -> str:
    return "/".join(Path(source).parts[-2:])


def bytes_per_token(sources: Sequence[str], counters: dict[str, Count], max_chars: int | None) -> list[dict[str, Any]]:
    """Measure every source: documents, bytes, and the bytes per token of every tokenizer."""
    rows = []
    for source in sources:
        size = count = 0
        tokens = dict.fromkeys(counters, 0)
        batch: list[str] = []

        def flush(batch: list[str], tokens: dict[str, int]) -> None:
            for name, counter in counters.items():
                tokens[name] += counter(batch)
            batch.clear()

        for text in first_chars(read_documents([source]), max_chars):
            batch.append(text)
            size += len(text.encode())
            count += 1
            if len(batch) == BATCH:
                flush(batch, tokens)
        flush(batch, tokens)
        if not size:
            raise UserError(f"{source} holds no text; give other files")
        ratios = {name: size / tokens[name] for name in counters}
        rows.append({"source": source, "documents": count, "bytes": size, "bytes_per_token": ratios})
    return rows


def eval_command(config: TokenizerEvalConfig) -> int:
    """Run `ascendchat tokenizer eval`: bytes per token on each source, beside other tokenizers."""
    from ascendchat.data.tokenizer.tokenizer import Tokenizer

    sources = (*config.source, *config.paths)  # the order in which `--source A B` was written
    if not sources:
        raise UserError("no text to measure; name files: ascendchat tokenizer eval FILE --against gpt2=PATH")
    folder = Path(config.tokenizer) if config.tokenizer else home() / "tokenizer"
    tokenizer = Tokenizer.load(folder)
    sizes: dict[str, int] = {"ours": tokenizer.vocab_size}
    counters: dict[str, Count] = {"ours": lambda texts: sum(map(len, tokenizer.encode_batch(texts)))}
    for spec in config.against:
        name, size, counter = other_tokenizer(spec)
        if name in counters:
            raise UserError(f"two tokenizers are called {name}; name them apart: --against NAME=PATH,OTHER=PATH")
        sizes[name], counters[name] = size, counter
    rows = bytes_per_token(sources, counters, config.max_chars)
    if config.json:
        result = {"tokenizer": str(folder), "fingerprint": tokenizer.fingerprint, "vocab_size": sizes, "sources": rows}
        print(json.dumps(result, ensure_ascii=False))
    else:
        print("\n".join(_table(sizes, rows)))
    return 0


def _table(sizes: dict[str, int], rows: list[dict[str, Any]]) -> Iterator[str]:
    """Format tokenizers down, sources across: bytes per token, and ours as a share of the other's."""
    labels = [_label(row["source"]) for row in rows]
    width = max(24, *(len(label) + 2 for label in labels))
    wide = max(12, *(len(name) + 2 for name in sizes))
    yield "bytes per token (more is better; in brackets, ours divided by it)"
    yield f"{'':<{wide}}{'ids':>9}" + "".join(f"{label:>{width}}" for label in labels)
    for name, size in sizes.items():
        cells = []
        for row in rows:
            value, ours = row["bytes_per_token"][name], row["bytes_per_token"]["ours"]
            cells.append(f"{value:.3f}" + ("        " if name == "ours" else f" ({ours / value:4.0%}) "))
        yield f"{name:<{wide}}{size:>9}" + "".join(f"{cell:>{width}}" for cell in cells)
