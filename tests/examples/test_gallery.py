"""The gallery: applications of five frameworks, with an expert that solves every task; the long tests train each."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_docs import ROOT

GALLERY = ("crewai_flow", "autogen_team", "agents_handoffs", "pydantic_clerk", "langgraph_supervisor")


def run(*words: str, **environment: str) -> str:
    given = {**os.environ, "PYTHONPATH": str(ROOT), "OPENAI_API_KEY": "none", "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run([sys.executable, *words], cwd=ROOT, env=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


RECORD_AND_SCORE = """
import importlib, pathlib, sys
from cotune.cli.main import main
from examples.gallery import warm

name, records = sys.argv[1:]
module = importlib.import_module(name)
warm.record(name, module.expert, module.tasks(4, 5), pathlib.Path(records))
sys.exit(main(["records", "score", records, f"{name}:solve"]))
"""
"""In one process: importing a framework takes longer than the four episodes."""


@pytest.mark.slow
@pytest.mark.parametrize("name", GALLERY)
def test_the_expert_solves_each_task_through_the_application(name: str, tmp_path: Path) -> None:
    records = str(tmp_path / "records")
    said = run("-c", RECORD_AND_SCORE, f"examples.gallery.{name}", records)
    assert "success 100.0% (4 of 4 episodes)" in said
    rows = re.findall(r"^(\w+) .*local (\S+)\s*$", said, re.MULTILINE)
    assert rows and {mean for _, mean in rows} == {"1.000"}, said


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", GALLERY)
def test_each_application_gets_better(name: str, tmp_path: Path) -> None:
    said = run("-m", f"examples.gallery.{name}", "--out", str(tmp_path / name))
    assert re.search(r"^trained is better than base by ", said, re.MULTILINE), said
