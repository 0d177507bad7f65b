"""The command line as users meet it, in processes of its own: `pytest tests/test_cli.py`."""

from __future__ import annotations

import difflib
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ascendchat import cli
from ascendchat.config import flags_of
from ascendchat.config.flags import _plain
from ascendchat.errors import UserError
from ascendchat.version import __version__

ROOT = Path(__file__).parent.parent

# A table with commands that end in every way; the machinery around them is the real one.
DRIVER = """
import dataclasses, os, signal, sys, time, types
from ascendchat import cli
from ascendchat.config import option, train
from ascendchat.errors import UserError

@dataclasses.dataclass(frozen=True)
class SampleConfig:
    words: tuple[str, ...] = option((), words="each")
    depth: int = 1

@dataclasses.dataclass(frozen=True)
class TrainConfig(train.TrainConfig):
    save_every: int = 1

def fails(config): raise RuntimeError("the tensor is upside down")
def refuses(config): raise UserError("no such tokenizer; type: ascendchat tokenizer train")
def reports(config): return 1
def waits(config):
    print("waiting", flush=True)
    time.sleep(60)
def prints(config):
    for n in range(100_000): print("line", n)
def echoes(config): print(config)
def trains(config):
    for n in range(100): print("step", n, flush=True)
    print("saved", file=sys.stderr)
def opens(config):
    with open("opened", "w") as file:
        os.write(1, b"printed by a library")
        file.write("mine")
def leaves(config): sys.exit(7)

module = types.ModuleType("ascendchat.sample")
module.__dict__.update({k: v for k, v in globals().items() if callable(v)})
sys.modules["ascendchat.sample"] = sys.modules["ascendchat.config.sample"] = module
names = ("fails", "refuses", "reports", "waits", "prints", "echoes", "leaves", "opens")
cli.COMMANDS.clear()
cli.COMMANDS.update({n: ("sample:SampleConfig", f"sample:{n}", n) for n in names})
cli.COMMANDS["trains"] = ("sample:TrainConfig", "sample:trains", "trains")
cli.COMMANDS.update({f"data {n}": ("sample:SampleConfig", "sample:echoes", n) for n in ("fetch", "verify")})
sys.exit(cli.main())
"""


def environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}  # buffered, as users have it
    return {**kept, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}


def drive(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", DRIVER, *argv], capture_output=True, text=True, env=environment(), timeout=240
    )


HELP = """
import sys
from ascendchat import cli
for command in ("", *cli.COMMANDS):
    print("page of", command or "all")
    assert cli.main([*command.split(), "--help"]) == 0
print("imported:", *sorted({"torch", "numpy", "rich", "httpx", "pyarrow"} & set(sys.modules)))
"""


def test_help_of_every_command_imports_nothing_that_takes_time() -> None:
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, env=environment(), timeout=240)
    assert done.returncode == 0, done.stderr
    pages = done.stdout.split("page of ")[1:]
    assert [page.splitlines()[0] for page in pages] == ["all", *cli.COMMANDS]
    assert all("\nusage: ascendchat" in page for page in pages)
    assert done.stdout.splitlines()[-1] == "imported:"


def test_overview_lists_every_command_and_version_is_ours(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["--help"], ["-h"], ["help"]):
        assert cli.main(argv) == 0
        shown = capsys.readouterr().out
        assert all(f"\n  {name} " in shown for name in cli.COMMANDS)
    words = [sys.executable, "-m", "ascendchat", "--version"]
    assert subprocess.run(words, capture_output=True, text=True, cwd=ROOT).stdout == f"ascendchat {__version__}\n"


def test_help_of_one_command_has_three_spellings(capsys: pytest.CaptureFixture[str]) -> None:
    pages = set()
    for argv in (["plan", "--help"], ["plan", "-h"], ["help", "plan"]):
        assert cli.main(argv) == 0
        pages.add(capsys.readouterr().out)
    assert len(pages) == 1
    assert "--device-batch-size" in pages.pop()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["plam"], "ascendchat plam: there is no command 'plam'; did you mean plan?"),
        (["xyzzy"], "choose from: "),
        (["plan", "--dept", "12"], "ascendchat plan: unknown flag --dept; did you mean --depth?"),
        (["plan", "--goal", "trian"], "did you mean train?"),
        (["rl", "--lora"], "; these commands have it: finetune"),
        (["base", "--preview", "2"], "; these commands have it: mid, sft, finetune"),
        (["rl", "--preview", "2"], "--preview is not done here: every answer is written to transcripts/"),
        (["launch", "--devices", "2"], "missing COMMAND"),
    ],
)
def test_a_wrong_word_exits_2_with_the_nearest_name_and_no_traceback(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert (shown.err.count("\n"), shown.out) == (1, "")


def test_two_word_commands() -> None:
    assert "words=('x',), depth=3" in drive("data", "fetch", "--depth", "3", "x").stdout
    done = drive("data", "fetsh")
    assert done.returncode == 2
    assert "data needs a second word; choose from: data fetch, data verify" in done.stderr
    for argv in (["data", "--help"], ["help", "data"]):
        done = drive(*argv)
        assert done.returncode == 0
        assert "data verify" in done.stdout
        assert "echoes" not in done.stdout


def test_exit_status_0_1_2_and_that_of_sys_exit() -> None:
    done = drive("echoes", "--depth=2", "--", "--depth", "5", "w")
    assert (done.returncode, done.stdout) == (0, "SampleConfig(words=('w',), depth=5)\n")
    assert drive("reports").returncode == 1
    assert drive("leaves").returncode == 7
    done = drive("refuses")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "ascendchat refuses: no such tokenizer; type: ascendchat tokenizer train\n"


def test_an_uncaught_error_is_shown_whole_and_exits_1() -> None:
    done = drive("fails")
    assert done.returncode == 1
    assert "RuntimeError: the tensor is upside down" in done.stderr
    assert "in fails" in done.stderr
    assert "During handling of" not in done.stderr


def test_ctrl_c_exits_130_without_traceback() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", DRIVER, "waits"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "waiting\n"
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=240)
    assert child.returncode == 130
    assert err == "ascendchat waits: stopped\n"


@pytest.mark.parametrize(("command", "status"), [("prints", 0), ("--help", 0), ("refuses", 2)])
def test_a_closed_pipe_is_silent(command: str, status: int) -> None:
    # `ascendchat ... | head -0`: the reader is gone before the first byte
    reader, pipe = os.pipe()
    os.close(reader)
    child = subprocess.Popen(
        [sys.executable, "-c", DRIVER, command], stdout=pipe, stderr=subprocess.PIPE, text=True, env=environment()
    )
    os.close(pipe)
    _, err = child.communicate(timeout=240)
    assert child.returncode == status
    assert "BrokenPipe" not in err
    assert "Traceback" not in err


full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device here is always full")


@full
def test_output_that_finds_no_room_is_one_sentence() -> None:
    with open("/dev/full", "w") as target:
        done = subprocess.run(
            [sys.executable, "-c", DRIVER, "prints"],
            stdout=target,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
    assert done.returncode == 1
    assert done.stderr == (
        "ascendchat: what is printed is lost from here on (No space left on device); make room there, or send it "
        "elsewhere\n"
    )


@full
def test_a_command_that_keeps_its_result_elsewhere_goes_on_without_its_output() -> None:
    with open("/dev/full", "w") as target:
        done = subprocess.run(
            [sys.executable, "-c", DRIVER, "trains"],
            stdout=target,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )
    lost, saved = done.stderr.splitlines()
    assert (done.returncode, lost.startswith("ascendchat: what is printed is lost"), saved) == (0, True, "saved")


@full
def test_an_error_is_an_error_though_nobody_can_be_told() -> None:
    with open("/dev/full", "w") as target:
        for command, status in (("refuses", 2), ("fails", 1)):
            done = subprocess.run(
                [sys.executable, "-c", DRIVER, command], stdout=target, stderr=target, env=environment()
            )
            assert done.returncode == status


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_files_of_ours(closed: str, tmp_path: Path) -> None:
    """The next file that is opened would have their number, and get what is printed."""
    for command, status in (("prints", 0), ("refuses", 2), ("fails", 1), ("opens", 0)):
        line = f'cd {tmp_path} && {shlex.quote(sys.executable)} -c "$DRIVER" {command} {closed}'
        done = subprocess.run(
            ["sh", "-c", line], capture_output=True, text=True, env=environment() | {"DRIVER": DRIVER}
        )
        assert (done.returncode, "AttributeError" in done.stderr) == (status, False), (command, done.stderr)
    assert (tmp_path / "opened").read_text() == "mine"


@pytest.mark.parametrize("name", ["torch", "numpy", "yaml"])
def test_a_package_that_is_missing_is_named_with_what_installs_it(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = cli._load

    def load(prefix: str, target: str) -> object:
        if prefix == "":
            raise ModuleNotFoundError(f"No module named {name!r}", name=f"{name}.inner")
        return whole(prefix, target)

    monkeypatch.setattr(cli, "_load", load)
    for clone, how in ((True, "pip install -e . in your clone of ascendchat"), (False, "pip install ascendchat")):
        monkeypatch.setattr("ascendchat.version.in_clone", lambda clone=clone: clone)
        assert cli.main(["plan"]) == 2
        assert capsys.readouterr().err == f"ascendchat plan: {name} is not installed; type: {how}\n"


def test_the_home_of_nobody_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--api-key-file", "~nobody-of-this-name/keys"]) == 2
    assert capsys.readouterr().err.endswith("with ~ and a user whom this machine does not know; write the path\n")


def test_a_module_of_ours_or_of_the_user_that_is_missing_is_shown_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("ascendchat.absent", "my_rewards"):

        def run(config: object, name: str = name) -> int:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        monkeypatch.setattr(
            cli,
            "_load",
            lambda prefix, target: (
                cli.importlib.import_module("ascendchat.config.commands").PlanConfig if prefix else run
            ),
        )
        assert cli.main(["plan"]) == 1
        assert "Traceback" in capsys.readouterr().err


def test_an_extra_is_named_as_it_is_installed_here(monkeypatch: pytest.MonkeyPatch) -> None:
    from ascendchat.version import install_command

    monkeypatch.setattr("ascendchat.version.in_clone", lambda: True)
    assert install_command("hf") == "pip install -e '.[hf]' in your clone of ascendchat"
    monkeypatch.setattr("ascendchat.version.in_clone", lambda: False)
    assert (install_command("hf"), install_command()) == ("pip install 'ascendchat[hf]'", "pip install ascendchat")


def test_training_ends_when_it_is_done_and_not_when_nobody_reads_on() -> None:
    """`ascendchat base ... | tee log`, and tee is gone: the status was 0, and the model not trained."""
    reader, pipe = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, "trains"], stdout=pipe, stderr=subprocess.PIPE, text=True, env=environment()
    )
    os.close(pipe)
    assert (done.returncode, done.stderr) == (0, "saved\n")


def test_options_are_those_written_down() -> None:
    golden = ROOT / "tests" / "golden" / "cli.txt"
    now = runpy.run_path(str(ROOT / "tests" / "golden" / "update.py"))["options"]()
    before = golden.read_text(encoding="utf-8")
    assert before.count("\n") > 40, "the golden list is not whole"
    change = "\n".join(
        difflib.unified_diff(before.splitlines(), now.splitlines(), "written down", "now", n=0, lineterm="")
    )
    assert not change, f"command-line options changed:\n{change}\nif that is meant: python tests/golden/update.py"


SPOKEN_OF = re.compile(r"(?:`|^    )ascendchat ([a-z][^`\n#]*)", re.MULTILINE)  # in a text, or on a line of its own


def test_the_commands_and_flags_that_the_code_speaks_of_exist() -> None:
    seen, wrong = 0, []
    for path in (ROOT / "ascendchat").rglob("*.py"):
        for said in SPOKEN_OF.findall(path.read_text(encoding="utf-8")):
            words, seen = said.split(), seen + 1
            try:
                name, rest = cli.split_command(words)
            except UserError as error:
                wrong += [f"{path}: {said}"] * ("needs a second word" not in str(error))
                continue
            known = {*flags_of(cli._load("config.", cli.COMMANDS[name][0])), "config", "help"}
            flags = [_plain(word) for word in rest if re.match("--?[a-z]", word)] if name != "launch" else []
            wrong += [f"{path}: {said}: {flag}" for flag in flags if flag.removeprefix("no_") not in known]
    assert seen > 150
    assert wrong == []
