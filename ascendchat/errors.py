"""Errors that a user can mend, each a sentence with the next step; and the folder where everything is stored."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

MAX_NAMED = 200  # with more choices only the first MAX_SHOWN are shown: a sentence, not a screen
MAX_SHOWN = 20
MAX_CAUSE = 200  # characters of another rank's error


class UserError(Exception):
    """An error that the user can mend: one clear sentence and the next step. The command line exits with `status`."""

    status = 2


class OutOfMemory(UserError):
    """The device's memory ran out, and only a new process can go on: `ascendchat launch` starts one that takes less."""

    status = 71  # EX_OSERR of sysexits.h


class NotSaved(UserError):
    """A result could not be written, which a later try may do: `ascendchat launch` starts the command again."""

    status = 75  # EX_TEMPFAIL of sysexits.h


class RankFailed(UserError):
    """Another rank met an error that is no mistake of the user's: `ascendchat launch` may start again, as after any."""

    status = 1


def rank_error(problem: Exception, rank: int) -> UserError:
    """Build the error that other ranks raise for one of this rank, so that none waits; only this rank has its
    traceback."""
    if isinstance(problem, UserError):
        return problem
    words = " ".join(str(problem).split())[:MAX_CAUSE]
    return RankFailed(f"rank {rank} cannot go on ({type(problem).__name__}: {words}); its own output has the traceback")


def home() -> Path:
    """Folder of data, tokenizers and runs: $ASCENDCHAT_HOME, by default ~/.cache/ascendchat."""
    return Path(os.environ.get("ASCENDCHAT_HOME") or "~/.cache/ascendchat").expanduser().absolute()


def nearest(word: str, choices: list[str]) -> str:
    """The sentence that names the nearest valid choice, and all of them when they are few or nothing is near."""
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.6)
    shown = [*choices[:MAX_SHOWN], "..."] if len(choices) > MAX_NAMED else choices
    every = f"choose from: {', '.join(shown)}"
    if not close:
        return every
    return f"did you mean {close[0]}? ({every})" if len(choices) <= 6 else f"did you mean {close[0]}?"
