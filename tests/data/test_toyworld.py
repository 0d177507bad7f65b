"""The embedded corpus: consistent, deterministic, in two languages, with splits that do not overlap."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from ascendchat.data import toyworld
from ascendchat.data.chat.render import canonical, text_of
from ascendchat.data.tokenizer.tokenizer import train_tokenizer
from ascendchat.data.toyworld import chats, correct, documents, problems, questions
from ascendchat.data.toyworld.exercises import value_of
from ascendchat.data.toyworld.texts import PHRASES, POLITE, sentence
from ascendchat.data.toyworld.world import toy_world

ROOT = Path(__file__).resolve().parents[2]
SPLITS = ("train", "validation", "test")
EXAM = {split: questions(split) for split in SPLITS}


@pytest.fixture(scope="module")
def training_text() -> str:
    """A fifth of what the world tells."""
    return "\n".join(documents("train", count=4000))


def plain(text: str) -> str:
    """A user's text without the polite words around it."""
    for pattern in [p for language in POLITE.values() for p in language if p != "{q}"]:
        before, after = pattern.split("{q}")
        if text.startswith(before) and text.endswith(after):
            text = text[len(before) : len(text) - len(after)]
    return text


def asked_in(split: str, kind: str, count: int) -> set[str]:
    return {plain(m["content"]) for c in chats(split, kind, count=count) for m in c if m["role"] == "user"}


SAMPLE = """
from itertools import islice
from ascendchat.data.toyworld import chats, documents, problems
print(*islice(documents("train"), 50), *islice(chats("validation", "sft"), 50), *problems("test", count=9), sep="\\n")
"""


def test_everything_follows_from_the_seed_in_any_process(capsys: pytest.CaptureFixture[str]) -> None:
    env = {**os.environ, "PYTHONHASHSEED": "77", "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    other = subprocess.run([sys.executable, "-c", SAMPLE], capture_output=True, encoding="utf-8", env=env, check=True)
    exec(SAMPLE, {})
    assert other.stdout == capsys.readouterr().out
    assert other.stdout.count("\n") > 100


def test_another_seed_is_another_world() -> None:
    values = [[fact.value["en"] for fact in toy_world(seed).facts.values()] for seed in (0, 1)]
    assert values[0] != values[1]
    assert list(documents("train", seed=1, count=5)) != list(documents("train", seed=0, count=5))


def test_documents_of_different_splits_do_not_overlap_and_none_is_told_twice() -> None:
    found = {split: list(documents(split, count=200)) for split in SPLITS}
    assert [len(set(texts)) for texts in found.values()] == [200, 200, 200]
    assert len(set().union(*map(set, found.values()))) == 600


def test_no_question_of_an_examination_is_asked_in_training() -> None:
    trained = asked_in("train", "mid", 4000) | asked_in("train", "sft", 4000)
    assert len(trained) > 3000
    exams = {split: {q.text for q in EXAM[split]} for split in ("validation", "test")}
    assert not trained & exams["validation"]
    assert not trained & exams["test"]
    assert not exams["validation"] & exams["test"]
    hard = {split: {q.text for q in problems(split, count=300)} for split in SPLITS}
    assert not hard["train"] & (hard["validation"] | hard["test"])
    assert not trained & hard["test"]


def test_training_asks_for_some_facts_never_for_some_in_one_language_and_for_no_fact_in_every_way() -> None:
    seen = Counter((q.text, q.language) for q in EXAM["train"] if q.topic == "fact")
    ways = Counter()
    for fact in toy_world().facts.values():
        by_language = []
        for language in toyworld.LANGUAGES:
            asks = PHRASES[fact.attribute][language].ask
            by_language.append(sum((sentence(ask, fact, language), language) in seen for ask in asks))
        ways[tuple(by_language)] += 1
    assert set(ways) == {(0, 0), (4, 0), (0, 4), (3, 3)}
    assert min(ways.values()) > 20


def test_every_fact_is_told_often_in_both_languages_by_the_training_text(training_text: str) -> None:
    for fact in toy_world().facts.values():
        for language in toyworld.LANGUAGES:
            told = sum(
                training_text.count(sentence(tell, fact, language)) for tell in PHRASES[fact.attribute][language].tell
            )
            assert told >= 5, (fact.entity.key, fact.attribute, language, told)


def test_the_text_never_contradicts_a_fact(training_text: str) -> None:
    world = toy_world()
    for fact in [*world.facts.values()][::3]:
        for value in world.values[fact.attribute]:
            wrong = type(fact)(fact.entity, fact.attribute, value)
            if value != fact.value:
                assert sentence(PHRASES[fact.attribute]["zh"].tell[0], wrong, "zh") not in training_text


def test_every_answer_is_correct_and_the_answer_to_another_question_is_not() -> None:
    draw, split = random.Random(0), "test"
    for topic in toyworld.TOPICS:
        pool = [q for q in EXAM[split] if q.topic.split(":")[0] == topic]
        assert {q.language for q in pool} == set(toyworld.LANGUAGES), topic
        for q in pool:
            assert correct(q, q.answer), q
            other = draw.choice(pool)
            if topic in ("choice", "arithmetic", "instruction") and not set(other.accept) & set(q.accept):
                assert not correct(q, other.answer)
            if topic == "fact":
                assert not correct(q, q.answer.replace(q.accept[0], draw.choice(q.reject)))
            if topic == "unknown":
                assert not correct(q, "It is red.")
            else:
                assert not correct(q, "I do not know.")
                assert not correct(q, "我不知道。")


def test_a_reply_with_a_wrong_value_beside_the_right_one_is_not_correct() -> None:
    q = next(q for q in EXAM["train"] if q.topic == "fact")
    assert correct(q, f"Surely it is {q.accept[0]}!")
    assert not correct(q, f"It is {q.accept[0]} or {q.reject[0]}.")
    assert not correct(q, "")


def test_numbers_are_compared_as_numbers_and_only_the_last_counts() -> None:
    q = next(q for q in EXAM["test"] if q.topic == "arithmetic")
    value = q.accept[0]
    assert correct(q, f"3 things and 4 make {value}.0")
    assert not correct(q, f"{value}1")
    assert not correct(q, f"{value} or 123456")


def test_arithmetic_and_problems_ask_the_calculator_for_what_it_answers() -> None:
    for q in [*EXAM["test"], *problems("test", count=100)]:
        if q.topic.split(":")[0] in ("arithmetic", "problem"):
            assert isinstance(q.content, list)
            assert [part["type"] for part in q.content] == ["tool", "output", "text"]
            expression = q.content[0]["text"]
            assert value_of(expression) == eval(expression) == int(q.content[1]["text"])
            assert q.content[1]["text"] in q.answer
            assert int(q.accept[0]) >= 0
            assert all(number in q.text for number in re.findall(r"\d+", expression))
        else:
            assert isinstance(q.reply, str)


def test_conversations_are_well_formed_and_cover_all_topics_of_their_kind() -> None:
    for kind in ("mid", "sft"):
        found = list(chats("train", kind, count=600))
        assert len(found) == 600
        for conversation in found:
            assert canonical(conversation) == conversation
            assert [m["role"] for m in conversation] == ["user", "assistant"] * (len(conversation) // 2)
        replies = " ".join(text_of(m["content"]) for c in found for m in c if m["role"] == "assistant")
        assert ("I do not know." in replies) == (kind == "sft")
        assert (toyworld.ASSISTANT_NAME in replies) == (kind == "sft")
    assert list(chats("train", "sft", count=20)) == list(islice(chats("train", "sft", count=50), 20))


def test_an_examination_has_many_questions_of_every_topic_in_both_languages() -> None:
    sizes = Counter((q.topic.split(":")[0], q.language) for q in EXAM["test"])
    assert set(sizes) == {(topic, language) for topic in toyworld.TOPICS for language in toyworld.LANGUAGES}
    assert all(count >= 50 for (topic, _), count in sizes.items() if topic != "identity"), sizes


def test_the_letter_of_a_choice_is_the_same_single_token_in_the_question_and_in_the_reply() -> None:
    tokenizer = train_tokenizer(islice(toyworld.texts(), 3500, 8000), 900)
    for q in [q for q in EXAM["test"] if q.topic == "choice"][::40]:
        *_, letter = tokenizer.encode(q.answer)
        assert tokenizer.decode([letter]).endswith(q.accept[0][-1])
        assert tokenizer.encode(q.text).count(letter) == 1


def test_training_meets_a_question_in_so_many_forms_that_letters_cannot_be_learnt_by_heart() -> None:
    for topic, least in (("check", 7), ("choice", 10)):
        seen: dict[tuple[str, ...], set[str]] = {}
        for q in EXAM["train"]:
            if q.topic == topic:
                key = (q.reply,) if topic == "check" else (q.text.split("\n")[0],)
                seen.setdefault(key, set()).add(q.text)
        assert min(map(len, seen.values())) >= least, topic
