"""`ascendchat report`: what it shows of runs, in which form, and while they train."""

from __future__ import annotations

import json
import re
import threading
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from ascendchat.cli import main
from ascendchat.errors import UserError
from ascendchat.report.command import LiveReport, server
from ascendchat.report.content import Plot, ReportTable, Section, content, half_band, spread
from ascendchat.report.gather import gather, group_seeds, newest_run, same_settings
from ascendchat.report.plots import Panel, PlotCurve, downsampled, draw, moving_average
from ascendchat.runs.results import NewResults


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where runs lie, in an English shell."""
    monkeypatch.setenv("ASCENDCHAT_HOME", str(tmp_path))
    monkeypatch.setenv("LANG", "C.UTF-8")
    return tmp_path / "runs"


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of tables: the plots of three stages take seconds of a slow core."""
    monkeypatch.setattr("ascendchat.report.content.draw", lambda panels: "<svg/>")


def write(folder: Path, rows: list[dict[str, Any]], *, seed: int = 0, **facts: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    split = {"devices": 2, "rows": 4, "accumulation": 1, "seq_len": 8}
    known = {"id": f"{folder.parent.name}", "started": 1000.0, "ended": 1060.0, "status": "finished", "world": 2}
    (folder / "run.json").write_text(json.dumps({**known, "split": split, "host": "secret-host", **facts}))
    (folder / "config.yaml").write_text(yaml.safe_dump({"depth": 4, "seed": seed, "run": folder.parent.name}))


def training(steps: int = 40, offset: float = 0.0) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        loss = offset + 5.0 / step
        rows.append({"step": step, "time": 1000.0 + step, "loss": loss, "lr_scale": 1.0, "tokens_per_second": 4000.0})
    return [*rows, {"step": steps, "time": 1055.0, "bpb": 0.9 + offset}]


def policy() -> list[dict[str, Any]]:
    return [
        {"step": step, "time": 1000.0 + step, "loss": 0.1, "reward": step / 30, "pass@4": 0.5, "staleness_max": 2.0}
        for step in range(1, 31)
    ]


def test_a_report_holds_every_stage_its_results_and_its_words(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(place / "demo" / "base", [*training(), {"step": 40, "time": 1056.0, "samples": ["<b>once</b> & again"]}])
    write(place / "demo" / "rl", policy())
    transcripts = place / "demo" / "rl" / "transcripts"
    transcripts.mkdir()
    lines = [
        {"question": "17+25?", "answer": "42</pre><script>", "reward": 1.0},
        {"question": "?", "answer": "no", "reward": 0.0},
    ]
    (transcripts / "step_000030-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    about = {"evaluation": "chat", "checkpoint": "x", "model": "m", "step": 40, "settings": {}}
    for task, accuracy in (("gsm8k", 0.25), ("arc", 0.75)):
        NewResults(place / "demo" / "base", about).add(task, 10, 10, {"accuracy": accuracy}, "")
    assert main(["report", "--run", "demo", "--price", "3"]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path == place / "demo" / "report.html"
    text = path.read_text(encoding="utf-8")
    assert len(text) < 3_000_000
    for shown in ("gsm8k", "25.0 %", "mean over chat tasks", "50.0 %", "finished", "0.10", "reward 0.1833 → 0.85"):
        assert shown in text, shown
    assert "&lt;b&gt;once&lt;/b&gt; &amp; again" in text
    assert "<script>" not in text  # what a model says is no program
    assert "42&lt;/pre&gt;&lt;script&gt;" in text
    assert text.count("data:image/svg+xml") == 2
    assert not re.search(r"(src|href)=\"(?!data:)", text)  # nothing is asked of anybody
    assert "secret-host" not in text


def examined(folder: Path, kind: str, results: dict[str, dict[str, Any]]) -> None:
    about = {"evaluation": kind, "checkpoint": "x", "model": "m", "step": 40, "settings": {}}
    for task, result in results.items():
        NewResults(folder, about).add(task, 10, 10, result, "")


def test_each_kind_of_evaluation_is_a_table_with_the_stages_that_have_it(place: Path, undrawn: None) -> None:
    """Tasks of the same name are others in CORE and in chat. The toy world has no score of its own: its mean is shown
    also beside CORE."""
    for stage in ("base", "mid", "sft"):
        write(place / "demo" / stage, training())
    examined(place / "demo" / "base", "bpb", {"wiki": {"bits_per_byte": 1.0735}})
    examined(place / "demo" / "base", "core", {"arc_easy": {"accuracy": 0.4, "centred": 0.2}})
    for stage, right in (("mid", 0.25), ("sft", 0.5)):
        examined(place / "demo" / stage, "chat", {"toy_fact_en": {"accuracy": right}, "toy_fact_zh": {"accuracy": 1.0}})
    examined(place / "demo" / "sft", "chat", {"arc_easy": {"accuracy": 0.3, "centred": 0.1}})
    (section,) = (section for section in content([gather("demo")]) if section.title == "Evaluations")
    assert section.parts == [
        ReportTable(["text", "BASE"], [["wiki", "1.0735"]], "demo, bits per byte"),
        ReportTable(["task", "BASE"], [["arc_easy", "40.0 %"], ["CORE", "0.2000"]], "demo, CORE tasks"),
        ReportTable(
            ["task", "MID", "SFT"],
            [
                ["toy_fact_en", "25.0 %", "50.0 %"],
                ["toy_fact_zh", "100.0 %", "100.0 %"],
                ["arc_easy", "–", "30.0 %"],
                ["mean over chat tasks", "62.5 %", "75.0 %"],
            ],
            "demo, chat tasks",
        ),
    ]


def test_scores_are_of_whole_kinds_of_tasks_and_others_keep_their_mean(
    place: Path, tmp_path: Path, undrawn: None
) -> None:
    """CORE and ChatCORE are centred, and a stage that lacks a task has none: it could not be compared. What is not a
    number counts as not there."""
    for stage in ("base", "sft", "rl"):
        write(place / "demo" / stage, training())
    core = {"copa": (0.6, True), "piqa": (0.1, True), "squad": (-0.9, False)}
    core_results = {t: {"accuracy": 0.5, "centred": c, "complete": whole} for t, (c, whole) in core.items()}
    examined(place / "demo" / "base", "core", core_results)
    examined(place / "demo" / "sft", "core", {"copa": {"accuracy": 0.5, "centred": 0.9, "complete": True}})
    chat = {"arc_easy": 0.1, "arc_challenge": 0.2, "mmlu": 0.3, "gsm8k": 0.0, "humaneval": -0.1}
    for stage, left_out in (("sft", ""), ("rl", "mmlu")):
        results = {task: {"accuracy": 0.5, "centred": centred} for task, centred in chat.items() if task != left_out}
        examined(place / "demo" / stage, "chat", results)
    toys = {"toy_capital_en": {"accuracy": 0.25}, "toy_sum_en": {"accuracy": None}, "cmmlu": {}}
    write(place / "toy" / "sft", training())
    examined(place / "toy" / "sft", "chat", toys | {"toy_a": {"accuracy": 0.75}, "ceval": {"accuracy": float("nan")}})
    out = tmp_path / "table.md"

    def lines(run: str) -> list[list[str]]:
        assert main(["report", "--run", run, "--out", str(out)]) == 0
        return [[cell.strip() for cell in line.strip("|").split("|")] for line in out.read_text().splitlines()]

    demo = lines("demo")
    assert ["CORE", "0.3500", "–"] in demo
    assert ["ChatCORE", "0.1000", "–"] in demo
    assert not any(line[0].startswith("mean over") for line in demo)
    assert ["mean over chat tasks", "50.0 %"] in lines("toy")


def test_markdown_has_its_plots_beside_it(place: Path, tmp_path: Path) -> None:
    write(place / "demo" / "base", training())
    out = tmp_path / "paper" / "appendix.md"
    assert main(["report", "--run", "demo", "--out", str(out)]) == 0
    text = out.read_text(encoding="utf-8")
    (named,) = re.findall(r"!\[[^]]*]\(([^)]+)\)", text)
    assert (out.parent / named).read_text().startswith("<svg")
    table = [line for line in text.splitlines() if line.startswith("| demo | base ")]
    assert "| 40 | 2,560 | 0:01:00 | 4,000 |" in table[0]


def test_runs_that_differ_in_their_seed_alone_are_one_curve_with_a_band(place: Path) -> None:
    for seed, offset in enumerate((0.0, 0.1, 0.2)):
        write(place / f"s{seed}" / "base", training(offset=offset), seed=seed)
    write(place / "other" / "base", training(20), seed=0)
    (place / "other" / "base" / "config.yaml").write_text(yaml.safe_dump({"depth": 6, "seed": 0}))
    runs = [gather(name) for name in ("s0", "other", "s1", "s2")]
    groups = [[run.name for run in group] for group in group_seeds(runs)]
    assert groups == [["s0", "s1", "s2"], ["other"]]
    sections = content(runs)
    (plot,) = (part for section in sections for part in section.parts if isinstance(part, Plot))
    assert "s0 and 2 more seeds" in plot.svg
    assert half_band([0.0, 0.1, 0.2]) == pytest.approx(4.30 * 0.1 / 3**0.5)
    assert spread([0.5, 0.7], percent=True) == "60.0 % ± 127.1"
    assert half_band([3.0]) == 0.0


def test_fine_tunings_of_two_models_are_not_seeds_of_one(place: Path) -> None:
    models = [str(place.parent / name) for name in ("qwen", "llama")]
    for path in models:
        Path(path).mkdir()
    for name, start in (("a-0", models[0]), ("a-1", models[0]), ("b-0", models[1]), ("c", "a-0")):
        write(place / name / "hf", training())
        settings = {"start": start, "seed": int(name[-1] == "1"), "output_dir": f"/out/{name}"}
        (place / name / "hf" / "config.yaml").write_text(yaml.safe_dump(settings))
    runs = [gather(name) for name in ("a-0", "b-0", "a-1")]
    assert [[run.name for run in group] for group in group_seeds(runs)] == [["a-0", "a-1"], ["b-0"]]
    assert "start" not in same_settings(gather("c").stages[0]), "a run has a seed of its own"


def test_the_time_of_a_stage_adds_up_over_its_sessions(place: Path) -> None:
    history = [{"started": 100.0, "ended": 130.0}, {"started": 200.0, "ended": None}, {"started": None}]
    rows = [{"step": 1, "time": 110.0, "loss": 1.0}, {"step": 2, "time": 245.0, "loss": 1.0}]
    write(place / "demo" / "base", rows, history=history, started=300.0, ended=310.0)
    assert gather("demo").stages[0].seconds == 30 + 45 + 10  # the second was killed after its last row


def test_what_is_not_a_number_breaks_nothing(place: Path) -> None:
    rows = training(5) + [{"step": 6, "time": 1.0, "loss": "NaN", "mfu": None, "flag": True}]
    write(place / "demo" / "base", rows)
    with (place / "demo" / "base" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')  # a run that writes at this moment
    stage = gather("demo").stages[0]
    assert len(stage.series("loss")[0]) == 5
    assert stage.metrics == ["step", "time", "loss", "lr_scale", "tokens_per_second", "bpb"]
    table = content([gather("demo")])[0].parts[0]
    assert isinstance(table, ReportTable)


def gone() -> list[Section]:
    raise FileNotFoundError("transcripts")


def test_a_watched_page_gets_what_is_new_and_nothing_else(place: Path) -> None:
    write(place / "demo" / "base", training(10))
    watched = LiveReport("demo", lambda: content([gather("demo")]))
    with server(watched, "127.0.0.1", 0) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{listening.server_address[1]}"

        def ask(path: str) -> tuple[int, str, str]:
            with urllib.request.urlopen(url + path, timeout=60) as answer:
                return answer.status, answer.read().decode(), answer.headers.get("x-mark") or ""

        first = ask("/")[1]
        (seen,) = re.findall(r'data-mark="(\w+)"', first)
        assert "setInterval" in first
        assert ask(f"/content?seen={seen}")[0] == 204
        write(place / "demo" / "base", training(11))
        watched._at = -100.0
        status, text, mark = ask(f"/content?seen={seen}")
        assert status == 200
        assert mark != seen
        assert "<td>11</td>" in text
        with pytest.raises(urllib.error.HTTPError):
            ask("/../secret")
        watched.make, watched._at = gone, -100.0  # the folder is renamed while it is read
        assert ask(f"/content?seen={mark}")[0] == 204
        assert watched._at > 0
        listening.shutdown()


def test_errors_are_sentences(place: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["report"]) == 2
    assert "train one first" in capsys.readouterr().err
    assert main(["report", "--run", "nobody"]) == 2
    assert "nothing to report" in capsys.readouterr().err
    write(place / "demo" / "base", training(3))
    assert newest_run() == "demo"
    assert main(["report", "--out", str(tmp_path / "x.pdf")]) == 2
    assert ".html or .md" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["report", "--out", str(tmp_path / "file" / "x.html")]) == 2
    with server(LiveReport("demo", lambda: []), "127.0.0.1", 0) as taken, pytest.raises(UserError, match="--port"):
        server(LiveReport("demo", lambda: []), "127.0.0.1", taken.server_address[1])


def test_long_curves_are_thinned_and_smoothed_without_a_shift() -> None:
    steps = list(range(1, 100_001))
    x, y = downsampled(steps, [2.0 * step for step in steps])
    assert len(x) <= 600
    np.testing.assert_allclose(y, 2 * x)
    np.testing.assert_allclose(moving_average(np.full(50, 3.0)), 3.0)
    line = moving_average(np.arange(100.0))
    np.testing.assert_allclose(line[5:-5], np.arange(100.0)[5:-5])
    drawn = draw([Panel("奖励", [PlotCurve("甲", [1, 2], [3, 4])])])
    assert "奖励" in drawn
    assert draw([Panel("奖励", [PlotCurve("甲", [1, 2], [3, 4])])]) == drawn  # the same every time
