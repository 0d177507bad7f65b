"""Questions of your own for reinforcement learning: `ascendchat rl --data questions.jsonl`.

    {"question": "What is 6 * 7?", "answer": "42"}                                  # or prompt, query, input
    {"messages": [{"role": "user", "content": "..."}], "answer": "...", "level": 3}
    {"question": "Which is red?", "choices": ["sky", "rose"], "answer": "B"}        # answered by a letter
    {"prompt": "def f(x):\\n", "entry_point": "f", "test": "def check(f): ..."}      # answered by a program
    {"question": "Write f(x) that doubles.", "test": ["assert f(2) == 4"]}

One question a line; json, tsv and parquet are read too, packed or not. The last message of `messages` may be the right
answer. Of an `answer` that is a list, each is right. All columns go to the reward. Rows that cannot be read are
counted, named and left out, as everywhere; a fiftieth, chosen by a hash of the row, is kept for evaluation.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ascendchat.data.chat.formats import PROMPT, REPLY, parse_choice
from ascendchat.data.chat.render import LETTERS, Conversation, render_choice, text_of
from ascendchat.data.chat.tables import TABLE_TYPES, TableRow, read_rows
from ascendchat.data.chat.turns import ABOUT, cell_messages, history, parse_turns, validated, with_system
from ascendchat.data.chat.turns import question_of as about
from ascendchat.data.mixture import is_held_out
from ascendchat.data.read import format_of
from ascendchat.data.surrogates import LONE_SURROGATE, has_lone_surrogate
from ascendchat.errors import UserError
from ascendchat.rl import rewards
from ascendchat.tasks.by_name import load
from ascendchat.tasks.humaneval import ASK
from ascendchat.tasks.task import Task

OWN = "prompt", "completion", "messages"  # columns that reach a reward by other arguments
VALIDATION = 0.02  # share of the rows kept for evaluation

Asked = tuple[Conversation, dict[str, Any]]  # the prompt, and what a reward gets


def read_question(row: TableRow) -> Asked:
    """Read a row as a prompt and the columns for the reward."""
    columns = {str(name): value for name, value in row.items() if name not in OWN}
    if has_lone_surrogate(columns):
        raise ValueError(LONE_SURROGATE)
    if row.get("answer") in (None, ""):
        replies = [row[name] for name in REPLY.split("|") if row.get(name) not in (None, "")]
        columns |= {"answer": replies[0]} if replies else {}
    name = next((name for name in PROMPT.split("|") if row.get(name) and str(row[name]).strip()), "")
    asked = row[name] if name else None
    row = {of: value for of, value in row.items() if of == name or of not in ABOUT or isinstance(value, str)}
    offers = row.get("choices") or isinstance(row.get("options"), (list, dict))
    if offers or (asked and all(row.get(letter) not in (None, "") for letter in "AB")):
        question, choices, right = parse_choice(row)
        columns |= {"letters": list(LETTERS[: len(choices)]), "choices": choices, "answer": LETTERS[right]}
        return validated([{"role": "user", "content": render_choice(question, choices)}]), columns
    if row.get("messages"):
        prompt = with_system(row, parse_turns(row["messages"]))
        if prompt[-1]["role"] == "assistant":
            last = text_of(prompt.pop()["content"])
            columns |= {"answer": last} if columns.get("answer") in (None, "") else {}
    elif asked is None:
        if empty := next((name for name in ("messages", *PROMPT.split("|")) if name in row), ""):
            raise ValueError(f"its {empty} column is empty")
        raise UserError(
            f"a question needs a column messages, or one of {PROMPT.replace('|', ', ')}; found: "
            f"{', '.join(row) or 'no column at all'}"
        )
    elif isinstance(asked, str) and row.get("test") and row.get("entry_point"):  # as HumanEval has it
        columns["starter"] = columns.get("starter") or asked
        prompt = cell_messages(ASK.format(prompt=asked.rstrip()), "user")
    else:
        prompt = with_system(row, history(row) + cell_messages(about(row, name), "user"))
    if not prompt or prompt[-1]["role"] not in ("user", "tool"):
        raise ValueError("its messages do not end where the assistant must speak")
    return validated(prompt), columns


def load_questions(name: str, split: str = "train", source: str = "") -> Task:
    """Open a task whose answers can be judged: by name, or a file of your own."""
    if Path(name).expanduser().is_file():
        return QuestionFile(name, split)
    if name == "humaneval":  # it has no other questions
        task = load(name, "test", source)
        task.notices = ["humaneval has only test questions: what is trained on them cannot be examined with them"]
        return task
    task = load(name, split, source)
    if task.kind == "dialog":
        raise UserError(f"--data {name}: its answers cannot be judged; choose tasks such as gsm8k, toy_problems")
    return task


class QuestionFile(Task):
    """The questions of one file. Without a reward of the user's, `rewards.answer` judges replies."""

    kind = "reply"

    def __init__(self, where: str, split: str = "train", say: Callable[[str], None] | None = None) -> None:
        path = Path(where).expanduser()
        self.name, self.split = path.name.split(".")[0], split or "train"
        if format_of(path.name)[0] not in TABLE_TYPES or not path.is_file():
            raise UserError(f"{path}: questions are read from {' '.join(TABLE_TYPES)} files; name one of these")
        notices: list[str] = []
        every = [_stored(one) for one in read_rows(path, read_question, say=say or notices.append)]
        held = [line for line in every if is_held_out(line.encode("utf-8", "surrogatepass"), VALIDATION)]
        held_lines = set(held)
        train = [line for line in every if line not in held_lines]
        if not held or not train:
            notices.append(f"{self.name} is too small to keep some for examination: examined on what is trained on")
            train, held = every, every[:32]
        judged = [line for line in held if not rewards.why_unjudged(json.loads(line)[1])]
        if 0 < len(judged) < len(held):
            why = next(filter(None, (rewards.why_unjudged(json.loads(line)[1]) for line in held)))
            left_out = f"{len(held) - len(judged)} of {len(held)} questions for examinations have no answer to compare"
            notices.append(f"{self.name}: {left_out}: {why}; left out")
            held = judged
        self.rows, self.notices = held if self.split in ("val", "test") else train, notices

    def __len__(self) -> int:
        return len(self.rows)

    def _at(self, index: int) -> Asked:
        prompt, columns = json.loads(self.rows[index])
        return prompt, columns

    def prompt(self, index: int) -> Conversation:
        return self._at(index)[0]

    def row(self, index: int) -> dict[str, Any]:
        return self._at(index)[1]

    def example(self, index: int) -> Conversation:
        prompt, columns = self._at(index)
        answer = columns.get("answer")
        first = next(iter(answer), None) if isinstance(answer, list) else answer
        return [*prompt, {"role": "assistant", "content": "" if first is None else str(first)}]

    @property
    def checkable(self) -> bool:
        """True if the first rows have answers to compare with."""
        return not any(rewards.why_unjudged(self.row(index)) for index in range(min(8, len(self))))

    def correct(self, index: int, reply: str) -> bool:
        prompt, columns = self._at(index)
        return rewards.answer(text_of(prompt[-1]["content"]), reply, **columns) > 0


def _stored(asked: Asked) -> str:
    return json.dumps(asked, ensure_ascii=False, default=str)
