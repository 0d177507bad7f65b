"""A user's reward function may raise, hang or die: every other answer is judged all the same."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ascendchat.errors import UserError
from ascendchat.rl.rewards import Judge, Judgement, JudgeRequest, row_of
from ascendchat.sandbox import pool
from ascendchat.sandbox.process import checked
from ascendchat.tasks.by_name import load

ROOT = Path(__file__).resolve().parents[2]
SUMS = load("toy_arithmetic_en", "train")
Open = Callable[..., Judge]

MODULE = """
import asyncio, multiprocessing, os, subprocess, sys, threading, time
from pathlib import Path

def fate(prompt, completion, **row):
    if completion == "raise":
        raise RuntimeError("as told")
    if completion == "die":
        os._exit(1)
    if completion == "hang":
        time.sleep(3600)
    if completion == "nan":
        return float("nan")
    return len(completion)

async def later(prompt, completion, **row):
    return float(row["index"])

def wild(prompt, completion, **row):
    if completion == "fork":
        while True:
            os.fork()
    if completion == "memory":
        taken = []
        while True:
            taken.append(bytearray(os.urandom(1 << 20)) * 16)
    if completion == "children":  # they hold the pipe to the trainer open
        if not os.fork():
            time.sleep(3600)
        os._exit(3)
    if completion == "twice":
        os.fork()
    if completion == "exit":
        sys.exit("enough")
    if completion == "unreadable":
        return Unreadable()
    if completion == "thread":
        threading.Thread(target=time.sleep, args=(3600,)).start()
    return float(os.getpid())

class Unreadable:
    def __float__(self):
        raise KeyboardInterrupt

met = {}

async def meet(prompt, completion, **row):
    "Only two that run beside one another in one process come through."
    if completion == "block":
        time.sleep(3600)
    if completion == "die":
        os._exit(5)
    if completion == "wait":
        await asyncio.sleep(3600)
    if completion == "nap":
        await asyncio.sleep(1)
        return 1.0
    key = completion
    first = met.pop(key, None)
    if first is None:
        first = met[key] = asyncio.Event()
        await first.wait()
    else:
        first.set()
    return 1.0

def areal(prompt, completions, prompt_ids, completion_ids, answer, **kwargs):
    return 100 * prompt_ids[0] + completion_ids[-1] + len(kwargs["finish"])

def few(prompt, completion, index):
    return index

class Callable:
    async def __call__(self, prompt, completion, **row):
        return 2.5

instance = Callable()

def threads(prompt, completion, **row):
    return float(threading.current_thread() is threading.main_thread())
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module with functions that judge, in the current folder."""
    (tmp_path / "fates.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "fates", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return "fates"


@pytest.fixture
def opened(module: str) -> Iterator[Open]:
    """Makes judges by `fates`, and closes them."""
    made: list[Judge] = []

    def judge(reward: str | tuple[str, ...], **settings: object) -> Judge:
        made.append(Judge(reward, **{"say": lambda text: None, **settings}))  # type: ignore[arg-type]
        return made[-1]

    yield judge
    for one in made:
        one.close()


def asked(*replies: str, row: int = 0) -> list[JudgeRequest]:
    """These answers to one question."""
    return [JudgeRequest(SUMS, row, reply) for reply in replies]


def verdicts(judge: Judge, *answers: JudgeRequest) -> list[Judgement]:
    """With an end, whatever happens."""
    return [judge.submit(one).result(timeout=20) for one in answers]


# ---- terms that run in this process --------------------------------------------------------------


def test_without_a_function_the_task_decides() -> None:
    right = row_of(SUMS, 0)["answer"]
    assert right == "The answer is 4059.", "what the assistant says in the end, without its calculations"
    judge = Judge()
    assert [one.reward for one in verdicts(judge, *asked(right, "I do not know."))] == [1.0, 0.0]
    assert judge.rewards([(SUMS, 0, right), (SUMS, 0, "I do not know.")]) == [1.0, 0.0]


def test_an_answer_is_right_by_the_first_term_that_is_not_about_its_form() -> None:
    answers = [JudgeRequest(SUMS, 0, text, (), (1, 2, 3), "stop") for text in (row_of(SUMS, 0)["answer"], "no")]
    right, wrong = verdicts(Judge(("length=-0.25", "format", "toyworld=2", "task=-1")), *answers)
    assert right.terms == {"length": 3.0, "format": 1.0, "toyworld": 1.0, "task": 1.0}
    assert wrong.terms == {"length": 3.0, "format": 1.0, "toyworld": 0.0, "task": 0.0}
    assert (right.reward, right.right) == (-0.75 + 1.0 + 2.0 - 1.0, True)
    assert (wrong.reward, wrong.right) == (-0.75 + 1.0, False)
    (manners,) = verdicts(Judge("format"), answers[0])
    assert (manners.reward, manners.right) == (1.0, False), "nothing says that it is right"


def test_a_term_that_cannot_judge_is_said_once_and_ends_a_run_in_which_it_never_could() -> None:
    said: list[str] = []
    judge = Judge(("task", "gsm8k"), say=said.append)  # the sums have no ####
    found = verdicts(judge, *asked("1", "2"))
    assert [(one.reward, list(one.terms)) for one in found] == [(None, ["task"])] * 2
    assert len(said) == 1
    assert said[0].startswith("--reward gsm8k failed: ValueError: the answer ")
    with pytest.raises(UserError, match="--reward gsm8k has judged none of 2 answers: ValueError: the answer"):
        judge.check_worked(2)


def test_a_reward_is_a_number_that_float32_can_tell_from_others() -> None:
    assert [checked(value) for value in (True, "0.5", -999_999)] == [1.0, 0.5, -999_999.0]
    for value in (1e6, -1e6, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="a number between -1e"):
            checked(value)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("fates", "--reward fates is no built-in term"),
        ("gsm8", "did you mean gsm8k?"),
        ("fates:nothing", "has no attribute 'nothing'; write module:function"),
        ("fates:met", "TypeError: fates:met is not a function"),
        ("no_such_module:fate", "No module named"),
        (":", "not of the form module:name"),
        ("gsm8k=x", "'x' is not a weight"),
        ("gsm8k=0", "a weight must be other than 0"),
    ],
)
def test_a_wrong_name_is_one_sentence_and_leaves_no_process(module: str, path: str, says: str) -> None:
    before = multiprocessing.active_children()
    with pytest.raises(UserError) as caught:
        Judge(path)
    assert says in str(caught.value)
    assert multiprocessing.active_children() == before


# ---- functions of the user's ---------------------------------------------------------------------


@pytest.mark.slow
def test_whatever_one_answer_does_the_others_are_judged(opened: Open) -> None:
    said: list[str] = []
    judge = opened("fates:fate", timeout=2.0, say=said.append)
    found = judge.rewards(asked("a", "raise", "bb", "die", "ccc", "hang", "dddd", "nan", *["eeeee"] * 8))
    assert found == [1.0, None, 2.0, None, 3.0, None, 4.0, None, *[5.0] * 8]
    assert len(said) == 1, "one sentence, however many fail"
    assert judge.rewards(asked("again")) == [5.0]


def test_a_function_that_never_works_ends_the_run_and_one_that_did_does_not(opened: Open) -> None:
    judge = opened("fates:fate")
    with pytest.raises(UserError, match="judged none of 3 answers: RuntimeError: as told; mend the function"):
        judge.rewards(asked("raise", "raise", "raise"))
    assert judge.rewards([]) == []
    assert judge.rewards(asked("a")) == [1.0]
    assert judge.rewards(asked("raise", "raise", "raise")) == [None] * 3


@pytest.mark.slow
def test_neither_forks_nor_memory_nor_children_stop_the_others(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "MAX_MEMORY", 512 << 20)
    judge = opened("fates:wild", timeout=60.0)
    words = ["a", "fork", "memory", "children", "twice", "exit", "unreadable", "thread", *["b"] * 8]
    found = judge.rewards(asked(*words))
    pids = {int(value) for value in found if value is not None}
    assert [value is None for value in found] == [word not in ("a", "twice", "thread", "b") for word in words]
    assert judge.rewards(asked("again")) != [None]
    judge.close()
    assert none_left(pids), "processes of a reward are left behind"


def none_left(sessions: set[int]) -> bool:
    """A process that was killed may still be ending."""
    end = time.monotonic() + 120
    while set(pool.usage()) & sessions and time.monotonic() < end:
        time.sleep(0.1)
    return not set(pool.usage()) & sessions


@pytest.mark.slow
def test_async_functions_run_beside_one_another_and_one_that_blocks_does_not_take_others_along(opened: Open) -> None:
    judge = opened("fates:meet", timeout=5.0)
    words = ["nap", "block", "nap", "die", "nap", "wait", *["nap"] * 9]
    assert judge.rewards(asked(*["two in each of four processes"] * 8)) == [1.0] * 8
    assert judge.rewards(asked(*words)) == [1.0 if word == "nap" else None for word in words]


def test_a_process_of_a_judge_imports_next_to_nothing() -> None:
    """Four start with every run: what the tasks need would take each of them 0.4 s more."""
    program = "import sys, ascendchat.sandbox.process; print(*sys.modules)"
    words = [sys.executable, "-c", program]
    found = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()
    assert not {"numpy", "torch", "httpx", "rich", "ascendchat.data", "ascendchat.tasks.by_name"} & {*found}


@pytest.mark.slow
def test_the_processes_of_a_judge_end_with_the_trainer(module: str) -> None:
    program = f"""
if __name__ == "__main__":
    from ascendchat.tasks.by_name import load
    from ascendchat.rl.rewards import Judge

    judge, task = Judge("{module}:wild", timeout=3600), load("toy_arithmetic_en", "train")
    print(int(judge.rewards([(task, 0, "pid")])[0]), flush=True)
    Judge("{module}:fate", timeout=3600).rewards([(task, 0, "hang")])
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.getcwd()])}
    words = [sys.executable, "-c", program]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as trainer:
        assert trainer.stdout is not None
        pid = int(trainer.stdout.readline())
        children = {int(line) for line in Path(f"/proc/{trainer.pid}/task/{trainer.pid}/children").read_text().split()}
        trainer.kill()
    assert pid not in (0, trainer.pid)
    assert none_left({pid} | children), "a process outlives its trainer"


@pytest.mark.parametrize(
    ("name", "reward"), [("areal", 706.0), ("few", 3.0), ("instance", 2.5), ("threads", 1.0), ("later", 3.0)]
)
def test_functions_of_every_shape_get_what_they_ask_for(opened: Open, name: str, reward: float) -> None:
    judge = opened(f"fates:{name}")
    assert judge.rewards([JudgeRequest(SUMS, 3, "x", (7, 8), (1, 2, 0), "length")]) == [reward]


def test_terms_are_added_with_their_weights_and_any_thread_may_ask(opened: Open) -> None:
    judge = opened(("task=2", "fates:fate=0.5", "length=-0.25", "format"))
    right = str(row_of(SUMS, 0)["answer"])
    replies = [right, "no"] * 4
    with ThreadPoolExecutor(4) as threads:
        found = list(
            threads.map(lambda reply: judge.verdicts([JudgeRequest(SUMS, 0, reply, (), (1, 2, 3))])[0], replies)
        )
    for verdict, reply in zip(found, replies):
        good = reply == right
        assert verdict.terms == {"task": good, "fates:fate": len(reply), "length": 3.0, "format": 1.0}
        assert verdict.reward == 2 * good + 0.5 * len(reply) - 0.75 + 1.0
        assert verdict.right == good
