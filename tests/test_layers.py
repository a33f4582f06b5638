"""What import-linter's contracts in pyproject.toml do not say: what core may import, and what importing it loads."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parent.parent
CORE = sorted((ROOT / "core").rglob("*.py"))
FRONT_DOOR = {"__init__.py", "types.py", *(p.relative_to(ROOT / "core").as_posix() for p in CORE if "cli" in p.parts)}
"""Modules of core that may import to the right: in functions, and for type checkers."""
FOREIGN_IN_CORE = {"filelock", "msgspec", "numpy"}
TERMINAL = {"rich"}
PRINTS = {
    "tables.py",
    *(
        f"cli/printing/{name}.py"
        for name in ("by_setting", "episode", "first_page", "groups", "overview", "prompts", "runs", "steps")
    ),
    "cli/trace.py",
}
"""Modules of core that are imported only to print; all others open rich where they need it."""
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
    prints = path.relative_to(ROOT / "core").as_posix() in PRINTS
    assert foreign(imports(tree, everywhere=False)) <= FOREIGN_IN_CORE | (TERMINAL if prints else set())
    assert foreign(imports(tree, everywhere=True)) <= FOREIGN_IN_CORE | TERMINAL


@pytest.mark.parametrize("path", CORE, ids=lambda path: path.name)
def test_core_reaches_right_only_inside_functions_of_its_front_door(path: Path) -> None:
    front_door = path.relative_to(ROOT / "core").as_posix() in FRONT_DOOR
    names = imports(ast.parse(path.read_text()), everywhere=not front_door)
    assert [name for name in names if name.startswith(RIGHT)] == []


def circle(package: str) -> list[str]:
    """Modules that import each other in a ring, also inside functions and for type checkers; empty for none."""
    graph = grimp.build_graph(package, cache_dir=None)
    try:
        TopologicalSorter({name: graph.find_modules_directly_imported_by(name) for name in graph.modules}).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def test_no_module_is_part_of_an_import_circle() -> None:
    assert circle("cotune") == []


@pytest.mark.parametrize(
    "deferred",
    [
        "import ring.left",
        "def later():\n    from ring import left",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ring.left import name",
    ],
)
def test_a_circle_is_found_wherever_the_import_stands(tmp_path: Path, monkeypatch, deferred: str) -> None:
    (tmp_path / "ring").mkdir()
    for name, source in {"__init__": "", "left": "import ring.right\nname = 1", "right": deferred}.items():
        (tmp_path / "ring" / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    assert set(circle("ring")) == {"ring.left", "ring.right"}


def test_only_storage_knows_which_store_it_is() -> None:
    rooms = [path for room in ("core", "integrations", "adapters", "trainer") for path in (ROOT / room).rglob("*.py")]
    outside = [path for path in rooms if not path.is_relative_to(ROOT / "core/storage")]
    assert [path for path in outside if "SqliteStore" in path.read_text()] == []


def test_only_its_room_names_the_sampler_in_process() -> None:
    rooms = [path for room in ("core", "integrations", "adapters", "trainer") for path in (ROOT / room).rglob("*.py")]
    outside = [path for path in rooms if not path.is_relative_to(ROOT / "integrations/models/transformers")]
    assert [path for path in outside if "TransformersSampler" in path.read_text()] == []


SQL = re.compile(r"\b(SELECT .+ FROM|INSERT INTO|INSERT OR|UPDATE \w+ SET|DELETE FROM|CREATE TABLE|PRAGMA) ", re.DOTALL)

MAY_SPEAK_SQL = re.compile(r"\b(SELECT|INSERT|UPDATE|DELETE|CREATE|PRAGMA|sqlite3|rows)\b")
"""Words of which every file has one that the test below could find. Parsing the others would take most of its time."""


def test_only_storage_speaks_sql() -> None:
    """Others ask the store by its named queries."""
    rooms = [path for room in ("core", "integrations", "adapters", "trainer") for path in (ROOT / room).rglob("*.py")]
    speak = [ROOT / "core/storage", ROOT / "integrations/collect/postgres"]
    found = []
    for path in (path for path in rooms if not any(map(path.is_relative_to, speak))):
        text = path.read_text()
        if not MAY_SPEAK_SQL.search(text):
            continue
        for node in ast.walk(ast.parse(text)):
            asked = isinstance(node, ast.Attribute) and node.attr == "rows" and "store" in ast.unparse(node.value)
            written = isinstance(node, ast.Constant) and isinstance(node.value, str) and SQL.search(node.value)
            imported = isinstance(node, ast.Import) and any(alias.name == "sqlite3" for alias in node.names)
            found += [f"{path.relative_to(ROOT)}:{node.lineno}"] if asked or written or imported else []
    assert found == []


def test_import_loads_no_heavy_package() -> None:
    heavy = [
        "torch",
        "numpy",
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
        "psycopg",
    ]
    code = f"import sys, cotune, cotune.cli.main; print([name for name in {heavy!r} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
