"""The types of the public names, as a user's checker sees them in the wheel."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import cotune
from cotune import types

USER = Path(__file__).parent / "typed_user"
RIGHT, WRONG = USER / "right.py", USER / "wrong.py"


@pytest.mark.slow
def test_strict_mypy_takes_what_is_right_and_names_what_is_wrong(base_environment: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--config-file=",
        "--python-executable",
        str(base_environment / "python"),
    ]
    done = subprocess.run([*command, RIGHT, WRONG], cwd=tmp_path, capture_output=True, text=True, check=False)
    found = re.findall(r"(\w+)\.py:(\d+): error: .* \[([\w-]+)\]", done.stdout)
    lines = WRONG.read_text().splitlines()
    wrong = [(str(n), line.partition("# error: ")[2]) for n, line in enumerate(lines, 1) if "# error: " in line]
    assert len(wrong) == 10
    assert found == [("wrong", *error) for error in wrong], done.stdout
    assert "Found 10 errors in 1 file" in done.stdout


def test_the_right_file_uses_every_public_name() -> None:
    text = RIGHT.read_text()
    assert [name for name in cotune.__all__ if f"cotune.{name}" not in text] == []
    used = text.partition(")\n")[2]
    assert [name for name in types.__all__ if not re.search(rf"\b{name}\b", used)] == []


def test_dir_lists_the_public_names_alone() -> None:
    assert dir(cotune) == sorted(cotune.__all__)
    assert dir(types) == sorted(types.__all__)


def test_every_type_is_there_at_run_time() -> None:
    assert [name for name in types.__all__ if not hasattr(types, name)] == []
    assert not hasattr(types, "Trainer")
