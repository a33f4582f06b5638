"""What applications and models say is shown on the terminal, never obeyed."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from cotune.cli.main import main
from cotune.episodes.episode import run_episode
from cotune.records.structs import Task
from cotune.storage.sqlite_store import SqliteStore
from cotune.terminal import LogFormat, harmless, terminal
from cotune.trainer.before.answers.responder import CheckResponder
from tests.trainer.tiny_app import application, ask

EVIL = "\x1b]0;owned\x07\x1b[2J[bold]hi[/bold] \u202egnp.exe\x9b31m"


def test_escapes_become_visible_and_markup_is_text() -> None:
    assert harmless(EVIL) == "␛]0;owned␇␛[2J[bold]hi[/bold] �gnp.exe�31m"
    assert harmless("a\tb\nc é 漢") == "a\tb\nc é 漢"
    out = io.StringIO()
    table = Table()
    table.add_column(EVIL)
    table.add_row(Text(EVIL, style="red"))
    console = terminal(file=out, width=200, force_terminal=True)
    console.print(EVIL)
    console.print(table)
    shown = out.getvalue()
    assert "[bold]hi[/bold]" in shown and "\x1b[31m" in shown, "its own colours are kept"
    assert not any(bad in shown for bad in ("\x1b]", "\x1b[2J", "\x07", "\x9b", "\u202e"))


def test_logs_are_harmless() -> None:
    record = logging.LogRecord("cotune", logging.WARNING, "", 0, "failed: %s", (EVIL,), None)
    assert LogFormat().format(record) == f"cotune: failed: {harmless(EVIL)}"


def test_an_error_of_an_application_is_harmless(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "evil_app.py").write_text("raise ValueError('\\x1b[2J')")
    (tmp_path / "tasks.jsonl").write_text('{"id": "a"}\n')
    assert main(["check", f"{tmp_path}/evil_app.py:solve", "--tasks", str(tmp_path / "tasks.jsonl")]) == 1
    said = capsys.readouterr().err
    assert "\x1b" not in said and "ValueError: ␛[2J" in said and f"{tmp_path}/evil_app.py:1" in said


@pytest.mark.parametrize("extra", [[], ["--groups"], ["--episode"]])
def test_show_prints_answers_harmless(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, extra: list[str]
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")

    async def solve(task: dict[str, str]) -> float:
        await ask(EVIL, EVIL)
        return 1.0

    with SqliteStore.open(tmp_path / "records.db") as store:
        flow = application(solve).cotune
        stub = CheckResponder(answers=lambda call: lambda index: {"role": "assistant", "content": EVIL})
        outcome = asyncio.run(run_episode(flow, Task(id=EVIL, input={"x": EVIL}), sink=store, responder=stub))
        assert outcome.error is None
    options = [*extra, *([outcome.episode.id] if extra == ["--episode"] else [])]
    assert main(["show", str(tmp_path), *options]) == 0
    shown = capsys.readouterr().out
    assert ("owned" in shown) is (extra != ["--groups"])
    assert not any(bad in shown for bad in ("\x1b", "\x07", "\x9b", "\u202e"))


def test_a_locale_that_lacks_what_is_shown_costs_a_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")

    async def solve(task: str) -> float:
        return float(bool(await ask("prüfer", "hello")))

    with SqliteStore.open(tmp_path / "records.db") as store:
        stub = CheckResponder(answers=lambda call: lambda index: {"role": "assistant", "content": "漢 ok"})
        ran = asyncio.run(run_episode(application(solve).cotune, Task(id="t", input=1), sink=store, responder=stub))
    command = [sys.executable, "-m", "cotune", "show", str(tmp_path), "--episode", ran.episode.id]
    shown = subprocess.run(command, env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, check=False)
    assert (shown.returncode, shown.stderr) == (0, b"")
    assert b"pr?fer" in shown.stdout and b"? ok" in shown.stdout


def test_no_word_is_lost_beside_characters_without_width() -> None:
    """A mark takes a column, so lines are broken with the marks in place."""
    words = [f"w{number:03d}" for number in range(200)]
    tree = Tree("call")
    tree.add(Text(" ".join(f"\x1b[32m{word}\x1b[0m\u200b" for word in words)))
    table = Table("role", "calls")
    table.add_row("\x1b[31mred\x1b[0m team", "1")
    out = io.StringIO()
    console = terminal(file=out, width=80)
    console.print(tree)
    console.print(table)
    assert re.findall(r"w\d\d\d", out.getvalue()) == words
    assert "␛[31mred␛[0m team" in out.getvalue()
