"""`ascendchat eval chat --run NAME --stage sft`: evaluates a chat model; also under `ascendchat launch`.

    ascendchat eval chat --tasks toy                                   the toy world's own tasks
    ascendchat eval chat --tasks chatcore,chinese --source DIR         sets in a folder of yours
    ascendchat eval chat --tasks humaneval --samples 8 --temperature 0.8      pass@1, 2, 4, 8

ChatCORE is the mean of the centred accuracies, (accuracy - chance) / (1 - chance), over ARC-Easy, ARC-Challenge, MMLU,
GSM8K and HumanEval; its Chinese counterpart over C-Eval and CMMLU. Results go to runs/NAME/results.jsonl after every
task, and the table of all stages of the run is printed. A task that cannot be loaded is named with the reason.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from ascendchat import sandbox
from ascendchat.config.generate import EvalChatConfig
from ascendchat.device import pick
from ascendchat.engine.open import engine_for, open_for_generation
from ascendchat.errors import UserError, home, nearest
from ascendchat.eval.chat_tasks import ModelChooser, Outcome, TaskEvaluator, check_room, evaluate_task
from ascendchat.eval.scorer import row_length
from ascendchat.eval.stages import GROUPS, score_lines, scores, stage_table, table_lines
from ascendchat.parallel import collectives
from ascendchat.parallel.context import Context, joined
from ascendchat.runs.results import NewResults, run_of
from ascendchat.tasks.by_name import EVALUATIONS
from ascendchat.tasks.by_name import load as load_task
from ascendchat.tasks.humaneval import HumanEval
from ascendchat.tasks.task import Task
from ascendchat.tasks.toy import TOY_TASKS as TOY


def chosen_tasks(words: Iterable[str]) -> list[str]:
    """Turn names of tasks and groups into names of tasks, in the order of the table."""
    chosen: set[str] = set()
    for word in words:
        plain = word.lower().replace("-", "_")
        if plain == "all":
            chosen.update(EVALUATIONS)
        elif plain in GROUPS:
            chosen.update(GROUPS[plain])
        elif plain in EVALUATIONS:
            chosen.add(plain)
        else:
            raise UserError(f"--tasks {word}: no such task; {nearest(plain, ['all', *GROUPS, *EVALUATIONS])}")
    return [name for name in EVALUATIONS if name in chosen]


def open_tasks(names: Sequence[str], source: str) -> tuple[list[Task], dict[str, str]]:
    """The tasks that can be loaded, and for each other one the reason."""
    tasks: list[Task] = []
    missing: dict[str, str] = {}
    for name in names:
        try:
            tasks.append(load_task(name, source="" if name in TOY else source))
        except UserError as error:
            missing[name] = str(error)
    return tasks, missing


def outcome_line(outcome: Outcome) -> str:
    """One row of the printed table."""
    notes = [f"{outcome.rows} of {outcome.rows_in_task} rows"] if outcome.rows < outcome.rows_in_task else []
    notes += [f"{outcome.cropped} cropped"] if outcome.cropped else []
    notes += [f"pass@{k} {share:.4f}" for k, share in outcome.pass_at.items() if k != "1"]
    return (
        f"  {outcome.name:<24}{outcome.accuracy:9.4f}{outcome.centred:9.4f}{outcome.rows:7d}{outcome.seconds:8.1f} s"
        f"  {'; '.join(notes)}"
    ).rstrip()


def evaluate_tasks(
    tasks: Sequence[Task], evaluator: TaskEvaluator, source: str, new: NewResults, say: Callable[[str], None]
) -> None:
    """Evaluate one task after the other; the result of each is printed and stored as it ends."""
    say(f"  {'task':<24}{'accuracy':>9}{'centred':>9}{'rows':>7}{'time':>8}")
    for task in tasks:
        outcome = evaluate_task(task, evaluator)
        say(outcome_line(outcome))
        if isinstance(task, HumanEval) and (failed := sum(collectives.gather_objects(len(task.sandbox_failed)))):
            say(f"  {'':<24} {failed} programs ended because the sandbox failed, or pretended so; they count as wrong")
        new.add(task.name, outcome.rows, outcome.rows_in_task, asdict(outcome), source_of(task.name, source))


def source_of(name: str, source: str) -> str | None:
    """The origin of a task, for its row of results: the absolute path of --source, "" if it was fetched, None if it is
    part of this package."""
    if name in TOY:
        return None
    return str(Path(source).expanduser().resolve()) if source else ""


def sandbox_line() -> str:
    """A line that says how programs are contained here. A sandbox that runs nothing is an error: every answer would
    count as wrong."""
    trial = sandbox.run("pass", seconds=20.0)
    if not trial.ok:
        raise UserError(
            f"humaneval cannot be examined: the sandbox does not run even an empty program here ({trial.reason}: "
            f"{trial.detail or trial.stderr.strip()}); leave humaneval out of --tasks, or repair that"
        )
    layers = sandbox.capabilities()
    return f"sandbox: {', '.join(layers['layers']) or 'limits only'}" + "".join(
        f"; {name} is NOT contained" for name, contained in layers.items() if contained is False
    )


def print_report(new: NewResults, as_json: bool, say: Callable[[str], None]) -> None:
    """Print the summary numbers, the table of stages, and with --json one object: the results of this evaluation, and
    earlier ones of the same weights with the same settings."""
    if notice := new.better_earlier():
        say(notice)
    rows = new.with_earlier()
    tasks = {name: rows[name]["result"] for name in EVALUATIONS if name in rows and rows[name]["examined"]}
    means = scores(tasks)
    for text in score_lines(means):
        say(text)
    if left := [name for name, row in new.rows.items() if "missing" in row["result"]]:
        say(f"not examined: {', '.join(left)}")
    if run := run_of(new.stage):
        say(f"stages of {run} ({home() / 'runs' / run}):")
        for text in table_lines(stage_table(run)):
            say(text)
    if as_json:
        missing = {name: row["result"]["missing"] for name, row in rows.items() if "missing" in row["result"]}
        source = next((row["source"] for row in rows.values() if row["source"] is not None), None)
        about = {**new.about, "stage": new.stage.name, "source": source}
        print(json.dumps({**about, "missing": missing, "tasks": tasks, "scores": means}))


def run(config: EvalChatConfig) -> int:
    """Run `ascendchat eval chat`."""
    if config.samples > 1 and config.temperature == 0:
        raise UserError("several samples need chance: give --temperature 0.8 (0 gives the same answer every time)")
    names = chosen_tasks(config.tasks)
    with joined(pick(config.device_type), sys.stderr if config.json else None) as here:
        return evaluate_model(config, names, here)


def evaluate_model(config: EvalChatConfig, names: Sequence[str], here: Context) -> int:
    """Open the model and the tasks, evaluate, print; the exit status."""
    say = here.say
    opened = open_for_generation(here, config, config.stage, config.context)
    tasks, missing = open_tasks(names, config.source)
    for name, why in missing.items():
        say(f"  {name:<24} MISSING: {why}")
    say(opened.why_kernel)
    if any(task.name == "humaneval" for task in tasks):
        say(sandbox_line())
    model, pin = opened.model, here.device.pin
    context = row_length("--context", config.context, model.shape.seq_len)
    chooser = ModelChooser(
        model, opened.kernel, here.place, max_tokens=config.tokens_per_batch, max_len=context, pin=pin
    )
    evaluator = TaskEvaluator(
        opened.tokenizer,
        chooser,
        engine_for(opened, config.slots, context),
        config.max_new_tokens,
        config.samples,
        config.temperature,
        config.seed,
        None if config.max_per_task == -1 else config.max_per_task,
    )
    if config.context:
        check_room(tasks, evaluator)
    folder, parameters = opened.source.folder, model.shape.total_parameters
    say(f"{folder}: {parameters / 1e6:.1f} M parameters, {len(tasks)} of {len(names)} tasks")
    if config.max_new_tokens >= context and any(task.kind == "reply" for task in tasks):
        say(f"prompt and reply share {context} tokens: a long prompt leaves half of them, not {config.max_new_tokens}")
    settings = {"max_new_tokens": config.max_new_tokens, "samples": config.samples, "temperature": config.temperature}
    settings |= {"seed": config.seed, "context": context}
    about = {"evaluation": "chat", **opened.identity, **opened.machine, "settings": settings}
    new = NewResults(opened.source.results_folder, about, main=here.main)
    for name, why in missing.items():
        new.add(name, 0, 0, {"missing": why}, source_of(name, config.source))
    evaluate_tasks(tasks, evaluator, config.source, new, say)
    if here.main:
        print_report(new, config.json, say)
    return 0 if tasks else 1
