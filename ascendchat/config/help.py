"""Help texts: the strings written under the fields of a config dataclass, laid out for `ascendchat COMMAND --help`."""

from __future__ import annotations

import ast
import dataclasses
import shutil
import sys
import types
import typing
from pathlib import Path
from typing import Any

from ascendchat.config.language import bracketed, translate, wrap


@dataclasses.dataclass(frozen=True)
class Range:
    """Which numbers a field takes; without bounds, all of them."""

    least: float | None = None  # itself allowed
    above: float | None = None  # itself not allowed
    most: float | None = None  # itself allowed
    below: float | None = None  # itself not allowed
    besides: tuple[int, ...] = ()  # single values that are allowed outside of the bounds

    def __contains__(self, value: float) -> bool:
        return value in self.besides or (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        """`at least 1 and at most 1000`"""
        bounds = [("at least", self.least), ("greater than", self.above), ("at most", self.most)]
        said = [f"{words} {short(bound)}" for words, bound in [*bounds, ("less than", self.below)] if bound is not None]
        return " and ".join(said) + "".join(f", or {value}" for value in self.besides)


def short(number: float) -> str:
    """1000000 -> 1e6: as it can be typed."""
    return f"{number:g}".replace("e+0", "e").replace("e+", "e")


def field_docs(cls: type) -> dict[str, str]:
    """Field name -> the string that stands under it in the source, base classes included."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        path = getattr(sys.modules.get(base.__module__), "__file__", None)
        if base is object or path is None:
            continue
        for node in ast.walk(ast.parse(Path(path).read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.name == base.__name__:
                docs.update(_docs_in(node))
    return docs


def _docs_in(node: ast.ClassDef) -> dict[str, str]:
    docs = {}
    for above, below in zip(node.body, node.body[1:]):
        if not (isinstance(above, ast.AnnAssign) and isinstance(above.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            docs[above.target.id] = " ".join(below.value.value.split())
    return docs


def shape(kind: Any) -> str:
    """How a value is written: N, X, TEXT, {a,b}, A,B,..."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return shape(next(a for a in args if a is not type(None)))
    if origin is typing.Literal:
        return "{" + ",".join(str(a) for a in args) + "}"
    if origin is tuple:
        return f"{shape(args[0])},..."
    return {int: "N", float: "X", bool: "", str: "TEXT", dict: "MAP"}.get(kind, "VALUE")


def usage(prog: str, cls: type) -> str:
    words = [f.name.upper() for f in dataclasses.fields(cls) if f.metadata.get("words")]
    return f"{translate('usage: ')}{prog} [--flags] {' '.join(words)}".rstrip()


def _notes(field: dataclasses.Field[Any]) -> str:
    """` (at least 1 and at most 1000; default: 20)`; no default for a switch that is off or a value that is absent."""
    notes, value = [translate(str(field.metadata.get("range", "")))], field.default
    if not (value is dataclasses.MISSING or value is None or value is False or value in ("", ())):
        shown = ",".join(map(str, value)) if isinstance(value, tuple) else value
        notes.append(translate(f"default: {shown}"))
    return bracketed([note for note in notes if note])


def help_page(prog: str, cls: type) -> str:
    """The whole help page of one command."""
    docs, kinds = field_docs(cls), typing.get_type_hints(cls)
    width = min(shutil.get_terminal_size((110, 24)).columns, 120)
    lines = [usage(prog, cls), "", *wrap(translate(" ".join((cls.__doc__ or "").split())), width), ""]
    for field in dataclasses.fields(cls):
        names = [field.name, *field.metadata.get("also", ())]
        if field.metadata.get("words"):
            head = field.name.upper()
        else:
            flags = [("-" if len(n) == 1 else "--") + n.replace("_", "-") for n in names]
            head = ", ".join(flags) + " " + shape(kinds[field.name])
        text = translate(docs.get(field.name, "")) + _notes(field)
        lines += wrap(text, width, f"  {head:<30} ", " " * 33) or [f"  {head}"]
    lines += [f"  {'--config FILE':<30} {translate('YAML file with the same names; flags win over it')}", ""]
    return "\n".join(lines)
