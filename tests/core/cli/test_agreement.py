"""Whether a search asks before it spends money."""

from __future__ import annotations

import io
import json
from pathlib import Path
from unittest.mock import Mock

import pytest

from cotune.cli.main import main
from cotune.cli.prompts.agreement import may_begin_search
from cotune.errors import RunError
from cotune.trainer.prompts.options import ImproveOptions

APP = "tests.trainer.worker_app:solve"


class Terminal(io.StringIO):
    """Standard input of a person."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def tasks(tmp_path: Path) -> str:
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(json.dumps({"id": str(n), "letter": "a"}) + "\n" for n in range(30)))
    return str(file)


def test_without_a_terminal_and_a_limit_it_ends_before_any_call(
    tmp_path: Path, tasks: str, capsys: pytest.CaptureFixture[str]
) -> None:
    searching = ["prompts", "improve", APP, "--tasks", tasks, "--reflection", "big", "--out", str(tmp_path / "p")]
    assert main(searching) == 1
    said = capsys.readouterr().err
    assert "max_cost" in said and "2,000 calls" in said and "big writes texts" in said and "--yes" in said
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize(("reply", "status"), [("y", True), ("", False), ("no", False)])
def test_the_person_at_the_terminal_is_asked(monkeypatch: pytest.MonkeyPatch, reply: str, status: bool) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda question: reply)
    assert may_begin_search(ImproveOptions(reflection="big"), yes=False, has_limit=False, app_is_local=False) is status


def test_the_end_of_the_input_is_a_no(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", Terminal(""))
    assert may_begin_search(ImproveOptions(reflection="big"), yes=False, has_limit=False, app_is_local=False) is False
    assert "no answer, which is taken as no" in capsys.readouterr().out


@pytest.mark.parametrize("search", ["[prompts]\nmax_calls = 5\n", "[prompts]\nrounds = 1\n"])
def test_a_limit_in_the_file_is_one(
    tmp_path: Path, tasks: str, search: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal("no\n"))
    monkeypatch.setattr("cotune.trainer.prompts.improve.improve", Mock(side_effect=RunError("begun", "")))
    (tmp_path / "c.toml").write_text(search)
    searching = ["prompts", "improve", APP, "--tasks", tasks, "--reflection", "big", "--out", str(tmp_path / "p")]
    main([*searching, "--config", str(tmp_path / "c.toml")])
    said = capsys.readouterr()
    assert ("begun" in said.err, "Go on?" in said.out) == (("max_calls" in search), ("max_calls" not in search))


@pytest.mark.parametrize(
    ("options", "yes", "limited", "here"),
    [
        (ImproveOptions(reflection="big"), True, False, False),
        (ImproveOptions(reflection="big"), False, True, False),
        (ImproveOptions(reflection="big", reflection_url="http://127.0.0.1:8000/v1"), False, False, True),
    ],
)
def test_nobody_is_asked_where_that_is_settled(
    monkeypatch: pytest.MonkeyPatch, options: ImproveOptions, yes: bool, limited: bool, here: bool
) -> None:
    monkeypatch.setattr("builtins.input", lambda question: pytest.fail("asked"))
    assert may_begin_search(options, yes=yes, has_limit=limited, app_is_local=here)
