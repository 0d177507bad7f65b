"""What our texts tell a user to type can be typed: commands and flags exist, and pip installs what it is told to."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

from ascendchat import config
from ascendchat.cli import COMMANDS
from ascendchat.doctor.explain_rules import all_rules, answer
from ascendchat.doctor.machine import faults

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "ascendchat").rglob("*.py"))
# Flags of other programs: docker, pip, srun, ps, git, torchrun, tensorboard, vLLM, vendor tools and installers.
OTHERS = set(
    "device shm-size ipc net upgrade version only-binary no-build-isolation force-reinstall install format sort "
    "query-gpu query-compute-apps ntasks-per-node rdzv-backend porcelain logdir pid "
    "weight-transfer-config additional-config worker-extension-cls index-url extra-index-url".split()
)
PROSE = set("command computes does is itself knows leaves needs or stopped trains".split())  # `ascendchat needs ...`
STANDING_IN = {"flags", "X", "no-X"}  # `--flags` in a usage line; `--{name}` in an f-string


def flags_of(command: str) -> set[str]:
    """Every spelling of every flag of a command, with dashes."""
    module, name = COMMANDS[command][0].split(":")
    known = config.flags_of(getattr(importlib.import_module(f"ascendchat.config.{module}"), name))
    return {flag.replace("_", "-") for flag in [*known, *(f"no_{flag}" for flag in known), "config", "help"]}


KNOWN = {command: flags_of(command) for command in COMMANDS}
ANY = set().union(*KNOWN.values())


def texts(path: Path) -> Iterator[str]:
    """The strings of a file that are no docstrings; what an f-string fills in is written X."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(part) for part in ast.walk(node)}
            yield "".join(str(v.value) if isinstance(v, ast.Constant) else "X" for v in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.value


def rule_texts() -> Iterator[str]:
    """All that `ascendchat explain` can say, and the faults that `ascendchat doctor` finds; `{slots}` are empty."""
    for text in _rule_texts():
        yield re.sub(r"\{\w+\}", "", text)


def _rule_texts() -> Iterator[str]:
    for fault in (fault for kinds in faults().values() for fault in kinds.values()):
        for text in fault.values():
            yield from [text] if isinstance(text, str) else text.values()
    for rules in all_rules():
        for rule in rules:
            for words in (rule.title, rule.cause, *rule.check):
                yield from words.values()
            yield from (*rule.symptoms["en"], *rule.symptoms["zh"], *rule.commands)
    for said in answer().values():
        for words in said if isinstance(said, list) else [said]:
            yield from words.values()


def commands_in(text: str) -> Iterator[tuple[str, str]]:
    """(command, the words behind it) for each `ascendchat COMMAND ...` that a text tells the user to type."""
    for begin in re.finditer(r"(?<![\w/.-])ascendchat (?=[a-z])", text):
        rest = re.split(r"[`;,|()\n，。；、（）]|\.(?:\s|$)|  #|: | && ", text[begin.end() :])[0]
        words = rest.split()
        name = next((n for n in (" ".join(words[:2]), words[0]) if n in COMMANDS), "")
        if name:
            yield name, rest[len(name) :]
        elif words[0] not in PROSE:
            yield rest, ""


def wrong(text: str) -> list[str]:
    """Commands and flags in a text that do not exist."""
    found = []
    for name, rest in commands_in(text):
        if name not in COMMANDS:
            found.append(f"ascendchat {name}")
            continue
        inner = next((w for w in rest.split() if w in COMMANDS), "") if name == "launch" else ""
        known = KNOWN[name] | (KNOWN[inner] if inner else set()) | STANDING_IN
        for flag in re.findall(r"(?<![\w-])--([a-zA-Z][\w-]*)", rest):
            if flag.replace("_", "-") not in known:
                found.append(f"ascendchat {name} --{flag}")
    for flag in re.findall(r"(?<![\w-])--([a-zA-Z][\w-]*)", text):
        if flag.replace("_", "-") not in ANY | OTHERS | STANDING_IN:
            found.append(f"--{flag}")
    return found


def test_commands_and_flags_in_texts_exist() -> None:
    assert [f"{path}: {problem}" for path in SOURCES for text in texts(path) for problem in wrong(text)] == []
    assert [problem for text in rule_texts() for problem in wrong(text)] == []
    assert sum(1 for text in rule_texts() for _ in commands_in(text)) > 30


def test_nothing_tells_to_install_ascendchat_from_an_index_that_does_not_have_it() -> None:
    """It is installed from a clone (README): `pip install ascendchat` finds nothing, or a stranger's package."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "Makefile", ROOT / "constraints.txt"]
    names = ("scripts", "recipes", "cannsim", "ascendchat/doctor/rules")
    folders = [p for name in names for p in (ROOT / name).rglob("*") if "build" not in p.parts]
    wanted = re.compile(r"""pip3? install (?:-\S+ )*["']?ascendchat\b""")
    pages += [ROOT / "ascendchat" / "doctor" / "faults.json"]
    endings = (".py", ".md", ".yaml", ".json", ".sh", ".txt", "")
    files = [p for p in [*SOURCES, *pages, *folders] if p.suffix in endings]
    told = [str(p.relative_to(ROOT)) for p in files if p.is_file() and wanted.search(p.read_text(errors="replace"))]
    assert told == []
    assert wanted.search("pip install 'ascendchat[npu]'")
    assert wanted.search("pip install -U ascendchat")
    assert any("pip install -e '.[npu]'" in page.read_text(encoding="utf-8") for page in pages)
