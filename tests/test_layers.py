"""What import-linter's contracts in pyproject.toml do not say: what core may import, and what importing it loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CORE = sorted((ROOT / "core").rglob("*.py"))
FRONT_DOOR = {
    "__init__.py",
    "types.py",
    *(f"cli/{name}.py" for name in ("fields", "records", "serve", "trace", "train")),
}
"""Modules of core that may import to the right: in functions, and for type checkers."""
FOREIGN_IN_CORE = {"msgspec", "numpy"}
TERMINAL = {"rich"}
RIGHT = ("cotune.integrations", "cotune.adapters", "cotune.trainer")


def imports(tree: ast.AST, *, everywhere: bool) -> Iterator[str]:
    """Absolute names that a module imports: when it is imported itself, or (`everywhere`) also in functions and for
    type checkers."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        if everywhere or not is_deferred(node):
            yield from imports(node, everywhere=everywhere)


def is_deferred(node: ast.AST) -> bool:
    functions = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    return isinstance(node, functions) or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")


def foreign(names: Iterator[str]) -> set[str]:
    return {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) - {"cotune", "__future__"}


@pytest.mark.parametrize("path", CORE, ids=lambda path: path.name)
def test_core_imports_only_its_own(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert foreign(imports(tree, everywhere=False)) <= FOREIGN_IN_CORE
    assert foreign(imports(tree, everywhere=True)) <= FOREIGN_IN_CORE | TERMINAL


@pytest.mark.parametrize("path", CORE, ids=lambda path: path.name)
def test_core_reaches_right_only_inside_functions_of_its_front_door(path: Path) -> None:
    front_door = path.relative_to(ROOT / "core").as_posix() in FRONT_DOOR
    names = imports(ast.parse(path.read_text()), everywhere=not front_door)
    assert [name for name in names if name.startswith(RIGHT)] == []


def test_import_loads_no_heavy_package() -> None:
    heavy = [
        "torch",
        "transformers",
        "peft",
        "openai",
        "langgraph",
        "langchain_core",
        "rich",
        "starlette",
        "uvicorn",
        "httpx",
        "scipy",
    ]
    code = f"import sys, cotune; print([name for name in {heavy!r} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
