"""What docs/*/serving.md shows is done: every Python block and every curl of the API, against a real server."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from running_server import ROOT, make, save, serving

PAGES = [ROOT / "docs" / language / "serving.md" for language in ("en", "zh")]
SHOWN = "http://127.0.0.1:8000"


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.M | re.S)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    home = tmp_path_factory.mktemp("served")
    save(home, make.model(3, seq_len=320))
    with serving(home) as running:
        yield running.url


ALL = """
import json, sys
for program in json.load(sys.stdin):  # one process: they take less time than their imports
    print("PROGRAM")
    exec(compile(program, program, "exec"), {"__name__": "__main__"})
"""


@pytest.mark.slow
def test_the_python_of_the_pages_runs(server: str, tmp_path: Path) -> None:
    pages = [blocks(page, "python") for page in PAGES]
    assert [len(programs) for programs in pages] == [5, 5]
    programs = [program for page in pages for program in page]
    assert all(SHOWN in program for program in programs)
    done = subprocess.run(
        [sys.executable, "-c", ALL],
        input=json.dumps([program.replace(SHOWN, server) for program in programs]),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.split("PROGRAM\n")[1:]
    assert len(said) == len(programs)
    assert all(text.strip() for text in said)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed here")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_the_curls_of_the_page_are_answered(server: str, page: Path) -> None:
    (whole, streamed) = [
        subprocess.run(["bash", "-c", command.replace(SHOWN, server)], capture_output=True, check=True, timeout=300)
        for block in blocks(page, "bash")
        if "/v1/chat/completions" in block
        for command in re.findall(r"^curl .*?(?=^curl|\Z)", block, flags=re.M | re.S)
    ]
    assert json.loads(whole.stdout)["choices"][0]["finish_reason"] in ("stop", "length")
    assert streamed.stdout.startswith(b"data: {")
    assert streamed.stdout.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_metrics_that_the_page_and_the_dashboard_name_are_there(page: Path) -> None:
    counted = ROOT / "ascendchat" / "serve" / "metrics.py"
    if not counted.exists():
        pytest.skip("there are no metrics yet")
    source = counted.read_text(encoding="utf-8")
    rules = [yaml.safe_load(block) for block in blocks(page, "yaml")]
    dashboard = json.loads((ROOT / "docs" / "grafana.json").read_text(encoding="utf-8"))
    named = set(re.findall(r"ascendchat_(\w+)", json.dumps([rules, dashboard["panels"]])))
    assert len(named) > 8
    for name in named:
        plain = re.sub(r"(_seconds_bucket|_total)$", "", name)
        assert re.search(rf'"(ascendchat_)?{plain}(_seconds)?"', source), f"{name} is not counted"
