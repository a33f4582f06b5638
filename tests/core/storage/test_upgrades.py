"""Databases of an older version are brought up to this one; files are refused. Both stores read the same."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

import psycopg
import pytest

from cotune.errors import RunError
from cotune.records.ids import message_id, pack_ids
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
from cotune.storage.episode_filters import EpisodeFilters
from cotune.storage.open_store import open_store
from cotune.storage.protocol import Store
from tests.postgres import Server

GO = {"role": "user", "content": "go"}
GO_ID = message_id(GO)


def fill(store: Store) -> None:
    """Some records of each kind."""
    said = {"role": "assistant", "content": "yes"}
    ends = [("ok", None), ("error", "policy"), ("error", "infrastructure"), ("cancelled", None)]
    for number, (status, blame) in enumerate(ends):
        found = tuple(
            Candidate(index=i, text="yes", message=said, token_ids=(5, i), logprobs=(-1.0, -0.5)) for i in (0, 1)
        )
        call = CallRecord(
            id=f"C{number}", episode=f"E{number}", role="r", step=0, turn=0, model="m", messages=(GO_ID,), prompt="s1",
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
    store.write([Message(GO_ID, GO), Segment("s1", None, pack_ids((1, 2)))])
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
        "message": store.message(GO_ID),
        "tokens": store.token_ids("s1"),
        "success": store.figures().success_counts(),
        "means": store.figures().outcome_means("lowest"),
        "by_task": store.figures().outcomes_by_task("train", "lowest"),
        "by_step": store.figures().outcomes_by_step("train", "lowest", ["t0", "t1"]),
        "by_role": store.figures().rewards_by_role(),
        "scored": store.figures().has_scored_candidates(),
        "counts": store.figures().counts(),
        "phases": store.figures().episodes_by_phase(),
        "use": store.figures().use(0),
        "failed": (store.figures().failed_episodes(), store.figures().failed_calls()),
        "answered": store.figures().answered_by("p"),
        "lines": store.figures().episode_lines(EVERYTHING, 9),
        "first": (
            store.figures().first_episodes("train", 0, ["t0", "t1"]),
            store.figures().first_episodes("train", None, ["t0"]),
        ),
        "repeated": store.figures().repeated_tasks("train", 5),
        "times": store.figures().call_times("E1"),
        "messages": store.figures().messages_of("E1", "r", 0),
        "holding": store.figures().episodes_with_text("YES", [f"E{n}" for n in range(4)], {}),
        "neighbours": store.figures().neighbours("E1"),
        "lists": (
            store.figures().phases(),
            store.figures().steps("train"),
            store.figures().recent_roles(),
            store.figures().open_episodes(5),
        ),
    }


@pytest.mark.parametrize("version", [2, 3, 5, 7])
def test_a_file_of_another_version_is_refused(version: int, tmp_path: Path) -> None:
    with open_store(tmp_path / "records.db") as store:
        fill(store)
    with contextlib.closing(sqlite3.connect(tmp_path / "records.db")) as db:
        db.execute(f"PRAGMA user_version = {version}")
    upgraded = version in (3, 5)
    remedy = r"at commit [0-9a-f]{8}: cotune records upgrade" if upgraded else "Use the cotune that wrote it"
    for read_only in (True, False):
        with pytest.raises(RunError, match=f"has records of version {version}.*{remedy}"):
            open_store(tmp_path, read_only=read_only)


def test_a_database_of_version_6(postgres: Server) -> None:
    """Its indexes took long texts if they could be compressed."""
    long = "again and again " * 400
    with open_store(address := postgres.database()) as store:
        fill(store)
    with psycopg.connect(address) as db:
        db.execute(
            "UPDATE episodes SET task = %s, phase = %s, body = jsonb_set(jsonb_set(body::jsonb, '{task,id}', "
            "to_jsonb(%s::text)), '{phase}', to_jsonb(%s::text))::text WHERE id = 'E1'",
            [long, long, long, long],
        )
        db.execute("DROP FUNCTION indexed")
        db.execute("UPDATE store SET version = 6")
    with pytest.raises(RunError, match=r"version 6.*cotune records upgrade"):
        open_store(address, read_only=True)
    with open_store(address) as store:
        (episode,) = store.episodes(EpisodeFilters(task=long))
        assert (episode.id, episode.task.id, episode.phase) == ("E1", long, long)
        assert list(store.episodes(EpisodeFilters(phase=long))) == [episode]
        ((_, task, phase),) = [row[:3] for row in store.figures().episode_lines(EpisodeFilters(task=long), 9)]
        assert (task, phase) == (long, long)
    with psycopg.connect(address) as db:
        ((task, phase),) = db.execute("SELECT task, phase FROM episodes WHERE id = 'E1'").fetchall()
        assert len(task) < 150 > len(phase) and task != phase


def test_every_reader_sees_the_same_in_both_stores(tmp_path: Path, postgres: Server) -> None:
    found = []
    for address in (tmp_path / "records.db", postgres.database()):
        with open_store(address) as store:
            fill(store)
        with open_store(address, read_only=True) as store:
            found.append(told(store))
    assert found[0] == found[1]
