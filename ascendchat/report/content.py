"""The content of a report: sections with tables, plots and texts, which html.py writes.

sections = content([gather("demo")], price=1.5)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ascendchat.chips import GIB
from ascendchat.config.language import translate
from ascendchat.eval.stages import SCORES
from ascendchat.report.gather import RunData, StageData, group_seeds, is_number, results_table, stage_names
from ascendchat.report.plots import Panel, PlotCurve, draw
from ascendchat.runs.console import clock

DOTS = ("bpb", "val_loss", "accuracy", "core")
# 97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
EXACT = {"lr_scale", "memory_peak"}  # metrics without noise, which need no smoothing
FROM_ZERO = {"lr_scale", "memory_peak", "tokens_per_second", "mfu", "rollout_tokens_per_second"}
PACKAGES = "torch torch_npu CANN CUDA flash-attn-4 quack-kernels numpy transformers peft safetensors".split()


# Title and metrics of each panel; those without numbers are left out. A metric that ends with * is a prefix.
Panels = tuple[tuple[str, tuple[str, ...]], ...]


def training_panels() -> Panels:
    return (
        (translate("loss"), ("loss",)),
        (translate("validation"), DOTS),
        (translate("learning rate, as a share of its peak"), ("lr_scale",)),
        (translate("gradient norm"), ("gradient_norm",)),
        (translate("tokens per second"), ("tokens_per_second",)),
        ("MFU", ("mfu",)),
        (translate("memory, GiB"), ("memory_peak",)),
    )


def policy_panels() -> Panels:
    return (
        (translate("reward"), ("reward*",)),
        (translate("accuracy on held-out questions"), ("accuracy",)),
        ("pass@k", ("pass@*",)),
        (translate("tokens of an answer"), ("answer_tokens",)),
        (translate("share of answers cut, of questions learnt from"), ("truncated", "informative")),
        (translate("entropy, nats"), ("entropy",)),
        (translate("trainer against generator"), ("logprob_gap", "mismatch_kl")),
        (translate("clipped and masked tokens"), ("clip_fraction", "masked_fraction")),
        (translate("age of the answers, in updates"), ("staleness_mean", "staleness_max")),
        (translate("tokens per second"), ("rollout_tokens_per_second", "training_tokens_per_second")),
        (translate("seconds of waiting"), ("trainer_waited", "rollouts_waited")),
        (translate("gradient norm"), ("gradient_norm",)),
        (translate("memory, GiB"), ("memory_peak",)),
    )


@dataclass(frozen=True)
class ReportTable:
    head: list[str]
    rows: list[list[str]]
    caption: str = ""


@dataclass(frozen=True)
class Plot:
    name: str  # for a file
    svg: str
    alt: str


@dataclass(frozen=True)
class Text:
    label: str
    text: str
    folded: bool = False


@dataclass(frozen=True)
class Section:
    title: str
    parts: Sequence[ReportTable | Plot | Text]


def content(runs: Sequence[RunData], price: float | None = None) -> list[Section]:
    """Build all sections of the report."""
    groups = group_seeds(runs)
    sections = [Section(translate("Stages"), [stage_table(runs, price)])]
    if results := results_section(groups):
        sections.append(results)
    sections += stage_sections(groups)
    if samples := [part for run in runs for part in sample_texts(run)]:
        sections.append(Section(translate("What it says"), samples))
    sections.append(Section(translate("Environment"), [environment(runs), *settings(runs)]))
    return sections


def name_of(group: Sequence[RunData]) -> str:
    if len(group) == 1:
        return group[0].name
    return translate(f"{group[0].name} and {len(group) - 1} more seeds")


def number(value: float | None, digits: int = 4) -> str:
    return "–" if value is None else f"{value:.{digits}g}" if abs(value) < 1000 else f"{value:,.0f}"


def stage_table(runs: Sequence[RunData], price: float | None) -> ReportTable:
    """Table with a line per stage: duration, speed, quality."""
    head = [translate("run"), translate("stage"), translate("status"), translate("steps"), translate("tokens")]
    head += [translate("time"), "tokens/s", "MFU", translate("memory, GiB"), translate("loss"), translate("validation")]
    head += [translate("cost")] if price is not None else []
    rows = []
    for run in runs:
        for stage in run.stages:
            shown = [f"{name} {number(value)}" for name in DOTS if (value := stage.last(name)) is not None]
            if (reward := stage.last("reward", 10)) is not None:
                first = stage.series("reward")[1][:10]
                shown.insert(0, f"reward {number(sum(first) / len(first))} → {number(reward)}")
            memory = stage.last("memory_peak")
            row = [
                run.name,
                stage.name,
                str(stage.facts.get("status", "–")),
                str(stage.steps),
                number(stage.tokens or None),
                clock(stage.seconds),
                number(stage.last("tokens_per_second", 50)),
                number(stage.last("mfu", 50), 3),
                number(None if memory is None else memory / GIB, 3),
                "–" if reward is not None else number(stage.last("loss", 20)),
                ", ".join(shown),
            ]
            if price is not None:
                row.append(f"{stage.seconds / 3600 * stage.devices * price:,.2f}")
            rows.append(row)
    total = sum(stage.seconds for run in runs for stage in run.stages)
    hours = sum(stage.seconds * stage.devices for run in runs for stage in run.stages) / 3600
    return ReportTable(head, rows, translate(f"{clock(total)} in all, {hours:.3g} device-hours"))


def results_section(groups: Sequence[Sequence[RunData]]) -> Section | None:
    """Evaluations: a table of each kind, with a line per task and a column per stage that has any; of several seeds the
    mean and the spread."""
    tables: list[ReportTable | Plot | Text] = []
    kinds = [
        ("bpb", translate("bits per byte"), ""),
        ("core", translate("CORE tasks"), translate("mean over CORE tasks")),
    ]
    kinds += [("chat", translate("chat tasks"), translate("mean over chat tasks"))]
    for group in groups:
        for kind, title, mean in kinds:
            table = results_table(group, kind)
            stages = [stage for stage in stage_names() if any(stage in by_stage for by_stage in table.values())]
            rows = [
                [task, *(spread(by_stage.get(stage, ()), percent=kind != "bpb") for stage in stages)]
                for task, by_stage in table.items()
            ]
            rows += centred_scores(group, kind, stages) or means(group, kind, stages, mean)
            head = [translate("text") if kind == "bpb" else translate("task"), *(stage.upper() for stage in stages)]
            tables += [ReportTable(head, rows, f"{name_of(group)}, {title}")] if rows else []
    return Section(translate("Evaluations"), tables) if tables else None


def centred_scores(group: Sequence[RunData], kind: str, stages: Sequence[str]) -> list[list[str]]:
    """Rows with CORE or ChatCORE, 0 for guessing and 1 for all right, of the stages that have all of their tasks;
    those of CORE are all that some stage has complete."""
    rows = []
    scores: dict[str, dict[str, tuple[str, ...]]] = {"core": {"CORE": ()}, "chat": SCORES}
    centred_by_stage = {stage: [centred_of(run, stage, kind) for run in group] for stage in stages}
    all_tasks = {task for runs in centred_by_stage.values() for centred in runs for task in centred}
    for title, members in scores.get(kind, {}).items():
        cells, needed = [], set(members) or all_tasks
        for runs in centred_by_stage.values():
            complete = [each for each in runs if needed and needed <= set(each)]
            cells.append(spread([sum(each[task] for task in needed) / len(needed) for each in complete], percent=False))
        if set(cells) - {"–"}:
            rows.append([title, *cells])
    return rows


def means(group: Sequence[RunData], kind: str, stages: Sequence[str], title: str) -> list[list[str]]:
    """Row with the mean of the tasks that all of these stages have in common, where there are several."""
    tasks_by_stage = [{task for run in group for task in tasks_of(run, stage, kind)} for stage in stages]
    shared = set.intersection(*tasks_by_stage) if tasks_by_stage else set()
    if len(shared) < 2:
        return []
    cells = []
    for stage in stages:
        values = [
            accuracies for run in group if (accuracies := tasks_of(run, stage, kind)) and shared <= set(accuracies)
        ]
        cells.append(spread([sum(each[task] for task in shared) / len(shared) for each in values], percent=True))
    return [[title, *cells]]


def results_of(run: RunData, stage: str, kind: str) -> dict[str, Any]:
    data = run.stage(stage)
    return {task: row["result"] for task, row in data.results.get(kind, {}).items()} if data else {}


def centred_of(run: RunData, stage: str, kind: str) -> dict[str, float]:
    """Centred accuracies of the tasks that were evaluated completely."""
    results = {task: row for task, row in results_of(run, stage, kind).items() if row.get("complete", True)}
    return {task: float(row["centred"]) for task, row in results.items() if is_number(row.get("centred"))}


def tasks_of(run: RunData, stage: str, kind: str) -> dict[str, float]:
    results = results_of(run, stage, kind)
    return {task: float(row["accuracy"]) for task, row in results.items() if is_number(row.get("accuracy"))}


def spread(values: Sequence[float], *, percent: bool) -> str:
    if not values:
        return "–"
    middle = sum(values) / len(values)
    half = half_band(values)
    if percent:
        return f"{100 * middle:.1f} %" + (f" ± {100 * half:.1f}" if len(values) > 1 else "")
    return f"{middle:.4f}" + (f" ± {half:.4f}" if len(values) > 1 else "")


def half_band(values: Sequence[float]) -> float:
    """Half the width of the 95 % confidence band of a mean."""
    count = len(values)
    if count < 2:
        return 0.0
    middle = sum(values) / count
    deviation = math.sqrt(sum((value - middle) ** 2 for value in values) / (count - 1))
    return (STUDENT[count - 2] if count - 2 < len(STUDENT) else 1.96) * deviation / math.sqrt(count)


def stage_sections(groups: Sequence[Sequence[RunData]]) -> list[Section]:
    """Sections with the curves of every stage, of all groups in the same panels."""
    sections = []
    names = list(dict.fromkeys(stage.name for group in groups for run in group for stage in run.stages))
    for name in names:
        members = [(name_of(group), [stage for run in group if (stage := run.stage(name))]) for group in groups]
        with_stage = [(label, stages) for label, stages in members if stages]
        policy = any(stage.last("reward") is not None for _, stages in with_stage for stage in stages)
        panels = [
            one_panel
            for title, metrics in (policy_panels() if policy else training_panels())
            if (one_panel := panel(title, metrics, with_stage))
        ]
        if panels:
            alt = ", ".join(shown.title for shown in panels)
            title = translate(f"Curves of {name}")
            sections.append(Section(title, [Plot(name, draw(panels), f"{title}: {alt}")]))
    return sections


def panel(title: str, metrics: Sequence[str], members: Sequence[tuple[str, list[StageData]]]) -> Panel | None:
    curves = []
    for label, stages in members:
        names = list(dict.fromkeys(name for metric in metrics for stage in stages for name in matching(metric, stage)))
        for name in names:
            scale = GIB if name == "memory_peak" else 1.0
            drawn = curve(stages, name, scale)
            if drawn is not None:
                several = len(names) > 1 or len(metrics) > 1
                words = [*([label] if len(members) > 1 else []), *([name] if several else [])]
                about = " ".join(words)
                curves.append(replace(drawn, label=about, dots=name.startswith(DOTS), exact=name in EXACT))
    return Panel(title, curves, from_zero=bool(FROM_ZERO & set(metrics))) if curves else None


def matching(metric: str, stage: StageData) -> list[str]:
    if metric.endswith("*"):
        return [name for name in stage.metrics if name.startswith(metric[:-1])]
    return [metric] if metric in stage.metrics else []


def curve(stages: Sequence[StageData], name: str, scale: float) -> PlotCurve | None:
    """Curve over the steps that all runs have; of several runs the mean, and the borders of its band."""
    series = [dict(zip(*stage.series(name))) for stage in stages]
    steps = sorted(set.intersection(*(set(each) for each in series)))
    if not steps:
        return None
    columns = [[each[step] / scale for each in series] for step in steps]
    middle = [sum(column) / len(column) for column in columns]
    if len(series) == 1:
        return PlotCurve("", steps, middle)
    halves = [half_band(column) for column in columns]
    low, high = [m - h for m, h in zip(middle, halves)], [m + h for m, h in zip(middle, halves)]
    return PlotCurve("", steps, middle, low, high)


def sample_texts(run: RunData) -> list[Text]:
    """Samples of every stage that has any, and answers of RL."""
    parts = []
    for stage in run.stages:
        if texts := stage.samples():
            parts.append(Text(f"{run.name}, {stage.name}, {translate('samples')}", "\n".join(texts)))
        for answer in stage.transcripts():
            about = translate(f"reward {answer['reward']:.3g}")
            parts.append(Text(f"{run.name}, {stage.name}, {about}", f"{answer['question']}\n\n{answer['answer']}"))
    return parts


def environment(runs: Sequence[RunData]) -> ReportTable:
    """Table of chip, software and commit of each stage; without names of hosts and paths."""
    head = [translate("run"), translate("stage"), translate("chip"), translate("devices"), "ascendchat"]
    head += [translate("commit"), "Python", translate("platform"), translate("packages")]
    rows = []
    for run in runs:
        for stage in run.stages:
            facts: dict[str, Any] = stage.facts
            versions = {**(facts.get("packages") or {}), **(facts.get("software") or {})}
            packages = ", ".join(f"{name} {versions[name]}" for name in PACKAGES if name in versions)
            row = [facts.get(name) for name in ("chip", "world", "ascendchat")]
            row += [
                str(facts["commit"])[:12] if facts.get("commit") else None,
                facts.get("python"),
                facts.get("platform"),
            ]
            rows.append([run.name, stage.name, *("–" if value is None else str(value) for value in row), packages])
    return ReportTable(head, rows)


def settings(runs: Sequence[RunData]) -> list[Text]:
    return [
        Text(f"{run.name}, {stage.name}: {translate('settings')}", path.read_text(encoding="utf-8"), folded=True)
        for run in runs
        for stage in run.stages
        if (path := stage.folder / "config.yaml").is_file()
    ]
