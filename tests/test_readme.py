"""What README and docs show is true: every command and flag exists, links lead somewhere, pasted output is current.

python -m pytest tests/test_readme.py
"""

from __future__ import annotations

import importlib
import io
import json
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from ascendchat import cli
from ascendchat.config import flags_of, parse, wants_help
from ascendchat.errors import UserError

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "README.zh.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHELLS = ("bash", "console")  # ```console shows commands after "$ " and what they print
IN_PROGRESS: set[str] = set()  # commands in the table of cli.py that no page shows yet
QUICK = ("plan", "explain")  # under a second, the same on every machine: really run, and their output compared
# Files that examples name; the quick ones read them.
LOG = "step 17\nRuntimeError: NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; 60.96 GiB total)\n"
SAMPLES = {
    "train.log": LOG,
    "runs/my-run/logs/attempt_0/rank_0.log": LOG,
    "config.json": json.dumps(
        {
            "model_type": "qwen2",
            "num_hidden_layers": 24,
            "hidden_size": 896,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "intermediate_size": 4864,
            "vocab_size": 151936,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
        }
    ),
}


@dataclass(frozen=True)
class Example:
    """One command line of a page, and the lines printed below it (``...`` stands for left-out lines)."""

    page: str
    line: int
    text: str
    output: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: Path) -> list[tuple[str, int, list[str]]]:
    """(language, line number of the first line, lines) of every fenced block."""
    found, language, start, lines = [], None, 0, []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if not line.lstrip().startswith("```"):
            lines.append(line)
        elif language is None:
            language, start, lines = line.strip()[3:], number + 1, []
        else:
            found.append((language, start, lines))
            language, lines = None, []
    assert language is None, f"{page.name}: a fenced block is never closed"
    return found


def examples(page: Path) -> list[Example]:
    """Every command line in the shell blocks of a page, continued lines joined."""
    name, found = str(page.relative_to(ROOT)), []
    for language, start, lines in blocks(page):
        if language not in SHELLS:
            continue
        command, output, at = "", [], 0
        for number, line in enumerate(lines, start):
            if command.endswith("\\"):
                command = command[:-1] + line
            elif language == "bash" or line.startswith("$ "):
                if command:
                    found.append(Example(name, at, command, tuple(output)))
                command, output, at = line.removeprefix("$ "), [], number
            else:
                output.append(line)
        if command:
            found.append(Example(name, at, command, tuple(output)))
    return found


def simple_commands(text: str) -> list[list[str]]:
    """`a --x 1 | b > f && c` -> [[a, --x, 1], [b], [c]]; comments and redirections are left out."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|&;<>()")
    lexer.whitespace_split = True
    commands: list[list[str]] = [[]]
    skip = False
    for token in lexer:
        if skip:
            skip = False
        elif token in ("<", ">", ">>"):
            skip = True
        elif set(token) <= set("|&;()"):
            commands.append([])
        else:
            commands[-1].append(token)
    return [c for c in commands if c]


def ours(text: str) -> list[list[str]]:
    """The arguments of each `ascendchat ...` in a command line, also behind srun, cannsim, torchrun or python -m."""
    found = []
    for words in simple_commands(text):
        for at, word in enumerate(words):
            if word == "ascendchat" or word.endswith("/ascendchat"):
                if at == 0 or words[at - 1] not in ("cd", "clone", "import", "--user"):
                    found.append(words[at + 1 :])
                break
    return found


def check(arguments: list[str]) -> None:
    """Raise UserError unless the command exists and all its flags and values are accepted."""
    if not arguments or arguments[0] in ("--help", "--version"):
        return
    name, rest = cli.split_command(arguments)
    config = "ascendchat.config." + cli.COMMANDS[name][0]
    cls = getattr(importlib.import_module(config.split(":")[0]), config.split(":")[1])
    if wants_help(rest):
        return
    parsed = parse(cls, rest)
    if name == "launch" and not parsed.command[0].endswith(".py") and parsed.command[0] not in ("-m", "--"):
        check(list(parsed.command))


def refusal(arguments: list[str]) -> str:
    """What the command line would answer to wrong arguments, "" to right ones."""
    try:
        check(arguments)
    except UserError as error:
        return str(error)
    return ""


EXAMPLES = [example for page in PAGES for example in examples(page)]
OURS = [example for example in EXAMPLES if ours(example.text)]


@pytest.mark.parametrize("readme", ["README.md", "README.zh.md"])
def test_the_readme_lists_every_command_that_is_ready(readme: str) -> None:
    listed = re.findall(r"^\| `ascendchat ([a-z -]+)`", (ROOT / readme).read_text(encoding="utf-8"), flags=re.M)
    assert sorted(listed) == sorted(set(cli.COMMANDS) - IN_PROGRESS), "mend the table of commands, or IN_PROGRESS"


def test_every_listed_command_has_an_example() -> None:
    shown = {" ".join(words[: len(name.split())]) for name in cli.COMMANDS for e in OURS for words in ours(e.text)}
    assert set(cli.COMMANDS) - IN_PROGRESS <= shown, "a command is in no page"
    assert len(OURS) > 60


def test_shown_commands_and_their_flags_exist() -> None:
    wrong = []
    for example in OURS:
        for problem in map(refusal, ours(example.text)):
            if problem and not any(problem in line for line in example.output):  # a page may show what is refused
                wrong.append(f"{example}: {example.text}\n{problem}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_inside_sentences_exist_too(page: Path) -> None:
    text = re.sub(r"^\s*```.*?^\s*```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for code in re.findall(r"`(?:\.venv/bin/)?ascendchat ([^`]+)`", text):
        words = code.split()
        if words[0].isupper() or words[0].startswith("-"):  # `ascendchat COMMAND --help`
            continue
        group = [name for name in cli.COMMANDS if name.startswith(words[0] + " ")]
        if group and len(words) == 1:  # `ascendchat data`: all commands of the group
            continue
        name, rest = cli.split_command(words)
        module, cls = cli.COMMANDS[name][0].split(":")
        known = flags_of(getattr(importlib.import_module(f"ascendchat.config.{module}"), cls))
        if name == "launch":  # the flags after the command are the command's own
            bare = next((i for i, w in enumerate(rest) if not w.startswith("-") and not rest[i - 1].startswith("-")), 0)
            rest = rest[:bare] if bare else rest
        for flag in re.findall(r"(?<!\S)\[?--([a-z][\w-]*)", " ".join(rest)):
            assert flag.replace("-", "_") in {*known, "config", "help"}, f"{page.name}: {code} has no flag --{flag}"


def run(arguments: list[str], cwd: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """As from a shell in that folder, but in this process: starting Python takes longer than these commands do."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(cwd)
        patch.delenv("ASCENDCHAT_CHIP", raising=False)
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8"))
        status = cli.main(arguments)
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())


QUICKLY = [e for e in OURS if e.text.removeprefix(".venv/bin/").startswith(tuple(f"ascendchat {q}" for q in QUICK))]
RUN = list({(tuple(ours(e.text)[0]), e.output): e for e in QUICKLY}.values())  # the languages share most of them


@pytest.mark.parametrize("example", RUN, ids=str)
def test_quick_examples_run_and_print_what_the_page_shows(example: Example, tmp_path: Path) -> None:
    for name, text in SAMPLES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    command = example.text.replace("$ASCENDCHAT_HOME", str(tmp_path))
    source = re.search(r"< *(\S+)", command)
    done = run(ours(command)[0], tmp_path, (tmp_path / source[1]).read_text() if source else "")
    refused = any(line.startswith("ascendchat ") for line in example.output)
    assert done.returncode == (2 if refused else 0), done.stderr
    if "cpu" not in example.text.split():  # that plan is of the machine it runs on
        printed = {line.rstrip() for line in (done.stdout + done.stderr).splitlines()}
        stale = [line for line in example.output if line.strip() not in ("", "...") and line.rstrip() not in printed]
        assert not stale, f"{example}: paste the new output of `{example.text}`:\n{done.stdout}{done.stderr}"


def test_quick_examples_were_found() -> None:
    assert len(RUN) > 8


def test_links_lead_to_a_file_and_shown_make_targets_exist() -> None:
    rules = set(re.findall(r"^([a-z-]+)\s*:(?!=)", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M))
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        paths = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
        assert [path for path in paths if not (page.parent / path).exists()] == [], f"{page} links to no file"
        shell = "\n".join(line for language, _, block in blocks(page) if language in SHELLS for line in block)
        shown = re.findall(r"`make ([a-z-]+)[^`]*`", text) + re.findall(r"^(?:\$ )?make ([a-z-]+)", shell, re.M)
        assert set(shown) <= rules | {"-C", "-"}, f"{page} shows make {set(shown) - rules}"


def test_paths_in_the_trees_of_the_readmes_exist() -> None:
    for page in PAGES[:2]:
        tree = r"^((?:[\w.-]+/)+[\w.-]*|[\w-]+\.(?:py|md|txt|toml))(?=\s{2,})"
        named = re.findall(tree, page.read_text(encoding="utf-8"), flags=re.M)
        assert [path for path in named if not (ROOT / path).exists()] == [], f"{page} names them"


def test_both_languages_show_the_same_commands() -> None:
    pairs = [(page, ROOT / "docs" / "zh" / page.name) for page in sorted((ROOT / "docs" / "en").glob("*.md"))]
    chosen = re.compile(r" --lang zh|\s*#.*")  # comments are translated, and a page may ask for its own language
    for pair in [(PAGES[0], PAGES[1]), *pairs]:
        english, chinese = ([chosen.sub("", e.text) for e in examples(page) if ours(e.text)] for page in pair)
        assert english == chinese, pair
    simulator = [ROOT / "cannsim" / name for name in ("README.md", "README.zh.md")]
    english, chinese = ([chosen.sub("", e.text) for e in examples(page)] for page in simulator)
    assert english == chinese != []
