"""What docs/*/serving.md shows is done: every Python block and every curl of the API, against a real server."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from running_server import ROOT, Server, make, save, serving

PAGES = [ROOT / "docs" / language / "serving.md" for language in ("en", "zh")]
SHOWN = "http://127.0.0.1:8000"


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.M | re.S)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Calls and JSON need more tokens than other tests allow."""
    home = tmp_path_factory.mktemp("served")
    save(home, make.model(3, seq_len=320))
    with serving(home, "--max-tokens=100") as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_the_python_of_the_page_runs(server: Server, page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    programs = blocks(page, "python")
    assert len(programs) == 5
    for program in programs:
        assert SHOWN in program
        code = compile(program.replace(SHOWN, server.url), str(page), "exec", dont_inherit=True)
        exec(code, {"__name__": "__main__"})
        assert capsys.readouterr().out.strip(), program


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed here")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_the_curls_of_the_page_are_answered(server: Server, page: Path) -> None:
    (whole, streamed) = [
        subprocess.run(["bash", "-c", command.replace(SHOWN, server.url)], capture_output=True, check=True, timeout=300)
        for block in blocks(page, "bash")
        if "/v1/chat/completions" in block
        for command in re.findall(r"^curl .*?(?=^curl|\Z)", block, flags=re.M | re.S)
    ]
    assert json.loads(whole.stdout)["choices"][0]["finish_reason"] in ("stop", "length")
    assert streamed.stdout.startswith(b"data: {")
    assert streamed.stdout.endswith(b"data: [DONE]\n\n")


@pytest.mark.slow
def test_metrics_that_the_pages_and_the_dashboard_name_are_there(server: Server) -> None:
    rules = [yaml.safe_load(block) for page in PAGES for block in blocks(page, "yaml")]
    dashboard = json.loads((ROOT / "docs" / "grafana.json").read_text(encoding="utf-8"))
    named = set(re.findall(r"ascendchat_\w+", json.dumps([rules, dashboard["panels"]])))
    assert len(named) > 8
    assert server.chat(max_tokens=2).status_code == 200
    counted = set(re.findall(r"^(ascendchat_\w+)", server.get("/metrics").text, flags=re.M))
    assert named <= counted, "named and not counted"
