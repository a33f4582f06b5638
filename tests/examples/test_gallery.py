"""The gallery: applications of five frameworks, with an expert that solves every task; the long tests train each."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cotune.cli.main import main
from examples.tool_agent.provider import serving
from tests.examples.applications import imported_again
from tests.test_docs import ROOT

GALLERY = ("crewai_flow", "autogen_team", "agents_handoffs", "pydantic_clerk", "langgraph_supervisor")


def run(*words: str, **environment: str) -> str:
    given = {**os.environ, "PYTHONPATH": str(ROOT), "OPENAI_API_KEY": "none", "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", GALLERY)
def test_the_expert_solves_each_task_through_the_application(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process: importing a framework takes longer than the four episodes."""
    workflow, tasks, records = f"examples.gallery.{name}:solve", tmp_path / "tasks.jsonl", str(tmp_path / "records")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    with imported_again("examples.gallery"):
        example = importlib.import_module(f"examples.gallery.{name}")
        tasks.write_text("".join(json.dumps(task) + "\n" for task in example.tasks(4, 5)))
    with serving(answers=example.expert) as url, imported_again("examples.gallery"):
        monkeypatch.setenv("OPENAI_BASE_URL", url)
        assert main(["trace", workflow, "--tasks", str(tasks), "--out", records]) == 0
        assert main(["records", "score", records, workflow]) == 0
    said = capsys.readouterr().out
    assert "success 100.0% (4 of 4 episodes)" in said
    rows = re.findall(r"^(\w+) .*local (\S+)\s*$", said, re.MULTILINE)
    assert rows and {mean for _, mean in rows} == {"1.000"}, said


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", GALLERY)
def test_each_application_gets_better(name: str, tmp_path: Path) -> None:
    said = run("-m", f"examples.gallery.{name}", "--out", str(tmp_path / name))
    assert re.search(r"^trained is better than base by ", said, re.MULTILINE), said
