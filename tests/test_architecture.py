"""The rules of the codebase, read from its syntax trees: layers, hardware names, torch-free modules, owners, sizes."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "ascendchat"
SOURCES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

# A module imports only from layers to its left, or from its own package.
LAYERS = """
    config < sandbox chips files < record < plan < device < launch < dist < nn < data checkpoint < tasks < hf < infer
    < eval < train < serve report doctor speedrun < cli
"""
RANK = {name: rank for rank, layer in enumerate(LAYERS.split("<")) for name in layer.split()}

# These import without torch: `--help`, planning and diagnosis must be instant, and work when torch is broken.
TORCH_FREE = [
    "config",
    "chips",
    "files",
    "sandbox",
    "record",
    "plan",
    "device",
    "launch",
    "doctor",
    "speedrun",
    "cli",
    "data.fetch",
    "data.prepare",
    "serve",
]
NEEDS_TORCH = {
    "device": {
        *("npu", "npu_attention", "npu_ops", "cuda", "cuda_attention", "cuda_products", "mps", "cpu"),
        *("accelerator", "compiling", "counting"),
    },
    "doctor": {"collective", "selftest_device", "selftest_operators"},
    "serve": {"terminal", "worker"},
}


# The one module that imports an optional or heavy dependency.
OWNERS = {
    "torch_npu": {"device", "nn.attention"},
    "flash_attn": {"device.cuda_attention"},
    "quack": {"device.cuda_products"},
    "triton": {
        "nn.one_query",
        "nn.heads",
        "nn.token_kernels",
        "nn.row_kernels",
        "nn.product_kernel",
        "nn.token_step",
        "infer.choice",
    },
    "transformers": {"hf"},
    "peft": {"hf"},
    "bitsandbytes": {"hf.quantize"},
    "tensorboard": {"record"},
    "swanlab": {"record"},
    "wandb": {"record"},
    "httpx": {"data.fetch", "infer.link", "infer.servers", "doctor"},
    "fastapi": {"serve"},
    "uvicorn": {"serve"},
    "prometheus_client": {"serve.metrics"},
    "llguidance": {"infer.grammar"},
    "math_verify": {"tasks.terms"},
    "matplotlib": {"report.plots"},
    "tiktoken": {"data.tokenizer"},
    "rustbpe": {"data.tokenizer"},
    "tokenizers": {"data.tokenizer"},
    "pyarrow": {"data"},
    "zstandard": {"data"},
    "fsspec": {"data.object_store"},
    "safetensors": {"checkpoint", "hf"},
    "vllm": set(),
    "cannsim": set(),  # the simulator is built around the product; the product does not know it
}

HARDWARE_FILES = {"chips", "device", "nn.attention"}
HARDWARE_TYPES = {"npu", "cuda", "mps"}


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def within(module: str, places: set[str]) -> bool:
    return any(module == place or module.startswith(place + ".") for place in places)


def imports(tree: ast.Module, package: str) -> Iterator[tuple[str, int]]:
    """Every imported module as an absolute name, wherever in the file it is imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(
                    ["ascendchat", *package.split(".")][: -node.level + 1 or None] + ([base] if base else [])
                )
            if base == "ascendchat":
                yield from ((f"ascendchat.{alias.name}", node.lineno) for alias in node.names)
            else:
                yield base, node.lineno
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module":
            yield from ((name.value, node.lineno) for name in node.args if isinstance(name, ast.Constant))


def test_a_module_imports_only_from_the_layers_below_it() -> None:
    wrong = []
    for path in SOURCES:
        module = name_of(path)
        own = module.split(".")[0]
        if own in ("", "__main__"):
            continue
        assert own in RANK, f"{module} is in no layer: add it to LAYERS"
        for target, line in imports(tree_of(path), module):
            parts = target.split(".")
            if parts[0] == "ascendchat" and len(parts) > 1 and parts[1] not in (own, "__version__"):
                below = parts[1] in RANK and RANK[parts[1]] < RANK[own]
                wrong += [] if below else [f"{path}:{line}: {own} may not import {parts[1]} (it is not below)"]
    assert wrong == []


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
    others = [path for path in SOURCES if not within(name_of(path), {*HARDWARE_FILES, "doctor"})]
    assert [f"{path}:{line} names {what}" for path in others for what, line in hardware_mentions(tree_of(path))] == []


def test_a_dependency_is_imported_only_by_its_owner() -> None:
    wrong = []
    for path in SOURCES:
        for target, line in imports(tree_of(path), name_of(path)):
            owners = OWNERS.get(target.split(".")[0])
            if owners is not None and not within(name_of(path), owners):
                wrong.append(f"{path}:{line}: only {sorted(owners)} may import {target}")
    assert wrong == []


def torch_free_modules() -> list[str]:
    """Every module of the torch-free packages, but the few that are named as needing torch."""
    found = []
    for module in map(name_of, SOURCES):
        package, _, rest = module.partition(".")
        if within(module, set(TORCH_FREE)) and rest not in NEEDS_TORCH.get(package, set()):
            found.append(module)
    return found


def test_torch_free_modules_import_without_torch() -> None:
    modules = torch_free_modules()
    assert len(modules) > 30, f"only {len(modules)} modules found: this test would not notice much"
    script = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module('ascendchat.' + name)\n"
        "    assert 'torch' not in sys.modules, name + ' imports torch'\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr


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
