"""Metrics of a batch of rollouts over all ranks, and its transcript: every answer, in the run's folder.

own = batch_sums(groups, kept, 2, batch, samples=8)      # this rank's
metrics = batch_metrics(own, device)                     # alike on all ranks, for metrics.jsonl
write_transcript(folder, step, groups)                   # runs/NAME/rl/transcripts/step_000012-0.jsonl
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from ascendchat.engine.request import Completion
from ascendchat.files import write_atomic
from ascendchat.parallel import collectives
from ascendchat.rl.rollout import AnswerGroup, pass_sums, task_sums, term_sums


class BatchSums(NamedTuple):
    """Sums over the groups of one rank."""

    sums: list[float]
    ratios: tuple[str, ...]  # names of metrics that are the quotient of two sums, the last ones of `sums`
    oldest: float  # versions


def own_tokens(answer: Completion) -> int:
    """Tokens that the model chose itself."""
    return sum(not forced for forced in answer.forced)


def staleness_of(groups: Sequence[AnswerGroup], batch: int) -> list[int]:
    """For each token that is learnt: by how many versions the weights that wrote it are older than those trained."""
    return [
        batch - version
        for group in groups
        for answer in group.answers
        for version, forced in zip(answer.versions, answer.forced)
        if not forced
    ]


def batch_sums(
    groups: Sequence[AnswerGroup],
    kept: Sequence[AnswerGroup],
    replaced: int,
    batch: int,
    *,
    samples: int,
    terms: Sequence[str] = (),
    tasks: Sequence[str] = (),
) -> BatchSums:
    """Sums over this rank's groups of up to `samples` answers; `kept` are learnt from, `replaced` were resampled.
    `terms` and `tasks`: names whose rewards become metrics of their own."""
    answers, staleness = [answer for group in groups for answer in group.answers], staleness_of(kept, batch)
    ratios = {f"pass@{k}": sums for k, sums in pass_sums(groups, samples).items()}
    ratios |= {f"reward_{term}": sums for term, sums in term_sums(groups, terms).items()}
    ratios |= {f"reward_of_{task}": sums for task, sums in task_sums(groups, tasks).items()}
    sums = [
        float(len(groups)),
        float(len(answers)),
        sum(reward for group in groups for reward in group.rewards),
        float(sum(len(answer.ids) for answer in answers)),
        float(sum(answer.finish_reason == "length" for answer in answers)),
        float(len(kept)),
        float(sum(len(group.answers) - group.judged for group in groups)),
        float(sum(group.rejected for group in groups)),
        float(replaced),
        float(sum(staleness)),
        float(len(staleness)),
        *(number for pair in ratios.values() for number in pair),
    ]
    return BatchSums(sums, tuple(ratios), float(max(staleness, default=0)))


def batch_metrics(own: BatchSums, device: torch.device) -> dict[str, float]:
    """The metrics of a batch over all ranks."""
    sums, oldest = torch.tensor(own.sums, device=device), torch.tensor([own.oldest], device=device)
    collectives.all_reduce(sums, "sum")
    collectives.all_reduce(oldest, "max")
    groups, count, reward, length, cut, used, unjudged, rejected, replaced, stale, tokens, *pairs = sums.tolist()
    means = {name: pairs[2 * i] / pairs[2 * i + 1] for i, name in enumerate(own.ratios) if pairs[2 * i + 1]}
    count = max(1.0, count)
    return {
        "reward": reward / count,
        **means,
        "answers": count,
        "answer_tokens": length / count,
        "truncated": cut / count,
        "informative": used / groups,
        "unjudged": unjudged,
        "rejected": rejected,
        "replaced": replaced,
        "staleness_max": oldest.item(),
        "staleness_mean": stale / max(1.0, tokens),
    }


def write_transcript(folder: Path, step: int, groups: Sequence[AnswerGroup]) -> None:
    """Write one line per answer: question, answer, reward, tokens, version."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps(
            {
                "task": group.question.task.name,
                "index": group.question.index,
                "question": question,
                "answer": answer.text,
                "reward": reward,
                **({"terms": group.terms[i]} if group.terms else {}),
                "tokens": len(answer.ids),
                "finish": answer.finish_reason,
                "version": answer.version,
            },
            ensure_ascii=False,
        )
        for group in groups
        for question in [group.question.task.question(group.question.index)]
        for i, (answer, reward) in enumerate(zip(group.answers, group.rewards))
    ]
    write_atomic(folder / f"step_{step:06d}-{collectives.world().rank}.jsonl", "\n".join(lines) + "\n")
