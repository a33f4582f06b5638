"""Every reader takes the address of a database, and says the same of it as of a file with the same records."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from pathlib import Path

import pytest

from cotune.cli.main import main
from cotune.cli.printing.next_command import next_commands
from cotune.config.learner import LearnerSettings
from cotune.config.records import RecordsConfig
from cotune.errors import ConfigError
from cotune.reading.find_runs import open_runs
from cotune.reading.run import OpenedRun
from cotune.recording.call_records import CallerContext
from cotune.recording.recorder import LiveEpisode
from cotune.records.answers import Answer
from cotune.records.structs import Candidate, PolicyRef, Task
from cotune.storage.open_store import folder_of, open_store, without_password
from cotune.storage.sql.upkeep import copy
from cotune.trainer.config.from_records import check_records
from tests.postgres import Server

APP = """
import cotune

@cotune.workflow
def solve(task):
    raise RuntimeError

@solve.scorer("writer")
def length(candidate, call, task):
    return len(candidate.text) / 10
"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, postgres: Server) -> dict[str, str]:
    """The same records in a file and in a database."""
    folder = tmp_path_factory.mktemp("pair")
    (folder / "scored.py").write_text(APP)
    file, database = str(folder / "records.db"), postgres.database()
    with open_store(file) as store:
        for number in range(12):
            live = LiveEpisode(store, Task(id=f"t{number % 4}", input={"q": number}), workflow="w")
            for role in ("writer", "critic"):
                asked = [{"role": "system", "content": "s"}, {"role": "user", "content": f"{role} {number}"}]
                call = live.start(CallerContext(role, "test"), {"messages": asked, "model": "m"})
                texts = (f"answer {number}", f"other answer {number}")
                answers = tuple(
                    Candidate(index=i, text=text, message={"role": "assistant", "content": text})
                    for i, text in enumerate(texts)
                )
                rewards = ({"local": number / 10}, {"local": 0.5})
                call.finish(Answer(candidates=answers, policy=PolicyRef("p", 1), rewards=rewards, chosen=number % 2))
            live.end("error" if number == 5 else "ok", rewards={"team": float(number)}, metrics={"success": number % 2})
    with open_store(file, read_only=True) as source, open_store(database) as target:
        copy(source, target, lambda *_: None)
    return {"file": file, "database": database, "folder": str(folder)}


COMMANDS = {
    "show": ["show", "RECORDS"],
    "groups": ["show", "RECORDS", "--groups"],
    "episode": ["show", "RECORDS", "--episode", "EPISODE", "--full"],
    "json": ["show", "RECORDS", "--json", "--role", "writer", "--min-reward", "2"],
    "sft": ["records", "sft", "RECORDS", "--out", "OUT", "--min-reward", "0.5"],
    "otel": ["otel", "export", "RECORDS", "--out", "OUT", "--content", "--tokens"],
    "score": ["records", "score", "RECORDS", "APP"],
    "label": ["records", "judge", "RECORDS", "--to-label", "OUT"],
    "html": ["show", "RECORDS", "--html", "OUT"],
    "list": ["records", "list", "RECORDS", "--by", "role,version"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command(
    pair: dict[str, str],
    command: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with open_store(pair["file"], read_only=True) as store:
        episode = next(iter(store.episodes())).id
    found = []
    for kind in ("file", "database"):
        out = tmp_path / kind
        words = {"RECORDS": pair[kind], "OUT": str(out), "EPISODE": episode, "APP": f"{pair['folder']}/scored.py:solve"}
        status = main([words.get(word, word) for word in COMMANDS[command]])
        shown = capsys.readouterr()
        text = out.read_text() if out.is_file() else ""
        told = (shown.out + shown.err + text).replace(pair[kind], "RECORDS").replace(str(out), "OUT")
        name = OpenedRun(pair[kind] if kind == "database" else Path(pair[kind])).name
        told = re.sub(rf"\b{re.escape(name)}\b *", "NAME ", told)
        told = re.sub("[ ─]+", " ", told).replace("NAME : NAME", "NAME : RECORDS")  # a database's place is its name
        told = re.sub(r"\d+(\.\d+)? KB|\d{4}-\d\d-\d\d \d\d:\d\d(:\d\d)?", "N", told)
        found.append((status, told))
    assert found[0] == found[1]
    assert found[0][0] == 0 and found[0][1]


def test_scores_are_written_to_a_database(
    pair: dict[str, str], postgres: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_store(pair["file"], read_only=True) as source, open_store(address := postgres.database()) as target:
        copy(source, target, lambda *_: None)
    assert main(["records", "score", address, f"{pair['folder']}/scored.py:solve", "--write"]) == 0
    with open_store(address, read_only=True) as store:
        call = store.calls(next(iter(store.episodes())).id)[0]
        assert store.rewards([f"{call.id}.0"])[f"{call.id}.0"] == {"local": 0.8}


def test_a_database_is_opened_beside_runs(pair: dict[str, str]) -> None:
    runs = open_runs([pair["file"], pair["database"], pair["database"]])
    assert [run.state for run in runs] == ["records", "records"] and len({run.name for run in runs}) == 2
    assert [run.folder for run in runs] == [None, None] and folder_of(pair["database"]) is None
    for run in runs:
        run.close()


def test_what_cannot_be_opened_is_one_line(
    postgres: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = {
        "postgresql://nobody:secret@127.0.0.1:1/x": "does not answer",
        "mysql://x": "No installed package opens mysql://x (installed: postgres://, postgresql://)",
        postgres.database(): "has no records",
    }
    for address, text in wrong.items():
        assert main(["show", address]) == 1
        said = capsys.readouterr().err
        assert text in said and said.count("\n") == 1 and "secret" not in said
    monkeypatch.setitem(__import__("sys").modules, "psycopg", None)
    monkeypatch.delitem(__import__("sys").modules, "cotune.integrations.collect.postgres.store", raising=False)
    assert main(["show", postgres.database()]) == 1
    assert "pip install -e '.[postgres]'" in capsys.readouterr().err


def test_json_lines_are_json(pair: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", pair["database"], "--json"]) == 0
    assert len([json.loads(line) for line in capsys.readouterr().out.splitlines()]) == 12


SECRETS = [
    "postgresql://cotune:hush@127.0.0.1:1/x",
    "postgresql://cotune:hu/sh@127.0.0.1:1/x",
    "postgresql://cotune:hu@sh@127.0.0.1:1/x",
    "postgresql://cotune@127.0.0.1:1/x?connect_timeout=1&password=hush",
    "postgresql://cotune@127.0.0.1:1/x?connect_timeout=1&p%61ssw%6Frd=hush",
    "mysql://cotune:hush@127.0.0.1/x",
]


@pytest.mark.parametrize("address", SECRETS)
def test_no_password_is_shown(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = without_password(address)
    assert "***" in shown and "hu" not in shown and "sh@" not in shown
    assert shown.startswith(f"{address.partition(':')[0]}://cotune") and "127.0.0.1" in shown
    assert without_password(shown) == shown
    for command in (["records", "list", address], ["show", address]):
        assert main(command) == 1
        told = capsys.readouterr()
        assert shown in told.out + told.err and "hush" not in told.out + told.err
    words = argparse.Namespace(command="records", subcommand="prune", store=address)
    assert next_commands(words, 0) == [shlex.join(["cotune", "records", "list", shown])]
    with pytest.raises(ConfigError, match=r"records\.path.*PGPASSWORD") as caught:
        check_records("sft", RecordsConfig(path=address), LearnerSettings())
    assert "hush" not in str(caught.value)


def test_addresses_without_a_password_stay_as_they_are() -> None:
    for address in (
        "runs/a:b@c",
        "postgresql://u@h:5432/db?host=/tmp",
        "postgresql:///db?user=a:b@c",
        "postgres://h/a:b",
    ):
        assert without_password(address) == address
        check_records("sft", RecordsConfig(path=address), LearnerSettings())
