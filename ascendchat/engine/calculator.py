"""The calculator that the model may call: arithmetic on a syntax tree, never `eval`.

    calculate("17 + 25")           "42"
    calculate("'strawberry'.count('r')")   "3"
    calculate("9**9**9")           "error: the numbers are too large"

Whatever the model writes, the answer comes within milliseconds and nothing but arithmetic happens.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

MAX_CHARACTERS = 200
MAX_DEPTH = 40
MAX_BITS = 2048  # of a whole number on the way
MAX_DIGITS = 40  # of a whole number in the answer

Number = int | float

BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
WRITTEN = str.maketrans({"×": "*", "÷": "/", "−": "-", "（": "(", "）": ")", "，": ",", "＋": "+", "＝": "="})


class _Refused(Exception):
    """An expression has no answer, and why."""


def calculate(expression: str) -> str:
    """Compute an expression: its value as text, or `error: ` and the reason."""
    try:
        return written(value(parsed(expression)))
    except _Refused as refusal:
        return f"error: {refusal}"


def parsed(expression: str) -> ast.expr:
    """Parse one expression; a closing `=`, thousands separators and typographic signs are understood."""
    text = expression.translate(WRITTEN).strip().rstrip("=").strip()
    if not text:
        raise _Refused("nothing to calculate")
    if len(text) > MAX_CHARACTERS:
        raise _Refused("the expression is too long")
    if "'" not in text and '"' not in text:
        text = _without_separators(text)
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _Refused("this is not arithmetic") from None


def _without_separators(text: str) -> str:
    """1,234,567 -> 1234567: commas between a digit and three more."""
    letters = []
    for i, letter in enumerate(text):
        after = text[i + 1 : i + 4]
        ends = not text[i + 4 : i + 5].isdigit()
        separates = letter == "," and i > 0 and text[i - 1].isdigit() and len(after) == 3 and after.isdigit() and ends
        letters.append("" if separates else letter)
    return "".join(letters)


def value(node: ast.expr, depth: int = 0) -> Number:
    """The number that a tree stands for."""
    if depth > MAX_DEPTH:
        raise _Refused("the expression is nested too deeply")
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        inner = value(node.operand, depth + 1)
        return -inner if isinstance(node.op, ast.USub) else inner
    if isinstance(node, ast.BinOp) and type(node.op) in BINARY:
        left, right = value(node.left, depth + 1), value(node.right, depth + 1)
        return _apply(type(node.op), left, right)
    if isinstance(node, ast.Call):
        return _count(node)
    raise _Refused("only numbers and + - * / // % ** ( ) are understood")


def _apply(kind: type[ast.operator], left: Number, right: Number) -> Number:
    if kind is ast.Pow:
        _check_power(left, right)
    try:
        result = BINARY[kind](left, right)
    except ZeroDivisionError:
        raise _Refused("division by zero") from None
    except OverflowError:
        raise _Refused("the numbers are too large") from None
    if isinstance(result, complex):
        raise _Refused("the result is not a real number")
    return _bounded(result)


def _check_power(left: Number, right: Number) -> None:
    """Refuse before computing: the digits of a power grow with the exponent."""
    if isinstance(left, int) and isinstance(right, int) and abs(left) > 1 and right > MAX_BITS / math.log2(abs(left)):
        raise _Refused("the numbers are too large")


def _bounded(number: Number) -> Number:
    if isinstance(number, int) and number.bit_length() > MAX_BITS:
        raise _Refused("the numbers are too large")
    if isinstance(number, float) and not math.isfinite(number):
        raise _Refused("the numbers are too large")
    return number


def _count(node: ast.Call) -> int:
    """'text'.count('t'), the one call there is: models are asked how many letters a word has."""
    function = node.func
    plain = isinstance(function, ast.Attribute) and function.attr == "count" and not node.keywords
    if plain and isinstance(function, ast.Attribute) and len(node.args) == 1:
        text, part = function.value, node.args[0]
        words = [node.value for node in (text, part) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        if len(words) == 2 and words[1]:
            return words[0].count(words[1])
    raise _Refused("only numbers and + - * / // % ** ( ) are understood")


def written(number: Number) -> str:
    """A number as people write it: 42, 0.5, 3.333333333333; a whole float loses its point."""
    if isinstance(number, float) and number.is_integer() and abs(number) < 1e15:
        number = int(number)
    if isinstance(number, int):
        if number.bit_length() > MAX_DIGITS * math.log2(10):
            raise _Refused("the numbers are too large")
        return str(number)
    return f"{number:.13g}"
