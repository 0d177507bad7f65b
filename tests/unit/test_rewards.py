"""A user's reward function may raise, hang or die: every other answer is judged all the same."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ascendchat.config import UserError
from ascendchat.tasks import load, pool
from ascendchat.tasks.rewards import Asked, Judge, row_of

ROOT = Path(__file__).resolve().parents[2]

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
    (tmp_path / "fates.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "fates", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return "fates"


@pytest.mark.slow
def test_whatever_one_answer_does_the_others_are_judged(module: str) -> None:
    task, said = load("toy_arithmetic_en", "train"), list[str]()
    judge = Judge(f"{module}:fate", timeout=4.0, say=said.append)
    words = ["a", "raise", "bb", "die", "ccc", "hang", "dddd", "nan", *["eeeee"] * 8]
    try:
        found = judge.rewards([(task, 0, word) for word in words])
        assert found == [1.0, None, 2.0, None, 3.0, None, 4.0, None, *[5.0] * 8]
        assert len(said) == 1, "one sentence, however many fail"
        assert judge.rewards([(task, 0, "again")]) == [5.0]
    finally:
        judge.close()


@pytest.mark.slow
def test_a_function_that_never_works_ends_the_run_and_one_that_did_does_not(module: str) -> None:
    task = load("toy_arithmetic_en", "train")
    judge = Judge(f"{module}:fate", say=lambda text: None)
    try:
        with pytest.raises(UserError, match="judged none of 3 answers: RuntimeError: as told"):
            judge.rewards([(task, 0, "raise")] * 3)
        assert judge.rewards([]) == []
        assert judge.rewards([(task, 0, "a")]) == [1.0]
        assert judge.rewards([(task, 0, "raise")] * 3) == [None] * 3
    finally:
        judge.close()


@pytest.mark.slow
def test_a_function_may_be_async_and_sees_its_row(module: str) -> None:
    task = load("toy_arithmetic_en", "train")
    judge = Judge(f"{module}:later")
    try:
        assert judge.rewards([(task, index, "x") for index in (3, 1, 2)]) == [3.0, 1.0, 2.0]
    finally:
        judge.close()


@pytest.mark.slow
def test_neither_forks_nor_memory_nor_children_stop_the_others(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "MOST_MEMORY", 512 << 20)
    task, said = load("toy_arithmetic_en", "train"), list[str]()
    judge = Judge(f"{module}:wild", timeout=60.0, say=said.append)
    words = ["a", "fork", "memory", "children", "twice", "exit", "unreadable", "thread", *["b"] * 8]
    try:
        found = judge.rewards([(task, 0, word) for word in words])
        pids = {int(value) for value in found if value is not None}
        assert [value is None for value in found] == [word not in ("a", "twice", "thread", "b") for word in words]
        assert judge.rewards([(task, 0, "again")]) != [None]
    finally:
        judge.close()
    end = time.monotonic() + 60  # a process that was killed may still be ending
    while set(pool.usage()) & pids and time.monotonic() < end:
        time.sleep(0.1)
    assert not set(pool.usage()) & pids, "processes of a reward are left behind"


@pytest.mark.slow
def test_async_functions_run_beside_one_another_and_one_that_blocks_does_not_take_others_along(module: str) -> None:
    task = load("toy_arithmetic_en", "train")
    judge = Judge(f"{module}:meet", timeout=5.0, say=lambda text: None)
    words = ["nap", "block", "nap", "die", "nap", "wait", *["nap"] * 9]
    try:
        assert judge.rewards([(task, 0, "two in each of four processes")] * 8) == [1.0] * 8
        found = judge.rewards([(task, 0, word) for word in words])
        assert found == [1.0 if word == "nap" else None for word in words]
    finally:
        judge.close()


def test_a_process_of_a_judge_imports_next_to_nothing() -> None:
    """Four start with every run: what the tasks need would take each of them 0.4 s more."""
    program = "import sys, ascendchat.tasks.reward_call; print(*sys.modules)"
    words = [sys.executable, "-c", program]
    found = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()
    assert not {"numpy", "torch", "httpx", "rich", "ascendchat.data", "ascendchat.tasks.named"} & {*found}


@pytest.mark.slow
def test_the_processes_of_a_judge_end_with_the_trainer(module: str) -> None:
    program = (
        "from ascendchat.tasks import load\nfrom ascendchat.tasks.rewards import Judge\n"
        f"judge = Judge('{module}:wild', timeout=3600)\n"
        "task = load('toy_arithmetic_en', 'train')\n"
        "print(int(judge.rewards([(task, 0, 'pid')])[0]), flush=True)\n"
        f"Judge('{module}:fate', timeout=3600).rewards([(task, 0, 'hang')])\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.getcwd()])}
    with subprocess.Popen(
        [sys.executable, "-c", f"if __name__ == '__main__':\n {program.replace(chr(10), chr(10) + ' ')}"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as trainer:
        assert trainer.stdout is not None
        pid = int(trainer.stdout.readline())
        children = {int(line) for line in Path(f"/proc/{trainer.pid}/task/{trainer.pid}/children").read_text().split()}
        trainer.kill()
    assert pid not in (0, trainer.pid)
    deadline = time.monotonic() + 120
    while ({pid} | children) & set(pool.usage()):
        assert time.monotonic() < deadline, "a process outlives its trainer"
        time.sleep(0.2)


@pytest.mark.slow
def test_functions_of_other_shapes(module: str) -> None:
    task = load("toy_arithmetic_en", "train")
    for name, wanted in (("areal", 706.0), ("few", 3.0), ("instance", 2.5), ("threads", 1.0)):
        judge = Judge(f"{module}:{name}")
        try:
            assert judge.rewards([Asked(task, 3, "x", (7, 8), (1, 2, 0), "length")]) == [wanted], name
        finally:
            judge.close()


@pytest.mark.slow
def test_terms_are_added_with_their_weights_and_any_thread_may_ask(module: str) -> None:
    task = load("toy_arithmetic_en", "train")
    right = str(row_of(task, 0)["answer"])
    judge = Judge(("task=2", f"{module}:fate=0.5", "length=-0.25", "format"))
    try:
        replies = [right, "no"] * 4
        with ThreadPoolExecutor(4) as threads:
            asked = [Asked(task, 0, reply, (), (1, 2, 3), "stop") for reply in replies]
            found = list(threads.map(lambda one: judge.verdicts([one])[0], asked))
        for verdict, reply in zip(found, replies):
            good = reply == right
            assert verdict.terms == {"task": good, f"{module}:fate": len(reply), "length": 3.0, "format": 1.0}
            assert verdict.reward == 2 * good + 0.5 * len(reply) - 0.75 + 1.0
            assert verdict.right == good
    finally:
        judge.close()


def test_without_a_function_the_task_decides() -> None:
    task = load("toy_arithmetic_en", "train")
    right = task.example(0)[-1]["content"]
    text = right if isinstance(right, str) else "".join(part["text"] for part in right if part["type"] == "text")
    assert Judge().rewards([(task, 0, text), (task, 0, "I do not know.")]) == [1.0, 0.0]


@pytest.mark.parametrize("path", ["fates", "fates:nothing", "no_such_module:fate", ":", "gsm8", "gsm8k=x", "gsm8k=0"])
def test_a_wrong_name_is_one_sentence(module: str, path: str) -> None:
    with pytest.raises(UserError, match=r"--reward|weight"):
        Judge(path)
