"""Every flag of every command against generated bad values: a sentence and status 2, or a value that means something.

python -m pytest -m '' tests/config/test_flags.py
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import itertools
import json
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ascendchat import cli
from ascendchat.config import convert, parse, spelling
from ascendchat.config.help import Range, field_groups
from ascendchat.errors import UserError

ROOT = Path(__file__).resolve().parent.parent.parent
BAD_NUMBERS = ("", " ", "none", "null", "abc", "true", "-1", "-5", "-0.5", "0", "0.5", "nan", "inf", "-inf", "1e999")
BAD_NUMBERS += ("9" * 20, "9" * 5000, "1,2", "0x10")
ODD_TEXTS = ("none", "0", "x" * 300, "a=")
MORE_ODD_TEXTS = ("-1", "nan", "/nowhere/at/all", "=1", "toyworld=nan")


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


def needed(command: str) -> list[str]:
    """The words that a command cannot do without."""
    return ["doctor"] if command == "launch" else []


def outcome(command: str, flag: str, value: str) -> Any:
    """The config that a value gives, or the sentence it is answered with."""
    try:
        return parse(config_of(command), [f"{flag}={value}", *needed(command)])
    except UserError as error:
        return str(error)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_a_bad_number_is_refused_or_lies_in_the_range_that_is_declared(command: str, tmp_path: Path) -> None:
    numbers = [(field, kind) for field, kind in fields_of(command) if kind in (int, float)]
    assert numbers or command not in ("plan", "base", "rl", "serve")
    for field, kind in numbers:
        flag, bounds, refused = spelling(field.name), field.metadata.get("range", Range()), 0
        assert bounds.least is not None or bounds.above is not None, f"{command} {flag}: least=... or above=..."
        assert bounds.most is not None or bounds.below is not None, f"{command} {flag}: most=... or below=..."
        for value in field.default if isinstance(field.default, tuple) else (field.default,):
            assert value is None or value in bounds, flag
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
                most = 1e18 if kind is int else 1e30
                assert item is None or (item == convert(flag, kind, item) and abs(item) <= most)
        assert refused >= 10, flag
        (tmp_path / "c.yaml").write_text(json.dumps({field.name: -1e30}))
        with pytest.raises(UserError, match=rf"c\.yaml: {field.name} must be "):
            parse(config_of(command), ["--config", str(tmp_path / "c.yaml"), *needed(command)])


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_an_empty_text_is_refused(command: str) -> None:
    texts = [field for field, kind in fields_of(command) if kind is str]
    for field in texts:
        assert "has an empty value; leave the flag out" in outcome(command, spelling(field.name), "  ")
        if field.metadata.get("words") == "each":
            with pytest.raises(UserError, match="has an empty value"):
                parse(config_of(command), [""])


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
    from ascendchat.data.tokenizer.tokenizer import train_tokenizer

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


def numbers_of(command: str) -> Iterator[list[str]]:
    """Numbers that are parsed, and could still go wrong: the least of each range, and those besides it."""
    for field, kind in fields_of(command):
        if field.metadata.get("words") or field.name == "shards":
            continue
        if kind in (int, float):
            bounds = field.metadata.get("range", Range())
            least = bounds.least if bounds.least is not None else kind(bounds.above) + 1e-6
            yield from ([spelling(field.name), str(value)] for value in (kind(least), *bounds.besides))


def texts_of(command: str, odd: tuple[str, ...]) -> Iterator[list[str]]:
    """Texts that are parsed, and mean nothing."""
    for field, kind in fields_of(command):
        if kind is str and not field.metadata.get("words") and field.name not in ("shards", "prompt", "system"):
            yield from ([f"{spelling(field.name)}={value}"] for value in odd)


def tracebacks(flags_given: Iterable[list[str]], answer: Callable[[list[str]], tuple[int, str]]) -> str:
    """Of each run of a command that ends in a traceback, or says too little."""
    wrong = []
    for flags in flags_given:
        status, said = answer(flags)
        if "Traceback" in said or status not in (0, 2):
            error = [line for line in said.splitlines() if line.strip().startswith("File ") or "Error" in line]
            wrong.append(f"{flags} status {status}\n" + "\n".join(error[-3:]))
        elif status == 2 and len(said.strip().splitlines()[-1]) < 30:
            wrong.append(f"{flags} status {status}\n{said}")
    return "\n\n".join(wrong)


@pytest.fixture
def answer(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> Callable[[list[str]], tuple[int, str]]:
    """Runs the command of a test with more flags: its status, and what it wrote to standard error."""
    return lambda flags: (run(command, flags, folder, monkeypatch), capsys.readouterr().err)


@pytest.mark.slow
@pytest.mark.parametrize("command", [name for name in SMALL if name != "sft"])
def test_no_flag_ends_in_a_traceback(command: str, answer: Callable[[list[str]], tuple[int, str]]) -> None:
    """One odd text for each flag, another for the next. Of `mid`, what `base` does not have."""
    odd = [list(texts_of(command, (text,)))[number::4] for number, text in enumerate(ODD_TEXTS)]
    same = [*numbers_of("base"), *texts_of("base", ODD_TEXTS)] if command == "mid" else []
    given = [flags for flags in (*numbers_of(command), *itertools.chain(*odd)) if flags not in same]
    assert tracebacks(given, answer) == ""


@pytest.mark.long(short="test_no_flag_ends_in_a_traceback")
@pytest.mark.parametrize("command", [name for name in SMALL if name != "sft"])
def test_no_odd_text_ends_in_a_traceback(command: str, answer: Callable[[list[str]], tuple[int, str]]) -> None:
    if command == "mid":
        assert list(numbers_of("sft")) == list(numbers_of("mid")), "the same code reads them, so one stands for both"
        assert tracebacks(numbers_of(command), answer) == ""
    assert tracebacks(texts_of(command, ODD_TEXTS + MORE_ODD_TEXTS), answer) == ""


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


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_a_long_help_page_is_in_groups(command: str) -> None:
    groups = field_groups(config_of(command))
    assert sorted(itertools.chain(*groups.values())) == sorted(field.name for field in fields_alone(command))
    assert all(len(names) <= 20 for names in groups.values())
    assert sum(map(len, groups.values())) <= 16 or len(groups) > 1


def fields_alone(command: str) -> list[dataclasses.Field[Any]]:
    return [field for field, _ in fields_of(command)]


def test_no_command_asks_whether_its_config_has_a_field() -> None:
    """Where a file knows configs of ours, a field that only some of them have is reached by their type."""
    wrong = []
    for path in (ROOT / "ascendchat").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "from ascendchat.config." in text and path.parent.name != "config":
            calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
            asked = [ast.unparse(call) for call in calls if ast.unparse(call.func) in ("getattr", "hasattr")]
            wrong += [f"{path}: {call}" for call in asked if re.match(r"\w+\((self\.)?(config|cls)\b", call)]
    assert wrong == []


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
