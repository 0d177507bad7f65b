"""`ascendchat eval chat`: scoring rules on hand-made models, the model's own choices, the command and its files."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_models import engine as engine_of
from engine_models import model as random_model
from engine_models import tokenizer as bytes_tokenizer
from ranks import Host, run_ranks

from ascendchat import sandbox
from ascendchat.checkpoint import Writer as CheckpointWriter
from ascendchat.config import parse
from ascendchat.config.generate import EvalChatConfig
from ascendchat.data.chat.render import Conversation, render_prompt, text_of
from ascendchat.data.chat.render import parse_messages as parse_ids
from ascendchat.data.tokenizer.tokenizer import Tokenizer
from ascendchat.device import pick
from ascendchat.engine.request import Completion, Request, Sampling
from ascendchat.errors import UserError, home
from ascendchat.eval import chat, stages
from ascendchat.eval.chat_tasks import Chosen, ModelChooser, Outcome, TaskEvaluator, evaluate_task, selection
from ascendchat.nn.attention import Reference, choose
from ascendchat.nn.gpt import GPT, dense
from ascendchat.parallel import collectives
from ascendchat.runs.results import stage_results
from ascendchat.runs.run import run_folder
from ascendchat.sizes.shape import Shape
from ascendchat.tasks import by_name
from ascendchat.tasks.task import Task

TOKENIZER = bytes_tokenizer()


class Quiz(Task):
    """Choices of two to five letters; the right one follows from the row."""

    name, kind, baseline = "quiz", "choice", 0.25

    def __len__(self) -> int:
        return 40

    def prompt(self, index: int) -> Conversation:
        return [{"role": "user", "content": f"Question {index}" + "?" * (index % 9)}]

    def letters(self, index: int) -> Sequence[str]:
        return "ABCDE"[: 2 + index % 4]

    def answer(self, index: int) -> int:
        return (index * 7) % (2 + index % 4)


class Sums(Task):
    """Say the sum."""

    name, kind = "sums", "reply"

    def __len__(self) -> int:
        return 30

    def prompt(self, index: int) -> Conversation:
        return [{"role": "user", "content": f"{index} + 1"}]

    def correct(self, index: int, reply: str) -> bool:
        return reply == str(index + 1)


class Fake:
    """A chooser and a generator with room for everything."""

    reserved, context, version = 0, 100_000, 0

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return [Completion(text=self.reply_to(request)) for request in requests]


class Always(Fake):
    """Chooses the first letter, and says always the same."""

    def __init__(self, reply: str = "") -> None:
        self.reply, self.asked = reply, 0

    def submit(self, prompts: Sequence[list[int]], options: Sequence[list[int]]) -> Chosen:
        self.asked += len(prompts)
        return lambda: [0] * len(prompts)

    def reply_to(self, request: Request) -> str:
        return self.reply


class Oracle(Fake):
    """Reads the prompt and knows the task."""

    def __init__(self, task: Task) -> None:
        self.rows = {text_of(task.prompt(i)[-1]["content"]): i for i in range(len(task))}
        self.task = task

    def row(self, prompt: list[int]) -> int:
        assert prompt[-1] == TOKENIZER.specials["<|assistant_start|>"]
        return self.rows[text_of(parse_ids(TOKENIZER, prompt)[-2]["content"])]

    def submit(self, prompts: Sequence[list[int]], options: Sequence[list[int]]) -> Chosen:
        rows = [self.row(prompt) for prompt in prompts]
        for row, given in zip(rows, options):
            assert [TOKENIZER.decode([i]) for i in given] == list(self.task.letters(row))
        return lambda: [self.task.answer(row) for row in rows]

    def reply_to(self, request: Request) -> str:
        return text_of(self.task.example(self.row(request.prompt))[-1]["content"])


class Sometimes(Fake):
    """Is right when the seed says so."""

    def reply_to(self, request: Request) -> str:
        wanted = int(TOKENIZER.decode(request.prompt[2:-2]).split()[0]) + 1
        return str(wanted) if request.sampling.seed % 4 == 0 else "?"


def evaluator(model: Any, **changes: Any) -> TaskEvaluator:
    return TaskEvaluator(TOKENIZER, **{"chooser": model, "generator": model, **changes})


def test_always_a_is_as_good_as_the_share_of_a_and_an_oracle_is_perfect() -> None:
    quiz = Quiz()
    found = evaluate_task(quiz, evaluator(Always()))
    assert found.accuracy == pytest.approx(sum(quiz.answer(i) == 0 for i in range(40)) / 40)
    assert found.centred == pytest.approx((found.accuracy - 0.25) / 0.75)
    best = evaluate_task(quiz, evaluator(Oracle(quiz)))
    assert (best.accuracy, best.centred, best.right) == (1.0, 1.0, [1] * 40)


@pytest.mark.parametrize("name", ["ceval", "gsm8k"])
def test_real_tasks_give_guessing_about_zero_and_an_oracle_one(name: str, real_data: Path) -> None:
    task = by_name.load(name, source=str(real_data / "eval"))
    most = len(task) // 9
    worst = evaluate_task(task, evaluator(Always("42"), max_rows=most))
    assert abs(worst.centred) < 0.07
    assert evaluate_task(task, evaluator(Oracle(task), max_rows=most)).centred == 1.0


@pytest.mark.parametrize("name", ["toy_choice_zh", "toy_fact_en", "toy_problems", "toy_check_en"])
def test_the_toy_world_gives_garbage_nothing_and_an_oracle_everything(name: str) -> None:
    task = by_name.load(name)
    most = max(1, len(task) // 5)
    assert evaluate_task(task, evaluator(Oracle(task), max_rows=most)).accuracy == 1.0
    assert evaluate_task(task, evaluator(Always("\ufffd colourless green 17 ideas"), max_rows=most)).accuracy <= 0.05


def test_several_samples_give_the_unbiased_pass_at_k_and_do_not_depend_on_the_other_rows() -> None:
    found = evaluate_task(Sums(), evaluator(Sometimes(), samples=8, temperature=1.0))
    assert set(found.pass_at) == {"1", "2", "4", "8"}
    assert found.pass_at["1"] == pytest.approx(found.accuracy)
    assert 0.1 < found.accuracy < 0.4
    assert found.pass_at["1"] < found.pass_at["2"] < found.pass_at["4"] < found.pass_at["8"]
    assert found.pass_at["8"] == pytest.approx(sum(n > 0 for n in found.right) / 30)
    part = evaluate_task(Sums(), evaluator(Sometimes(), samples=8, temperature=1.0, max_rows=10))
    rows = selection(Sums(), 10)
    assert part.right == [found.right[row] for row in rows]
    assert rows != list(range(10))  # tables are sorted by subject: the first rows would not be fair


def test_the_model_chooses_in_batches_what_it_chooses_one_by_one() -> None:
    made, place = random_model(), torch.device("cpu")
    draw = random.Random(5)
    prompts = [[draw.randrange(256) for _ in range(draw.randint(1, 90))] for _ in range(60)]
    options = [draw.sample(range(256), draw.randint(2, 6)) for _ in prompts]
    chooser = ModelChooser(made, choose("cpu", torch.float32, 8)[0], place, max_tokens=700, max_len=100)
    found = chooser.submit(prompts, options)()
    with torch.no_grad():
        for prompt, given, answer in zip(prompts, options, found):
            hidden = made(torch.tensor([prompt]), dense(made, Reference(), 112))[0, -1]
            assert answer == int((made.head[given] @ hidden).argmax())
    assert len(set(found)) > 3
    assert chooser.submit([], [])() == []


def test_replies_come_from_the_engine_and_prompts_that_are_too_long_lose_their_beginning() -> None:
    engine = engine_of(random_model(), pick("cpu"), slots=3, context=64)
    prompts = [render_prompt(TOKENIZER, Sums().prompt(i)) for i in range(7)]
    requests = [Request(prompt, Sampling(max_tokens=8, temperature=0.0)) for prompt in prompts]
    assert engine.generate(requests) == [engine.generate([request])[0] for request in requests]

    class Long(Sums):
        def __len__(self) -> int:
            return 6

        def prompt(self, index: int) -> Conversation:
            return [{"role": "user", "content": "x" * (20 * index)}]

    found = evaluate_task(Long(), evaluator(Always(), generator=engine, max_tokens=16))
    assert (found.rows, found.accuracy) == (6, 0.0)
    assert found.cropped == 3  # 60, 80 and 100 letters do not fit into 48 tokens


def judged() -> dict[str, Any]:
    """What this rank finds, which asks its share of the questions."""
    first = Always()
    results = [
        evaluate_task(Quiz(), evaluator(first)),
        evaluate_task(Sums(), evaluator(Sometimes(), samples=4, temperature=1.0)),
    ]
    assert first.asked - len(Quiz()) // collectives.world().size in (0, 1)
    return {found.name: (found.right, found.accuracy, found.pass_at) for found in results}


def ranked(rank: int) -> dict[str, Any]:
    collectives.init(Host())
    found = judged()
    collectives.teardown()
    return found


@pytest.mark.slow
def test_any_number_of_ranks_gives_the_result_of_one() -> None:
    alone = judged()
    for found in run_ranks(ranked, 3, seconds=120):  # 40 and 30 questions: the shares differ
        assert found == alone


def result(**tasks_found: float) -> dict[str, dict[str, Any]]:
    return {
        name: {"accuracy": a, "rows": 10, "centred": (a - b) / (1 - b)}
        for name, a in tasks_found.items()
        for b in [0.0 if name in ("gsm8k", "humaneval") or "toy" in name else 0.25]
    }


def test_chatcore_is_the_mean_of_centred_accuracies_and_says_what_it_lacks() -> None:
    five = result(arc_easy=0.25, arc_challenge=1.0, mmlu=0.625, gsm8k=0.5, humaneval=0.0)
    found = stages.scores({**five, **result(ceval=0.25, cmmlu=0.55)})
    assert found["ChatCORE"]["score"] == pytest.approx((0 + 1 + 0.5 + 0.5 + 0) / 5)
    assert found["ChatCORE-zh"]["score"] == pytest.approx(0.2)
    assert found["ChatCORE"]["without"] == []
    del five["humaneval"]
    lacking = stages.scores(five)["ChatCORE"]
    assert (lacking["tasks"], lacking["of"], lacking["without"]) == (4, 5, ["humaneval"])
    assert "INCOMPLETE: without humaneval" in stages.score_lines({"ChatCORE": lacking})[0]
    assert stages.scores({}) == {}
    toy = stages.scores(result(toy_fact_en=0.9, toy_check_en=0.7, toy_problem_en=0.0, toy_problems=0.4))
    assert toy["toyworld en"]["score"] == pytest.approx(0.8)
    assert toy["toyworld"]["score"] == pytest.approx(0.5)  # of all questions


def test_tasks_are_named_one_by_one_or_in_groups() -> None:
    assert chat.chosen_tasks(["chinese", "gsm8k", "ARC-Easy"]) == ["arc_easy", "gsm8k", "ceval", "cmmlu"]
    assert chat.chosen_tasks(["all"]) == list(by_name.EVALUATIONS)
    assert len(chat.chosen_tasks(["toy"])) == 17
    with pytest.raises(UserError, match="did you mean mmlu"):
        chat.chosen_tasks(["mmlo"])


def save(stage: str, seed: int, step: int = 3) -> GPT:
    """A tiny model as a checkpoint of the run `tiny`."""
    tokenizer = Tokenizer([])
    tokenizer.save(home() / "tokenizer")
    tiny = GPT(Shape.from_depth(2, vocab=tokenizer.vocab_size, dim=32, head_dim=16, seq_len=256))
    tiny.initialise(seed=seed)
    state = {"shape": tiny.shape.to_dict(), "tokenizer": tokenizer.fingerprint, "stage": stage, "step": step}
    writer = CheckpointWriter(run_folder("tiny", stage), say=lambda text: None)
    writer.save(step, model=dict(tiny.state_dict()), shards={}, state=state)
    writer.wait()
    return tiny


def stored(stage: str) -> list[dict[str, Any]]:
    """All results of a stage of the run `tiny`."""
    return stage_results(run_folder("tiny", stage), "chat")


def command(*words: str) -> int:
    flags = ["--device-type", "cpu", "--max-per-task", "4", "--max-new-tokens", "5", "--slots", "4", *words]
    return chat.run(parse(EvalChatConfig, flags))


def test_the_command_writes_its_results_and_prints_the_stages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save("mid", 1)
    save("sft", 2)
    assert command("--run", "tiny", "--stage", "mid", "--tasks", "toy_fact_en,toy_choice_zh") == 0
    assert command("--tasks", "toy_choice_zh,mmlu", "--source", str(tmp_path)) == 0  # by default the latest stage
    shown = capsys.readouterr().out
    assert "MISSING: no files of mmlu" in shown
    assert "not examined: mmlu" in shown
    assert [line.split() for line in shown.splitlines() if "MID" in line][-1] == ["MID", "SFT"]
    missing, found = stored("sft")
    assert (found["stage"], found["step"], found["task"]) == ("sft", 3, "toy_choice_zh")
    assert (found["examined"], found["in_task"], len(found["result"]["right"])) == (4, 325, 4)
    assert (len(found["model"]), found["source"], found["dtype"]) == (12, None, "float32")
    assert (missing["examined"], missing["source"]) == (0, str(tmp_path.resolve()))
    assert "no files of mmlu" in missing["result"]["missing"]
    rows = {row["task"]: row for row in stages.stage_table("tiny")}
    assert set(rows) == {"toy_fact_en", "toy_choice_zh", "toyworld en", "toyworld zh", "toyworld"}
    assert rows["toy_fact_en"] == {"task": "toy_fact_en", "mid": 0.0, "sft": None}
    assert rows["toyworld zh"]["incomplete"] == ["mid", "sft"]
    assert stages.stage_table("no-such-run") == []


def test_json_goes_to_standard_output_alone_and_nothing_examined_is_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save("sft", 2)
    assert command("--tasks", "toy_choice_en", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tasks"]["toy_choice_en"]["kind"] == "reply"
    about = {"checkpoint", "model", "stage", "step", "chip", "world", "settings", "source", "missing", "scores"}
    assert about <= set(found)
    assert command("--tasks", "mmlu", "--source", str(tmp_path)) == 1


def test_settings_that_fit_neither_each_other_nor_the_model_are_refused_in_a_sentence() -> None:
    for flags in (["--samples", "4"], ["--temperature", "-1"]):
        with pytest.raises(UserError, match="--"):
            command(*flags)  # before anything is loaded: there is no model
    save("sft", 2)
    for said, flags in {
        "--context 257: this model was trained with rows of 256 tokens; give at most those": "--context 257",
        "--context 16 leaves a prompt 11 tokens, and those of toy_choice_en have ": "--context 16",
        "--context 90 leaves a prompt 45 tokens, and those of toy": "--context 90 --max-new-tokens 80",
    }.items():
        with pytest.raises(UserError, match=said):
            command("--tasks", "toy_choice_en", *flags.split())
    assert stored("sft") == []


def test_replies_that_cannot_be_as_long_as_asked_for_are_announced(capsys: pytest.CaptureFixture[str]) -> None:
    save("sft", 2)
    assert command("--tasks", "toy_choice_en", "--max-per-task", "1", "--max-new-tokens", "256") == 0
    assert "share 256 tokens: a long prompt leaves half of them, not 256" in capsys.readouterr().out
    assert command("--tasks", "toy_choice_en", "--max-per-task", "1", "--context", "200") == 0
    assert "share" not in capsys.readouterr().out


def write_humaneval(folder: Path) -> None:
    row = {"prompt": "def f(x):\n", "entry_point": "f", "canonical_solution": "    return x\n"}
    row["test"] = "def check(f):\n    assert f(2) == 2\n"
    (folder / "HumanEval.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")


def test_a_sandbox_that_runs_nothing_is_an_error_and_not_a_model_without_a_right_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save("sft", 2)
    write_humaneval(tmp_path)
    real = sandbox.run
    broken = sandbox.ProgramResult(False, "", "", "sandbox", "libpython: no such file")
    with monkeypatch.context() as patch:
        patch.setattr(sandbox, "run", lambda code, **limits: broken)
        with pytest.raises(UserError, match="libpython: no such file"):
            command("--tasks", "humaneval", "--source", str(tmp_path))
    assert stored("sft") == []
    with monkeypatch.context() as patch:  # later ones are counted: a program can imitate it
        patch.setattr(sandbox, "run", lambda code, **limits: broken if "check(f)" in code else real(code, **limits))
        assert command("--tasks", "humaneval", "--source", str(tmp_path)) == 0
    assert "1 programs ended because the sandbox failed" in capsys.readouterr().out
    assert command("--tasks", "humaneval", "--source", str(tmp_path)) == 0
    assert "the sandbox failed" not in capsys.readouterr().out


def test_finished_tasks_are_on_disk_before_the_next_one_begins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a quick look says that a fuller result counts. Which of them do: test_results.py."""

    def guess(task: Task, evaluator: TaskEvaluator) -> Outcome:
        """In place of an examination, which takes longer."""
        if task.name == "toy_check_en":
            raise KeyboardInterrupt
        rows = len(selection(task, evaluator.max_rows))
        return Outcome(task.name, task.kind, task.split, rows, len(task), 0.5, 0.0, 0.5, {}, 0, 0.0, [1, 0])

    monkeypatch.setattr(chat, "evaluate_task", guess)
    save("sft", 2)
    assert command("--tasks", "toy_choice_en", "--max-per-task", "9") == 0
    with pytest.raises(KeyboardInterrupt):
        command("--tasks", "toy_fact_en,toy_check_en")
    assert [row["task"] for row in stored("sft")] == ["toy_choice_en", "toy_fact_en"]
    assert {row["task"]: row["sft"] for row in stages.stage_table("tiny")}["toyworld en"] == 0.5
    capsys.readouterr()
    assert command("--tasks", "toy_choice_en,toy_choice_zh", "--json") == 0  # four rows
    shown = capsys.readouterr()
    assert "what was found before still counts: toy_choice_en over 9 of 317 (now 4)\n" in shown.err
    printed = json.loads(shown.out)  # what this run found is printed nevertheless, beside what was there
    rows = {name: task["rows"] for name, task in printed["tasks"].items()}
    assert rows == {"toy_fact_en": 4, "toy_choice_en": 4, "toy_choice_zh": 4}
    assert printed["scores"] == stages.scores(printed["tasks"])
    assert command("--tasks", "toy_choice_en", "--max-new-tokens", "3") == 0
    assert "before with other settings still counts: toy_choice_en over 9 of 317 (now 4)" in capsys.readouterr().out
    save("sft", 3)  # trained again, to the same step
    assert command("--tasks", "toy_choice_en") == 0
    assert "still counts" not in capsys.readouterr().out
