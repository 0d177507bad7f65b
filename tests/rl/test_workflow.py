"""Conversations of several turns: masks on what the model did not write, and the same tokens whatever runs beside."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from engine_models import calculator_script, engine, model, scripted, tokenizer

from ascendchat.data.chat.render import render_prompt
from ascendchat.device import pick
from ascendchat.engine.engine import Engine
from ascendchat.engine.request import Completion, Request, Sampling
from ascendchat.errors import UserError
from ascendchat.nn import IGNORE
from ascendchat.rl.episode import TRY_AGAIN
from ascendchat.rl.questions import QuestionFile
from ascendchat.rl.rewards import Judge
from ascendchat.rl.rollout import AnswerGroup, TaskQuestion, answer_seed, pack
from ascendchat.rl.workflow import Workflows

CONTEXT = 96
FLOWS = """
import asyncio, os, time

async def plain(generator, row):
    talk = generator.talk(row["messages"])
    answer = await talk.reply()
    return talk.trajectory(await generator.reward(answer))

async def moods(generator, row):
    "Raises, blocks, waits for ever, dies, rejects or returns nonsense, each for one question."
    mood = row["mood"]
    talk = generator.talk(row["messages"])
    answer = await talk.reply()
    if mood == "raise":
        raise RuntimeError("as told")
    if mood == "block":
        time.sleep(3600)
    if mood == "wait":
        await asyncio.sleep(3600)
    if mood == "die":
        os._exit(3)
    if mood == "reject":
        return None
    if mood == "nonsense":
        return {"input_ids": [1, 2], "loss_mask": [0, 1], "logprobs": [0, float("nan")], "rewards": 1.0}
    if mood == "odd":
        return 17
    if mood == "too long":
        try:
            await generator.agenerate([1] * 1000)
        except Exception as refused:
            assert "no room" in str(refused)
            return talk.trajectory(0.5)
    return talk.trajectory(1.0)

class Several:
    "Asks twice at once, waits by the clock of its own, and goes on with the longer answer."
    async def arun(self, generator, row):
        await asyncio.sleep(0.001 * (row["index"] % 3))
        talk = generator.talk(row["messages"])
        one, two = await asyncio.gather(generator.agenerate(talk.ids), generator.agenerate(row["messages"]))
        talk.say("first " + str(len(one.ids)) + " " + str(sum(two.ids)))
        answer = await talk.reply(max_tokens=7)
        talk.say("more", role="system")
        await talk.reply(temperature=0.5)
        return talk.trajectory(float(len(answer.ids)))

async def areal(generator, row):
    answer = await generator.agenerate(row["messages"], max_tokens=5)
    prompt = generator.talk(row["messages"]).ids
    mask = [0] * len(prompt) + [1] * len(answer.ids)
    return {
        "input_ids": [prompt + answer.ids], "loss_mask": [mask], "rewards": [2.0],
        "logprobs": [[0.0] * len(prompt) + answer.logprobs], "versions": [[-1] * len(prompt) + answer.versions],
    }

async def other_prompts(generator, row):
    first = await generator.agenerate(row["messages"], max_tokens=3)
    talk = generator.talk([{"role": "system", "content": "s" * (1 + sum(first.ids) % 3)}, *row["messages"]])
    await talk.reply(max_tokens=3)
    return talk.trajectory(float(sum(talk.ids)))

def not_async(generator, row):
    return None
"""


@pytest.fixture
def flows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module with workflows, in the current folder."""
    (tmp_path / "flows.py").write_text(FLOWS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return "flows"


class Setting:
    """An engine, questions of a file, and a judge."""

    def __init__(self, folder: Path, engine: Engine, rows: list[dict[str, Any]]) -> None:
        path = folder / "asked.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        self.task, self.engine, self.judge = QuestionFile(str(path)), engine, Judge()
        self.said: list[str] = []
        self.open: list[Workflows] = []

    def questions(self, numbers: list[int] | None = None) -> list[TaskQuestion]:
        rows = range(len(self.task)) if numbers is None else numbers
        prompts = {i: render_prompt(tokenizer(), self.task.prompt(i), CONTEXT // 2) for i in rows}
        return [TaskQuestion(100 + i, self.task, i, prompts[i]) for i in rows]

    def workflows(self, name: str, temperature: float = 1.0, **more: Any) -> Workflows:
        sampling = Sampling(12, temperature, logprobs=True, keep_stop=True)
        sizes = {"seed": 5, "room": CONTEXT // 2, "context": CONTEXT, "say": self.said.append, **more}
        made = Workflows(name, tokenizer(), self.engine, self.judge, sampling, **sizes)
        self.open.append(made)
        return made

    def close(self) -> None:
        for workflows in self.open:
            workflows.close()
        self.judge.close()


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[Setting]:
    """An engine with random weights, and a question of each mood."""
    rows = [{"question": f"say {i}", "answer": str(i), "mood": mood} for i, mood in enumerate(MOODS)]
    made = Setting(tmp_path, engine(model(), pick("cpu", compiled=False), slots=5, context=CONTEXT), rows)
    yield made
    made.close()


class Locked:
    """A generator that many threads may ask, as one over a connection is."""

    elsewhere, version = True, 0

    def __init__(self, engine: Engine) -> None:
        self.engine, self.context, self.lock = engine, engine.context, threading.Lock()
        self.at_once = self.most = 0

    def generate(self, requests: list[Request]) -> list[Completion]:
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        with self.lock:
            answers = self.engine.generate(requests)
        self.at_once -= 1
        return answers


MOODS = ["good", "raise", "good", "block", "wait", "die", "reject", "nonsense", "odd", "too long", "good"]


def same(one: Completion, other: Completion) -> bool:
    """But for the rounding of products whose numbers of rows differ: other rows ran beside the two."""
    near = one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
    return one.ids == other.ids and near and one.forced == other.forced


@pytest.mark.slow
def test_a_workflow_of_one_turn_is_an_answer(flows: str, setting: Setting) -> None:
    asked = setting.questions([0, 2])
    groups = setting.workflows(f"{flows}:plain").groups(asked, 2)
    for question, group in zip(asked, groups):
        seeds = [answer_seed(5, question.number, sample) for sample in range(2)]
        requests = [Request(question.prompt, Sampling(12, 1.0, seed=s, logprobs=True, keep_stop=True)) for s in seeds]
        plain = setting.engine.generate(requests)
        assert group.question == question
        for answer, wanted in zip(group.answers, plain):
            assert answer.ids == wanted.ids
            assert answer.logprobs == pytest.approx(wanted.logprobs, abs=1e-5)
            assert answer.forced == [False] * len(answer.ids)
            assert answer.versions == wanted.versions
            assert answer.finish_reason == wanted.finish_reason


@pytest.mark.slow
def test_whatever_an_episode_does_the_others_are_whole(flows: str, setting: Setting) -> None:
    workflows = setting.workflows(f"{flows}:moods", timeout=3.0)
    groups = workflows.groups(setting.questions(), 2)
    kept = [mood in ("good", "too long") for mood in MOODS]
    assert [len(group.answers) for group in groups] == [2 * good for good in kept]
    assert [group.rejected for group in groups] == [2 * (not good) for good in kept]
    assert groups[9].rewards == [0.5, 0.5]
    assert len(setting.said) == 1, "one sentence, however many fail"
    assert not any(setting.engine.running), "a row of an episode that is over still runs"
    again = workflows.groups(setting.questions([0]), 2)
    assert all(map(same, again[0].answers, groups[0].answers))
    assert not groups[1].differ


@pytest.mark.slow
def test_the_same_episodes_whatever_runs_beside_them_and_wherever_the_generator_is(
    flows: str, setting: Setting
) -> None:
    workflows, asked = setting.workflows(f"{flows}:Several"), setting.questions([0, 2, 7])
    many, again = (workflows.groups(asked, 2) for _ in range(2))
    (alone,) = workflows.groups(asked[2:], 2)
    setting.engine = elsewhere = Locked(setting.engine)  # type: ignore[assignment]
    there = setting.workflows(f"{flows}:Several").groups(asked, 2)
    for group, twin, other in zip(many, again, there, strict=True):
        assert all(map(same, group.answers, twin.answers))
        assert [answer.ids for answer in group.answers] == [answer.ids for answer in other.answers]
    assert [answer.ids for answer in alone.answers] == [answer.ids for answer in many[2].answers]
    assert len({tuple(answer.ids) for group in many for answer in group.answers}) == 2 * 3
    assert elsewhere.most > 4, "it was asked by many at once"


@pytest.mark.slow
def test_what_the_model_did_not_write_is_masked_and_the_rest_has_its_log_probabilities(
    flows: str, setting: Setting
) -> None:
    text, special = tokenizer(), tokenizer().specials
    groups = setting.workflows("try-again").groups(setting.questions([0]), 2)
    for group in groups:
        for answer in group.answers:
            assert [value is None for value in answer.logprobs] == answer.forced
            forced = [token for token, is_forced in zip(answer.ids, answer.forced) if is_forced]
            words = [
                special["<|user_start|>"],
                *text.encode(TRY_AGAIN["en"]),
                special["<|user_end|>"],
                special["<|assistant_start|>"],
            ]
            cut = answer.ids[answer.forced.index(True) - 1] != special["<|assistant_end|>"]
            assert forced == [special["<|assistant_end|>"]] * cut + words
            whole = group.question.prompt + answer.ids
            check_log_probabilities(setting.engine, whole, [None] * len(group.question.prompt) + answer.logprobs)
        group.advantages = [1.0, -1.0]
    rows = pack(groups, lambda answer: 1.0, CONTEXT, special["<|pad|>"])
    learnt = [answer.forced.count(False) for group in groups for answer in group.answers]
    assert (rows.targets != IGNORE).sum() == sum(learnt)


def check_log_probabilities(engine: Engine, whole: list[int], logprobs: list[float | None]) -> None:
    """Against the plain reference decoder."""
    import torch
    from engine_models import logits_of

    made = engine.decoder.model
    for at, value in enumerate(logprobs):
        if value is not None:
            wanted = torch.log_softmax(logits_of(made, whole[:at], CONTEXT), dim=-1)[whole[at]]
            assert value == pytest.approx(float(wanted), abs=1e-4)


@pytest.mark.slow
def test_the_calculator_as_a_tool_gives_what_the_engine_gives(tmp_path: Path, flows: str) -> None:
    follows, answer = calculator_script()
    made = engine(scripted(follows), pick("cpu", compiled=False), slots=2, context=CONTEXT)
    setting = Setting(tmp_path, made, [{"question": "sum", "answer": "你好!"}] * 2)
    with closing(setting):
        [group] = setting.workflows("calculator", temperature=0.0).groups(setting.questions([0]), 2)
        [plain] = made.generate([Request(group.question.prompt, Sampling(40, 0.0, logprobs=True, keep_stop=True))])
    assert plain.ids[:-1] == answer
    for found in group.answers:
        assert (found.ids, found.forced) == (plain.ids, plain.forced)
        assert found.logprobs == pytest.approx(plain.logprobs, abs=1e-5)
        assert "[result] 42" in found.text
    assert group.rewards == [1.0, 1.0]


@pytest.mark.slow
def test_dicts_in_the_form_of_areal_and_prompts_of_ones_own(flows: str, setting: Setting) -> None:
    [group] = setting.workflows(f"{flows}:areal").groups(setting.questions([0]), 2)
    assert group.rewards == [2.0, 2.0]
    assert all(1 <= len(answer.ids) <= 5 and not any(answer.forced) for answer in group.answers)
    [group] = setting.workflows(f"{flows}:other_prompts").groups(setting.questions([0]), 6)
    special = tokenizer().specials
    assert group.question.prompt[:2] == [special["<|bos|>"], special["<|system_start|>"]]
    for answer, reward in zip(group.answers, group.rewards):
        written = answer.forced.index(False)
        assert all(answer.forced[:written])
        assert answer.ids[written - 1] == special["<|assistant_start|>"]
        assert sum(group.question.prompt) + sum(answer.ids) == reward


@pytest.mark.slow
def test_a_workflow_that_never_works_is_one_sentence(flows: str, setting: Setting) -> None:
    for name in (f"{flows}:not_async", "again"):
        with pytest.raises(UserError, match="--workflow"):
            setting.workflows(name)
    with pytest.raises(UserError, match="finished none of 2 episodes: RuntimeError: as told"):
        setting.workflows(f"{flows}:moods").groups(setting.questions([1]), 2)


def test_a_group_without_answers_has_no_difference() -> None:
    assert not AnswerGroup(None, [], []).differ  # type: ignore[arg-type]
