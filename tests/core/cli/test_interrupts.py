"""Ctrl-C at each moment of a command's life: no traceback, one line at most, status 130."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path

import pytest

COMMAND = Path(sysconfig.get_path("scripts"), "cotune")
AT_IMPORT = """
import importlib.abc, os, signal, sys

class Interrupting(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {moment!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
"""
AT_EXIT = "import atexit, os, signal\n\natexit.register(os.kill, os.getpid(), signal.SIGINT)\n"


def interrupted(folder: Path, moment: str, *, ignoring: bool = False) -> subprocess.CompletedProcess[str]:
    """`cotune show nowhere`, which gets SIGINT when it imports `moment`, or at its end."""
    (folder / "sitecustomize.py").write_text(AT_IMPORT.format(moment=moment) if moment != "exit" else AT_EXIT)
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command: list[str | Path] = [COMMAND, "show", "nowhere"]
    if ignoring:  # as shells have their background jobs do
        command = ["sh", "-c", f"trap '' INT; exec {COMMAND} show nowhere"]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("moment", ["cotune", "cotune.recording.redaction", "cotune.cli.main", "cotune.cli.show"])
def test_before_a_command_begins_it_ends_without_a_word(moment: str, tmp_path: Path) -> None:
    done = interrupted(tmp_path, moment)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_while_a_command_imports_what_it_needs_it_is_one_line(tmp_path: Path) -> None:
    done = interrupted(tmp_path, "cotune.tables")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_after_a_command_it_ends_without_another_word(tmp_path: Path) -> None:
    done = interrupted(tmp_path, "exit")
    assert (done.returncode, done.stderr.count("\n")) == (130, 1)
    assert done.stderr.startswith("cotune show: ")


@pytest.mark.parametrize("moment", ["cotune", "exit"])
def test_a_command_that_ignores_it_goes_on(moment: str, tmp_path: Path) -> None:
    done = interrupted(tmp_path, moment, ignoring=True)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
