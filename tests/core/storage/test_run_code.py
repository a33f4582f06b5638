"""Which folders are obeyed: those that this user made here, agreed to, or named; their code runs for no other."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from cotune.cli.main import main
from cotune.errors import UntrustedFolderError
from cotune.recording.recorder import LiveEpisode
from cotune.records.structs import Task
from cotune.storage.run_code import is_trusted, open_run_code, orders_of_run, remember_orders
from cotune.storage.run_layout import WITHHELD, read_run_json
from cotune.storage.sqlite_store import SqliteStore

APP = """
import pathlib

import cotune

pathlib.Path(__file__).with_name("code_ran").touch()


def hide(message):
    return message


@cotune.workflow
def solve(task):
    return 1.0


@solve.judge
def judge(episodes, task):
    return [1.0 for _ in episodes]
"""


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("cotune.storage.run_code._trusted_here", set())
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("sent_app", "own_app"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.fixture
def sent(tmp_path: Path) -> Path:
    """A run that somebody else has made: it names an application, a redactor, and servers."""
    folder = tmp_path / "sent"
    folder.mkdir()
    (folder / "sent_app.py").write_text(APP)
    config: dict[str, Any] = {"model": "m", "redact": "sent_app:hide", "steps": 3, "recipe": "distill"}
    config["distill"] = {"teacher": "http://elsewhere:8000"}
    config |= {"engine": "mine:open", "engine_args": {"folder": "/shared"}}
    config["cluster"] = {"address": "10.0.0.9:6379", "env": {"OPENAI_API_KEY": "sk-secret-of-an-old-run"}}
    described = {"workflow": "sent_app:solve", "folder": str(folder), "run": str(folder), "tasks": None}
    (folder / "run.json").write_text(json.dumps({**described, "config": config}))
    with SqliteStore.open(folder) as store:
        LiveEpisode(store, Task(id="t", input={"id": "t"}), workflow="solve").end("ok")
    return folder


def test_all_that_a_run_decides_is_named(sent: Path) -> None:
    assert orders_of_run(sent, read_run_json(sent)).current == {
        "workflow": "sent_app:solve",
        "redact": "sent_app:hide",
        "distill.teacher": "http://elsewhere:8000",
        "engine": "mine:open",
        "engine_args.folder": "/shared",
        "cluster.address": "10.0.0.9:6379",
        "cluster.env.OPENAI_API_KEY": WITHHELD,
        "modules from": str(sent),
    }


@pytest.mark.parametrize(
    "words",
    [
        ["train", "--resume", "{run}"],
        ["replay", "{run}", "--all"],
        ["records", "judge", "{run}", "--labels", "labels.jsonl"],
        ["eval", "own_app.py:solve", "--tasks", "tasks.jsonl", "--run", "{run}"],
        ["records", "score", "{run}", "own_app.py:solve"],
    ],
    ids=lambda words: words[1] if words[0] == "records" else words[0],
)
def test_a_run_of_somebody_else_is_refused_before_its_code_runs(
    words: list[str],
    sent: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own_app.py").write_text(APP.replace("code_ran", "own_ran"))
    Path("tasks.jsonl").write_text('{"id": "a"}\n')
    Path("labels.jsonl").write_text('{"id": "x.0", "score": 1}\n')
    monkeypatch.setattr("cotune.trainer.evaluation.subject.open_evaluated_policies", lambda *a, **b: _Anything())
    assert main([word.format(run=sent) for word in words]) == 1
    said = capsys.readouterr().err
    assert "was not written by you on this machine" in said and "redact: sent_app:hide" in said, said
    assert "--trust-folder" in said and "COTUNE_TRUST_FOLDERS" in said
    assert not (sent / "code_ran").exists() and str(sent) not in sys.path


class _Anything:
    def check_bases(self) -> None: ...


def test_what_the_command_line_names_is_not_taken_from_the_folder(sent: Path) -> None:
    orders = set(orders_of_run(sent, read_run_json(sent)).current) - {"modules from"}
    with pytest.raises(UntrustedFolderError) as caught:
        open_run_code(sent, orders - {"redact"})
    assert caught.value.used_orders == {"redact": "sent_app:hide", "modules from": str(sent)}
    before = list(sys.path)
    assert open_run_code(sent, orders) is False
    assert sys.path == before


def test_a_folder_that_was_agreed_to_stays_trusted_until_it_changes(sent: Path, monkeypatch: Any) -> None:
    orders = orders_of_run(sent, read_run_json(sent))
    remember_orders(orders)
    monkeypatch.setattr("cotune.storage.run_code._trusted_here", set())  # as in another process
    assert open_run_code(sent) and sys.path[0] == str(sent)
    described = json.loads((sent / "run.json").read_text())
    described["config"]["distill"]["teacher"] = "http://evil:8000"
    (sent / "run.json").write_text(json.dumps(described))
    with pytest.raises(UntrustedFolderError, match=r"http://evil:8000"):
        open_run_code(sent)


def test_a_project_that_this_user_moved_is_still_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that somebody else made of it, with a file of theirs in the application's place, is not."""

    def write(project: Path) -> Path:
        (project / "run").mkdir(parents=True)
        (project / "app.py").touch()
        described = {"workflow": str(tmp_path / "mine" / "app.py:solve"), "run": str(tmp_path / "mine" / "run")}
        (project / "run" / "run.json").write_text(json.dumps({**described, "config": {"model": "m"}}))
        return project / "run"

    run = write(tmp_path / "mine")
    remember_orders(orders_of_run(run, read_run_json(run)))
    moved = (tmp_path / "mine").rename(tmp_path / "moved") / "run"
    orders = orders_of_run(moved, read_run_json(moved))
    assert orders.current["workflow"] == str(tmp_path / "moved" / "app.py:solve") and is_trusted(orders)
    theirs = write(tmp_path / "theirs")
    orders = orders_of_run(theirs, read_run_json(theirs))
    assert orders.current["workflow"] == str(tmp_path / "theirs" / "app.py:solve") and not is_trusted(orders)


def test_folders_below_a_trusted_one_are_obeyed(sent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    orders = orders_of_run(sent, read_run_json(sent))
    monkeypatch.setenv("COTUNE_TRUST_FOLDERS", f"/no/such:{tmp_path}")
    assert is_trusted(orders)
    monkeypatch.setenv("COTUNE_TRUST_FOLDERS", f"{tmp_path}/sen:")
    assert not is_trusted(orders)
    (tmp_path / "trusted").mkdir()
    (tmp_path / "trusted" / "link").symlink_to(sent)
    monkeypatch.setenv("COTUNE_TRUST_FOLDERS", str(tmp_path / "trusted"))
    assert not is_trusted(orders_of_run(tmp_path / "trusted" / "link", read_run_json(sent)))


def test_a_run_that_names_no_code_is_open_to_all(sent: Path) -> None:
    (sent / "run.json").write_text(json.dumps({"workflow": None, "folder": str(sent), "config": {"model": "m"}}))
    assert open_run_code(sent)


@pytest.mark.parametrize(("reply", "runs"), [("y", True), ("", False), ("n", False)])
def test_at_a_terminal_the_user_is_asked(
    reply: str, runs: bool, sent: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: reply)
    assert main(["replay", str(sent), "--all"]) == 1
    said, error = capsys.readouterr()
    assert "It chooses code or addresses:\n  workflow: sent_app:solve\n" in said
    assert "distill.teacher" not in said  # replay asks no teacher
    assert (sent / "code_ran").exists() == runs
    assert ("The records have no finished episode" in error) == runs  # which replay says once the application is loaded


def test_a_flag_agrees_beforehand(sent: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (["--trust-folder"], []):
        assert main(["replay", str(sent), "--all", *flags]) == 1
        assert "The records have no finished episode" in capsys.readouterr().err
    assert (sent / "code_ran").exists()


def test_a_search_of_somebody_else_chooses_no_address_and_no_key(
    sent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"reflection": "m", "reflection_url": "http://elsewhere/v1", "reflection_key_env": "MY_SECRET"}
    about = {"app": f"{sent}/sent_app.py:solve", "cwd": str(sent), "tasks": str(tmp_path / "tasks.jsonl")}
    about |= {"task_ids": ["a"], "options": {**options, "redact": f"{sent}/sent_app.py:hide"}, "secret": "s"}
    (sent / "improve.json").write_text(json.dumps(about))
    again = ["prompts", "improve", "--out", str(sent), "--resume"]
    assert main(again) == 1
    said = capsys.readouterr().err
    assert "reflection_url: http://elsewhere/v1; reflection_key_env: MY_SECRET" in said, said
    monkeypatch.chdir(tmp_path)
    Path("own_app.py").write_text(APP.replace("code_ran", "own_ran"))
    mine = ["own_app.py:solve", "--set", "reflection_url=http://mine/v1", "--set", "reflection_key_env=MINE"]
    assert main([*again, *mine]) == 1
    said = capsys.readouterr().err
    assert "it chooses code or addresses: redact:" in said and "elsewhere" not in said
    assert not (sent / "code_ran").exists()
    (sent / "improve.json").write_text(json.dumps({name: about[name] for name in about if name != "task_ids"}))
    assert main(again) == 1
    assert "improve.json is broken" in capsys.readouterr().err
