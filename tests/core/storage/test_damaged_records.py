"""Records files that are damaged or crafted: one line that says what to do, never a traceback and never a hang."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from cotune.cli.main import main
from cotune.errors import RecordError
from cotune.recording.call_records import CallerContext
from cotune.recording.recorder import LiveEpisode
from cotune.records.answers import Answer
from cotune.records.structs import Candidate, PolicyRef, Task
from cotune.storage.sqlite_store import SqliteStore

PAGE = 8192


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    with SqliteStore.open(folder) as store:
        for number in range(60):
            live = LiveEpisode(store, Task(id=f"t{number}", input="x" * 500), workflow="w")
            for step in range(3):
                body = {"messages": [{"role": "user", "content": f"{number} {step} " + "word " * 100}]}
                said = {"role": "assistant", "content": "yes " * 50}
                candidate = Candidate(index=0, text=said["content"], message=said, token_ids=(5,), logprobs=(-1.0,))
                call = live.start(CallerContext("r", "test"), body)
                call.finish(Answer(candidates=(candidate,), prompt_ids=(1, number, step), policy=PolicyRef("p")))
            live.end("ok", rewards={"team": 1.0})
    with contextlib.closing(sqlite3.connect(folder / "records.db")) as db:
        db.execute("VACUUM")  # The layout of the pages no longer depends on when the store wrote.
    return folder


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(recorded, tmp_path / "run"))


COMMANDS = {
    "show": ["show", "RUN"],
    "groups": ["show", "RUN", "--groups"],
    "sft": ["records", "sft", "RUN", "--out", "OUT"],
    "otel": ["otel", "export", "RUN", "--out", "OUT", "--content", "--tokens"],
}


def zero(run: Path, page: int) -> None:
    with (run / "records.db").open("r+b") as file:
        file.seek(page * PAGE)
        file.write(bytes(PAGE))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_zeroed_page_is_one_line_with_the_way_out(run: Path, tmp_path, capsys, command):
    for page in range(9, (run / "records.db").stat().st_size // PAGE, 2):
        zero(run, page)
    words = [{"RUN": str(run), "OUT": str(tmp_path / "out")}.get(word, word) for word in COMMANDS[command]]
    assert main(words) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"The records file {run / 'records.db'} is damaged (database disk image is malformed)" in said
    assert "; before the damage it has " in said
    assert f"sqlite3 {shlex.quote(str(run / 'records.db'))} .recover | sqlite3 " in said


@pytest.mark.slow
def test_any_one_page_zeroed_is_read_around_or_named(run: Path, tmp_path, capsys):
    whole = (run / "records.db").read_bytes()
    endings = set()
    for page in range(0, len(whole) // PAGE, max(1, len(whole) // PAGE // 10)):
        (run / "records.db").write_bytes(whole)
        zero(run, page)
        for words in COMMANDS.values():
            status = main([{"RUN": str(run), "OUT": str(tmp_path / "out")}.get(word, word) for word in words])
            said = capsys.readouterr().err
            assert status == 0 or ".recover" in said, (page, words, said)
            endings.add(status)
    assert endings == {0, 1}


def test_a_cycle_of_segments_ends(run: Path):
    with sqlite3.connect(run / "records.db") as db:
        ids = [id for (id,) in db.execute("SELECT id FROM segments LIMIT 2")]
        db.executemany("UPDATE segments SET parent = ? WHERE id = ?", [ids, ids[::-1]])
    db.close()
    with SqliteStore.open(run, read_only=True) as store, pytest.raises(RecordError, match="is not complete"):
        store.token_ids(ids[0])
    words = ["otel", "export", str(run), "--out", str(run / "spans"), "--tokens"]
    done = subprocess.run([sys.executable, "-m", "cotune", *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "2 prompt_not_stored" in done.stdout


@pytest.mark.parametrize("table", ["calls", "episodes"])
@pytest.mark.parametrize("latency", [1e308, -1.0])
def test_a_time_that_no_clock_shows_breaks_its_row_alone(run: Path, table: str, latency: float, capsys):
    with contextlib.closing(sqlite3.connect(run / "records.db")) as db:
        db.execute(f"UPDATE {table} SET body = json_set(body, '$.latency', ?, '$.started', 1e308)", (latency,))
        db.commit()
    assert main(["otel", "export", str(run), "--out", str(run / "spans")]) in (0, 1)
    assert main(["show", str(run)]) == 0
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(("where", "path", "value"), [("body", "$.chosen", 10**15), ("candidates", "$", "[]")])
def test_a_call_without_its_chosen_candidate_is_left_out(run: Path, where: str, path: str, value: object, capsys):
    with contextlib.closing(sqlite3.connect(run / "records.db")) as db:
        made = "json(?)" if where == "candidates" else "?"
        empty = ", token_ids = x'', logprobs = x''" if where == "candidates" else ""
        db.execute(f"UPDATE calls SET {where} = json_set({where}, '{path}', {made}){empty}", (value,))
        db.commit()
    assert main(["records", "sft", str(run), "--out", str(run / "sft.jsonl")]) in (0, 1)
    assert (run / "sft.jsonl").read_bytes() == b""
    assert "Traceback" not in capsys.readouterr().err


def test_a_reward_whose_name_is_no_text_is_left_out(run: Path, capsys):
    with contextlib.closing(sqlite3.connect(run / "records.db")) as db:
        db.execute("UPDATE rewards SET name = x'00ff'")
        db.commit()
    assert main(["show", str(run), "--groups"]) == 0
    assert main(["otel", "export", str(run), "--out", str(run / "spans")]) == 0
    assert "Traceback" not in capsys.readouterr().err


def test_a_call_whose_episode_is_no_text_is_shown(run: Path, capsys):
    with contextlib.closing(sqlite3.connect(run / "records.db")) as db:
        db.execute("UPDATE calls SET episode = x'00ff' WHERE rowid = 1")
        db.commit()
    assert main(["show", str(run)]) == 0
    assert "b'\\x00\\xff'" in capsys.readouterr().out
