"""What the command line imports: code of the current folder is for commands that load the user's application."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cotune.recording.recorder import LiveEpisode
from cotune.records.structs import Task
from cotune.storage.sqlite_store import SqliteStore

MODULES = ("rich", "numpy", "msgspec", "jinja2", "starlette", "uvicorn", "torch", "transformers", "sqlite3", "tomllib")
COMMANDS = """
import sys
from cotune.cli.main import main

sys.argv[0] = "cotune"
for words in (
    ["show", "."], ["show", ".", "--groups"], ["show", ".."], ["show", ".", "--html", "r.html"],
    ["records", "sft", ".", "--out", "s.jsonl"], ["otel", ".", "--out", "o.jsonl"], ["view", "nothing-here"],
    ["serve", "nothing-here"], ["export", ".", "--out", "e"], ["records", "judge", ".", "--labels", "none.jsonl"],
    ["doctor"],
):
    print(words[0], main(words), sorted(sys.modules.keys() & {"rich", "jinja2"}))
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Records in a folder that brings modules under the names of libraries, each of which tells that it was run."""
    store = SqliteStore.open(tmp_path)
    LiveEpisode(store, Task(id="t", input={"id": "t"}), workflow="w").end("ok")
    store.close()
    for name in MODULES:
        (tmp_path / f"{name}.py").write_text("import pathlib\npathlib.Path('code_ran').write_text(__name__)\n")
    return tmp_path


def test_looking_at_a_run_imports_no_code_from_its_folder(run: Path) -> None:
    said = subprocess.run([sys.executable, "-P", "-c", COMMANDS], cwd=run, capture_output=True, text=True, timeout=60)
    assert not (run / "code_ran").exists(), (run / "code_ran").read_text()
    assert "show 0 ['rich']" in said.stdout, said
