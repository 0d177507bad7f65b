"""Moves the modules of ascendchat to the places that a map names, and rewrites what imports or mentions them.

    python lab/move_house.py MAP move      # every file to its new folder, one by one: `git mv` and imports
    python lab/move_house.py MAP merge     # files that become one
    python lab/move_house.py MAP names     # names that move to another file, imports that are cut
    python lab/move_house.py MAP wrap      # lines of prose that longer names have made too long
    python lab/move_house.py MAP conflicts # names that two files to be merged would both bind

The map: `NEW: OLD [OLD ...]`; `OLD name -> NEW` moves one name; `OLD name => other` renames one before a merge;
`NEW := sentence` makes a file that holds only this docstring, or begins with it.
Run it on a clean checkout, then `ruff check --fix` and `ruff format`, which sort and drop imports.
"""

from __future__ import annotations

import ast
import collections
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
WIDTH = 120
HISTORY = ("CHANGELOG.md", "docs/log.md", "lab/", "cannsim/CHANGELOG.md")  # what was true when it was written
Key = tuple[str, str]


class Map(NamedTuple):
    new: dict[str, str]  # old file -> new file, in the order of the map
    moved: dict[Key, str]  # (old file, name) -> new file
    renamed: dict[Key, str]  # (old file, name) -> new name
    docstrings: dict[str, str]  # new file -> what it opens with


def read_map(file: str) -> Map:
    new: dict[str, str] = {}
    moved: dict[Key, str] = {}
    renamed: dict[Key, str] = {}
    docstrings: dict[str, str] = {}
    for line in Path(file).read_text().splitlines():
        if line.startswith("#") or not line.strip():
            continue
        if found := re.fullmatch(r"(\S+) := (.+)", line):
            docstrings[found[1]] = found[2]
        elif found := re.fullmatch(r"(\S+) (\w+) => (\w+)", line):
            renamed[found[1], found[2]] = found[3]
        elif found := re.fullmatch(r"(\S+) (\w+) -> (\S+)", line):
            moved[found[1], found[2]] = found[3]
        elif ": " in line:
            name, olds = line.split(": ")
            new.update(dict.fromkeys(olds.split(), name))
    return Map(new, moved, renamed, docstrings)


def interim(new: dict[str, str]) -> dict[str, str]:
    """Where each file lies before files are merged: the first under the new name, the others beside it."""
    places: dict[str, str] = {}
    for old, name in new.items():
        if name not in places.values() and (old == name or name not in new):
            places[old] = name
    for old, name in new.items():
        if old not in places:
            folder, stem = str(Path(name).parent), Path(old).stem
            stem = Path(old).parent.name if stem == "__init__" else stem
            beside = f"{folder}/{stem}.py".removeprefix("./")
            if beside in places.values() or beside in new.values():
                beside = f"{folder}/{Path(old).parent.name}_{stem}.py".removeprefix("./")
            places[old] = beside
    assert len({*places.values()}) == len(places)
    return places


def module(path: str) -> str:
    """ascendchat.train.loop of train/loop.py."""
    return ".".join(["ascendchat", *Path(path).with_suffix("").parts]).removesuffix(".__init__")


class Names(NamedTuple):
    """What becomes of modules and of names in them. Modules are named in full."""

    place: dict[str, str]
    moved: dict[Key, str]
    renamed: dict[Key, str]

    def of(self, where: str, name: str) -> Key:
        """The module in which a name is found, and what it is called there."""
        return self.moved.get((where, name), self.place.get(where, where)), self.renamed.get((where, name), name)


class Edit(NamedTuple):
    start: int
    end: int
    text: str


class Source:
    """One Python file: its tree, and edits at positions of its bytes."""

    def __init__(self, text: str) -> None:
        self.bytes = text.encode()
        self.tree = ast.parse(text)
        self.lines = [0]
        for line in self.bytes.splitlines(keepends=True):
            self.lines.append(self.lines[-1] + len(line))
        self.edits: list[Edit] = []

    def span(self, node: Any) -> tuple[int, int]:
        return self.lines[node.lineno - 1] + node.col_offset, self.lines[node.end_lineno - 1] + node.end_col_offset

    def replace(self, node: Any, text: str) -> None:
        self.edits.append(Edit(*self.span(node), text))

    def text(self) -> str:
        result = self.bytes
        for edit in sorted(set(self.edits), reverse=True):
            result = result[: edit.start] + edit.text.encode() + result[edit.end :]
        return result.decode()


def bound_in(function: Any) -> set[str]:
    """Names that a function binds itself: arguments and what it assigns."""
    names = {arg.arg for arg in ast.walk(function.args) if isinstance(arg, ast.arg)}
    if isinstance(function, ast.Lambda):
        return names
    outer: set[str] = set()
    todo: list[Any] = list(function.body)
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
            continue
        if isinstance(node, ast.Lambda):
            continue
        if isinstance(node, ast.Global):
            outer |= {*node.names}
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        if isinstance(node, ast.Import) or (
            isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("ascendchat")
        ):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        if isinstance(node, ast.ExceptHandler) and node.name:
            names.add(node.name)
        todo += ast.iter_child_nodes(node)
    return names - outer


def uses(tree: ast.AST, wanted: set[str]) -> list[tuple[ast.Name, bool]]:
    """Every use of a name of the module, and whether a function around it binds the same name for itself."""
    found = []

    def visit(node: Any, hidden: frozenset[str]) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            inner = hidden | (bound_in(node) & wanted)
            for child in getattr(node, "decorator_list", []):
                visit(child, hidden)
            for name, value in ast.iter_fields(node):
                if name != "decorator_list":
                    for child in value if isinstance(value, list) else [value]:
                        if isinstance(child, ast.AST):
                            visit(child, inner)
            return
        if isinstance(node, ast.Name) and node.id in wanted:
            found.append((node, node.id in hidden))
        for child in ast.iter_child_nodes(node):
            visit(child, hidden)

    visit(tree, frozenset())
    return found


def rewrite(source: Source, own: str, names: Names, known: set[str], report: list[str]) -> None:
    """Imports of one file, and its uses of modules and names that are called otherwise now. `own`: its module, as it was."""  # noqa: E501
    here = names.place.get(own, own)
    local: dict[str, str] = {}  # names of this file that change
    inside: dict[str, str] = {}  # alias of a module that becomes this file -> old module
    aliases: dict[str, str] = {}  # alias -> old module
    for (where, name), new in names.renamed.items():
        if where == own:
            local[name] = new
    spare = {  # statements that may go without leaving an empty block
        id(statement)
        for node in ast.walk(source.tree)
        for block in (getattr(node, "body", None), getattr(node, "orelse", None))
        if isinstance(block, list) and len(block) > 1 and not all(isinstance(s, ast.ImportFrom) for s in block)
        for statement in block
    }
    bound = {
        node.id for node in ast.walk(source.tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    bound |= {node.arg for node in ast.walk(source.tree) if isinstance(node, ast.arg)}
    bound |= {node.name for node in ast.walk(source.tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    elsewhere: dict[str, set[str]] = collections.defaultdict(set)  # name -> modules in which its attributes are now
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom):
            aliases |= {
                alias.asname or alias.name: f"{node.module}.{alias.name}"
                for alias in node.names
                if f"{node.module}.{alias.name}" in known
            }
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            elsewhere[node.value.id].add(names.of(aliases[node.value.id], node.attr)[0])
        elif isinstance(node, ast.Call) and len(node.args) > 1 and getattr(node.args[0], "id", "") in aliases:  # noqa: SIM102
            if isinstance(node.args[1], ast.Constant) and isinstance(node.args[1].value, str):
                elsewhere[node.args[0].id].add(names.of(aliases[node.args[0].id], node.args[1].value)[0])  # type: ignore
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "ascendchat":
            lines = []
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                called = alias.asname or alias.name
                if full in known:
                    aliases[called] = full
                    target = names.place.get(full, full)
                    if len(elsewhere[called]) == 1:
                        target = next(iter(elsewhere[called]))
                    if target == here and own != "" and own != full:
                        inside[called] = full
                        continue
                    parent, _, base = target.rpartition(".")
                    if called != base and base in bound:
                        lines.append(f"from {parent} import {base} as {called}")
                    elif alias.asname and alias.asname != base:
                        lines.append(f"from {parent} import {base} as {alias.asname}")
                    else:
                        lines.append(f"from {parent} import {base}")
                        if called != base:
                            local[called] = base
                    continue
                target, new = names.of(node.module or "", alias.name)
                if target == here and own != "":
                    if called != new:
                        local[called] = new
                    continue
                if alias.asname and alias.asname != new:
                    lines.append(f"from {target} import {new} as {alias.asname}")
                else:
                    lines.append(f"from {target} import {new}" + (f" as {new}" if alias.asname else ""))
                    if called != new:
                        local[called] = new
            indent = "\n" + " " * node.col_offset
            source.replace(node, indent.join(lines) or ("" if id(node) in spare else "pass"))
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name in local:  # noqa: SIM102
            if node in source.tree.body:  # type: ignore[attr-defined]
                start = source.span(node)[0]
                at = source.bytes.index(node.name.encode(), start)
                source.edits.append(Edit(at, at + len(node.name), local[node.name]))
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
            old = aliases[node.value.id]
            target, new = names.of(old, node.attr)
            if node.value.id in inside:
                source.replace(node, new)
                if any(
                    new in bound_in(f) for f in ast.walk(source.tree) if isinstance(f, (ast.FunctionDef, ast.Lambda))
                ):
                    report.append(
                        f"{own}:{node.lineno}: {node.value.id}.{new} loses its module, and a function binds {new}"
                    )
            elif new != node.attr:
                source.edits.append(Edit(source.span(node)[1] - len(node.attr), source.span(node)[1], new))
            if target != names.place.get(old, old) and len(elsewhere[node.value.id]) > 1:
                report.append(f"{own}:{node.lineno}: {node.value.id}.{node.attr} has moved to {target}")
        elif isinstance(node, ast.Call) and len(node.args) > 1 and isinstance(node.args[0], ast.Name):
            name = node.args[1]
            if node.args[0].id in aliases and isinstance(name, ast.Constant) and isinstance(name.value, str):
                target, new = names.of(aliases[node.args[0].id], name.value)
                if new != name.value:
                    source.replace(name, f'"{new}"')
                if (
                    target != names.place.get(aliases[node.args[0].id], aliases[node.args[0].id])
                    and len(elsewhere[node.args[0].id]) > 1
                ):
                    report.append(f"{own}:{node.lineno}: {node.args[0].id}, {name.value!r} has moved to {target}")
    for use, hidden in uses(source.tree, set(local)):
        if not hidden:
            source.replace(use, local[use.id])


def mentions(text: str, names: Names, files: dict[str, str]) -> str:
    """Dotted names and paths of modules in strings, comments and pages."""

    def dotted(found: re.Match[str]) -> str:
        words = found[0].split(".")
        for count in range(len(words), 1, -1):
            where = ".".join(words[:count])
            if where in names.place:
                if count < len(words):
                    target, new = names.of(where, words[count])
                    return ".".join([target, new, *words[count + 1 :]])
                return names.place[where]
        return found[0]

    text = re.sub(r"\bascendchat(?:\.\w+)+", dotted, text)
    pattern = "|".join(re.escape(old) for old in sorted(files, key=len, reverse=True) if "/" in old)
    return re.sub(rf"(?<![\w/.-])((?:ascendchat/)?)({pattern})\b", lambda m: m[1] + files[m[2]], text)


def command(text: str, names: Names) -> str:
    """A row of the table of commands, `train.base:run` or `train:BaseConfig`."""
    where, _, name = text.partition(":")
    for prefix in ("ascendchat.", "ascendchat.config."):
        if prefix + where in names.place:
            target, new = names.of(prefix + where, name)
            return f"{target.removeprefix(prefix)}:{new}"
    return text


def bare(name: str, own: str, files: dict[str, str]) -> str:
    """`gather.py` in a text of the same folder: its new name, with the folder where that is another one."""
    new = files.get(str(Path(own).parent / name), name)
    here = files.get(own, own)
    return Path(new).name if Path(new).parent == Path(here).parent else new


def mentions_in_python(source: Source, own: str, names: Names, files: dict[str, str]) -> None:
    """The same in strings and comments of a Python file; its imports are another matter."""
    text = source.bytes.decode()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.STRING, tokenize.COMMENT):
            new = mentions(token.string, names, files)
            if re.fullmatch(r'"[a-z_.]+:\w+"', token.string):
                new = f'"{command(token.string[1:-1], names)}"'
            if (own and token.type == tokenize.COMMENT) or (token.string.startswith('"""') and own):
                new = re.sub(r"(?<![\w/.])\w+\.py\b", lambda m: bare(m[0], own, files), new)
            if new != token.string:
                (row, column), (last, end) = token.start, token.end
                rows = text.splitlines(keepends=True)
                start = source.lines[row - 1] + len(rows[row - 1][:column].encode())
                stop = source.lines[last - 1] + len(rows[last - 1][:end].encode())
                source.edits.append(Edit(start, stop, new))


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and not name.startswith(HISTORY)]


def apply(names: Names, files: dict[str, str], report: list[str]) -> None:
    """Rewrite everything that imports or mentions what moves; the files lie where they lay."""
    known = {module(old) for old in files}
    for path in tracked():
        if (
            path.suffix not in (".py", ".md", ".toml", ".yaml", ".yml", ".json", ".sh", ".html", ".js", "")
            or path.is_symlink()
        ):
            continue
        try:
            before = text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if path.suffix == ".py":
            inside = path.is_relative_to(ROOT / "ascendchat")
            own = module(str(path.relative_to(ROOT / "ascendchat"))) if inside else ""
            source = Source(text)
            rewrite(source, own, names, known, report)
            mentions_in_python(source, str(path.relative_to(ROOT / "ascendchat")) if inside else "", names, files)
            text = source.text()
        else:
            text = mentions(text, names, files)
        if text != before:
            path.write_text(text, encoding="utf-8")


def git(*words: str) -> None:
    subprocess.run(["git", *words], cwd=ROOT, check=True)


def move(given: Map) -> list[str]:
    report: list[str] = []
    places = interim(given.new)
    modules = {module(old): module(new) for old, new in places.items()}
    apply(Names(modules, {}, {}), places, report)
    for old, new in places.items():
        if old != new:
            (ROOT / "ascendchat" / new).parent.mkdir(parents=True, exist_ok=True)
            aside = ROOT / "ascendchat" / (new + ".moving")
            git("mv", f"ascendchat/{old}", str(aside))
    for old, new in places.items():
        if old != new:
            git("mv", f"ascendchat/{new}.moving", f"ascendchat/{new}")
    for name, docstring in given.docstrings.items():
        path = ROOT / "ascendchat" / name
        if path.name == "__init__.py" and not path.exists():
            path.write_text(f'"""{docstring}"""\n')
            git("add", str(path))
    return report


class Part(NamedTuple):
    """A module cut into what a merged file needs: its docstring, imports, imports for types, and all else."""

    docstring: str
    imports: list[str]
    types: list[str]
    body: str


def parts(text: str) -> Part:
    source, docstring, imports, types, body = Source(text), "", [], [], []
    end = 0
    for number, node in enumerate(source.tree.body):  # type: ignore[attr-defined]
        stop = source.span(node)[1]
        while stop < len(source.bytes) and source.bytes[stop : stop + 1] != b"\n":
            stop += 1  # a comment behind the statement
        segment = source.bytes[end:stop].decode()
        end = stop
        if number == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docstring = segment.strip()
        elif isinstance(node, ast.ImportFrom) and node.module == "__future__":
            continue
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            imports.append(segment.strip())
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            assert all(isinstance(s, (ast.Import, ast.ImportFrom, ast.Pass)) for s in node.body), ast.unparse(node)
            types += [ast.unparse(s) for s in node.body if not isinstance(s, ast.Pass)]
        elif isinstance(node, ast.Pass):
            continue
        else:
            body.append(segment)
    rest = source.bytes[end:].decode()
    return Part(docstring, imports, types, "".join(body).strip("\n") + (rest.rstrip() and "\n" + rest.rstrip()))


def section(docstring: str) -> str:
    """The docstring of a module that became part of another, as a comment above its part."""
    lines = ast.literal_eval(docstring).strip().splitlines()
    return "\n".join(["# " + line if line else "#" for line in lines])


def merged(files: list[tuple[str, str]]) -> str:
    """One file of several (path, text): the docstring of the first, all imports, then each body behind those it uses."""  # noqa: E501
    cut = {path: parts(text) for path, text in files}
    first = files[0][0]
    lines = [cut[first].docstring, "", "from __future__ import annotations", ""]
    lines += dict.fromkeys(line for part in cut.values() for line in part.imports)
    types = dict.fromkeys(line for part in cut.values() for line in part.types)
    if types:
        lines += ["", "if TYPE_CHECKING:", *(f"    {line}" for line in types)]
    programs = []  # what runs a file as a program stands behind all that it needs
    for path, _ in in_order(files):
        body, start, program = cut[path].body.partition('if __name__ == "__main__":\n')
        programs += ["", "", start + program] if start else []
        lines += [
            "",
            "",
            *([section(cut[path].docstring), ""] if path != first and cut[path].docstring else []),
            body.rstrip(),
        ]
    return "\n".join([*lines, *programs]) + "\n"


def defined(text: str) -> set[str]:
    names = set()
    for node in ast.parse(text).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        for child in (
            ast.walk(node) if isinstance(node, (ast.Assign, ast.AnnAssign, ast.If, ast.Try, ast.With, ast.For)) else ()
        ):
            if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
                names.add(child.id)
    return names


def in_order(files: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Files behind those whose names they need while they are imported: base classes, decorators, constants."""
    own = {path: defined(text) for path, text in files}
    needs = {path: needed_early(text) for path, text in files}
    left, done = list(files), []
    while left:
        ready = [f for f in left if not any(needs[f[0]] & own[o[0]] for o in left if o is not f)] or left[:1]
        done.append(ready[0])
        left.remove(ready[0])
    return done


def needed_early(text: str) -> set[str]:
    """Names that are used while a module is imported."""
    names: set[str] = set()

    def visit(node: Any) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            for child in [
                *getattr(node, "decorator_list", []),
                *node.args.defaults,
                *filter(None, node.args.kw_defaults),
            ]:
                visit(child)
            return
        if isinstance(node, ast.AnnAssign):
            for child in filter(None, [node.value]):
                visit(child)
            return
        if isinstance(node, ast.Name):
            names.add(node.id)
        for child in ast.iter_child_nodes(node):
            visit(child)

    for node in ast.parse(text).body:
        visit(node)
    return names


def groups(given: Map) -> dict[str, list[str]]:
    """New file -> the files, where they lie now, that become it."""
    places, found = interim(given.new), collections.defaultdict(list)
    for old, new in given.new.items():
        found[new].append(places[old])
    return {new: olds for new, olds in found.items() if len(olds) > 1}


def conflicts(given: Map) -> None:
    """Names that two files of a group bind to different things."""
    back = {place: old for old, place in interim(given.new).items()}
    for new, olds in groups(given).items():
        bound: dict[str, dict[str, list[str]]] = collections.defaultdict(lambda: collections.defaultdict(list))
        own = {module(place) for place in olds}
        for place in olds:
            text = (ROOT / "ascendchat" / place).read_text()
            renamed = {name: to for (where, name), to in given.renamed.items() if where == back[place]}
            for name in defined(text):
                bound[renamed.get(name, name)][f"{place}"].append(back[place])
            for node in ast.parse(text).body:
                inner = node.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) else [node]
                for statement in inner:
                    if isinstance(statement, ast.ImportFrom):
                        for alias in statement.names:
                            origin = f"{statement.module}.{alias.name}"
                            if statement.module in own:
                                path = next(place for place in olds if module(place) == statement.module)
                                was = next(
                                    (to for (w, n), to in given.renamed.items() if w == back[path] and n == alias.name),
                                    alias.name,
                                )
                                bound[was if not alias.asname else alias.asname][path].append(back[place])
                            elif origin not in own:
                                bound[alias.asname or alias.name][origin].append(back[place])
                    elif isinstance(statement, ast.Import):
                        for alias in statement.names:
                            bound[(alias.asname or alias.name).split(".")[0]][
                                (alias.asname and alias.name) or alias.name.split(".")[0]
                            ].append(back[place])
        for name, things in sorted(bound.items()):
            if len(things) > 1:
                print(
                    f"{new}: {name}:",
                    "; ".join(f"{thing} ({', '.join(dict.fromkeys(who))})" for thing, who in things.items()),
                )


def merge(given: Map) -> list[str]:
    report: list[str] = []
    places = interim(given.new)
    modules = {module(places[old]): module(new) for old, new in given.new.items()}
    renamed = {(module(places[old]), name): to for (old, name), to in given.renamed.items()}
    apply(Names(modules, {}, renamed), {places[old]: new for old, new in given.new.items()}, report)
    for new, olds in groups(given).items():
        texts = [(old, (ROOT / "ascendchat" / old).read_text()) for old in olds]
        for old in olds:
            if old != new:
                git("rm", "-q", "-f", f"ascendchat/{old}")
        (ROOT / "ascendchat" / new).write_text(merged(texts))
        git("add", f"ascendchat/{new}")
    return report


def names(given: Map) -> list[str]:
    """Move single definitions to other files, with the comments above them and the imports that they need."""
    report: list[str] = []
    moves = {(module(given.new[old]), name): module(new) for (old, name), new in given.moved.items()}
    here = {path: path for path in sorted({*given.new.values(), *given.moved.values()})}
    taken: dict[str, list[str]] = collections.defaultdict(list)
    needed: dict[str, list[str]] = collections.defaultdict(list)
    for old in dict.fromkeys(old for old, _ in given.moved):
        path = ROOT / "ascendchat" / given.new[old]
        wanted = {name: new for (file, name), new in given.moved.items() if file == old}
        source, end = Source(path.read_text()), 0
        origin = {
            alias.asname or alias.name: f"from {node.module} import {alias.name}"
            + (f" as {alias.asname}" if alias.asname else "")
            for node in ast.walk(source.tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        origin |= {
            (alias.asname or alias.name).split(".")[0]: ast.unparse(ast.Import([alias]))
            for node in ast.walk(source.tree)
            if isinstance(node, ast.Import)
            for alias in node.names
        }
        own = defined(path.read_text())
        for node in source.tree.body:  # type: ignore[attr-defined]
            stop = source.span(node)[1]
            while source.bytes[stop : stop + 1] not in (b"\n", b""):
                stop += 1
            bound = {getattr(node, "name", "")} | {
                t.id
                for t in ast.walk(node)
                if isinstance(node, (ast.Assign, ast.AnnAssign))
                and isinstance(t, ast.Name)
                and isinstance(t.ctx, ast.Store)
            }
            if chosen := bound & {*wanted}:
                target = wanted[chosen.pop()]
                taken[target].append(source.bytes[end:stop].decode().strip("\n"))
                source.edits.append(Edit(end, stop, ""))
                for used in {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}:
                    if used in origin:
                        needed[target].append(origin[used])
                    elif used in own and used not in wanted:
                        report.append(f"{target} needs {used} of {given.new[old]}")
                        needed[target].append(f"from {module(given.new[old])} import {used}")
                    elif used in wanted and wanted[used] != target:
                        needed[target].append(f"from {module(wanted[used])} import {used}")
            end = stop
        text = source.text()
        left = {n.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name)} & {*wanted}
        path.write_text(text)
        needed[given.new[old]] += [f"from {module(wanted[name])} import {name}" for name in sorted(left)]
    for target in {*taken, *needed}:
        path = ROOT / "ascendchat" / target
        if not path.exists():
            path.write_text(f'"""{given.docstrings[target]}"""\n\nfrom __future__ import annotations\n')
        cut = parts(path.read_text())
        lines = [cut.docstring, "", "from __future__ import annotations", "", *cut.imports]
        lines += dict.fromkeys(line for line in needed[target] if f" {module(target)} " not in line)
        lines += ["", "if TYPE_CHECKING:", *(f"    {line}" for line in cut.types)] if cut.types else []
        early = [segment for segment in taken[target]]
        path.write_text("\n\n\n".join(["\n".join(lines), *early, cut.body]) + "\n")
        git("add", str(path))
    apply(Names({module(path): module(path) for path in here}, moves, {}), here, report)
    return report


def wrap(given: Map) -> list[str]:
    """Break comments and docstrings of more than WIDTH characters, and carry their last words into the next line."""
    report: list[str] = []
    for path in [*(ROOT / "ascendchat").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]:
        lines, number = path.read_text().splitlines(), -1
        prose = prose_lines(path.read_text())
        while (number := number + 1) < len(lines):
            line = lines[number]
            if len(line) <= WIDTH or "# type: ignore" in line or "# noqa" in line:
                continue
            if shorter := re.search(r"\S( {2,})# ", line):  # an example with a comment behind it
                lines[number] = (
                    line[: shorter.start(1)]
                    + " " * max(1, len(shorter[1]) - len(line) + WIDTH)
                    + (line[shorter.end(1) :])
                )
                continue
            if number + 1 not in prose:
                report.append(f"{path.relative_to(ROOT)}:{number + 1} is too long")
                continue
            lead = re.match(r" *(# )?", line)[0]  # type: ignore[index]
            cut = line.rindex(" ", 0, WIDTH + 1)
            lines[number], rest = line[:cut], line[cut + 1 :]
            after = lines[number + 1] if number + 1 < len(lines) else ""
            text = after[len(lead) :]
            if (
                after.startswith(lead)
                and text[:1] not in ("", " ")
                and not text.startswith(('"""', "#"))
                and (number + 2 in prose)
            ):
                lines[number + 1] = f"{lead}{rest} {text}"
            else:
                lines.insert(number + 1, lead + rest)
                prose = {at + (at > number + 1) for at in prose} | {number + 2}
        if (text := "\n".join(lines) + "\n") != path.read_text():
            path.write_text(text)
    return report


def prose_lines(text: str) -> set[int]:
    """The numbers of lines that are comments or parts of docstrings."""
    comments = {
        token.start[0]
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT and not token.line[: token.start[1]].strip()
    }
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            comments |= {*range(node.lineno, (node.end_lineno or 0) + 1)}
    return comments


if __name__ == "__main__":
    plan = read_map(sys.argv[1])
    if sys.argv[2] == "conflicts":
        conflicts(plan)
    else:
        print("\n".join({"move": move, "merge": merge, "names": names, "wrap": wrap}[sys.argv[2]](plan)))
