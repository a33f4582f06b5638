"""A prune of PostgreSQL drops whole months, and deletes the same as row by row."""

from __future__ import annotations

from datetime import UTC, datetime

import psycopg
import pytest

from cotune.records.ids import message_id, ulid
from cotune.records.structs import CallRecord, Candidate, Episode, FeedbackRecord, Message, RewardRecord, Task
from cotune.storage.open_store import open_store
from cotune.storage.protocol import Store
from cotune.storage.sql.upkeep import page, prune
from tests.postgres import Server

HOUR = 3600.0
AUGUST, SEPTEMBER, OCTOBER = (datetime(2026, month, 1, tzinfo=UTC).timestamp() for month in (8, 9, 10))
TABLES = ("episodes", "calls", "rewards", "feedback", "replaced", "consumed", "messages")


def id_of(moment: float, number: int = 0) -> str:
    return ulid(int(moment * 1000) << 80 | number)


def write(store: Store, moment: float, calls: tuple[float, ...], app: str = "desk", ended: bool = True) -> str:
    """An episode that starts at a moment, with calls of these moments."""
    episode = id_of(moment)
    for step, started in enumerate(calls):
        body = {"role": "user", "content": f"{moment} {step}"}
        call = id_of(started, step + 1)
        store.write([
            Message(message_id(body), body),
            CallRecord(id=call, episode=episode, role="r", step=step, turn=step, messages=(message_id(body),), app=app,
                       started=started, candidates=(Candidate(index=0, text="ok", message={}),), chosen=0),
            *(RewardRecord(f"{call}.0", "local", 1.0, at, app) for at in (1.0, 2.0)),
        ])  # fmt: skip
    if ended:
        store.write([
            Episode(id=episode, task=Task(id="t", input=1), workflow="w", app=app, started=moment, calls=len(calls)),
            FeedbackRecord(episode, "team", "why", 1.0, 0, app),
        ])  # fmt: skip
    store.flush()
    return episode


def fill(store: Store) -> dict[str, str]:
    return {
        "august": write(store, AUGUST + HOUR, (AUGUST + HOUR, AUGUST + 2 * HOUR)),
        "cut off": write(store, AUGUST + 5 * HOUR, (AUGUST + 5 * HOUR,), ended=False),
        "across": write(store, SEPTEMBER - HOUR, (SEPTEMBER - HOUR, SEPTEMBER + HOUR)),
        "september": write(store, SEPTEMBER + 5 * HOUR, (SEPTEMBER + 5 * HOUR,)),
        "across, kept": write(store, OCTOBER - HOUR, (OCTOBER - HOUR, OCTOBER + HOUR)),
        "october": write(store, OCTOBER + 2 * HOUR, (OCTOBER + 2 * HOUR,)),
    }


def left(store: Store) -> dict[str, object]:
    return {table: page(store, table, (), 1000) for table in TABLES if table != "messages"}


def partitions(address: str) -> set[str]:
    with psycopg.connect(address) as db:
        found = db.execute("SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'calls'::regclass")
        return {str(name).rpartition("calls_")[2] for (name,) in found.fetchall()}


@pytest.mark.parametrize(
    ("before", "options", "dropped"),
    [
        (SEPTEMBER - 2 * HOUR, {}, set()),
        (SEPTEMBER + 2 * HOUR, {}, {"2026_08"}),
        (SEPTEMBER + 2 * HOUR, {"app": "desk"}, {"2026_08"}),
        (SEPTEMBER + 2 * HOUR, {"app": "shop"}, set()),
        (OCTOBER - 2 * HOUR, {}, {"2026_08"}),
        (OCTOBER + HOUR / 2, {}, {"2026_08", "2026_09"}),
        (OCTOBER + HOUR / 2, {"keep_trained": True}, {"2026_08"}),
    ],
)
def test_whole_months_are_dropped(
    postgres: Server, monkeypatch: pytest.MonkeyPatch, before: float, options: dict[str, object], dropped: set[str]
) -> None:
    """As many are counted, and the same is left, as where each row is deleted by itself."""
    found = []
    for by_rows in (False, True):
        with open_store(address := postgres.database()) as store:
            ids = fill(store)
            store.consume({"g": [f"{store.calls(ids['september'])[0].id}.0"]}, 0)
            assert partitions(address) == {"2026_08", "2026_09", "2026_10", "other"}
            if by_rows:
                monkeypatch.setattr(store, "drop_months", lambda *_: ())
            counts = {"episodes": 0, "calls": 0, "messages": 0}
            for part in prune(store, before, **options):  # type: ignore[arg-type]
                counts |= {name: count + part.get(name, 0) for name, count in counts.items()}
            found.append((counts, left(store)))
        gone = {"2026_08", "2026_09", "2026_10"} - partitions(address)
        assert gone == (set() if by_rows else dropped)
    assert found[0] == found[1]


def test_a_month_that_someone_reads_is_deleted_row_by_row(postgres: Server, caplog: pytest.LogCaptureFixture) -> None:
    with open_store(address := postgres.database()) as store, psycopg.connect(address) as backup:
        ids = fill(store)
        backup.execute("SELECT count(*) FROM calls").fetchall()  # its transaction stays open
        for _ in prune(store, SEPTEMBER + 2 * HOUR):
            pass
        assert "2026_08" in partitions(address)
        assert {e.id for e in store.episodes()} == {ids[name] for name in ("september", "across, kept", "october")}
    assert "2026_08 is deleted row by row (canceling statement due to lock timeout" in caplog.text


def test_records_of_a_month_that_was_dropped_may_still_come(postgres: Server) -> None:
    with open_store(postgres.database()) as store:
        fill(store)
        for _ in prune(store, SEPTEMBER + 2 * HOUR):
            pass
        late = write(store, AUGUST + 9 * HOUR, (AUGUST + 9 * HOUR,))
        assert [call.episode for call in store.calls(late)] == [late]
        for _ in prune(store, SEPTEMBER + 2 * HOUR):
            pass
        assert store.calls(late) == []
