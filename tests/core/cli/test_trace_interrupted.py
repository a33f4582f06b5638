"""`cotune trace` that is ended by Ctrl-C."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from cotune.storage.sqlite_store import SqliteStore

APP = """
import asyncio, os, signal
import cotune

@cotune.workflow
async def solve(task):
    if task["id"] == "last":
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(60)
    return 1.0
"""


def test_the_episodes_that_ended_are_kept_and_counted(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "tasks.jsonl").write_text('{"id": "a"}\n{"id": "b"}\n{"id": "last"}\n')
    code = "import sys; from cotune.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = ["trace", "app:solve", "--tasks", "tasks.jsonl", "--out", "traced", "--concurrency", "1"]
    ended = subprocess.run(
        [sys.executable, "-c", code, *command], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 130, ended.stderr
    told = " ".join((ended.stdout + ended.stderr).split())
    assert "2 of 3 episodes had ended and are recorded in traced. See them with: cotune show traced" in told
    with SqliteStore.open(tmp_path / "traced", read_only=True) as store:
        assert [episode.task.id for episode in store.episodes() if episode.status == "ok"] == ["a", "b"]
