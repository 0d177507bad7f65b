"""The page of `ascendchat COMMAND --help`: the strings under the fields of a config dataclass, under its headings."""

from __future__ import annotations

import ast
import dataclasses
import functools
import shutil
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ascendchat.config.language import bracketed, language, translate, wrap


@dataclasses.dataclass(frozen=True)
class Range:
    """The range of a numeric field; without bounds, every number."""

    least: float | None = None  # value >= least
    above: float | None = None  # value > above
    most: float | None = None  # value <= most
    below: float | None = None  # value < below
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
    """Write a number as short as it can be typed: 1000000 -> 1e6."""
    return f"{number:g}".replace("e+0", "e").replace("e+", "e")


class _Entry(NamedTuple):
    """One string or field in the body of a config class: a heading, or a field under it with its help text."""

    heading: str
    field: str = ""
    text: str = ""


@functools.cache
def _bodies(path: str) -> dict[str, list[ast.stmt]]:
    """The statements of every class in a file."""
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    return {node.name: node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def _entries(cls: type) -> Iterator[_Entry]:
    """The headings and fields in the body of one class, in their order."""
    path, heading = getattr(sys.modules.get(cls.__module__), "__file__", None), ""
    body = _bodies(path).get(cls.__name__, []) if path else []
    for node, below in zip(body, [*body[1:], None]):
        if (text := _string(node)).startswith("# "):
            heading = text[2:]
            yield _Entry(heading)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            text = _string(below)
            yield _Entry(heading, node.target.id, "" if text.startswith("# ") else text)


def _string(node: ast.stmt | None) -> str:
    """The text of a statement that is nothing but a string; else empty."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return " ".join(node.value.value.split())
    return ""


def field_docs(cls: type) -> dict[str, str]:
    """Field name -> the string that stands under it in the source, base classes included."""
    entries = [entry for base in reversed(cls.__mro__) for entry in _entries(base)]
    return {entry.field: entry.text for entry in entries if entry.text}


def field_groups(cls: type) -> dict[str, list[str]]:
    """Heading -> fields, in the order of the help page: fields without a heading, then the headings of the class itself
    before those of its bases; under each the fields of the class itself before inherited ones. A heading without fields
    gives inherited ones their place."""
    own = [entry for entry in _entries(cls) if entry.field]
    inherited = [entry for base in reversed(cls.__mro__[1:]) for entry in _entries(base) if entry.field]
    heading_of = {entry.field: entry.heading for entry in [*inherited, *own] if entry.heading}
    groups: dict[str, list[str]] = {"": []}
    groups |= {entry.heading: [] for base in cls.__mro__ for entry in _entries(base)}
    fields = [field.name for field in dataclasses.fields(cls)]
    for name in dict.fromkeys([*(entry.field for entry in own), *fields]):
        if name in fields:
            groups[heading_of.get(name, "")].append(name)
    return {heading: names for heading, names in groups.items() if names}


def shape(kind: Any) -> str:
    """The placeholder of a value in the help page: N, X, TEXT, {a,b}, A,B,..."""
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
    """The help page of one command: its flags in groups, most used first."""
    docs, kinds, fields = field_docs(cls), typing.get_type_hints(cls), {f.name: f for f in dataclasses.fields(cls)}
    width = min(shutil.get_terminal_size((110, 24)).columns, 120)
    colon = "：" if language() == "zh" else ":"
    lines = [usage(prog, cls), "", *wrap(translate(" ".join((cls.__doc__ or "").split())), width)]
    for heading, names in field_groups(cls).items():
        lines += ["", *([translate(heading) + colon] if heading else [])]
        for name in names:
            field = fields[name]
            flags = [
                ("-" if len(n) == 1 else "--") + n.replace("_", "-") for n in (name, *field.metadata.get("also", ()))
            ]
            head = name.upper() if field.metadata.get("words") else f"{', '.join(flags)} {shape(kinds[name])}"
            text = translate(docs.get(name, "")) + _notes(field)
            lines += wrap(text, width, f"  {head:<30} ", " " * 33) or [f"  {head}"]
    lines += ["", f"  {'--config FILE':<30} {translate('YAML file with the same names; flags win over it')}", ""]
    return "\n".join(lines)
