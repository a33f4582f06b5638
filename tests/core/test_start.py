"""The first page of the documentation, followed as a new user does: in a clone, with an empty environment and an empty
home folder, every command as it stands."""

from __future__ import annotations

import os
import re
import shutil
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.core.installed import ROOT, clone
from tests.page_reader import Reader, bare_environment

PAGE = ROOT / "docs" / "start.md"
(TORCH,) = re.findall(r"^torch==\S+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


def packages(home: Path) -> Iterator[tuple[str, str]]:
    """How this machine reaches packages: pip's settings, and nothing else of its user."""
    settings = Path(".config", "pip", "pip.conf")
    if (Path.home() / settings).is_file():
        (home / settings).parent.mkdir(parents=True)
        shutil.copy(Path.home() / settings, home / settings)
    yield from ((name, value) for name, value in os.environ.items() if name.startswith("PIP_"))


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_first_page_ends_with_a_better_application(tmp_path: Path) -> None:
    home, folder = tmp_path / "home", tmp_path / "environment"
    venv.create(folder, with_pip=True)
    environment = {**dict(bare_environment(home, folder / "bin")), **dict(packages(home))}
    reader = Reader(clone(tmp_path / "clone", "examples"), environment, {}, installs=True)
    status, said_of_torch = reader.run(f"pip install {TORCH}")  # its build for the CPU, as the page asks
    assert status == 0, said_of_torch
    reader.follow(PAGE)
    said = list(reader.said.items())
    (installed,) = [text for line, text in said if line.startswith("pip install")]
    assert re.search(r"Successfully installed .*\bcotune-", installed)
    (verdict,) = [text for line, text in said if line.startswith("cotune eval")]
    assert "trained is better than base" in verdict
    assert [text.strip() for line, text in said if line.endswith("my parcel problem")] == ["ciao shipping"]
    assert said[-1][1].strip() == "hallo billing"
    assert (reader.folder / "report.html").stat().st_size > 10_000


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_base_that_solves_nothing_ends_better(tmp_path: Path) -> None:
    """The tutorial that learns a provider's answers first: every command as it stands."""
    binaries = f"{ROOT / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": binaries, "PYTHONPATH": str(ROOT), "OPENAI_API_KEY": "none"}
    reader = Reader(tmp_path, environment, {})
    reader.follow(ROOT / "docs" / "tutorials" / "from-nothing.md")
    (verdict,) = [text for line, text in reader.said.items() if line.startswith("cotune eval")]
    before = re.search(r"^base +([\d.]+)%", verdict, re.MULTILINE)
    assert before and float(before[1]) < 10 and "trained is better than base" in verdict
