"""Every flag of every command against generated bad values: a sentence and status 2, or a value that means something.

python -m pytest -m '' tests/unit/test_flags.py
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ascendchat import cli
from ascendchat.config import UserError, convert, parse, spelling
from ascendchat.config.text import Range

ROOT = Path(__file__).resolve().parent.parent.parent
BAD_NUMBERS = (
    "",
    " ",
    "none",
    "null",
    "abc",
    "true",
    "-1",
    "-5",
    "-0.5",
    "0",
    "0.5",
    "nan",
    "inf",
    "-inf",
    "1e999",
    "9" * 20,
    "9" * 5000,
    "1,2",
    "0x10",
)
BAD_TEXTS = ("none", "-1", "0", "nan", "x" * 300, "/nowhere/at/all", "a=", "=1", "toyworld=nan")


def config_of(command: str) -> type:
    module, name = cli.COMMANDS[command][0].split(":")
    found: type = getattr(importlib.import_module(f"ascendchat.config.{module}"), name)
    return found


def fields_of(command: str) -> Iterator[tuple[dataclasses.Field[Any], Any]]:
    """Fields with the type of one value: int of `int | None` and of `tuple[int, ...]`."""
    cls = config_of(command)
    kinds = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        kind = kinds[field.name]
        if typing.get_origin(kind) in (typing.Union, types.UnionType):
            kind = next(a for a in typing.get_args(kind) if a is not type(None))
        yield field, typing.get_args(kind)[0] if typing.get_origin(kind) is tuple else kind


NUMBERS = [(command, field) for command in cli.COMMANDS for field, kind in fields_of(command) if kind in (int, float)]
TEXTS = [(command, field) for command in cli.COMMANDS for field, kind in fields_of(command) if kind is str]


def named(case: object) -> str:
    return case.name if isinstance(case, dataclasses.Field) else str(case).replace(" ", "-")


def needed(command: str) -> list[str]:
    """The words that a command cannot do without."""
    return ["doctor"] if command == "launch" else []


def outcome(command: str, flag: str, value: str) -> Any:
    """The config that a value gives, or the sentence it is answered with."""
    try:
        return parse(config_of(command), [f"{flag}={value}", *needed(command)])
    except UserError as error:
        return str(error)


def test_every_command_has_numbers_and_texts_here() -> None:
    assert len(NUMBERS) > 90
    assert len(TEXTS) > 60


@pytest.mark.parametrize(("command", "field"), NUMBERS, ids=named)
def test_a_number_has_a_range_where_it_is_declared(command: str, field: dataclasses.Field[Any]) -> None:
    bounds = field.metadata.get("range", Range())
    assert bounds.least is not None or bounds.above is not None, f"{command} {field.name}: least=... or above=..."
    assert bounds.most is not None or bounds.below is not None, f"{command} {field.name}: most=... or below=..."
    for value in field.default if isinstance(field.default, tuple) else (field.default,):
        assert value is None or value in bounds


@pytest.mark.parametrize(("command", "field"), NUMBERS, ids=named)
def test_a_bad_number_is_refused_or_means_something(command: str, field: dataclasses.Field[Any]) -> None:
    kind, flag = dict((f.name, k) for f, k in fields_of(command))[field.name], spelling(field.name)
    bounds, refused = field.metadata["range"], 0
    for value in BAD_NUMBERS:
        found = outcome(command, flag, value)
        if isinstance(found, str):
            assert flag in found
            assert "\n" not in found
            refused += 1
            continue
        got = getattr(found, field.name)
        for item in got if isinstance(got, tuple) else (got,):
            assert item is None if value in ("none", "null") else item in bounds
            assert item is None or (item == convert(flag, kind, item) and abs(item) <= (1e18 if kind is int else 1e30))
    assert refused >= 10


@pytest.mark.parametrize(("command", "field"), NUMBERS, ids=named)
def test_yaml_is_held_to_the_same_range(command: str, field: dataclasses.Field[Any], tmp_path: Path) -> None:
    bounds: Range = field.metadata["range"]
    high = bounds.most if bounds.most is not None else bounds.below
    for value in (-1e30, high * 2 + 1):
        (tmp_path / "c.yaml").write_text(json.dumps({field.name: value}))
        with pytest.raises(UserError, match=rf"c\.yaml: {field.name} must be "):
            parse(config_of(command), ["--config", str(tmp_path / "c.yaml"), *needed(command)])


@pytest.mark.parametrize(("command", "field"), TEXTS, ids=named)
def test_an_empty_text_is_refused(command: str, field: dataclasses.Field[Any]) -> None:
    for value in ("", "  "):
        assert "has an empty value; leave the flag out" in outcome(command, spelling(field.name), value)
        if field.metadata.get("words") == "each":
            with pytest.raises(UserError, match="has an empty value"):
                parse(config_of(command), [value])


# What each command is run with: small enough for a second. FOLDER is a home with a corpus and a model.
ROWS = "--max-seq-len 32 --device-batch-size 2 --total-batch-size 64 --device-type cpu"
TRAINED = f"{ROWS} --steps 1 --eval-every -1 --sample-every 0 --resume never"
SMALL = {
    "plan": "--depth 2 --chip H100",
    "data fetch": "core --offline",
    "data prepare": "FOLDER/text.jsonl --tokenizer FOLDER/tokenizer --out FOLDER/out --workers 1",
    "data verify": "words",
    "tokenizer train": "FOLDER/text.jsonl --vocab-size 300 --out FOLDER/other",
    "tokenizer eval": "FOLDER/text.jsonl --tokenizer FOLDER/tokenizer",
    "base": f"--depth 1 --dim 16 --data FOLDER/words --eval-tokens 64 {TRAINED} --run again",
    "mid": f"--run tiny --data FOLDER/chats.jsonl {TRAINED}",
    "sft": f"--run tiny --data FOLDER/chats.jsonl {TRAINED}",
    "eval base": "--run tiny --eval bpb --eval-tokens 64 --device-type cpu",
    "eval chat": "--run tiny --tasks toy_fact_en --max-per-task 1 --max-new-tokens 2 --device-type cpu",
    "chat": "--run tiny --prompt hello --max-tokens 2 --device-type cpu",
    "bench train": f"--depth 1 --dim 16 --vocab-size 300 --steps-to-time 1 {ROWS}",
    "bench decode": "--depth 1 --vocab-size 300 --batch-sizes 1 --prompt-tokens 2 --new-tokens 4 --context 64 "
    "--device-type cpu",
    "explain": "FOLDER/text.jsonl",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with text, conversations, a tokenizer, a corpus and a model of one step."""
    from ascendchat.data.prepare import prepare
    from ascendchat.data.tokenizer import train_tokenizer

    where = tmp_path_factory.mktemp("flags")
    texts = [f"the {a} tree under the {b} river sings over the stone" for a in "abcdef" for b in "uvwxyz"]
    chats = [[{"role": "user", "content": t}, {"role": "assistant", "content": t[::-1]}] for t in texts]
    (where / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    (where / "chats.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    train_tokenizer(texts, 300).save(where / "tokenizer")
    prepare([str(where / "text.jsonl")], where / "tokenizer", where / "words", val_fraction=0.2, workers=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ASCENDCHAT_HOME", str(where))
        for stage in ("base", "mid", "sft"):
            assert cli.main([stage, *words_of(stage, where), "--run", "tiny"]) == 0
    return where


def words_of(command: str, folder: Path) -> list[str]:
    return SMALL[command].replace("FOLDER", str(folder)).split()


def run(command: str, more: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("ASCENDCHAT_HOME", str(folder))
    monkeypatch.chdir(folder)
    return cli.main([*command.split(), *words_of(command, folder), *more])


def risky(command: str) -> Iterator[list[str]]:
    """Flags that are parsed, and could still go wrong: the least number of each range, and odd texts."""
    for field, kind in fields_of(command):
        if field.metadata.get("words") or field.name in ("shards", "prompt", "system"):
            continue
        bounds = field.metadata.get("range", Range())
        if kind in (int, float):
            least = bounds.least if bounds.least is not None else kind(bounds.above) + 1e-6
            yield from ([spelling(field.name), str(value)] for value in (kind(least), *bounds.besides))
        elif kind is str:
            yield from ([f"{spelling(field.name)}={value}"] for value in BAD_TEXTS)


@pytest.mark.slow
@pytest.mark.parametrize("command", [name for name in SMALL if name != "sft"])
def test_no_flag_ends_in_a_traceback(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = []
    if command == "mid":
        assert list(risky("sft")) == list(risky("mid")), "the same code reads them, so one stands for both"
    for flags in risky(command):
        status, said = run(command, flags, folder, monkeypatch), capsys.readouterr()
        if "Traceback" in said.err or status not in (0, 2):
            error = [line for line in said.err.splitlines() if line.strip().startswith("File ") or "Error" in line]
            wrong.append((flags, status, "\n".join(error[-3:])))
        elif status == 2 and len(said.err.strip().splitlines()[-1]) < 30:
            wrong.append((flags, status, said.err))
    assert not wrong, "\n\n".join(f"{flags} status {status}\n{err}" for flags, status, err in wrong)


SOMETIMES = {"mid": {"epochs"}, "sft": {"epochs"}}  # not with --steps


@pytest.mark.slow
@pytest.mark.parametrize("command", [name for name in SMALL if name not in ("plan",)])
def test_a_command_reads_every_flag_it_accepts(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cls, read = config_of(command), set[str]()
    names = {field.name for field in dataclasses.fields(cls)}

    def note(config: Any, name: str) -> Any:
        if name in names and sys._getframe(1).f_globals.get("__name__") != "dataclasses":  # not asdict and replace
            read.add(name)
        return object.__getattribute__(config, name)

    monkeypatch.setattr(cls, "__getattribute__", note, raising=False)
    run(command, [], folder, monkeypatch)
    assert names - read - SOMETIMES.get(command, set()) == set()


def attributes() -> set[str]:
    """Names that are read from something in ascendchat/, the configs themselves aside."""
    found = set()
    for path in (ROOT / "ascendchat").rglob("*.py"):
        if path.parent.name != "config":
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                    found.add(node.attr)
    return found


def test_every_field_of_every_config_is_read_somewhere() -> None:
    known = attributes()
    unread = {(c, f.name) for c in cli.COMMANDS for f in dataclasses.fields(config_of(c)) if f.name not in known}
    assert not unread
