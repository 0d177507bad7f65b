"""The page of `ascendchat report` in a browser: nothing is asked of anybody, and axe finds nothing serious."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ascendchat.cli import main


@pytest.mark.slow
def test_the_page_is_whole_by_itself_and_can_be_read_by_everybody(
    chromium: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    axe = pytest.importorskip("axe_playwright_python.base", reason="axe is not installed: pip install -e '.[dev]'")
    monkeypatch.setenv("ASCENDCHAT_HOME", str(tmp_path))
    folder = tmp_path / "runs" / "demo" / "base"
    folder.mkdir(parents=True)
    rows = [{"step": step, "time": 1.0 * step, "loss": 5 / step, "lr_scale": 1.0} for step in range(1, 40)]
    rows.append({"step": 40, "time": 40.0, "samples": ["The capital of France is Paris.", "你好"]})  # type: ignore[dict-item]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.yaml").write_text("depth: 4\n")
    assert main(["report", "--run", "demo"]) == 0
    page = chromium.new_page(viewport={"width": 1240, "height": 900})
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto((tmp_path / "runs" / "demo" / "report.html").as_uri())
    assert page.locator("figure img").evaluate("image => image.complete && image.naturalWidth") > 500
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    page.evaluate(axe.AXE_SCRIPT)
    found = page.evaluate("async () => (await axe.run()).violations.map((v) => [v.impact, v.id, v.nodes[0].html])")
    page.close()
    assert [entry for entry in found if entry[0] in ("serious", "critical")] == []
