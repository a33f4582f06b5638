"""`cotune records`: counts, deleting and copying, in a file and in a database."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cotune.cli.main import main
from cotune.errors import RecordError
from cotune.recording.call_records import CallerContext
from cotune.recording.recorder import LiveEpisode
from cotune.records.answers import Answer
from cotune.records.ids import key_target, message_id, new_id
from cotune.records.structs import (
    CallRecord,
    Candidate,
    Episode,
    FeedbackRecord,
    Message,
    PolicyRef,
    RewardRecord,
    Task,
)
from cotune.storage.open_store import open_store
from cotune.storage.protocol import Store
from cotune.storage.sql import upkeep
from cotune.storage.sql.upkeep import copy_episodes, delete, size
from tests.core.storage.test_upgrades import fill, told
from tests.postgres import Server

DAY = 86400.0
SYSTEM = {"role": "system", "content": "be kind"}


@pytest.fixture(params=["sqlite", "postgres"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "records.db") if request.param == "sqlite" else request.getfixturevalue("postgres").database()


def said(number: int) -> dict[str, str]:
    return {"role": "user", "content": f"I am person {number}"}


def write(store: Store, numbers: range, days: float, app: str = "desk") -> list[str]:
    """Episodes of so many days ago, with one call each; all share a message."""
    ids = []
    for number in numbers:
        id, call, started = new_id(), new_id(), time.time() - days * DAY
        answer = Candidate(index=0, text="ok", message={"role": "assistant", "content": "ok"})
        bodies = [SYSTEM, said(number)]
        names = tuple(map(message_id, bodies))
        store.write([
            *map(Message, names, bodies),
            CallRecord(id=call, episode=id, role="r", step=0, turn=0, messages=names, app=app, started=started,
                       policy=PolicyRef("p", number % 2), candidates=(answer,), chosen=0),
            Episode(id=id, task=Task(id="t", input=number), workflow="w", app=app, key=f"order-{number}", calls=1,
                    started=started),
            RewardRecord(f"{call}.0", "local", 1.0, 1.0, app), FeedbackRecord(id, "team", "why", 1.0, 0, app),
        ])  # fmt: skip
        ids.append(id)
    store.flush()
    return ids


def age(store: Any, days: float) -> None:
    """Messages were last used so long ago."""
    store.act(lambda does: does.execute("UPDATE messages SET at = at - ?", [days * DAY]))


def left(store: Store) -> dict[str, int]:
    return {table: size(store, table) for table in ("episodes", "calls", "messages", "rewards", "feedback")}


def test_list(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    with open_store(address) as store:
        write(store, range(3), 1.0)
        write(store, range(2), 400.0, "shop")
    assert main(["records", "list", address]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:5] for line in lines[-2:]] == [["desk", "3", "3", "3", "0"], ["shop", "2", "2", "2", "0"]]
    assert main(["records", "list", address, "--by", "app,version", "--app", "desk"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[-2:]] == [["desk", "p@0", "2"], ["desk", "p@1", "1"]]
    assert main(["records", "list", address, "--by", "color"]) == 1
    assert "color" in capsys.readouterr().err


def test_upgrade(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    with open_store(address):
        pass
    is_database = "://" in address
    assert main(["records", "upgrade", address]) == (0 if is_database else 1)
    out, err = capsys.readouterr()
    expected = "has records of version 7" if is_database else "is a file; only databases are upgraded"
    assert expected in (out if is_database else err)


def test_upgrade_refuses_a_store_that_is_not_postgresql(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["records", "upgrade", "mongodb://ann:secret@host/records"]) == 1
    said = capsys.readouterr().err
    assert "mongodb://ann:***@host/records" in said and "is not a PostgreSQL database" in said


def test_prune(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    with open_store(address) as store:
        old = write(store, range(4), 40.0)
        store.write([CallRecord(id=new_id(), episode=new_id(), role="r", step=0, turn=0, started=1.0)])
        store.consume({"g": [f"{store.calls(old[0])[0].id}.0"]}, 0)
        other = write(store, range(4, 6), 40.0, "shop")
        age(store, 40.0)
    with open_store(address) as store:  # a writer that has not sent the shared message today
        new = write(store, range(6, 8), 1.0)
    assert main(["records", "prune", address, "--older-than", "30d", "--keep-trained", "--app", "desk"]) == 0
    assert "deleted 3 episodes, 3 calls, 3 messages" in capsys.readouterr().out
    with open_store(address, read_only=True) as store:
        assert {e.id for e in store.episodes()} == {old[0], *other, *new}
        assert [store.message(m) for m in store.calls(old[0])[0].messages] == [SYSTEM, said(0)]
        assert left(store) == {"episodes": 5, "calls": 6, "messages": 6, "rewards": 5, "feedback": 5}
    assert main(["records", "prune", address, "--older-than", "30d"]) == 0
    with open_store(address, read_only=True) as store:
        assert {e.id for e in store.episodes()} == set(new)
        assert [store.message(m) for m in store.calls(new[0])[0].messages] == [SYSTEM, said(6)]
    assert main(["records", "prune", address, "--older-than", "soon"]) == 1
    assert "Write a number with m, h, d or w" in capsys.readouterr().err


def test_a_person_is_forgotten(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    with open_store(address) as store:
        ids = write(store, range(3), 1.0)
        store.write([RewardRecord(key_target("desk", "order-1"), "stars", 1.0, 5.0, "desk")])
    assert main(["records", "delete", address, "--app", "desk", "--key", "order-1"]) == 0
    assert "deleted 1 episode, 1 call, 1 message" in capsys.readouterr().out
    assert main(["records", "delete", address, "--episode", ids[2]]) == 0
    assert main(["records", "delete", address, "--episode", ids[2]]) == 1
    with open_store(address, read_only=True) as store:
        assert left(store) == {"episodes": 1, "calls": 1, "messages": 2, "rewards": 1, "feedback": 1}
        assert store.message(message_id(SYSTEM)) == SYSTEM
        assert store.figures().episodes_with_text("person 0", ids, {}).keys() == {
            ids[0]
        } and not store.figures().episodes_with_text("person 1", ids, {})


def test_images_and_segments_go_with_the_last_call(address: str) -> None:
    from tests.core.storage.test_records_fuzz import image_part

    with open_store(address) as store:
        ids = []
        for number in range(2):
            live = LiveEpisode(store, Task(id="t", input=1), workflow="w")
            for text in (b"all", str(number).encode()):
                content = [image_part(text)]
                call = live.start(CallerContext("r", "test"), {"messages": [{"role": "user", "content": content}]})
                answer = Candidate(index=0, text="x", message={"role": "assistant", "content": "x"}, token_ids=(9,))
                path = (1, 2) if text == b"all" else (1, 2, number)
                call.finish(Answer(candidates=(answer,), prompt_ids=path))
            live.end("ok")
            ids.append(live.id)
        store.flush()
        assert [size(store, table) for table in ("images", "segments", "messages")] == [3, 3, 3]
        assert delete(store, [ids[0]]) == {"episodes": 1, "calls": 2, "messages": 1, "images": 1, "segments": 1}
        assert [len(store.token_ids(str(c.prompt))) for c in store.calls(ids[1])] == [2, 3]
        assert delete(store, [ids[1]]) == {"episodes": 1, "calls": 2, "messages": 2, "images": 2, "segments": 2}


@pytest.fixture
def pair(postgres: Server, tmp_path: Path) -> dict[str, str]:
    return {"file": str(tmp_path / "records.db"), "database": postgres.database()}


@pytest.mark.parametrize("way", [("file", "database"), ("database", "file")])
def test_copy(pair: dict[str, str], way: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    source, target = pair[way[0]], pair[way[1]]
    with open_store(source) as store:
        fill(store)
        write(store, range(3), 1.0)
        store.commit([], {"dropped": 5, "sampled": 70})
        expected = told(store)
    assert expected["counters"] == {"lost": 0, "refused": 1, "foreign": 0, "dropped": 5, "sampled": 70}
    assert main(["records", "copy", source, target]) == 0
    with open_store(target, read_only=True) as store:
        assert told(store) == expected
        before = {table: size(store, table) for table in ("calls", "rewards", "replaced")}
    capsys.readouterr()
    with open_store(source) as store:
        store.commit([], {"sampled": 1})
    with open_store(target) as store:
        store.commit([], {"sampled": 100})  # its own
    assert main(["records", "copy", source, target]) == 0
    with open_store(target, read_only=True) as store:
        expected["counters"]["sampled"] += 101
        assert told(store) == expected
        assert {table: size(store, table) for table in before} == before


def test_a_copy_leaves_out_messages_whose_ids_are_not_their_addresses(
    pair: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.core.storage.test_records_fuzz import image_part

    part = image_part(b"genuine")
    honest = {
        message_id(SYSTEM): SYSTEM,
        message_id({"tools": [SYSTEM]}): [SYSTEM],
        message_id({"response_format": SYSTEM}): SYSTEM,
        message_id({"grammar": SYSTEM}): SYSTEM,
        message_id({"role": "user", "content": [part]}): {"role": "user", "content": [part]},
    }
    forged = {message_id(said(1)): said(2), "m1": said(3)}
    with open_store(pair["file"]) as store:
        store.write([Message(id, body) for id, body in (honest | forged).items()])
    with sqlite3.connect(pair["file"]) as db:
        db.execute("INSERT INTO images VALUES (?, 'image/png', ?, 1.0)", ["0" * 64, b"other"])
    assert main(["records", "copy", pair["file"], pair["database"]]) == 1
    out = capsys.readouterr().out
    assert "copied 6 records of 9; the others were left out, or the target has them already" in out
    assert "3 messages or images left out: their ids are not the hashes of their contents" in out
    with open_store(pair["database"], read_only=True) as store:
        assert {id: store.message(id) for id in honest} == honest
        assert {id for id in forged if store.bodies([id])} == set()
        assert (size(store, "messages"), size(store, "images")) == (5, 1)


def test_a_copy_goes_on_where_it_was_stopped(pair: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    from cotune.storage.sql import upkeep

    with open_store(pair["file"]) as store:
        fill(store)
        write(store, range(40), 1.0)
    with open_store(pair["file"], read_only=True) as source, open_store(pair["database"]) as target:

        def stop(table: str, _: int) -> None:
            if table == "calls":
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            upkeep.copy(source, target, stop, limit=10)
        assert size(target, "calls") == 10
        sent = []
        load = upkeep.load

        def loading(store: Store, table: str, rows: Sequence[tuple[Any, ...]]) -> int:
            sent.append((table, len(rows)))
            return load(store, table, rows)

        monkeypatch.setattr(upkeep, "load", loading)
        upkeep.copy(source, target, lambda *_: None, limit=10)
        assert sum(rows for table, rows in sent if table == "calls") == size(source, "calls") - 10
        assert told(target) | {"counters": None} == told(source) | {"counters": None}


def test_a_copy_of_episodes_says_that_the_target_could_not_store_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(str(tmp_path / "from.db")) as source, open_store(str(tmp_path / "to.db")) as target:
        episodes = write(source, range(2), 1.0)
        copy_episodes(source, target, episodes)
        assert [target.episode(id).id for id in episodes] == episodes
        monkeypatch.setattr(upkeep, "load", lambda store, table, rows: len(rows))
        with pytest.raises(RecordError, match=r"to\.db could not store \d+ of \d+ rows of messages"):
            copy_episodes(source, target, episodes)
