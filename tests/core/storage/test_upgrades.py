"""Records of an older version are brought up to this one, and read the same."""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from cotune.errors import RunError
from cotune.records.ids import pack_ids
from cotune.records.structs import (
    CallRecord,
    Candidate,
    Episode,
    FeedbackRecord,
    Message,
    PolicyRef,
    RewardRecord,
    Segment,
    Task,
)
from cotune.storage.open_store import open_store
from cotune.storage.protocol import Store
from cotune.storage.schema import FIGURES
from tests.postgres import Server

VERSION_3 = """
CREATE TABLE images (id TEXT PRIMARY KEY, media_type TEXT NOT NULL, data BLOB NOT NULL);
CREATE TABLE messages (id TEXT PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE segments (id TEXT PRIMARY KEY, parent TEXT, token_ids BLOB NOT NULL);
CREATE TABLE calls (
    id TEXT PRIMARY KEY, episode TEXT NOT NULL, step INTEGER NOT NULL, role TEXT NOT NULL, turn INTEGER NOT NULL,
    status TEXT NOT NULL, prompt TEXT, prompt_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL,
    body TEXT NOT NULL, candidates TEXT NOT NULL, token_ids BLOB NOT NULL, logprobs BLOB NOT NULL);
CREATE INDEX calls_by_episode ON calls (episode, step);
CREATE TABLE episodes (
    id TEXT PRIMARY KEY, task TEXT NOT NULL, phase TEXT NOT NULL, training_step INTEGER, status TEXT NOT NULL,
    body TEXT NOT NULL, metrics TEXT NOT NULL);
CREATE INDEX episodes_by_step ON episodes (phase, training_step);
CREATE INDEX episodes_by_task ON episodes (task);
CREATE TABLE rewards (target TEXT, name TEXT, value REAL, at REAL, PRIMARY KEY (target, name)) WITHOUT ROWID;
CREATE TABLE feedback (
    target TEXT, name TEXT, text TEXT, at REAL, cut INTEGER, PRIMARY KEY (target, name)) WITHOUT ROWID;
CREATE TABLE consumed (
    target TEXT PRIMARY KEY, training_step INTEGER NOT NULL, is_group INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE VIEW candidates AS
    SELECT calls.id || '.' || json_extract(value, '$.index') AS id, calls.id AS call, calls.episode, calls.role,
           calls.turn, json_extract(value, '$.index') AS "index", json_extract(value, '$.text') AS text,
           json_extract(value, '$.tokens') AS tokens, json_extract(value, '$.finish_reason') AS finish_reason,
           json_extract(value, '$.index') IS json_extract(calls.body, '$.chosen') AS chosen
    FROM calls, json_each(iif(json_valid(calls.candidates), calls.candidates, '[]'));
PRAGMA application_id = 1668248693;
PRAGMA user_version = 3;
ATTACH '{new}' AS new;
INSERT INTO images SELECT id, media_type, data FROM new.images;
INSERT INTO messages SELECT id, body FROM new.messages;
INSERT INTO segments SELECT id, parent, token_ids FROM new.segments;
INSERT INTO calls SELECT id, episode, step, role, turn, status, prompt, prompt_tokens, completion_tokens, body,
    candidates, token_ids, logprobs FROM new.calls ORDER BY rowid;
INSERT INTO episodes SELECT id, task, phase, training_step, status, body, metrics FROM new.episodes ORDER BY rowid;
INSERT INTO rewards SELECT target, name, value, at FROM new.rewards;
INSERT INTO feedback SELECT target, name, text, at, cut FROM new.feedback;
INSERT INTO consumed SELECT * FROM new.consumed;
INSERT INTO counters SELECT * FROM new.counters;
"""


def fill(store: Store) -> None:
    """Some records of each kind."""
    said = {"role": "assistant", "content": "yes"}
    ends = [("ok", None), ("error", "policy"), ("error", "infrastructure"), ("cancelled", None)]
    for number, (status, blame) in enumerate(ends):
        found = tuple(
            Candidate(index=i, text="yes", message=said, token_ids=(5, i), logprobs=(-1.0, -0.5)) for i in (0, 1)
        )
        call = CallRecord(
            id=f"C{number}", episode=f"E{number}", role="r", step=0, turn=0, model="m", messages=("m1",), prompt="s1",
            policy=PolicyRef("p", number), started=1e9 + number, latency=0.5, candidates=found, chosen=1,
            status="ok" if number else "timeout", error=None if number else "slow",
        )  # fmt: skip
        end = Episode(
            id=f"E{number}", task=Task(id=f"t{number % 2}", input=number), workflow="w", phase="train", status=status,
            training_step=number // 2, blame=blame, error="boom" if blame else None, started=1e9, latency=2.0, calls=1,
            metrics={"success": float(number == 0)} if number < 2 else {},
        )  # fmt: skip
        rewards = [RewardRecord(f"E{number}", "team", number, 1.0), RewardRecord(f"C{number}.0", "local", 0.5, 1.0)]
        store.write([call, end, *rewards, FeedbackRecord(f"C{number}.0", "local", "why", 1.0)])
    store.write([Message("m1", {"role": "user", "content": "go"}), Segment("s1", None, pack_ids((1, 2)))])
    store.consume({"g": ["C3.0"]}, 1)
    store.write([RewardRecord("C3.0", "local", 1.0, 2.0)])
    store.flush()


def told(store: Store) -> dict[str, object]:
    """What readers ask."""
    from cotune.storage.episode_filters import EVERYTHING

    ids = [f"{kind}{n}{end}" for kind, end in (("E", ""), ("C", ".0")) for n in range(4)]
    return {
        "episodes": list(store.episodes()),
        "calls": [store.calls(f"E{n}") for n in range(4)],
        "rewards": store.rewards(ids),
        "feedback": store.feedback(ids),
        "consumed": dict(store.consumed()),
        "counters": dict(store.counters()),
        "message": store.message("m1"),
        "tokens": store.token_ids("s1"),
        "success": store.success_counts(),
        "means": store.outcome_means("lowest"),
        "by_task": store.outcomes_by_task("train", "lowest"),
        "by_step": store.outcomes_by_step("train", "lowest", ["t0", "t1"]),
        "by_role": store.rewards_by_role(),
        "scored": store.has_scored_candidates(),
        "counts": store.counts(),
        "phases": store.episodes_by_phase(),
        "use": store.use(0),
        "failed": (store.failed_episodes(), store.failed_calls()),
        "answered": store.answered_by("p"),
        "lines": store.episode_lines(EVERYTHING, 9),
        "first": (store.first_episodes("train", 0, ["t0", "t1"]), store.first_episodes("train", None, ["t0"])),
        "repeated": store.repeated_tasks("train", 5),
        "times": store.call_times("E1"),
        "messages": store.messages_of("E1", "r", 0),
        "holding": store.holding("YES", [f"E{n}" for n in range(4)], {}),
        "neighbours": store.neighbours("E1"),
        "lists": (store.phases(), store.steps("train"), store.recent_roles(), store.open_episodes(5)),
    }


def test_a_file_of_version_3(tmp_path: Path) -> None:
    with open_store(tmp_path / "new.db") as store:
        fill(store)
        expected = told(store)
    old = tmp_path / "old.db"
    db = sqlite3.connect(old)
    db.executescript(VERSION_3.format(new=tmp_path / "new.db"))
    db.close()
    with pytest.raises(RunError, match=r"version 3.*cotune records upgrade"):
        open_store(old, read_only=True)
    with open_store(old) as store:
        assert told(store) == expected
    with open_store(old, read_only=True) as store:
        assert told(store) == expected
    columns = """SELECT m.name, c.name, c.type, c."notnull", c.pk
        FROM sqlite_master AS m, pragma_table_info(m.name) AS c ORDER BY m.name, c.cid"""
    indexes = "SELECT name, tbl_name FROM sqlite_master WHERE type = 'index' ORDER BY name"
    for sql in (columns, indexes):
        made, upgraded = (sqlite3.connect(tmp_path / name).execute(sql).fetchall() for name in ("new.db", "old.db"))
        assert upgraded == made


def downgraded(execute: Callable[[str], object], version: str) -> None:
    """Version 4 from this one: without the applications of rewards, and without the indexes of figures."""
    for index in re.findall("CREATE INDEX ([a-z_]+)", FIGURES):
        execute(f"DROP INDEX {index}")
    for table in ("rewards", "feedback", "replaced"):
        execute(f"ALTER TABLE {table} DROP COLUMN app")
    execute(version)


def test_a_file_of_version_4(tmp_path: Path) -> None:
    with open_store(tmp_path / "records.db") as store:
        fill(store)
        expected = told(store)
    with contextlib.closing(sqlite3.connect(tmp_path / "records.db")) as db:
        downgraded(db.execute, "PRAGMA user_version = 4")
    with pytest.raises(RunError, match=r"version 4.*cotune records upgrade"):
        open_store(tmp_path, read_only=True)
    with open_store(tmp_path) as store:
        assert told(store) == expected


def test_a_database_of_version_4(postgres: Server) -> None:
    with open_store(address := postgres.database()) as store:
        fill(store)
        expected = told(store)
    with psycopg.connect(address) as db:
        downgraded(db.execute, "UPDATE store SET version = 4")
    with pytest.raises(RunError, match=r"version 4.*cotune records upgrade"):
        open_store(address, read_only=True)
    with open_store(address) as store:
        assert told(store) == expected
        store.commit([RewardRecord("E1", "team", 7.0, 9.0)])
        assert store.rewards(["E1"]) == {"E1": {"team": 7.0}}


def test_every_reader_sees_the_same_in_both_stores(tmp_path: Path, postgres: Server) -> None:
    found = []
    for address in (tmp_path / "records.db", postgres.database()):
        with open_store(address) as store:
            fill(store)
        with open_store(address, read_only=True) as store:
            found.append(told(store))
    assert found[0] == found[1]
