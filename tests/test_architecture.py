"""The rules of the codebase, read from its syntax trees: order, circles, owners, private names, torch-free modules.

No rule has an exception that a list would name.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "ascendchat"
SOURCES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

# A module imports only from what stands to the left of its own package, or from its own package.
ORDER = """
    errors version < chips files processes sandbox < config < runs < sizes < device < parallel < checkpoint < nn < data
    < tasks < models < engine < remote < eval < train < rl < serve < bench < plan < report < speedrun < doctor < launch
    < compat < cli
"""
RANK = {name: rank for rank, group in enumerate(ORDER.split("<")) for name in group.split()}

# These import without torch: `--help`, planning and diagnosis must be instant, and work when torch is broken.
TORCH_FREE = (
    "errors version chips files processes sandbox config runs sizes device plan launch report speedrun doctor serve cli"
    " data.fetch data.prepare parallel.world remote.vllm_server bench.serve bench.http_client"
).split()
NEEDS_TORCH = set(
    "device.npu device.npu_attention device.npu_ops device.cuda device.cuda_attention device.cuda_products device.mps "
    "device.cpu device.accelerator device.attention device.packages device.triton_attention "
    "doctor.collective doctor.selftest_device doctor.selftest_operators serve.terminal "
    "serve.worker launch.torchrun".split()
)

# The only modules that import an optional or heavy dependency.
OWNERS = {
    "torch_npu": "device",
    "flash_attn": "device.cuda_attention",
    "quack": "device.cuda_products",
    "triton": "device.triton_attention nn.triton_decoding nn.triton_training engine.gpt_step engine.sampling_kernels",
    "transformers": "models",
    "peft": "models",
    "bitsandbytes": "models.quantize",
    "tensorboard": "runs.trackers",
    "swanlab": "runs.trackers",
    "wandb": "runs.trackers",
    "httpx": "data.fetch remote bench.http_client doctor",
    "fastapi": "serve",
    "uvicorn": "serve",
    "prometheus_client": "serve.metrics",
    "llguidance": "engine.grammar",
    "math_verify": "rl.rewards",
    "matplotlib": "report.plots",
    "tiktoken": "data.tokenizer",
    "rustbpe": "data.tokenizer",
    "tokenizers": "data.tokenizer",
    "pyarrow": "data",
    "zstandard": "data",
    "fsspec": "data.object_store",
    "safetensors": "checkpoint models",
    "vllm": "",
    "cannsim": "",  # the simulator is built around the product; the product does not know it
}

HARDWARE_TYPES = {"npu", "cuda", "mps"}
# A docstring is a sentence with a subject or a verb: none begins like this.
OPENINGS = re.compile(r"(?:Of|The same|As|What|Whether|Who|How|Where|When)\b")
# A bound is called MAX_ or MIN_, never like this.
OTHER_BOUNDS = re.compile(r"(?:MOST|LEAST|LONGEST|SHORTEST)(?:_\w+)?")


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in SOURCES}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def within(module: str, places: str) -> bool:
    return any(module == place or module.startswith(f"{place}.") for place in places.split())


def base_of(node: ast.ImportFrom, path: Path) -> str:
    """The absolute name of the module that `from ... import` names."""
    above: list[str] = []
    if node.level:
        package = ["ascendchat", *path.relative_to(PACKAGE).parts[:-1]]
        above = package[: len(package) - node.level + 1]
    return ".".join([*above, *filter(None, [node.module])])


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """Every imported module as an absolute name, wherever in the file it is imported."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = base_of(node, path)
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield (whole if whole.removeprefix("ascendchat.") in MODULES else base), node.lineno
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module":
            yield from ((name.value, node.lineno) for name in node.args if isinstance(name, ast.Constant))


def own_imports(path: Path) -> Iterator[tuple[str, int]]:
    """Those of our modules, without the name of the root package; "" is the root package itself."""
    for target, line in imports(path):
        if target.split(".")[0] == "ascendchat":
            name = target.partition(".")[2]
            yield (name if name in MODULES else name.rpartition(".")[0]), line


def test_a_module_imports_only_what_stands_before_it() -> None:
    wrong = []
    for path in SOURCES:
        own = name_of(path).split(".")[0]
        if own in ("", "__main__"):
            continue
        assert own in RANK, f"{path} has no place: add {own} to ORDER"
        for target, line in own_imports(path):
            other = target.split(".")[0]
            if other != own and not (other in RANK and RANK[other] < RANK[own]):
                wrong.append(f"{path}:{line}: {own} may not import {target or 'ascendchat'}")
    assert wrong == []


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Every name that reaches itself, and all on its way, as groups."""
    reach = {name: set(targets) for name, targets in graph.items()}
    for middle in graph:
        for targets in reach.values():
            if middle in targets:
                targets |= reach[middle]
    groups = {tuple(sorted(b for b in reach[a] if a in reach.get(b, ()))) for a in reach if a in reach[a]}
    return sorted(map(list, groups))


def test_no_two_modules_and_no_two_packages_import_each_other() -> None:
    modules: dict[str, set[str]] = defaultdict(set)
    packages: dict[str, set[str]] = defaultdict(set)
    for name, path in MODULES.items():
        for target, _ in own_imports(path):
            if target != name:
                modules[name].add(target)
            if target.split(".")[0] != name.split(".")[0] and name not in ("", "__main__"):
                packages[name.split(".")[0]].add(target.split(".")[0])
    assert circles(modules) == []
    assert circles(packages) == []


def hardware_mentions(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """torch.npu, torch.cuda, torch.mps, `import torch_npu`, and comparisons with a device type."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            if node.attr in HARDWARE_TYPES:
                yield f"torch.{node.attr}", node.lineno
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
            for name in names:
                if name.split(".")[0] == "torch_npu" or name.startswith(("torch.cuda", "torch.npu", "torch.mps")):
                    yield name, node.lineno
        elif isinstance(node, ast.Compare):
            for part in [node.left, *node.comparators]:
                if isinstance(part, ast.Constant) and part.value in HARDWARE_TYPES:
                    yield f'comparison with "{part.value}"', node.lineno


def test_hardware_is_named_only_where_a_chip_is_described() -> None:
    found = {name for name, path in MODULES.items() if any(hardware_mentions(tree_of(path)))}
    assert {name for name in found if not within(name, "chips device")} == set()


def test_a_dependency_is_imported_only_by_its_owner() -> None:
    wrong = []
    for path in SOURCES:
        for target, line in imports(path):
            owners = OWNERS.get(target.split(".")[0])
            if owners is not None and not within(name_of(path), owners):
                wrong.append(f"{path}:{line}: only {owners or 'nobody'} may import {target}")
    assert wrong == []


def test_torch_free_modules_import_without_torch() -> None:
    modules = [name for name in MODULES if within(name, " ".join(TORCH_FREE)) and name not in NEEDS_TORCH]
    assert len(modules) > 80, f"only {len(modules)} modules found: this test would not notice much"
    script = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module('ascendchat.' + name)\n"
        "    assert 'torch' not in sys.modules, name + ' imports torch'\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr


SMALL = {  # what a process imports -> MiB that it may have resident, Python's own 10 included
    "serve.app serve.command serve.pool": 80,  # the front of the server, one per server
    "sandbox.process": 40,  # a process for functions of users, one per core
    "cli": 30,
}


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells resident memory only on Linux")
@pytest.mark.parametrize("modules", SMALL)
def test_a_process_that_needs_no_torch_stays_small(modules: str) -> None:
    imported = ", ".join(f"ascendchat.{name}" for name in modules.split())
    script = f"import {imported}; print(open('/proc/self/status').read().split('VmRSS:')[1].split()[0])"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert int(result.stdout) / 1024 <= SMALL[modules]


def test_a_package_opens_with_a_docstring_and_re_exports_alone() -> None:
    allowed = (ast.Import, ast.ImportFrom)
    found = set()
    for name, path in MODULES.items():
        if path.name == "__init__.py" and name != "device":
            body = tree_of(path).body
            for node in body:
                docstring = node is body[0] and isinstance(node, ast.Expr)
                names = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
                if not (docstring or names or isinstance(node, allowed)):
                    found.add(name)
    assert found == set()


def private_definitions(tree: ast.Module) -> set[str]:
    """All names with one underscore that a file gives to something."""
    found = {
        node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    }
    for node in ast.walk(tree):
        if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def test_what_is_private_is_used_in_its_own_file() -> None:
    defined = {name: private_definitions(tree_of(path)) for name, path in MODULES.items()}
    everywhere = set().union(*defined.values()) - {"_replace", "_fields", "_asdict"}  # those of a NamedTuple
    found = {}
    for name, path in MODULES.items():
        used = {node.attr for node in ast.walk(tree_of(path)) if isinstance(node, ast.Attribute)}
        used |= {a.name for node in ast.walk(tree_of(path)) if isinstance(node, ast.ImportFrom) for a in node.names}
        if foreign := sorted((used & everywhere) - defined[name]):
            found[name] = " ".join(foreign)
    assert found == {}


def classes_and_users() -> dict[tuple[str, str], bool]:
    """(name, module) of every class, and whether another file imports its module and says its name."""
    users = defaultdict(list)
    for path in [*SOURCES, *TESTS]:
        for target in {target for target, _ in own_imports(path)}:
            users[target].append(path)
    words = {path: set(re.findall(r"\w+", path.read_text(encoding="utf-8"))) for path in [*SOURCES, *TESTS]}
    return {
        (node.name, module): any(node.name in words[user] for user in users[module] if user != path)
        for module, path in MODULES.items()
        if not within(module, "models.remote_code")
        for node in tree_of(path).body
        if isinstance(node, ast.ClassDef)
    }


def test_a_class_has_a_name_of_its_own_or_is_private() -> None:
    classes = classes_and_users()
    count = Counter(name for (name, _), used in classes.items() if used)
    assert {name for name, number in count.items() if number > 1} == set()
    alone = {f"{module}.{name}" for (name, module), used in classes.items() if not used and not name.startswith("_")}
    assert alone == set(), "used in their own file only: begin them with an underscore"


def docstrings(tree: ast.Module) -> Iterator[str]:
    """All of a file: its own, and those of its classes and functions."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node) or ""


def test_a_docstring_begins_with_what_the_thing_does() -> None:
    found = {name: sum(map(bool, map(OPENINGS.match, docstrings(tree_of(path))))) for name, path in MODULES.items()}
    assert {name: number for name, number in found.items() if number} == {}


def test_a_bound_is_called_max_or_min() -> None:
    names = {
        node.id
        for path in SOURCES
        for statement in tree_of(path).body
        for node in ast.walk(statement)
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and isinstance(node, ast.Name)
        if isinstance(node.ctx, ast.Store)
    }
    assert {name for name in names if OTHER_BOUNDS.fullmatch(name)} == set()


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All of a file, methods and inner ones included."""
    return (node for node in ast.walk(tree_of(path)) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def test_a_function_has_at_most_80_lines() -> None:
    for path in SOURCES + TESTS:
        for node in functions(path):
            kernel = any("triton" in ast.unparse(decorator) for decorator in node.decorator_list)
            first = node.body[0].lineno if kernel else node.lineno  # of a kernel, whose arguments stand one a line
            length = (node.end_lineno or node.lineno) - first + 1
            assert length <= 80, f"{path.name}:{node.lineno}: {node.name} has {length} lines"


def long_marks(node: ast.AST) -> list[ast.AST]:
    """Every `pytest.mark.long` in a part of a file, as it is written."""
    return [part for part in ast.walk(node) if getattr(part, "attr", "") == "long" and "mark.long" in ast.unparse(part)]


def test_a_long_test_names_the_short_one_that_holds_the_same() -> None:
    """`make test` leaves out what is marked long(short="test_x"): a test of this name must stand there in its place."""
    short, long, named = set(), set(), []
    for path in TESTS:
        text = path.read_text(encoding="utf-8")
        if "mark.long" not in text:
            short |= set(re.findall(r"^ *def (test_\w+)", text, re.M))
            continue
        whole = [node for node in tree_of(path).body if isinstance(node, ast.Assign) and long_marks(node)]
        for node in functions(path):
            marked = whole or [mark for mark in node.decorator_list if "parametrize" not in ast.unparse(mark)]
            (long if any(map(long_marks, marked)) else short).add(node.name)
        calls = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call) and long_marks(node.func)]
        assert len(calls) == len(long_marks(tree_of(path))), f"{path}: write pytest.mark.long(short=...)"
        named += [(path, {word.arg: ast.literal_eval(word.value) for word in call.keywords}) for call in calls]
    assert not [f"{path}: {given}" for path, given in named if given.get("short") not in short], "no test has this name"
    assert not [f"{path}: {given}" for path, given in named if given["short"] in long], "it is long itself"


def test_a_module_opens_with_what_it_is_for_and_swallows_no_error() -> None:
    for path in SOURCES:
        assert ast.get_docstring(tree_of(path)), f"{path} has no docstring"
        assert path.stem not in ("utils", "util", "common", "helpers", "misc")
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ExceptHandler):
                broad = node.type is None or getattr(node.type, "id", "") in ("Exception", "BaseException")
                silent = all(isinstance(s, (ast.Pass, ast.Continue)) for s in node.body)
                assert not (broad and silent), f"{path}:{node.lineno} swallows every error"


def test_a_file_that_is_also_a_program_runs_when_all_of_it_is_defined() -> None:
    for path in SOURCES:
        for node in tree_of(path).body[:-1]:
            program = isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
            assert not program, f"{path}:{node.lineno}: what stands below is not defined yet when this runs"


def test_no_path_of_a_developers_machine_is_committed() -> None:
    pattern = re.compile(r"/(?:root|home/[a-z]+|Users/[a-z]+|work)/(?!ma-user)")
    for path in [*SOURCES, *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *PACKAGE.rglob("*.yaml")]:
        found = pattern.search(path.read_text(encoding="utf-8"))
        assert not found, f"{path} holds the path {found.group()}"  # type: ignore[union-attr]


def test_test_files_have_different_names() -> None:
    """pytest imports them by name alone: two of the same name stop plain `pytest` at collection."""
    names = [path.name for path in TESTS if path.name not in ("conftest.py", "__init__.py")]
    twice = sorted({name for name in names if names.count(name) > 1})
    assert not twice, f"rename one of each: {twice}"


PAGES = [ROOT / "docs" / language / "architecture.md" for language in ("en", "zh")]
LOOKED_IN = [
    ROOT,
    PACKAGE,
    ROOT / "tests",
    *(PACKAGE / name for name in ("config", "data", "doctor", "doctor/rules", "serve")),
]
OF_OTHERS = {"npu_rms_norm", "npu_rotary_mul"}  # operators of torch_npu, called by a name put together


def names_in(path: Path) -> set[str]:
    """Everything that a file gives a name to: modules, definitions, variables, attributes, arguments, keys."""
    found = {path.stem, path.parent.name}
    for node in ast.walk(tree_of(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


@pytest.mark.parametrize("page", PAGES, ids=["en", "zh"])
def test_the_page_of_the_architecture_is_true(page: Path) -> None:
    """Packages stand in the order of imports; every path exists; every name is defined, and where the page says so."""
    text = page.read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]+) \|", text, re.M)
    listed = [name for row in rows for name in re.findall(r"`(\w+)(?:\.py|/)`", row)]
    assert set(listed) == set(RANK)
    assert sorted(listed, key=RANK.__getitem__) == listed
    prose = re.sub(r"```.*?```", "", text, flags=re.S)
    quoted = set(re.findall(r"`([^`\n]+)`", prose))
    paths = {
        name
        for name in quoted
        if re.fullmatch(r"(?:[a-z_]\w*/)+|(?:[a-z_]\w*/)*[a-z_]\w*\.(?:py|md|txt|json|yaml)", name)
    }
    assert len(paths) > 60
    assert [name for name in sorted(paths) if not any((folder / name).exists() for folder in LOOKED_IN)] == []
    everywhere = set().union(*(names_in(path) for path in [*SOURCES, *TESTS]), OF_OTHERS)
    names = {name for name in quoted - paths if re.fullmatch(r"[A-Za-z_][\w.]*(\(.*\))?", name)}
    assert [name for name in sorted(names) if not set(name.partition("(")[0].split(".")) <= everywhere] == []
    told = re.findall(r"^\d+\. `([\w/]+\.py)`[:：](.*?)[.。;；]", text, re.M)
    assert len(told) > 4
    for file, sentence in told:
        for name in re.findall(r"`(\w+(?:\.\w+)?)(?:\(.*?\))?`", sentence):
            assert set(name.split(".")) <= names_in(PACKAGE / file), f"{page}: {name} is not in {file}"
