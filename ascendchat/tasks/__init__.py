"""Tasks by name: what `ascendchat eval chat --tasks` examines, and what `mid` and `sft` take in `--data NAME=WEIGHT`.

    load("mmlu"), load("gsm8k", "train"), load("smoltalk", "train"), load("my.jsonl", "train"), load("toy_fact_zh")

base.py says what a task is, named.py which there are. They are imported when asked for: the processes of reward
functions (sandbox/process.py) need nothing of them, and would take 0.4 s more to start, each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ascendchat.tasks.base import Task
    from ascendchat.tasks.named import EVALUATIONS, knows, load, pass_at_k


__all__ = ["EVALUATIONS", "Task", "knows", "load", "pass_at_k"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ascendchat.tasks import named

    return getattr(named, name)
