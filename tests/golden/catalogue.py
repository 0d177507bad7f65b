"""The texts that users of a Chinese shell read in Chinese, collected from the package, and what zh.json lacks of them.

python tests/golden/catalogue.py            what ascendchat/config/zh.json lacks, as JSON to fill in, and what is stale
python tests/golden/catalogue.py FILE.json  add what FILE.json fills in, drop what is stale, sort

Collected are: the message of every UserError, with the pieces it is put together from (local variables, arguments, and
functions of the package that give text); the help of every command and flag; what `plan` prints; every argument of
`translate`. In a template `{}` stands for a value; both branches of a condition are written out.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import itertools
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "ascendchat"
CATALOGUE = PACKAGE / "config" / "zh.json"
sys.path.insert(0, str(ROOT))

WORD = re.compile(r"[A-Za-z]{2,}")
COMMAND = re.compile(r"(ascendchat|pip|source|python|torchrun|srun) |-")  # typed, not read: the same in Chinese
# Exceptions that become a part of a UserError, in these modules: the refusal of a plan, a row that cannot be read.
PARTS = {
    "TooLarge": ["plan.goals"],
    "ValueError": ["data.read", *(f"data.chat.{name}" for name in ("formats", "turns", "pairs", "tables", "render"))],
}
PARTS["ValueError"] += ["tasks.multiple_choice", "tasks.eval_files", "tasks.gsm8k"]
# Methods that are called in one module and defined in others: those begin like this.
DEFINED_IN = {
    "refusal": ("ascendchat.device.attention", "ascendchat.device.cuda_attention", "ascendchat.device.npu_att")
}
TEXT = ("str", "str | None")  # what a function that gives text is annotated with


class Module:
    """One file: its functions, what it imports, and which function holds each node."""

    def __init__(self, path: Path, package: Path) -> None:
        parts = path.relative_to(package.parent).with_suffix("").parts
        self.name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        self.tree = ast.parse(path.read_text(encoding="utf-8"))
        self.functions: dict[str, list[ast.FunctionDef]] = {}
        self.imported: dict[str, tuple[str, str]] = {}  # name here -> (module, name there)
        self.home: dict[ast.AST, ast.FunctionDef | None] = {}
        tables = [n for n in self.tree.body if isinstance(n, ast.Assign) and isinstance(n.value, ast.Dict)]
        self.tables = {getattr(n.targets[0], "id", ""): n.value for n in tables}
        self.walk(self.tree, None)

    def walk(self, node: ast.AST, inside: ast.FunctionDef | None) -> None:
        for child in ast.iter_child_nodes(node):
            self.home[child] = inside
            if isinstance(child, ast.FunctionDef):
                self.functions.setdefault(child.name, []).append(child)
            elif isinstance(child, ast.ImportFrom):
                self.imported |= {a.asname or a.name: (child.module or "", a.name) for a in child.names}
            self.walk(child, child if isinstance(child, ast.FunctionDef) else inside)


class Collector:
    """Reads the syntax trees of a package; `texts` is what it found."""

    def __init__(self, package: Path = PACKAGE) -> None:
        found = [Module(path, package) for path in sorted(package.rglob("*.py"))]
        self.modules = {module.name: module for module in found}
        self.texts: set[str] = set()
        self.seen: set[tuple[ast.FunctionDef, str]] = set()
        nodes = [(module, node) for module in found for node in module.home]
        self.calls: dict[str, list[tuple[Module, ast.Call]]] = {}
        for module, node in nodes:
            if isinstance(node, ast.Call):
                self.calls.setdefault(self.called(node), []).append((module, node))
        errors = {"UserError"}
        for _ in range(3):  # subclasses of subclasses
            for _, node in nodes:
                if isinstance(node, ast.ClassDef) and any(getattr(b, "id", "") in errors for b in node.bases):
                    errors.add(node.name)
        for name in sorted({*errors, *PARTS}):
            for module, call in self.calls.get(name, []):
                if call.args and module.name.removeprefix("ascendchat.") in PARTS.get(name, [module.name[11:]]):
                    self.keep(self.whole(call.args[0], module))

    @staticmethod
    def called(call: ast.Call) -> str:
        """The last name of what is called: storage.damaged(...) -> damaged."""
        return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")

    def functions(self, call: ast.Call, module: Module) -> list[tuple[Module, ast.FunctionDef]]:
        """The functions of the package that may be called here, and their modules."""
        name, base = self.called(call), getattr(getattr(call.func, "value", None), "id", "")
        place = module.name
        if isinstance(call.func, ast.Attribute) and base in module.imported:
            place = ".".join(module.imported[base])
        elif isinstance(call.func, ast.Attribute):  # a method, or a function of a module chosen at run time
            prefixes = (module.name, *DEFINED_IN.get(name, ()))
            near = [m for m in self.modules.values() if m.name.startswith(prefixes)]
            return [(m, function) for m in near for function in m.functions.get(name, [])]
        for _ in range(4):  # a package hands on what its files define
            there = self.modules.get(place)
            if there is None or name in there.functions:
                return [(there, function) for function in there.functions[name]] if there else []
            place, name = there.imported.get(name, ("", ""))
        return []

    def keep(self, templates: Iterable[str], piece: bool = False) -> None:
        """Store the templates that have words. A piece of a message counts when it has a space, as in `translate`."""
        for text in templates:
            if WORD.search(text) and not (piece and (" " not in text.strip() or COMMAND.match(text))):
                self.texts.add(text)

    def whole(self, node: ast.expr, module: Module) -> list[str]:
        """What a message says: as `templates`, and of a variable or a function what it holds or gives."""
        if isinstance(node, ast.Name):
            return self.variable(node, module)
        if isinstance(node, ast.Call):
            self.pieces(node, module)
            return []
        return self.templates(node, module)

    def templates(self, node: ast.expr, module: Module) -> list[str]:
        """What the expression can say; the texts of the values in it are collected on the way."""
        if isinstance(node, ast.Constant):
            return [node.value.replace("{", "{{").replace("}", "}}")] if isinstance(node.value, str) else ["{}"]
        if isinstance(node, ast.IfExp):
            return self.templates(node.body, module) + self.templates(node.orelse, module)
        if isinstance(node, ast.JoinedStr):
            parts = [self.templates(part, module) for part in node.values]
            return ["".join(chosen) for chosen in itertools.product(*parts)]
        if isinstance(node, ast.FormattedValue) and isinstance(node.value, (ast.IfExp, ast.BinOp)):
            return self.templates(node.value, module)
        if isinstance(node, ast.FormattedValue):
            node = node.value
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            pairs = itertools.product(self.templates(node.left, module), self.templates(node.right, module))
            return ["{}" if a == b == "{}" else a + b for a, b in pairs]
        if isinstance(node, ast.BinOp) and isinstance(node.left, ast.Constant) and isinstance(node.left.value, str):
            return ["", node.left.value]  # "s" * (n > 1)
        self.pieces(node, module)
        return ["{}"]

    def pieces(self, node: ast.expr, module: Module) -> None:
        """Collect the texts that a value inside a message can be."""
        if isinstance(node, ast.Name):
            self.keep(self.variable(node, module), piece=True)
        elif isinstance(node, ast.BoolOp):
            for value in node.values:
                self.keep(self.templates(value, module), piece=True)
        elif isinstance(node, ast.Call) and self.called(node) == "join":
            separator = getattr(getattr(node.func, "value", None), "value", "")
            self.keep([f"{{}}{separator}{{}}"])
        elif isinstance(node, ast.Call) and getattr(getattr(node.func, "value", None), "id", "") in module.tables:
            for value in module.tables[node.func.value.id].values:  # type: ignore[attr-defined]
                self.keep(self.templates(value, module), piece=True)  # TABLE.get(name)
        elif isinstance(node, ast.Call):
            for owner, function in self.functions(node, module):
                if function.returns and ast.unparse(function.returns) in TEXT and (function, "") not in self.seen:
                    self.seen.add((function, ""))
                    for step in ast.walk(function):
                        if isinstance(step, ast.Return) and step.value is not None:
                            self.keep(self.whole(step.value, owner), piece=True)

    def variable(self, node: ast.Name, module: Module) -> list[str]:
        """The texts that a name is given in its function, with what is added to them; of a parameter the arguments."""
        function = module.home[node]
        if function is None or (function, node.id) in self.seen:
            return []
        self.seen.add((function, node.id))
        found: list[str] = []
        for step in ast.walk(function):
            targets = step.targets if isinstance(step, ast.Assign) else [getattr(step, "target", None)]
            if not any(getattr(target, "id", "") == node.id for target in targets):
                continue
            if isinstance(step, ast.AugAssign):
                found += [a + b for a in found for b in self.templates(step.value, module)]
            elif isinstance(step, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and step.value is not None:
                found += self.templates(step.value, module)
        names = [a.arg for a in function.args.args]
        if node.id in names:
            at = names.index(node.id) - (names[0] in ("self", "cls"))
            for caller, call in self.calls.get(function.name, []):
                if any(found is function for _, found in self.functions(call, caller)):
                    given = [k.value for k in call.keywords if k.arg == node.id] or call.args[at : at + 1]
                    for value in given:
                        found += self.whole(value, caller)
        return [text for text in found if text != "{}"]


def help_texts(collector: Collector) -> set[str]:
    """One line per command; head, headings and texts of its page; arguments of `translate`."""
    from ascendchat.cli import COMMANDS
    from ascendchat.config.help import field_docs, field_groups

    texts = set()
    for target, _, line in COMMANDS.values():
        module, name = target.split(":")
        cls = getattr(importlib.import_module(f"ascendchat.config.{module}"), name)
        docs = field_docs(cls)
        texts |= {line, " ".join(cls.__doc__.split()), *(docs[f.name] for f in dataclasses.fields(cls))}
        texts |= set(filter(None, field_groups(cls)))
    collector.texts = {text.replace("{", "{{").replace("}", "}}") for text in texts}
    for where, call in collector.calls["translate"]:
        collector.keep(collector.whole(call.args[0], where))
    return collector.texts


def reasons() -> set[str]:
    """The sentences for settings that a command does not have: `not_used` and `refused` of its config class."""
    from ascendchat.cli import COMMANDS

    texts: set[str] = set()
    for target, _, _ in COMMANDS.values():
        module, name = target.split(":")
        cls = getattr(importlib.import_module(f"ascendchat.config.{module}"), name)
        texts |= {*getattr(cls, "not_used", {}).values(), *getattr(cls, "refused", {}).values()}
    return texts


def ranges() -> set[str]:
    """How the ranges of the numbers read: `at least {} and at most {}`."""
    from ascendchat.cli import COMMANDS

    found = set()
    for target, _, _ in COMMANDS.values():
        module, name = target.split(":")
        cls = getattr(importlib.import_module(f"ascendchat.config.{module}"), name)
        found |= {str(field.metadata.get("range", "")) for field in dataclasses.fields(cls)}
    return {re.sub(r"-?\d[\d.e-]*", "{}", text) for text in found} - {""}


def plan_texts(collector: Collector) -> set[str]:
    """What `plan` shows: rows (label, value) of plan/show.py, lists of notes, where the figures of a chip are from."""
    collector.texts = part_names()
    show, chips = collector.modules["ascendchat.plan.show"], collector.modules["ascendchat.chips"]
    for node in ast.walk(show.tree):
        first = node.elts[0] if isinstance(node, ast.Tuple) and len(node.elts) == 2 else None
        if isinstance(first, (ast.Constant, ast.JoinedStr, ast.Call)) or getattr(first, "id", "") == "title":
            collector.keep(text.replace("_", " ") for elt in node.elts for text in collector.whole(elt, show))
    for node in ast.walk(chips.tree):
        if isinstance(node, ast.keyword) and node.arg == "source":
            collector.keep(collector.whole(node.value, chips))
    for name in ("ascendchat.plan.command", "ascendchat.plan.goals"):
        module = collector.modules[name]
        for node in ast.walk(module.tree):
            notes = node.elts if isinstance(node, ast.List) else []
            if isinstance(node, ast.Call) and collector.called(node) == "append":
                notes = node.args
            for note in notes:
                collector.keep(collector.whole(note, module), piece=True)
    return collector.texts


def part_names() -> set[str]:
    """The names of parameters, memory and rates in plans of every kind."""
    from ascendchat.chips import CHIPS, Chip
    from ascendchat.config.commands import PlanConfig
    from ascendchat.sizes import hf, memory, schedule
    from ascendchat.sizes.shape import Shape

    chip, shape = CHIPS["Ascend910B3"], Shape.from_depth(2)
    sizes = dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads"), 8)
    sizes |= {"intermediate_size": 8, "vocab_size": 8}
    model = hf.from_config({"model_type": "qwen3_moe", **sizes}, PlanConfig.max_seq_len)
    names = [shape.parameters(), model.parameters(), schedule.rates(64, 1024), memory.training(shape, chip, 2, 1)]
    names += [hf.finetuning(model, chip, 2, 1), memory.decoding(shape, chip, 1, 8), {"rollout_weights": 0}]
    return {name.replace("_", " ") for part in names for name in part} | {Chip.source}


def every_text() -> dict[str, set[str]]:
    """All texts by group, each in one of them."""
    from ascendchat import chips

    collector = Collector()
    errors = collector.texts | ranges() | reasons() | set(chips._FAMILIES.values())
    lines = help_texts(collector) - errors
    return {"errors": errors, "help": lines, "plan": plan_texts(collector) - lines - errors}


def stored() -> dict[str, dict[str, str]]:
    return dict(json.loads(CATALOGUE.read_text(encoding="utf-8")))


def compare(texts: dict[str, set[str]]) -> tuple[dict[str, dict[str, str]], list[str]]:
    """({group: {missing text: ""}}, stale texts)"""
    have = {group: set(entries) for group, entries in stored().items()}
    missing = {group: dict.fromkeys(sorted(texts[group] - have[group]), "") for group in texts}
    return missing, sorted(text for group in have for text in have[group] - texts[group])


def merge(filled: dict[str, dict[str, str]], texts: dict[str, set[str]]) -> None:
    """Write the catalogue again: one entry per line, sorted, so that two branches rarely meet on a line. A translation
    stays with its text when that moves to another group."""
    chinese = {en: zh for entries in (*stored().values(), *filled.values()) for en, zh in entries.items() if zh}
    sorted_ = {group: {en: chinese[en] for en in sorted(texts[group]) if en in chinese} for group in sorted(texts)}
    CATALOGUE.write_text(json.dumps(sorted_, ensure_ascii=False, indent=0) + "\n", "utf-8")


if __name__ == "__main__":
    texts = every_text()
    if sys.argv[1:]:
        merge(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), texts)
    missing, stale = compare(texts)
    print(json.dumps(missing, ensure_ascii=False, indent=0))
    for text in stale:
        print(f"stale: {text}", file=sys.stderr)
