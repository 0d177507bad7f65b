"""Every command of the READMEs and the quick start is executed: `make test-docs`, minutes, so not by default.

python -m pytest -m docs -n0 tests/test_docs_run.py

In the order of the page, in a folder of its own; what says NPU, on simulated NPUs. What cannot be run so is in LEFT_OUT
with the reason, and a fast test sees to it that nothing is in neither.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_readme import ROOT, SAMPLES, Example, examples

import cannsim

PAGES = ["README.md", "README.zh.md", "docs/en/quickstart.md", "docs/zh/quickstart.md"]
LEFT_OUT = {  # beginning of a command -> why it is not run here
    "make ": "CI has a job for each target",
    "pip install": "needs the network",
    "curl ": "asks a server, see tests/serve",
    "ascendchat speedrun --recipe tiny-cpu": "`make demo`: minutes",
    "ascendchat chat --run tiny": "its model is that of `make demo`",
    "ascendchat serve": "runs until it is stopped, see tests/serve",
    "ascendchat chat      #": "waits for somebody who types",
}
LIMIT = 600.0  # seconds for one command, on a busy machine


def commands(page: str) -> list[Example]:
    """The command lines of a page, without what a shell prints."""
    return [e for e in examples(ROOT / page) if e.text.strip() and not e.text.lstrip().startswith("#")]


def plain(text: str) -> str:
    return text.strip().removeprefix(".venv/bin/")


def left_out(text: str) -> bool:
    return plain(text).startswith(tuple(LEFT_OUT))


def test_every_command_is_run_or_left_out_for_a_reason() -> None:
    for page in PAGES:
        run = [e.text for e in commands(page) if not left_out(e.text)]
        strange = [text for text in run if not re.match(r"(\S*/)?(ascendchat|python -m cannsim) ", plain(text))]
        assert not strange, f"{page}: run or leave out {strange}"
        assert len(run) >= (6 if "quickstart" in page else 4), f"{page}: only {run} would be run"
    used = [plain(e.text) for page in PAGES for e in commands(page)]
    unused = [begin for begin in LEFT_OUT if not any(text.startswith(begin) for text in used)]
    assert not unused, f"no page has {unused}"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the pages share."""
    return tmp_path_factory.mktemp("docs")


@pytest.mark.docs
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_run_in_order(page: str, home: Path) -> None:
    folder = home / page.replace("/", "-")
    folder.mkdir()
    for name, text in SAMPLES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    environment = dict(os.environ, ASCENDCHAT_HOME=str(folder / "home"), PYTHONPATH=str(ROOT))
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    for example in commands(page):
        if left_out(example.text):
            continue
        command = plain(example.text).replace(" .venv/bin/", " ")
        simulated = command.startswith("python -m cannsim")
        if simulated and not cannsim.built():
            pytest.skip("make cannsim first")
        environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "1" if simulated else "0"
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
        refused = any(line.startswith("ascendchat ") for line in example.output)  # the page shows that it is
        allowed = (0, 1) if " doctor" in command else (2,) if refused else (0,)  # 1: the doctor has found something
        assert done.returncode in (*allowed, 2 * refused), f"{example}: {command}\n{done.stdout}{done.stderr}"
