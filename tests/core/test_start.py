"""The first page of the documentation, followed in an environment with the wheel and what it says to install."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.core.installed import ROOT, install
from tests.page_reader import Reader, bare_environment

PAGE = ROOT / "docs" / "start.md"


@pytest.mark.long
def test_the_first_page_ends_with_a_better_application(wheel: Path, tmp_path: Path) -> None:
    environment = install(wheel, tmp_path / "venv", "langgraph", "train", "view", also=("langchain-openai",))
    clone = tmp_path / "clone"
    shutil.copytree(ROOT / "examples", clone / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    reader = Reader(clone, dict(bare_environment(tmp_path, environment)), {})
    reader.follow(PAGE)
    said = list(reader.said.items())
    (verdict,) = [text for line, text in said if line.startswith("cotune eval")]
    assert "trained is better than base" in verdict
    assert [text.strip() for line, text in said if line.endswith("my parcel problem")] == ["ciao shipping"]
    assert said[-1][1].strip() == "hallo billing"
    assert (reader.folder / "report.html").stat().st_size > 10_000
