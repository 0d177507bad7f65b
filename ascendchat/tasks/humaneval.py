"""HumanEval: 164 Python functions to write; each answer runs against its tests in the sandbox.

HumanEval(source="DIR").correct(0, "```python\\ndef has_close_elements(...): ...```")   # `eval chat --tasks humaneval`
"""

from __future__ import annotations

import math
import re

from ascendchat import sandbox
from ascendchat.config import UserError
from ascendchat.data.chat import Conversation
from ascendchat.tasks.base import Task
from ascendchat.tasks.files import rows

BLOCK = re.compile(r"```(?:python|py)?[ \t]*\r?\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
ASK = "Complete this Python function. Answer with the whole function in one code block.\n\n```python\n{prompt}\n```"
SECONDS = 5.0
MEMORY = 256 << 20  # bytes


def code_of(reply: str) -> str:
    """The first code block of a reply, or all of it."""
    found = BLOCK.search(reply)
    return found[1] if found else reply


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Chance that at least one of k answers is right, unbiased, from `right` of `samples` drawn answers."""
    if not 0 <= right <= samples or not 1 <= k <= samples:
        raise ValueError(f"{right} right of {samples} samples cannot tell pass@{k}")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


class HumanEval(Task):
    """All of it is for examination."""

    name, split, kind, language = "humaneval", "test", "reply", "en"

    def __init__(self, split: str = "test", source: str = "") -> None:
        if split != "test":
            raise UserError(f"humaneval has only the split test, not {split!r}")
        self.rows = list(rows("humaneval", r"human[-_]?eval", r"", source))
        if not self.rows or {"prompt", "test", "entry_point", "canonical_solution"} - set(self.rows[0]):
            raise UserError("the file of humaneval has other columns than it should; fetch it again")

    def __len__(self) -> int:
        return len(self.rows)

    def question(self, index: int) -> str:
        return str(self.rows[index]["prompt"])

    def example(self, index: int) -> Conversation:
        row = self.rows[index]
        solution = f"```python\n{row['prompt']}{row['canonical_solution']}\n```"
        ask = ASK.format(prompt=row["prompt"].rstrip())
        return [{"role": "user", "content": ask}, {"role": "assistant", "content": solution}]

    def program(self, index: int, reply: str) -> str:
        """The answer between what the prompt gives (imports, other functions) and the tests."""
        row = self.rows[index]
        prompt, name, code = row["prompt"], row["entry_point"], code_of(reply)
        if re.search(rf"^def\s+{re.escape(name)}\b", code, re.M):
            given = prompt[: prompt.rindex(f"def {name}")]
        else:  # only the body: it continues the prompt
            given = prompt
        return f"{given}{code}\n\n{row['test']}\n\ncheck({name})\n"

    def correct(self, index: int, reply: str) -> bool:
        return sandbox.run(self.program(index, reply), seconds=SECONDS, memory=MEMORY).ok
