"""Benchmarks and demonstrations are run by hand and seldom: their imports of cotune and their settings must exist."""

from __future__ import annotations

import ast
import functools
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from benchmarks import kept_results
from benchmarks.blame_summary import summarize
from cotune.config.train import TrainConfig

ROOT = Path(__file__).parents[1]
TABLES = {
    field.name: field.type
    for field in msgspec.structs.fields(TrainConfig)
    if field.name in ("evaluation", "learner", "lora", "loss", "plan", "sampling", "schedule")
}
"""Tables of a configuration whose names stand for nothing else in these files."""
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


def tables_in(tree: ast.AST) -> Iterator[tuple[str, ast.Dict]]:
    """Each dict that is written as the value of a name: {"learner": {...}}, or train(learner={...})."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(value, ast.Dict):
                    yield str(key.value), value
        elif isinstance(node, ast.keyword) and isinstance(node.value, ast.Dict):
            yield str(node.arg), node.value


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_table_of_settings_in_a_benchmark_or_an_example_has_only_known_settings(file: Path) -> None:
    for name, table in tables_in(ast.parse(file.read_text())):
        kind = TABLES.get(name)
        if kind is not None:
            known = {field.name for field in msgspec.structs.fields(kind)}
            assert {key.value for key in table.keys if isinstance(key, ast.Constant)} <= known, name


def test_a_training_that_was_stopped_is_not_measured_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def train(*_: Any, out: Path, **__: Any) -> None:
        (out / "run.json").touch()
        done.extend(["train"] * 2)

    monkeypatch.setattr(kept_results, "train", train)
    monkeypatch.setattr(kept_results, "resume", lambda *_, **__: done.append("resume"))
    monkeypatch.setattr(kept_results, "read_metrics", lambda _: iter(done))
    once = functools.partial(kept_results.train_once, tmp_path, None, [], {}, 3, Console(quiet=True))
    with pytest.raises(SystemExit, match="stopped after 2 of 3 steps; the same command continues it"):
        once()
    assert once() == once() == tmp_path
    assert done == ["train", "train", "resume"]


def planted_fault(named: list[str], verdict: str = "named", **fields: Any) -> dict[str, Any]:
    """An analysis of a fault of the writer."""
    line = {"part": "planted", "rate": 0.3, "hidden": False, "guilty": ["writer"], "verdict": verdict, "named": named}
    costs = {"writer": 0.4, "reader": 0.12, "checker": 0.05}
    return {**line, "first": named[0] if named else "checker", "costs": costs, "last": "writer", "judge": "", **fields}


def test_the_verdicts_on_planted_faults_are_counted() -> None:
    lines = [
        planted_fault(["writer", "reader"]),  # The reader costs more than 10 points.
        planted_fault(["writer", "checker"]),
        planted_fault(["reader", "writer"], "either"),
        planted_fault(["reader"]),
        planted_fault([], "undecided"),
        {"part": "planted", "rate": 0.3, "hidden": True},
    ]
    (counts,) = summarize(lines, "part", "rate")
    assert (counts["hidden"], counts["analysed"], counts["undecided"], counts["last"], counts["judge"]) == (
        1,
        5,
        1,
        5,
        0,
    )
    assert (counts["named"], counts["one found"], counts["wrong"], counts["also"]) == (2, 3, 1, 1)


def test_of_two_faults_both_have_to_be_in_the_verdict() -> None:
    both = planted_fault(["reader", "writer"], guilty=["writer", "reader"], part="two")
    one = planted_fault(["reader"], guilty=["writer", "reader"], part="two")
    (counts,) = summarize([both, one], "part")
    assert (counts["named"], counts["all found"], counts["one found"], counts["wrong"]) == (2, 1, 2, 0)


def test_a_healthy_application_in_which_a_role_is_named_counts_as_wrong() -> None:
    lines = [planted_fault(["reader"], guilty=[]), planted_fault([], "nobody", guilty=[])]
    (counts,) = summarize(lines, "part")
    assert (counts["analysed"], counts["wrong"], counts["nobody"], counts["all found"]) == (2, 1, 1, 0)
