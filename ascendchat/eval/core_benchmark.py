"""The CORE benchmark, 22 tasks and one number: writes the prompts, and judges the nats that the scorer gives them.

    report = score_tasks(load_bundle(folder), scorer, tokenizer, max_len=2048)      # `ascendchat eval base --eval core`

The rules, which make the number comparable: the rows of a task are shuffled with seed 1337 and only then cut by
--max-per-task; the demonstrations of row i are drawn from the others by Random(1234 + i); multiple choice and schema
take the option with the least mean nats over its own tokens (where the options differ, or where they end alike);
language modelling wants every token of the continuation to be the model's first choice; a row that is too long loses
its beginning; accuracy is centred, (accuracy - chance) / (1 - chance); CORE is the mean over tasks. If --max-per-task
leaves fewer rows than a prompt has demonstrations, which the published program refuses, these are drawn from all rows.
"""

from __future__ import annotations

import csv
import io
import json
import lzma
import math
import random
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ascendchat.data.chat.render import Encoder
from ascendchat.data.read import UNREADABLE, unreadable
from ascendchat.errors import UserError
from ascendchat.eval.scorer import Example, Pending, Scored, Scorer
from ascendchat.parallel import collectives

DEMONSTRATION_SEED = 1234
EXAMPLES_AT_ONCE = 512  # examples encoded and submitted at a time


@dataclass
class TaskScore:
    """The result of one task."""

    label: str
    kind: str
    shots: int
    rows: int  # scored
    rows_in_file: int
    rows_of_task: int  # as published
    accuracy: float
    chance: float
    centred: float
    cropped: int  # prompts that lost their beginning
    unclean: int  # prompts whose context does not end at a token boundary: scored from where the tokens differ
    seconds: float
    examples_per_second: float
    complete: bool  # the file holds the whole task
    correct: list[bool] = field(default_factory=list, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without `correct`."""
        return {name: value for name, value in asdict(self).items() if name != "correct"}


def demonstrations(count: int, index: int, shots: int) -> list[int]:
    """Indices of the rows that demonstrate the task before row `index`: never itself, and the same in every run."""
    drawn = random.Random(DEMONSTRATION_SEED + index).sample(range(count - 1), shots)
    return [i + (i >= index) for i in drawn]


def check_rows(tasks: Iterable[CoreTask]) -> None:
    """Refuse tasks whose file has too few rows to draw the demonstrations from, before anything is computed."""
    for task in tasks:
        if not task.missing and task.shots >= len(task.rows):
            raise UserError(
                f"{task.label} shows {task.shots} other rows before each, but its file {task.file} holds only "
                f"{len(task.rows)}; {AGAIN}, or give another folder: --bundle DIR"
            )


def demonstration_texts(task: CoreTask, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The text of each demonstration: a row with its right answer and an empty line behind it."""
    between = task.delimiter
    if task.kind == "multiple_choice":
        return [f"{row['query']}{between}{row['choices'][row['gold']]}\n\n" for row in rows]
    if task.kind == "schema":
        return [f"{row['context_options'][row['gold']]}{between}{row['continuation']}\n\n" for row in rows]
    return [f"{row['context'].strip()}{between}{row['continuation']}\n\n" for row in rows]


def query_texts(task: CoreTask, row: Mapping[str, Any]) -> list[str]:
    """The texts behind the demonstrations: one for each option; for language modelling the context without and with
    the continuation."""
    between = task.delimiter
    if task.kind == "multiple_choice":
        return [f"{row['query']}{between}{choice}" for choice in row["choices"]]
    if task.kind == "schema":
        return [f"{context}{between}{row['continuation']}" for context in row["context_options"]]
    context = f"{row['context'].strip()}{between}"
    # A blank at the end of the context would be a token of its own, but belongs to the continuation's first token.
    return [context.rstrip(), f"{context}{row['continuation']}"]


class Prompts:
    """Encodes prompts part by part and caches the parts: the same demonstrations return in thousands of prompts.

    Parts are joined where a line break is followed by a visible character. No match of our split pattern crosses such
    a place, so the ids are those of the whole text. The first prompts are also encoded whole; where a tokenizer gives
    other ids, all prompts are.
    """

    def __init__(self, tokenizer: Encoder, checks: int = 4) -> None:
        self.tokenizer, self.checks, self.exact = tokenizer, checks, True
        self.cache: dict[str, list[int]] = {}

    def encode(self, head: Sequence[str], ends: Sequence[str]) -> list[list[int]]:
        """Token rows, one per end: the tokenizer's opening tokens, the parts of the head, the end."""
        if not self.exact or not all(part[:1].strip() for part in (*head[1:], *ends)):
            return self.whole(head, ends)
        begin = [*self.tokenizer.opening]
        for part in head:
            begin += self.part(part)
        rows = []
        for end in ends:
            cut = end.rfind("\n") + 1  # text before the last line is the same for all options
            if cut and end[cut : cut + 1].strip():
                rows.append([*begin, *self.part(end[:cut]), *self.tokenizer.encode(end[cut:])])
            else:
                rows.append([*begin, *self.tokenizer.encode(end)])
        if self.checks:
            self.checks -= 1
            whole = self.whole(head, ends)
            self.exact = whole == rows
            return whole
        return rows

    def part(self, text: str) -> list[int]:
        """The ids of a part, encoded once."""
        tokens = self.cache.get(text)
        if tokens is None:
            tokens = self.cache[text] = self.tokenizer.encode(text)
        return tokens

    def whole(self, head: Sequence[str], ends: Sequence[str]) -> list[list[int]]:
        """The rows of `encode`, each encoded as one text."""
        return [[*self.tokenizer.opening, *self.tokenizer.encode("".join(head) + end)] for end in ends]


def common_prefix(rows: Sequence[list[int]]) -> int:
    """Number of tokens that all rows begin with: the common prefix of the least and the greatest in dictionary order,
    which all rows between them share."""
    least, greatest = min(rows), max(rows)
    low, high = 0, min(len(least), len(greatest))
    while low < high:  # bisection: slices compare much faster than tokens in a loop
        middle = (low + high + 1) // 2
        if least[low:middle] == greatest[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass
class PromptCounts:
    """Counts of prompts of a task that are not scored as written."""

    cropped: int = 0
    unclean: int = 0


def build_example(kind: str, rows: list[list[int]], max_len: int, counts: PromptCounts) -> Example:
    """An Example for the scorer: rows cut to `max_len` tokens from the left, each with the start of its scored part."""
    if kind == "multiple_choice":
        starts = [common_prefix(rows)] * len(rows)
    elif kind == "schema":
        suffix = common_prefix([row[::-1] for row in rows])
        starts = [len(row) - suffix for row in rows]
    else:
        context, whole = rows
        start = common_prefix(rows)
        counts.unclean += start < len(context) or len(context) == len(whole)
        rows, starts = [whole], [start]
    cut = [max(0, len(row) - max_len) for row in rows]
    counts.cropped += any(cut)
    cropped = [row[size:] if size else row for row, size in zip(rows, cut)]
    # At least one token must stand before the first scored one.
    return Example(cropped, [max(1, start - size) for start, size in zip(starts, cut)], kind == "multiple_choice")


def is_right(kind: str, row: Mapping[str, Any], scored: Sequence[Scored]) -> bool:
    """True if the model's choice is right. An option without tokens of its own has no mean (NaN), and is chosen only
    when it is first."""
    if kind == "language_modeling":
        return len(scored[0].greedy) > 0 and bool(scored[0].greedy.all())
    means = [float(s.nats.mean(dtype="float64")) if len(s.nats) else math.nan for s in scored]
    return means.index(min(means)) == row["gold"]


def score_task(
    task: CoreTask, scorer: Scorer, tokenizer: Encoder, *, max_len: int, max_rows: int | None = None
) -> TaskScore:
    """Score one task; each of N ranks takes every N-th row, and all of them get all results."""
    began = time.perf_counter()
    check_rows([task])
    rows = task.rows[:max_rows] if max_rows else task.rows
    pool = rows if len(rows) > task.shots else task.rows
    prompts, counts, world = Prompts(tokenizer), PromptCounts(), collectives.world()
    mine = range(world.rank, len(rows), world.size)
    pending: list[Pending] = []
    for first in range(0, len(mine), EXAMPLES_AT_ONCE):
        examples = []
        for index in mine[first : first + EXAMPLES_AT_ONCE]:
            demos = [pool[i] for i in demonstrations(len(pool), index, task.shots)] if task.shots else []
            tokens = prompts.encode(demonstration_texts(task, demos), query_texts(task, rows[index]))
            examples.append(build_example(task.kind, tokens, max_len, counts))
        pending.append(scorer.submit(examples))
    scored = [result for chunk in pending for result in chunk()]
    own = {index: is_right(task.kind, rows[index], result) for index, result in zip(mine, scored)}
    gathered = collectives.gather_objects((own, counts.cropped, counts.unclean))
    every = {index: right for part, _, _ in gathered for index, right in part.items()}
    correct = [every[index] for index in range(len(rows))]
    accuracy, seconds = sum(correct) / len(correct), time.perf_counter() - began
    return TaskScore(
        task.label,
        task.kind,
        task.shots,
        rows=len(rows),
        rows_in_file=len(task.rows),
        rows_of_task=task.expected,
        accuracy=accuracy,
        chance=task.chance,
        centred=centre(accuracy, task.chance),
        cropped=sum(part[1] for part in gathered),
        unclean=sum(part[2] for part in gathered),
        seconds=seconds,
        examples_per_second=len(rows) / seconds,
        complete=task.complete,
        correct=correct,
    )


def centre(accuracy: float, chance: float) -> float:
    """0 for guessing, 1 for perfect."""
    return (accuracy - chance) / (1.0 - chance)


@dataclass
class _CoreReport:
    """The scores of all tasks, and CORE over them."""

    tasks: list[TaskScore]
    missing: dict[str, str]  # label -> reason
    max_per_task: int | None
    seconds: float

    def mean(self, subsets: bool) -> float | None:
        """Mean of the centred accuracies, with or without the tasks whose file holds only a part of the rows."""
        centred = [task.centred for task in self.tasks if task.complete or subsets]
        return sum(centred) / len(centred) if centred else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON. `core` is over the complete tasks; `core_with_subsets` over all that were scored."""
        total = sum(task.rows for task in self.tasks)
        return {
            "core": self.mean(subsets=False),
            "core_tasks": sum(task.complete for task in self.tasks),
            "core_with_subsets": self.mean(subsets=True),
            "core_with_subsets_tasks": len(self.tasks),
            "tasks_in_bundle": len(self.tasks) + len(self.missing),
            "missing": self.missing,
            "subsets": {t.label: f"{t.rows_in_file} of {t.rows_of_task} rows" for t in self.tasks if not t.complete},
            "max_per_task": self.max_per_task,
            "examples": total,
            "seconds": self.seconds,
            "examples_per_second": total / self.seconds if self.seconds else 0.0,
            "tasks": [task.to_dict() for task in self.tasks],
        }


def score_tasks(
    tasks: Sequence[CoreTask],
    scorer: Scorer,
    tokenizer: Encoder,
    *,
    max_len: int,
    max_per_task: int | None = None,
    say: Callable[[str], None] = print,
    done: Callable[[str, int, int, dict[str, Any]], object] = lambda *result: None,
) -> _CoreReport:
    """Score one task after the other. As each ends a line is printed, and `done` gets its label, the number of rows
    scored and in the file, and the result."""
    began, scores = time.perf_counter(), []
    for task in tasks:
        if task.missing:
            say(f"  {task.label:<34} MISSING: {task.missing}")
            done(task.label, 0, 0, {"missing": task.missing})
            continue
        score = score_task(task, scorer, tokenizer, max_len=max_len, max_rows=max_per_task)
        scores.append(score)
        say(score_line(score))
        correct = "".join("01"[right] for right in score.correct)
        done(score.label, score.rows, score.rows_in_file, {**score.to_dict(), "correct": correct})
    missing = {task.label: task.missing for task in tasks if task.missing}
    return _CoreReport(scores, missing, max_per_task, time.perf_counter() - began)


def score_line(task: TaskScore) -> str:
    """One row of the printed table."""
    notes = [] if task.complete else [f"SUBSET {task.rows_in_file} of {task.rows_of_task} rows"]
    if task.rows < task.rows_in_file:
        notes.append(f"first {task.rows} rows" + (", shown ones from all" if task.rows <= task.shots else ""))
    notes += [f"{task.cropped} cropped"] if task.cropped else []
    notes += [f"{task.unclean} unclean"] if task.unclean else []
    speed = f"{task.examples_per_second:9.1f}/s {task.seconds:7.1f} s"
    return (
        f"  {task.label:<34}{task.accuracy:8.4f}{task.centred:9.4f}{task.rows:7d} {speed}  {'; '.join(notes)}".rstrip()
    )


def core_lines(report: _CoreReport) -> list[str]:
    """The lines under the table; each mean names the tasks that it is over."""
    summary = report.to_dict()
    cut = f", first {report.max_per_task} rows of each" if report.max_per_task else ""
    complete, with_subsets = summary["core"], summary["core_with_subsets"]
    lines = []
    if complete is not None:
        lines.append(
            f"CORE {complete:.4f} over the {summary['core_tasks']} complete of {summary['tasks_in_bundle']} tasks{cut}"
        )
    if with_subsets is not None and summary["subsets"]:
        names = ", ".join(f"{name}: {rows}" for name, rows in summary["subsets"].items())
        lines.append(
            f"CORE {with_subsets:.4f} over {summary['core_with_subsets_tasks']} tasks, subsets included ({names}){cut}"
        )
    if report.missing:
        lines.append(f"not scored, files missing: {', '.join(report.missing)}")
    lines.append(f"{summary['examples']} examples in {report.seconds:.1f} s, {summary['examples_per_second']:.1f}/s")
    return lines


# The CORE bundle on disk: core.yaml (tasks), eval_meta_data.csv (chance and row counts), one file of rows per task.
#
#     tasks = load_bundle(folder)           # stored by `ascendchat data fetch core`, or `eval base --bundle DIR`
#
# The folder holds the bundle itself, or the fetched archive, which is read in place. Files of rows may be compressed
# (.jsonl.xz). A task without a file, or with only a part of its rows, is listed as such.

ROW_ORDER_SEED = 1337  # a published rule: with --max-per-task it decides which rows are scored
KINDS = ("multiple_choice", "schema", "language_modeling")
ROW_COUNTS = {"arc_challenge": 1172}  # the bundle's table repeats arc_easy's count here
AGAIN = "fetch it again: ascendchat data fetch core"

Folder = Path | zipfile.Path


@dataclass(frozen=True)
class CoreTask:
    """One task of the bundle. Without its file `rows` is empty, and `missing` says why."""

    label: str
    kind: str  # one of KINDS
    shots: int  # demonstrations before each row
    delimiter: str  # between a question and its answer
    chance: float  # accuracy of guessing, 0 to 1
    rows: list[dict[str, Any]]  # shuffled
    expected: int  # rows of the complete task
    file: str = ""
    missing: str = ""

    @property
    def complete(self) -> bool:
        return not self.missing and len(self.rows) >= self.expected


def _candidates(folder: Path) -> Iterator[Folder]:
    """Folders in which core.yaml may be."""
    yield folder
    yield folder / "eval_bundle"
    archives = [folder] if folder.suffix == ".zip" else sorted(folder.glob("*.zip"))
    for archive in archives:
        if archive.is_file():
            yield zipfile.Path(archive)
            yield zipfile.Path(archive) / "eval_bundle"


def find_bundle(folder: Path) -> Folder:
    """The folder of core.yaml: this one, one below, or one inside an archive."""
    try:
        for candidate in _candidates(folder):
            if (candidate / "core.yaml").is_file():
                return candidate
    except zipfile.BadZipFile as error:
        raise UserError(f"the CORE archive in {folder} is damaged ({error}); {AGAIN}") from None
    raise UserError(
        f"no CORE bundle at {folder} (core.yaml is not there); get it: ascendchat data fetch core, "
        "or give its folder: --bundle DIR"
    )


def read_rows(path: Folder) -> list[dict[str, Any]]:
    """Rows of a .jsonl or .jsonl.xz file."""
    try:
        content = path.read_bytes()
        text = (lzma.decompress(content) if path.name.endswith(".xz") else content).decode("utf-8")
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    except (*UNREADABLE, ValueError) as error:
        raise unreadable(path, error, AGAIN) from None


def find_file(folder: Folder, uri: str) -> Folder | None:
    """The task's file, compressed or not; else a subset of it (squad.subset1000.jsonl.xz)."""
    parent, _, name = uri.rpartition("/")
    within = folder / parent if parent else folder
    files: dict[str, Folder] = {path.name: path for path in within.iterdir()} if within.is_dir() else {}
    subset = f"{name.removesuffix('.jsonl')}.subset"
    names = [name, f"{name}.xz", *sorted(n for n in files if n.startswith(subset) and n.endswith((".jsonl", ".xz")))]
    return next((files[n] for n in names if n in files), None)


def load_bundle(folder: Path) -> list[CoreTask]:
    """All tasks of core.yaml, in its order."""
    import yaml

    bundle = find_bundle(folder)
    try:
        table = csv.DictReader(io.StringIO((bundle / "eval_meta_data.csv").read_text(encoding="utf-8")))
        facts = {row["Eval Task"]: row for row in table}
        entries = yaml.safe_load((bundle / "core.yaml").read_text(encoding="utf-8"))["icl_tasks"]
        return [_task(entry, facts, bundle / "eval_data") for entry in entries]
    except UNREADABLE as error:
        raise unreadable(f"the CORE bundle at {folder}", error, AGAIN) from None
    except (KeyError, TypeError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"the CORE bundle at {folder} is damaged ({error!r}); {AGAIN}") from None


def _task(entry: Mapping[str, Any], facts: Mapping[str, Mapping[str, str]], folder: Folder) -> CoreTask:
    label, kind = entry["label"], entry["icl_task_type"]
    if kind not in KINDS:
        raise ValueError(f"{label}: unknown type {kind}")
    path = find_file(folder, entry["dataset_uri"])
    rows = read_rows(path) if path else []
    random.Random(ROW_ORDER_SEED).shuffle(rows)
    return CoreTask(
        label=label,
        kind=kind,
        shots=int(entry["num_fewshot"][0]),
        delimiter=entry.get("continuation_delimiter", " "),
        chance=0.01 * float(facts[label]["Random baseline"]),
        rows=rows,
        expected=ROW_COUNTS.get(label) or int(facts[label]["#datapoints"].replace(",", "")),
        file=path.name if path else "",
        missing="" if path else f"no file {entry['dataset_uri']}",
    )
