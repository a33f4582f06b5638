"""What works with the base install alone; what needs an extra says which one, in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BASE_ONLY = """
import sys

BASE = {"app", "cotune", "markdown_it", "mdurl", "msgspec", "numpy", "pygments", "rich", *sys.stdlib_module_names}

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in BASE:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""
"""What pip installs for `cotune` without an extra; all else is absent."""
CLI = BASE_ONLY + "from cotune.cli.main import main; sys.exit(main(sys.argv[1:]))"
WORKFLOW = "import cotune\n\n@cotune.workflow\ndef solve(task):\n    return 1.0\n"
RUN = ("app:solve", "--tasks", "tasks.jsonl")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An application with one task, and an episode of it that was recorded without any extra."""
    made = tmp_path_factory.mktemp("base")
    (made / "app.py").write_text(WORKFLOW)
    (made / "tasks.jsonl").write_text('{"id": "a"}\n')
    told = cotune(made, "trace", *RUN, "--out", "traced")
    assert "1 episodes, 0 calls, 0 failed episodes, 0 lost records: traced" in told.stdout, told.stderr
    return made


def cotune(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CLI, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_importing_cotune_needs_no_extra(folder: Path) -> None:
    code = BASE_ONLY + "import cotune; print(cotune.workflow.__name__)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True, cwd=folder) == "workflow\n"


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("--help",), 0, "cotune gateway"),
        (("check", *RUN), 1, "not trainable as it is"),
        (("show", "traced"), 0, "team 1"),
        (("sft", "traced", "--to", "sft.jsonl"), 1, "wrote 0 lines"),
        (("otel", "export", "traced", "--to", "spans.jsonl"), 0, "exported 1 spans of 1 episodes"),
    ],
)
def test_works_without_an_extra(folder: Path, arguments: tuple[str, ...], status: int, said: str) -> None:
    done = cotune(folder, *arguments)
    assert (done.returncode, done.stderr) == (status, "")
    assert said in done.stdout


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (("check", *RUN, "--model", "some/model"), "train"),
        (("train", *RUN, "--model", "some/model"), "train"),
        (("train", *RUN, "--model", "some/model", "--cluster", "auto"), "train"),
        (("eval", *RUN, "--run", "traced"), "train"),
        (("serve", "./nowhere"), "train"),
        (("gateway", "--upstream", "http://127.0.0.1:9"), "gateway"),
        (("otel", "export", "traced", "--endpoint", "http://127.0.0.1:9"), "otel"),
        (("trace", *RUN, "--out", "other", "--otlp", "http://127.0.0.1:9"), "otel"),
    ],
)
def test_names_the_extra_that_is_missing(folder: Path, arguments: tuple[str, ...], extra: str) -> None:
    done = cotune(folder, *arguments)
    assert done.returncode == 1
    assert all(line.endswith(" ...") for line in done.stdout.splitlines()), "only what is being loaded"
    assert done.stderr.startswith(f"cotune {arguments[0]}: ")
    assert f"pip install 'cotune[{extra}]'" in done.stderr
    assert done.stderr.count("\n") == 1
