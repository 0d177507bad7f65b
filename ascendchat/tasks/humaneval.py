"""HumanEval: 164 Python functions to write; each answer runs against its tests in the sandbox.

HumanEval(source="DIR").correct(0, "```python\\ndef has_close_elements(...): ...```")   # `eval chat --tasks humaneval`
"""

from __future__ import annotations

import ast
import math
import re
import textwrap
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from ascendchat import sandbox
from ascendchat.data.chat.render import Conversation
from ascendchat.data.chat.tables import TableRow
from ascendchat.errors import UserError
from ascendchat.tasks.eval_files import set_rows
from ascendchat.tasks.task import Task

# fence (``` or ~~~), info, code; none of its parts can be divided in two ways, so it takes linear time
CODE_BLOCK = re.compile(r"^[^`\n]*?(`|(?<!~)~)\1\1+([^`~\n]*)\n(.*?)(?:\1{3,}|\Z)", re.DOTALL | re.MULTILINE)
PYTHON = re.compile(r"\W*(?:py|$)", re.IGNORECASE)  # python3, py, {.python}, or nothing
ASK = "Complete this Python function. Answer with the whole function in one code block.\n\n```python\n{prompt}\n```"
COLUMNS = "prompt", "test", "entry_point", "canonical_solution"
SECONDS = 5.0
MEMORY = 256 << 20  # bytes


def defines(code: str, name: str) -> bool:
    return re.search(rf"^def\s+{re.escape(name)}\b", code, re.M) is not None


def code_of(reply: str, name: str) -> str:
    """Extract the first code block of a reply that defines the function, else the first that can be Python, else the
    first, or all of the reply. A function that is indented as a whole, as in a list, loses that; a bare body does
    not."""
    blocks = CODE_BLOCK.findall(reply)
    codes = [code for _, _, code in blocks] or [reply]
    for code in codes:
        for text in (code, textwrap.dedent(code)):
            if defines(text, name):
                return text
    return next((code for _, info, code in blocks if PYTHON.match(info)), codes[0])


def program(reply: str, test: str | Sequence[str], starter: str = "", entry_point: str = "") -> tuple[str, str]:
    """Build (answer, tests) as programs: the answer follows the question's `starter` (imports, other functions, the
    head of the function), the tests, one text or several, run after the answer. HumanEval's define check(f), and
    `entry_point` names f. Tests that would run nothing of the answer are a ValueError, since then every answer
    would be right."""
    tests = test if isinstance(test, str) else "\n".join(test)
    call = f"\n\ncheck({entry_point})\n" if entry_point and defines(tests, "check") else "\n"
    if lacking := runs_nothing(f"{tests}{call}"):
        raise ValueError(lacking)
    code, head = code_of(reply, entry_point), starter
    if entry_point and defines(code, entry_point) and f"def {entry_point}" in starter:  # else only the body
        head = starter[: starter.rindex(f"def {entry_point}")]
    return f"{head}{code}\n", f"{tests}{call}"


@lru_cache(maxsize=1024)  # many answers have the same tests
def runs_nothing(tests: str) -> str:
    """Tell what tests lack that only define functions, or have no statement at all; "" of others."""
    try:
        tree = ast.parse(tests)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""  # the sandbox says so: no answer is right
    if defines(tests, "check") and not any(_is_call(node, "check") for node in ast.walk(tree)):
        return "its test defines check(), which nothing calls: the column entry_point must name the function to check"
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.Call, ast.Assert, ast.Raise)):
            return ""
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            pending += ast.iter_child_nodes(node)
    return "its column test runs nothing: it needs an assert, or a call of the functions that it defines"


def _is_call(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


def judged(answer: str, tests: str) -> sandbox.ProgramResult:
    """Run answer and tests in the sandbox, within the time and memory of a small function. Code under
    `if __name__ == "__main__"` does not run, and where the answer exits its tests run all the same."""
    return sandbox.run(tests, first=answer, seconds=SECONDS, memory=MEMORY)


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Chance that at least one of k answers is right, unbiased, from `right` of `samples` drawn answers."""
    if not 0 <= right <= samples or not 1 <= k <= samples:
        raise ValueError(f"{right} right of {samples} samples cannot tell pass@{k}")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


class HumanEval(Task):
    """164 functions, all for evaluation."""

    name, split, kind, language = "humaneval", "test", "reply", "en"

    def __init__(self, split: str = "test", source: str = "") -> None:
        if split != "test":
            raise UserError(f"humaneval has only the split test, not {split!r}")
        self.rows = list(set_rows("humaneval", r"human[-_]?eval", r"", source, self._row))
        self.sandbox_failed: list[int] = []  # rows whose program ended because the sandbox failed, or pretended so

    @staticmethod
    def _row(row: TableRow) -> dict[str, str]:
        if wrong := next((name for name in COLUMNS if not isinstance(row[name], str)), ""):
            raise ValueError(f"its column {wrong} is not text")
        return {name: row[name] for name in COLUMNS}

    def __len__(self) -> int:
        return len(self.rows)

    def question(self, index: int) -> str:
        return str(self.rows[index]["prompt"])

    def example(self, index: int) -> Conversation:
        row = self.rows[index]
        solution = f"```python\n{row['prompt']}{row['canonical_solution']}\n```"
        ask = ASK.format(prompt=row["prompt"].rstrip())
        return [{"role": "user", "content": ask}, {"role": "assistant", "content": solution}]

    def row(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        return {"starter": row["prompt"], "test": row["test"], "entry_point": row["entry_point"]}

    def program(self, index: int, reply: str) -> tuple[str, str]:
        return program(reply, **self.row(index))

    def correct(self, index: int, reply: str) -> bool:
        result = judged(*self.program(index, reply))
        if result.reason == "sandbox":  # not raised: a program can imitate it
            self.sandbox_failed.append(index)
        return result.ok
