"""What RL has generated and not trained yet, as tensors of a checkpoint: groups, answers under way, rows of a batch.

    tensors = to_tensors(slots, parts)                   # of this rank; Writer.save puts them into a file
    slots, parts = from_tensors(saved.extras(), ask)     # of all ranks, of however many there were

Everything is there to the last digit, so that a run that goes on trains on what it would have trained on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ascendchat.engine.request import Completion
from ascendchat.rl.rollout import Group, Question, TokenRows
from ascendchat.rl.schedule import Slot

COLUMNS = {
    "ids": np.int64,
    "logprobs": np.float64,
    "forced": np.uint8,
    "versions": np.int64,
}  # of the tokens of answers
OF_SLOT = "number", "round", "wave", "first", "rejected"
OF_GROUP = "rewards", "judged", "right", "terms", "rejected"


@dataclass(frozen=True)
class Part:
    """The share of a batch that one update is made of, on this rank."""

    rows: TokenRows
    tokens: int  # that are learnt
    answers: int


def to_tensors(slots: Sequence[Slot], parts: Mapping[int, Part]) -> dict[str, Tensor]:
    """Empty where there is nothing to keep. `parts`: of the batch that is trained, by number."""
    if not slots and not parts:
        return {}
    about: dict[str, Any] = {"slots": [], "parts": []}
    answers: list[Completion] = []
    for slot in slots:
        entry: dict[str, Any] = {name: getattr(slot, name) for name in OF_SLOT}
        if slot.group is not None:
            question = slot.group.question
            known = {name: getattr(slot.group, name) for name in OF_GROUP}
            entry["group"] = {"question": question.number, "prompt": question.prompt, **known}
        own = slot.group.answers if slot.group is not None else slot.answers
        entry["answers"] = [
            {"tokens": len(one.ids), "text": one.text, "finish_reason": one.finish_reason, "version": one.version}
            for one in own
        ]
        answers += own
        about["slots"].append(entry)
    tensors = {
        name: torch.from_numpy(np.concatenate([np.empty(0, kind), *(column(one, name, kind) for one in answers)]))
        for name, kind in COLUMNS.items()
    }
    for number, part in parts.items():
        about["parts"].append({"number": number, "tokens": part.tokens, "answers": part.answers})
        for field in fields(TokenRows):
            tensors[f"part{number}.{field.name}"] = torch.from_numpy(getattr(part.rows, field.name))
    text = np.frombuffer(json.dumps(about).encode(), np.uint8)
    return {"about": torch.from_numpy(text.copy()), **tensors}


def column(answer: Completion, name: str, kind: Any) -> np.ndarray:
    """One value per token."""
    return np.array([np.nan if value is None else value for value in getattr(answer, name)], kind)


def from_tensors(
    files: Iterable[Mapping[str, Tensor]], ask: Callable[[int], Question]
) -> tuple[list[Slot], list[dict[int, Part]]]:
    """The slots of all ranks; the parts of each rank."""
    slots, parts = [], []
    for tensors in files:
        about = json.loads(bytes(tensors["about"].numpy()))
        at = 0
        columns = {name: tensors[name].tolist() for name in COLUMNS}
        for entry in about["slots"]:
            answers = []
            for one in entry["answers"]:
                end = at + one["tokens"]
                answers.append(completion({name: values[at:end] for name, values in columns.items()}, one))
                at = end
            first = entry["first"] and tuple(entry["first"])
            slot = Slot(**{**{name: entry[name] for name in OF_SLOT}, "first": first})
            if "group" in entry:
                known = entry["group"]
                question = replace(ask(known["question"]), prompt=known["prompt"])
                slot.group = Group(question, answers, **{name: known[name] for name in OF_GROUP}, first=first)
            else:
                slot.answers = answers
            slots.append(slot)
        found = {}
        for part in about["parts"]:
            arrays = {one.name: tensors[f"part{part['number']}.{one.name}"].numpy() for one in fields(TokenRows)}
            found[part["number"]] = Part(TokenRows(**arrays), part["tokens"], part["answers"])
        parts.append(found)
    return slots, parts


def completion(columns: dict[str, list[Any]], about: dict[str, Any]) -> Completion:
    """An answer of its columns."""
    forced = [bool(value) for value in columns["forced"]]
    logprobs = [None if missing else value for value, missing in zip(columns["logprobs"], forced)]
    return Completion(
        ids=columns["ids"],
        text=about["text"],
        logprobs=logprobs,
        forced=forced,
        finish_reason=about["finish_reason"],
        version=about["version"],
        versions=columns["versions"],
    )


def dealt(parts: Sequence[dict[int, Part]], rank: int, ranks: int) -> dict[int, Part]:
    """The parts of one rank, when another number of ranks has saved them: whole shares, dealt round."""
    mine: dict[int, Part] = {}
    for share in parts[rank::ranks]:
        for number, part in share.items():
            before = mine.get(number)
            mine[number] = part if before is None else _together(before, part)
    return mine


def _together(a: Part, b: Part) -> Part:
    columns = {
        field.name: np.concatenate((getattr(a.rows, field.name), getattr(b.rows, field.name)))
        for field in fields(TokenRows)
    }
    return Part(TokenRows(**columns), a.tokens + b.tokens, a.answers + b.answers)
