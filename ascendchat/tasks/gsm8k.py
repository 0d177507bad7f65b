"""GSM8K: word problems of primary school, solved with the calculator; the answer follows ####.

Gsm8k("test", source="DIR").correct(0, "... 9 * 2 = 18\\n#### 18")           # `ascendchat eval chat --tasks gsm8k`
"""

from __future__ import annotations

import re
from decimal import Decimal

from ascendchat.data.chat.formats import calculations
from ascendchat.data.chat.render import Conversation
from ascendchat.data.chat.tables import TableRow
from ascendchat.errors import UserError
from ascendchat.tasks.eval_files import SPLIT, set_rows
from ascendchat.tasks.task import Task

SIGN = r"[-+\u2212]"  # \u2212: a minus sign
POWER = r"[eE][-+]?\d"
DECIMAL = rf"(?:(?<!\d){SIGN})?(?:\d+(?:,\d+)*(?:\.\d+)?|(?<!\d)\.\d+)(?:{POWER}+(?![A-Za-z\d]))?"
NUMBER = rf"(?:(?<!\d/){DECIMAL}/\d+(?![/.,]?\d|{POWER})|{DECIMAL})"  # 1/2 is one number, 3/4/2024 are three
OTHER = rf"[/.,^]?\d|\.?{POWER}|\*\*?\d"  # after a number: it is a part of another one
# No blank can match in two ways, so it takes linear time over the output of a degenerate model
FINAL = re.compile(rf"####\s*(?:\*\*\s*)?(?:\$\s*)?((?:{SIGN}\s+)?{NUMBER})(?!{OTHER})")
SIGNED = re.compile(rf"({SIGN})\s+(?=[.\d])")


def as_number(text: str) -> Decimal | None:
    """Parse a number: 1,000 and $1000.00 and 1e3 are equal, 1/2 and .5 too, and - 3 is -3; None if it is no number."""
    text = text.strip().lstrip("$")
    if apart := SIGNED.match(text):
        text = apart[1] + text[apart.end() :]
    over, slash, under = text.replace(",", "").replace("\u2212", "-").partition("/")
    try:
        number = Decimal(over) / Decimal(under) if slash else Decimal(over)
    except ArithmeticError:  # no number, or divided by 0
        return None
    return number if number.is_finite() else None  # "infinity" and "nan" are words


def final_number(reply: str) -> Decimal | None:
    """The number after the last ####."""
    numbers = FINAL.findall(reply)
    return as_number(numbers[-1]) if numbers else None


class Gsm8k(Task):
    """7,473 problems to train on, 1,319 to evaluate with."""

    name, kind, language = "gsm8k", "reply", "en"

    def __init__(self, split: str = "test", source: str = "") -> None:
        if split not in ("train", "test"):
            raise UserError(f"gsm8k has the splits train and test, not {split!r}")
        self.split = split
        self.rows = list(set_rows("gsm8k", r"(^|/)gsm8k[^/]*/", SPLIT[split], source, self._row))

    @staticmethod
    def _row(row: TableRow) -> tuple[str, str]:
        """Parse question and answer; an answer that is a bare number gets the form that replies must have."""
        question, answer = row["question"], str(row["answer"]).strip()
        if not isinstance(question, str):
            raise ValueError("its question is not text")
        if final_number(answer) is None:
            if as_number(answer) is None:
                raise ValueError(f"its answer {answer[-60:]!r} is no number and has none behind ####")
            answer = f"#### {answer}"
        return question.strip(), answer

    def __len__(self) -> int:
        return len(self.rows)

    def example(self, index: int) -> Conversation:
        question, answer = self.rows[index]
        return [{"role": "user", "content": question}, {"role": "assistant", "content": calculations(answer)}]

    def correct(self, index: int, reply: str) -> bool:
        return final_number(reply) == final_number(self.rows[index][1])
