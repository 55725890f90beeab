"""Which file may import which: ops <- spec_decode <- model_executor <- register."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = "kdtree_runner"
FOLDERS = {"": "kdtree_runner", "spec_decode": "spec_decode", "model_executor": "model_executor"}
# A module may import modules of its own layer and of those before it.
KERNELS = tuple(f"kdtree_kernels{part}" for part in ("_arguments", "_tree", "_cache", ""))
LAYERS = ("native", *KERNELS, "ops", "spec_decode", "model_executor", "register")
TORCH_ONLY = ("spec_decode.tree", "spec_decode.reference")
REFERENCE = ("spec_decode.reference", "spec_decode.reference_step")


def modules() -> dict[str, Path]:
    """Every module of the package by its name in it, such as "spec_decode.tree"."""
    found = {}
    for prefix, folder in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = [prefix, *path.relative_to(ROOT / folder).with_suffix("").parts]
            name = ".".join(p for p in parts if p and p != "__init__")
            found[name or "__init__"] = path
    return found


MODULES = modules()


def imports(path: Path) -> Iterator[str]:
    """Full names of what a file imports, anywhere in it; `from a import b` gives a and a.b."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def own_imports(path: Path) -> set[str]:
    """Modules of the package that a file imports, by their name in it."""
    found = set()
    for name in imports(path):
        inner = name.removeprefix(f"{PACKAGE}.")
        if name.startswith(f"{PACKAGE}.") and inner in MODULES:
            found.add(inner)
    return found


def layer(module: str) -> int | None:
    """Place in LAYERS; None for the modules that belong to none (config, cli, ...)."""
    top = module.split(".")[0]
    return LAYERS.index(top) if top in LAYERS else None


def test_the_modules_are_found() -> None:
    assert {"__init__", "native", "ops", *KERNELS, *TORCH_ONLY} <= MODULES.keys()


@pytest.mark.parametrize("module", MODULES)
def test_imports_are_absolute(module: str) -> None:
    assert not [name for name in imports(MODULES[module]) if name.startswith(".")]


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_one_way(module: str) -> None:
    place = layer(module)
    if place is None:
        return
    for imported in own_imports(MODULES[module]):
        imported_place = layer(imported)
        assert imported_place is None or imported_place <= place, f"{module} imports {imported}"


@pytest.mark.parametrize("module", TORCH_ONLY)
def test_torch_only(module: str) -> None:
    others = {name.split(".")[0] for name in imports(MODULES[module])} - sys.stdlib_module_names
    assert others <= {"torch", PACKAGE}, module
    assert own_imports(MODULES[module]) <= set(TORCH_ONLY), module


@pytest.mark.parametrize("module", MODULES)
def test_the_reference_is_not_used_at_run_time(module: str) -> None:
    if module not in REFERENCE:
        assert not own_imports(MODULES[module]) & set(REFERENCE)


@pytest.mark.parametrize("module", MODULES)
def test_only_ops_calls_the_library(module: str) -> None:
    text = MODULES[module].read_text()
    if module != "ops":
        assert "torch.ops.kdtree" not in text
    if module not in ("ops", *KERNELS):
        assert not own_imports(MODULES[module]) & set(KERNELS)
    if module not in ("native", *KERNELS):
        assert "ctypes" not in set(imports(MODULES[module]))


def test_nobody_imports_the_bare_folders() -> None:
    files = [*MODULES.values()]
    for folder in ("tests", "examples"):
        files += (ROOT / folder).rglob("*.py")
    for path in files:
        tops = {name.split(".")[0] for name in imports(path)}
        assert not tops & {"spec_decode", "model_executor"}, path
