"""`ascendchat eval chat --run NAME --stage sft`: what a chat model knows and can do; also under `ascendchat launch`.

    ascendchat eval chat --tasks toy                                   the toy world's own examination
    ascendchat eval chat --tasks chatcore,chinese --source DIR         sets in a folder of yours
    ascendchat eval chat --tasks humaneval --samples 8 --temperature 0.8      pass@1, 2, 4, 8

ChatCORE is the mean of the centred accuracies, (accuracy - chance) / (1 - chance), over ARC-Easy, ARC-Challenge, MMLU,
GSM8K and HumanEval; its Chinese counterpart over C-Eval and CMMLU. Results go to runs/NAME/STAGE/eval_chat.json after
every task, and the table of all stages of the run is printed. A task that cannot be had is named with the reason, never
left out.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ascendchat import dist, sandbox
from ascendchat.checkpoint import Checkpoint
from ascendchat.config import UserError, home, nearest
from ascendchat.config.eval import EvalChatConfig
from ascendchat.device import describe, pick
from ascendchat.eval.examine import Examiner, ModelChooser, Outcome, check_room, examine, selection
from ascendchat.eval.scorer import row_length
from ascendchat.files import write_atomic
from ascendchat.infer.engine import Engine
from ascendchat.infer.load import STAGES, load
from ascendchat.nn.attention import choose
from ascendchat.record import run_folder
from ascendchat.tasks import EVALUATIONS, Task
from ascendchat.tasks import load as load_task
from ascendchat.tasks.humaneval import HumanEval
from ascendchat.tasks.toy import TOY_EXAMS as TOY

FILE = "eval_chat.json"
GROUPS: dict[str, tuple[str, ...]] = {
    "chatcore": ("arc_easy", "arc_challenge", "mmlu", "gsm8k", "humaneval"),
    "chinese": ("ceval", "cmmlu"),
    "toy": TOY,
}
SCORES = {"ChatCORE": "chatcore", "ChatCORE-zh": "chinese"}  # the mean of the centred accuracies of a group
Rows = Mapping[str, tuple[int, int]]  # task -> rows to examine, rows that there are
# All questions of the toy world in one language, but the word problems: those are what RL has to improve.
POOLS = {
    f"toyworld {language}": tuple(name for name in TOY if name.endswith(f"_{language}") and "_problem_" not in name)
    for language in ("en", "zh")
}


def chosen_tasks(words: Iterable[str]) -> list[str]:
    """Names of tasks and groups, in any order -> names of tasks, in the order of the table."""
    found: set[str] = set()
    for word in words:
        plain = word.lower().replace("-", "_")
        if plain == "all":
            found.update(EVALUATIONS)
        elif plain in GROUPS:
            found.update(GROUPS[plain])
        elif plain in EVALUATIONS:
            found.add(plain)
        else:
            raise UserError(f"--tasks {word}: no such task; {nearest(plain, ['all', *GROUPS, *EVALUATIONS])}")
    return [name for name in EVALUATIONS if name in found]


def open_tasks(names: Sequence[str], source: str) -> tuple[list[Task], dict[str, str]]:
    """The tasks that are there, and why the others are not."""
    tasks: list[Task] = []
    missing: dict[str, str] = {}
    for name in names:
        try:
            tasks.append(load_task(name, source="" if name in TOY else source))
        except UserError as error:
            missing[name] = str(error)
    return tasks, missing


def scores(tasks: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The summary numbers of one stage; each says over what it was taken, and what it lacks."""
    found: dict[str, dict[str, Any]] = {}
    for name, group in SCORES.items():
        there = [task for task in GROUPS[group] if task in tasks]
        if there:
            mean = sum(tasks[task]["centred"] for task in there) / len(there)
            found[name] = {
                "score": mean, "tasks": len(there), "of": len(GROUPS[group]),
                "without": [task for task in GROUPS[group] if task not in tasks],
            }  # fmt: skip
    for name, members in POOLS.items():
        there = [task for task in members if task in tasks]
        rows = sum(tasks[task]["rows"] for task in there)
        if rows:
            right = sum(tasks[task]["accuracy"] * tasks[task]["rows"] for task in there)
            found[name] = {
                "score": right / rows, "tasks": len(there), "of": len(members),
                "without": [task for task in members if task not in tasks],
            }  # fmt: skip
    return found


def line(outcome: Outcome) -> str:
    """One row of the printed table."""
    notes = [f"{outcome.rows} of {outcome.rows_in_task} rows"] if outcome.rows < outcome.rows_in_task else []
    notes += [f"{outcome.cropped} cropped"] if outcome.cropped else []
    notes += [f"pass@{k} {share:.4f}" for k, share in outcome.pass_at.items() if k != "1"]
    return (
        f"  {outcome.name:<24}{outcome.accuracy:9.4f}{outcome.centred:9.4f}{outcome.rows:7d}{outcome.seconds:8.1f} s"
        f"  {'; '.join(notes)}"
    ).rstrip()


def score_lines(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The summary numbers in words."""
    lines = []
    for name, value in found.items():
        lacks = f", INCOMPLETE: without {', '.join(value['without'])}" if value["without"] else ""
        lines.append(f"{name} {value['score']:.4f} over {value['tasks']} of {value['of']} tasks{lacks}")
    return lines


def read_results(stage: Path) -> dict[str, Any]:
    """What an earlier evaluation of a stage found; nothing if there is none, or it cannot be read."""
    try:
        found = json.loads((stage / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) and isinstance(found.get("tasks"), dict) else {}


def merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Tasks may be examined in several goes: what the same weights reached in the same way on the same files stays."""
    before: dict[str, Any] = old if same_weights(old, new) and same_settings(old, new) else {}
    source = before.get("source") if new["source"] is None else new["source"]
    stays = [name for name in EVALUATIONS if name in TOY or before.get("source") == source]
    tasks = {name: found for name, found in before.get("tasks", {}).items() if name in stays} | new["tasks"]
    missing = {name: why for name, why in before.get("missing", {}).items() if name in stays} | new["missing"]
    missing = {name: why for name, why in missing.items() if name not in tasks}
    ordered = {name: tasks[name] for name in EVALUATIONS if name in tasks}
    return {**new, "source": source, "tasks": ordered, "missing": missing, "scores": scores(ordered)}


def same_weights(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    return all(old.get(key) == new[key] for key in ("model", "step"))


def same_settings(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether both were asked in the same way. Over how many rows, each task says itself (older files say it here)."""
    was, now = ({**found.get("settings", {}), "max_per_task": None} for found in (old, new))
    return was == now


def fuller(old: Mapping[str, Any], new: Mapping[str, Any], rows: Rows) -> dict[str, dict[str, Any]]:
    """The tasks that the same weights were examined on before, over more rows of the same files than now."""
    if not same_weights(old, new):
        return {}
    stays = [name for name in rows if name in TOY or old.get("source") == new["source"]]
    before: dict[str, dict[str, Any]] = {name: old["tasks"][name] for name in stays if name in old["tasks"]}
    same = {name: was for name, was in before.items() if was.get("rows_in_task") == rows[name][1]}
    return {name: was for name, was in same.items() if was["rows"] > rows[name][0]}


def kept(old: dict[str, Any], found: dict[str, Any], rows: Rows) -> tuple[dict[str, Any], str]:
    """What goes into the file: `found`, but results over fewer rows never replace those over more.

    The second value says what was kept so. `rows` are those of all tasks of this run, also of those that come later:
    a file of other settings must not be given up for the first task and then be wanted for the second."""
    if not rows and old.get("tasks") and same_weights(old, found):
        return old, "what was found before: nothing was examined now"
    more = fuller(old, found, rows)
    if not more:
        return found, ""
    names = ", ".join(f"{name} over {was['rows']} rows (now {rows[name][0]})" for name, was in more.items())
    if not same_settings(old, found):
        return old, f"what was found before with other settings: {names}; the results of this run are not added to it"
    tasks = found["tasks"] | more
    return {**found, "tasks": tasks, "scores": scores(tasks)}, f"what was found before: {names}"


def store(stage: Path, new: dict[str, Any], rows: Rows) -> tuple[dict[str, Any], str]:
    """Add results to the file of a stage; gives them back with those of earlier goes, and says what the file keeps."""
    old = read_results(stage)
    found = merged(old, new)
    both, words = kept(old, found, rows)
    if dist.world().rank == 0:
        write_atomic(stage / FILE, json.dumps(both, indent=1))
    return found, words


def source_of(names: Iterable[str], source: str) -> str | None:
    """Where the tasks come from: the absolute path of --source, "" if they are fetched, None if all are embedded."""
    if all(name in TOY for name in names):
        return None
    return str(Path(source).expanduser().resolve()) if source else ""


def stage_table(run: str) -> list[dict[str, Any]]:
    """A row per task and summary number, a column per stage: {"task": ..., "base": 0.25, "sft": 0.31}.

    A value is None where a stage has not been examined on the task. Summary numbers that lack a task are marked in
    `incomplete`, a list of stages."""
    stages = {stage: read_results(run_folder(run, stage)) for stage in STAGES}
    stages = {stage: found for stage, found in stages.items() if found}
    rows: list[dict[str, Any]] = []
    for name in EVALUATIONS:
        values = {stage: (found["tasks"].get(name) or {}).get("accuracy") for stage, found in stages.items()}
        if any(value is not None for value in values.values()):
            rows.append({"task": name, **values})
    for name in (*SCORES, *POOLS):
        both = {stage: scores(found["tasks"]).get(name) for stage, found in stages.items()}
        if any(both.values()):
            values = {stage: value["score"] if value else None for stage, value in both.items()}
            rows.append(
                {"task": name, **values, "incomplete": [s for s, value in both.items() if value and value["without"]]}
            )
    return rows


def table_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """`stage_table` for people; * marks a number that lacks some of its tasks."""
    stages = [stage for stage in STAGES if any(stage in row for row in rows)]
    lines = [f"  {'':<24}" + "".join(f"{stage.upper():>10}" for stage in stages)]
    for row in rows:
        cells = []
        for stage in stages:
            value = row.get(stage)
            mark = "*" if stage in row.get("incomplete", ()) else ""
            shown = "-" if value is None or math.isnan(value) else f"{value:.4f}{mark}"
            cells.append(f"{shown:>10}")
        lines.append(f"  {row['task']:<24}" + "".join(cells))
    if any(row.get("incomplete") for row in rows):
        lines.append("  * some of its tasks are missing: not comparable with complete ones")
    return lines


def evaluate(
    tasks: Sequence[Task], examiner: Examiner, say: Callable[[str], None], done: Callable[[dict[str, Any]], object]
) -> dict[str, dict[str, Any]]:
    """All tasks, one after the other; as each ends it is announced, and `done` gets all results so far."""
    say(f"  {'task':<24}{'accuracy':>9}{'centred':>9}{'rows':>7}{'time':>8}")
    found: dict[str, dict[str, Any]] = {}
    for task in tasks:
        outcome = examine(task, examiner)
        say(line(outcome))
        if isinstance(task, HumanEval) and (failed := sum(dist.gather_objects(len(task.sandbox_failed)))):
            say(f"  {'':<24} {failed} programs ended because the sandbox failed, or pretended so; they count as wrong")
        found[task.name] = asdict(outcome)
        done(found)
    return found


def sandbox_line() -> str:
    """What holds the programs here. A sandbox that runs nothing is an error: every answer would count as wrong."""
    tried = sandbox.run("pass", seconds=20.0)
    if not tried.ok:
        raise UserError(
            f"humaneval cannot be examined: the sandbox does not run even an empty program here ({tried.reason}: "
            f"{tried.detail or tried.stderr.strip()}); leave humaneval out of --tasks, or repair that"
        )
    walls = sandbox.capabilities()
    return f"sandbox: {', '.join(walls['layers']) or 'limits only'}" + "".join(
        f"; {name} is NOT contained" for name, held in walls.items() if held is False
    )


def run(config: EvalChatConfig) -> int:
    """The command."""
    if config.samples > 1 and config.temperature == 0:
        raise UserError("several samples need chance: give --temperature 0.8 (0 gives the same answer every time)")
    most, names = None if config.max_per_task == -1 else config.max_per_task, chosen_tasks(config.tasks)
    device = pick(config.device_type)
    world = dist.init(device)
    place = device.bind(world.local_rank)

    def say(text: str) -> None:
        if world.rank == 0:
            print(text, file=sys.stderr if config.json else sys.stdout, flush=True)

    say(describe(device))
    loaded = load(
        device, place, run=config.run, stage=config.stage, checkpoint=config.checkpoint, tokenizer=config.tokenizer,
        say=say,
    )  # fmt: skip
    weights = Checkpoint(loaded.folder, loaded.state).fingerprint
    tasks, missing = open_tasks(names, config.source)
    for name, why in missing.items():
        say(f"  {name:<24} MISSING: {why}")
    shape = loaded.model.shape
    kernel, reason = choose(device.type, device.dtype, shape.head_dim, config.attention)
    say(reason)
    if any(task.name == "humaneval" for task in tasks):
        say(sandbox_line())
    context = row_length("--context", config.context, shape.seq_len)
    engine = Engine(loaded.model, kernel, loaded.tokenizer, device, place, slots=config.slots, context=context)
    chooser = ModelChooser(
        loaded.model, kernel, place, max_tokens=config.tokens_per_batch, max_len=context, pin=device.pin
    )
    examiner = Examiner(
        loaded.tokenizer, chooser, engine, config.max_new_tokens, config.samples, config.temperature, config.seed, most
    )
    if config.context:
        check_room(tasks, examiner)
    say(f"{loaded.folder}: {shape.total_parameters / 1e6:.1f} M parameters, {len(tasks)} of {len(names)} tasks")
    if config.max_new_tokens >= context and any(task.kind == "reply" for task in tasks):
        say(f"prompt and reply share {context} tokens: a long prompt leaves half of them, not {config.max_new_tokens}")
    settings = {
        "max_new_tokens": config.max_new_tokens, "samples": config.samples, "temperature": config.temperature,
        "context": context, "seed": config.seed,
    }  # fmt: skip
    about = {
        "checkpoint": str(loaded.folder), "model": weights, "stage": loaded.folder.parent.name,
        "step": loaded.state.get("step"), "chip": device.chip.name, "world": world.size, "settings": settings,
        "source": source_of(names, config.source), "missing": missing,
    }  # fmt: skip
    stage, rows = loaded.folder.parent, {task.name: (len(selection(task, most)), len(task)) for task in tasks}
    results = evaluate(tasks, examiner, say, lambda found: store(stage, {**about, "tasks": found}, rows))
    found, words = store(stage, {**about, "tasks": results}, rows)
    if words:
        say(f"{stage / FILE} keeps {words}")
    for text in score_lines(found["scores"]):
        say(text)
    if missing:
        say(f"not examined: {', '.join(missing)}")
    if world.rank == 0:
        name = stage.parent.name
        if stage == run_folder(name, stage.name):
            say(f"stages of {name} ({home() / 'runs' / name}):")
            for text in table_lines(stage_table(name)):
                say(text)
        if config.json:
            print(json.dumps(found))
    dist.teardown()
    return 0 if tasks else 1
