"""Finds rules by what a user sees instead of an error text: `ascendchat explain "training hangs"`, `explain 显存不足`.

Question and phrases are cut into terms: English words without their endings, Chinese characters and pairs of them. A
rare term weighs more than a common one. A rule is as good as its best phrase: how much of the phrase is in the
question, and how much of the question in the phrase.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter

from ascendchat.doctor.explain_rules import HOLE, Rule, all_rules

MOST = 5  # rules in an answer
ENOUGH = 0.45  # score from which a rule is named at all
NEAR = 0.6  # others are named too from this part of the best score on
TITLE = 0.8  # a title is worth less than a symptom: it names the cause
STOP_WORDS = frozenset(
    "a an the is are was were be been am my your i we it its this that of on in at to for with from by and or as do "
    "does did has have had when while after before very so too just get gets got what why how can will would there "
    "please help me during all always still then".split()
)
NEGATED = frozenset("no not cannot can't doesn't don't isn't won't never".split())
ENDING = re.compile(r"(?:ing|ed|er|ly|es|s|e)$")
FILLER = re.compile("[的了很是在太我你吗呢么怎为什个有会就都也啊呀请问时候一直老总]")


def terms(text: str) -> frozenset[str]:
    """What a text is compared by."""
    parts: set[str] = set()
    for word in re.findall(r"[a-z0-9][a-z0-9_'-]*", text.casefold()):
        if word in NEGATED:
            parts.add("not")
        elif word not in STOP_WORDS:
            parts.add(word if len(word) < 5 or word.endswith("ss") else ENDING.sub("", word))
    for run in re.findall(r"[\u4e00-\u9fff]+", FILLER.sub("", text)):
        parts |= set(run) | {run[i : i + 2] for i in range(len(run) - 1)}
    return frozenset(parts)


def phrases(rule: Rule) -> list[tuple[str, float]]:
    """(phrase, what it is worth) of a rule in both languages."""
    told = [(phrase, 1.0) for told in rule.symptoms.values() for phrase in told]
    return told + [(HOLE.sub("", title), TITLE) for title in rule.title.values()]


@functools.cache
def known_phrases() -> tuple[list[tuple[Rule, str, float, frozenset[str]]], Counter[str]]:
    """(rule, phrase, what it is worth, its terms) of all rules, and in how many phrases each term is."""
    known = [(rule, phrase, worth, terms(phrase)) for rule in all_rules()[0] for phrase, worth in phrases(rule)]
    return known, Counter(term for _, _, _, parts in known for term in parts)


def alike(question: str) -> list[tuple[Rule, str]]:
    """(rule, the phrase of it that is most like the question), best first; empty when nothing is like it."""
    known, frequency = known_phrases()

    def weight(parts: frozenset[str]) -> float:
        return sum(math.log(1 + len(known) / (1 + frequency[term])) for term in parts)

    wanted = terms(question)
    whole = weight(wanted)
    best: dict[str, tuple[float, Rule, str]] = {}
    for rule, phrase, worth, parts in known:
        shared = weight(parts & wanted)
        if not shared:
            continue
        score = worth * shared / weight(parts) * (0.5 + 0.5 * shared / whole)
        if score > best.get(rule.id, (0.0,))[0]:
            best[rule.id] = (score, rule, phrase)
    ranked = sorted(best.values(), key=lambda entry: -entry[0])  # stable: rules named first stay first
    floor = max(ENOUGH, NEAR * ranked[0][0]) if ranked else 0.0
    return [(rule, phrase) for score, rule, phrase in ranked if score >= floor][:MOST]
