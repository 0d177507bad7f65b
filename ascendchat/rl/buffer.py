"""Rollouts that are not trained yet, as tensors of a checkpoint: finished groups, packed rows of a batch.

    tensors = to_tensors(slots, shares)                  # of this rank; Writer.save puts them into a file
    slots, shares = from_tensors(saved.extras(), ask)    # of all ranks, of however many there were

Everything is there to the last digit, so that a resumed run trains on what it would have trained on. Of a slot whose
answers were still generated only its place is kept: they are generated again, with the same seeds. Older checkpoints
hold such answers half written; they are dropped.
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
from ascendchat.rl.rollout import AnswerGroup, TaskQuestion, TokenRows
from ascendchat.rl.schedule import PromptSlot

COLUMNS = {"ids": np.int64, "logprobs": np.float64, "forced": np.uint8, "versions": np.int64}  # one value per token
OF_GROUP = "rewards", "judged", "right", "terms", "rejected"


@dataclass(frozen=True)
class UpdateShare:
    """The rows of one update, on this rank."""

    rows: TokenRows
    tokens: int  # that are learnt
    answers: int


def to_tensors(slots: Sequence[PromptSlot], shares: Mapping[int, UpdateShare]) -> dict[str, Tensor]:
    """Tensors for a checkpoint; none where nothing is left. `shares`: by update of the batch that is trained."""
    if not slots and not shares:
        return {}
    about: dict[str, Any] = {"slots": list(map(_described, slots)), "parts": []}
    answers = [answer for slot in slots if slot.group for answer in slot.group.answers]
    tensors = {
        name: torch.from_numpy(np.concatenate([np.empty(0, kind), *(_column(one, name, kind) for one in answers)]))
        for name, kind in COLUMNS.items()
    }
    for number, share in shares.items():
        about["parts"].append({"number": number, "tokens": share.tokens, "answers": share.answers})
        for field in fields(TokenRows):
            tensors[f"part{number}.{field.name}"] = torch.from_numpy(getattr(share.rows, field.name))
    text = np.frombuffer(json.dumps(about).encode(), np.uint8)
    return {"about": torch.from_numpy(text.copy()), **tensors}


def _described(slot: PromptSlot) -> dict[str, Any]:
    """All of a slot but the tokens of its answers."""
    place = {"number": slot.number, "round": slot.attempt, "first": slot.first, "rejected": slot.rejected}
    if slot.group is None:
        return {**place, "answers": []}
    question, group = slot.group.question, {name: getattr(slot.group, name) for name in OF_GROUP}
    return {
        **place,
        "group": {"question": question.number, "prompt": question.prompt, **group},
        "answers": [
            {"tokens": len(one.ids), "text": one.text, "finish_reason": one.finish_reason, "version": one.version}
            for one in slot.group.answers
        ],
    }


def _column(answer: Completion, name: str, kind: Any) -> np.ndarray:
    return np.array([np.nan if value is None else value for value in getattr(answer, name)], kind)


def from_tensors(
    files: Iterable[Mapping[str, Tensor]], ask: Callable[[int], TaskQuestion]
) -> tuple[list[PromptSlot], list[dict[int, UpdateShare]]]:
    """The slots of all ranks, and the shares of each rank. `ask`: QuestionMixture.ask."""
    slots, shares = [], []
    for tensors in files:
        about = json.loads(bytes(tensors["about"].numpy()))
        at = 0
        columns = {name: tensors[name].tolist() for name in COLUMNS}
        for entry in about["slots"]:
            answers = []
            for one in entry["answers"]:
                end = at + one["tokens"]
                answers.append(_completion({name: values[at:end] for name, values in columns.items()}, one))
                at = end
            first = entry["first"] and tuple(entry["first"])
            slot = PromptSlot(entry["number"], entry["round"], first=first, rejected=entry["rejected"])
            if group := entry.get("group"):
                question = replace(ask(group["question"]), prompt=group["prompt"])
                slot.group = AnswerGroup(question, answers, **{name: group[name] for name in OF_GROUP}, first=first)
            slots.append(slot)
        share = {}
        for part in about["parts"]:
            arrays = {one.name: tensors[f"part{part['number']}.{one.name}"].numpy() for one in fields(TokenRows)}
            share[part["number"]] = UpdateShare(TokenRows(**arrays), part["tokens"], part["answers"])
        shares.append(share)
    return slots, shares


def _completion(columns: dict[str, list[Any]], about: dict[str, Any]) -> Completion:
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


def dealt(shares: Sequence[dict[int, UpdateShare]], rank: int, ranks: int) -> dict[int, UpdateShare]:
    """The shares of one rank, when another number of ranks has saved them: whole ones, dealt round."""
    mine: dict[int, UpdateShare] = {}
    for one in shares[rank::ranks]:
        for number, share in one.items():
            mine[number] = _joined(mine[number], share) if number in mine else share
    return mine


def _joined(a: UpdateShare, b: UpdateShare) -> UpdateShare:
    columns = {
        field.name: np.concatenate((getattr(a.rows, field.name), getattr(b.rows, field.name)))
        for field in fields(TokenRows)
    }
    return UpdateShare(TokenRows(**columns), a.tokens + b.tokens, a.answers + b.answers)
