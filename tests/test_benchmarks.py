"""Benchmarks and demonstrations are run by hand and seldom: what they import of cotune must be there all the same."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(file for folder in ("benchmarks", "examples") for file in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_what_a_benchmark_or_an_example_imports_of_cotune_is_there(file: Path) -> None:
    imports = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
    for node in imports:
        if node.module and node.module.split(".")[0] == "cotune":
            module = importlib.import_module(node.module)
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")
