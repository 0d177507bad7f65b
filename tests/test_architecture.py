"""The rules of the codebase, read from its syntax trees: layers, hardware names, torch-free modules, owners, sizes."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_module_imports_only_from_the_layers_below_it(path: Path) -> None:
    module = name_of(path)
    own = module.split(".")[0]
    if own in ("", "__main__"):
        return
    assert own in RANK, f"{module} is in no layer: add it to LAYERS"
    for target, line in imports(tree_of(path), module):
        parts = target.split(".")
        if parts[0] != "ascendchat" or len(parts) == 1 or parts[1] in (own, "__version__"):
            continue
        assert parts[1] in RANK, f"{path.name}:{line} imports {target}, which is in no layer"
        assert RANK[parts[1]] < RANK[own], f"{path.name}:{line}: {own} may not import {parts[1]} (it is not below)"


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


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_hardware_is_named_only_where_a_chip_is_described(path: Path) -> None:
    module = name_of(path)
    if within(module, HARDWARE_FILES) or module.startswith("doctor"):
        return
    found = list(hardware_mentions(tree_of(path)))
    assert not found, f"{path.name} names hardware: {found}"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_dependency_is_imported_only_by_its_owner(path: Path) -> None:
    module = name_of(path)
    for target, line in imports(tree_of(path), module):
        owners = OWNERS.get(target.split(".")[0])
        if owners is not None:
            assert within(module, owners), f"{path.name}:{line}: only {sorted(owners)} may import {target}"


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


@pytest.mark.parametrize("path", SOURCES + TESTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_have_at_most_400_lines_and_functions_at_most_80(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 400, f"{path} has {len(text.splitlines())} lines"
    for node in ast.walk(tree_of(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            kernel = any("triton" in ast.unparse(decorator) for decorator in node.decorator_list)
            first = node.body[0].lineno if kernel else node.lineno  # of a kernel, whose arguments stand one a line
            length = (node.end_lineno or node.lineno) - first + 1
            assert length <= 80, f"{path.name}:{node.lineno}: {node.name} has {length} lines"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_module_opens_with_what_it_is_for(path: Path) -> None:
    assert ast.get_docstring(tree_of(path)), f"{path.name} has no docstring"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_no_module_is_a_grab_bag_and_no_error_is_swallowed(path: Path) -> None:
    assert path.stem not in ("utils", "util", "common", "helpers", "misc")
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ExceptHandler):
            broad = node.type is None or (
                isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")
            )
            silent = all(isinstance(s, (ast.Pass, ast.Continue)) for s in node.body)
            assert not (broad and silent), f"{path.name}:{node.lineno} swallows every error"


@pytest.mark.parametrize("readme", ["README.md", "README.zh.md"])
def test_paths_in_the_readmes_exist(readme: str) -> None:
    text = (ROOT / readme).read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    tree = re.findall(r"^((?:[\w.-]+/)+[\w.-]*|[\w-]+\.(?:py|md|txt|toml))(?=\s{2,})", text, flags=re.M)
    assert links, "the README links to nothing: this test would not notice a broken path"
    for path in links + tree:
        assert (ROOT / path).exists(), f"{readme} names {path}, which does not exist"


def test_both_languages_have_the_same_pages() -> None:
    english = sorted(p.name for p in (ROOT / "docs" / "en").glob("*.md"))
    chinese = sorted(p.name for p in (ROOT / "docs" / "zh").glob("*.md"))
    assert english == chinese
    assert english, "no documentation found"


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
