"""What a step of RL has seen: figures over all ranks for metrics.jsonl, and every answer in the run's folder.

figures(groups, kept, 2, batch, place, samples=8)     # alike on all ranks
write_transcript(folder, step, groups)       # runs/NAME/rl/transcripts/step_000012-0.jsonl
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from ascendchat.engine.request import Completion
from ascendchat.files import write_atomic
from ascendchat.parallel import collectives
from ascendchat.rl.rollout import Group, pass_sums, task_sums, term_sums


def learnt(answer: Completion) -> int:
    """Tokens that the model chose itself."""
    return sum(not forced for forced in answer.forced)


def ages(groups: Sequence[Group], batch: int) -> list[int]:
    """Of each token that is learnt: by how many versions the weights that wrote it are older than those trained."""
    return [
        batch - version
        for group in groups
        for answer in group.answers
        for version, forced in zip(answer.versions, answer.forced)
        if not forced
    ]


def figures(
    groups: Sequence[Group],
    kept: Sequence[Group],
    replaced: int,
    batch: int,
    place: torch.device,
    *,
    samples: int,
    terms: Sequence[str] = (),
    tasks: Sequence[str] = (),
) -> dict[str, float]:
    """Of the groups of a batch, of up to `samples` answers each; `kept` are learnt from, so many others were
    `replaced`. `terms` and `tasks`: those whose rewards are shown apart."""
    answers, old = [answer for group in groups for answer in group.answers], ages(kept, batch)
    parts = {f"pass@{k}": sums for k, sums in pass_sums(groups, samples).items()}
    parts |= {f"reward_{term}": sums for term, sums in term_sums(groups, terms).items()}
    parts |= {f"reward_of_{task}": sums for task, sums in task_sums(groups, tasks).items()}
    own = torch.tensor(
        [
            float(len(groups)),
            float(len(answers)),
            sum(reward for group in groups for reward in group.rewards),
            float(sum(len(answer.ids) for answer in answers)),
            float(sum(answer.finish_reason == "length" for answer in answers)),
            float(len(kept)),
            float(sum(len(group.answers) - group.judged for group in groups)),
            float(sum(group.rejected for group in groups)),
            float(replaced),
            float(sum(old)),
            float(len(old)),
            *(number for sums in parts.values() for number in sums),
        ],
        device=place,
    )
    oldest = torch.tensor([float(max(old, default=0))], device=place)
    collectives.all_reduce(own, "sum")
    collectives.all_reduce(oldest, "max")
    questions, count, reward, length, cut, used, unjudged, rejected, others, age, tokens, *sums = own.tolist()
    means = {name: sums[2 * i] / sums[2 * i + 1] for i, name in enumerate(parts) if sums[2 * i + 1]}
    count = max(1.0, count)
    return {
        "reward": reward / count,
        **means,
        "answers": count,
        "answer_tokens": length / count,
        "truncated": cut / count,
        "informative": used / questions,
        "unjudged": unjudged,
        "rejected": rejected,
        "replaced": others,
        "staleness_max": oldest.item(),
        "staleness_mean": age / max(1.0, tokens),
    }


def write_transcript(folder: Path, step: int, groups: Sequence[Group]) -> None:
    """What was asked, answered and how it was judged, one line per answer."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps(
            {
                "task": group.question.task.name,
                "index": group.question.index,
                "question": group.question.task.question(group.question.index),
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
        for i, (answer, reward) in enumerate(zip(group.answers, group.rewards))
    ]
    write_atomic(folder / f"step_{step:06d}-{collectives.world().rank}.jsonl", "\n".join(lines) + "\n")
