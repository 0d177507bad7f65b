"""One call of a reward function of the user's, in a process of the pool (rl/rewards.py). Little is imported here: every
process of every run begins with it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from ascendchat.sandbox.process import Link, find_object

MOST_REWARD = 1e6  # beyond, float32 has no room for differences


async def run(link: Link, path: str, *args: Any) -> Any:
    """In a process of the pool: a number for an answer; without one, whether the function is async."""
    function = find_object(path)
    if not callable(function):
        raise TypeError(f"{path} is not a function")
    if not args:
        return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
    link.begin()
    prompt, completion, row = args
    value = function(prompt, completion, **accepted(function, row))
    return checked(await value if inspect.isawaitable(value) else value)


def accepted(function: Callable[..., Any], row: dict[str, Any]) -> dict[str, Any]:
    """The columns that a function takes: all with **row, else those that it names."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return row
    return {name: value for name, value in row.items() if name in parameters}


def checked(value: Any) -> float:
    number = float(value)
    if not abs(number) < MOST_REWARD:
        raise ValueError(f"a reward must be a number between -{MOST_REWARD:g} and {MOST_REWARD:g}, not {number}")
    return number
