"""`Store.commit` returns only when the records are durable, whatever goes wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
import pytest
from msgspec.structs import replace

from cotune.errors import RecordError, RunError
from cotune.records.ids import new_id, pack_ids, segment_id
from cotune.records.structs import CallRecord, Episode, Message, Record, Segment, Task
from cotune.storage.open_store import open_store
from cotune.storage.sql.sqlite import SqliteDatabase
from cotune.storage.sql.upkeep import delete
from tests.postgres import Server


@pytest.mark.parametrize("error", [MemoryError(), KeyError("x"), AssertionError()])
def test_an_error_that_nobody_expects_is_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fails(self: Any) -> None:
        raise error

    with open_store(tmp_path / "records.db") as store:
        with monkeypatch.context() as patch:
            patch.setattr(SqliteDatabase, "commit", fails)
            for _ in range(2):
                with pytest.raises(RunError, match="did not take 1 records"):
                    store.commit([Message("m1", {"role": "user", "content": "hello"})])
        store.commit([Message("m1", {"role": "user", "content": "hello"})])
        assert store.message("m1")["content"] == "hello"


def test_tables_of_another_version_are_no_fault_of_a_record(postgres: Server) -> None:
    message = Message("m1", {"role": "user", "content": "hello"})
    with open_store(address := postgres.database()) as store, psycopg.connect(address, autocommit=True) as db:
        store.commit([Message("m0", {"role": "user", "content": "before"})])
        db.execute("ALTER TABLE messages RENAME COLUMN body TO other")
        with pytest.raises(RunError, match='column "body"'):
            store.commit([message])
        assert store.health.lost == 0
        db.execute("ALTER TABLE messages RENAME COLUMN other TO body")
        store.commit([message])
        assert store.message("m1") == message.body


def test_what_another_process_has_deleted_is_stored_again(postgres: Server) -> None:
    message = Message("m1", {"role": "system", "content": "Be brief."})

    def episode() -> tuple[str, list[Record]]:
        id = new_id()
        call = CallRecord(id=new_id(), episode=id, role="r", step=0, turn=0, messages=("m1",))
        return id, [message, call, Episode(id=id, task=Task(id="t", input=1), workflow="w")]

    with open_store(address := postgres.database()) as store:
        id, records = episode()
        store.commit(records)
        with open_store(address) as other:
            assert delete(other, [id])["messages"] == 1
        store.commit(episode()[1])
        assert store.message("m1") == message.body


def test_what_comes_during_a_deletion_keeps_its_messages(postgres: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pack_ids([1, 2])
    shared: list[Record] = [
        Message("m1", {"role": "system", "content": "Be brief."}),
        Message("m2", {"role": "user", "content": "Name it."}),
        Segment(segment_id([1, 2]), None, packed),
    ]

    def episode() -> tuple[str, list[Record]]:
        id = new_id()
        call = CallRecord(
            id=new_id(), episode=id, role="r", step=0, turn=0, messages=("m1",), prompt=segment_id([1, 2])
        )
        return id, [*shared, call, Episode(id=id, task=Task(id="t", input=1), workflow="w")]

    with open_store(address := postgres.database()) as store, open_store(address) as other:
        id, records = episode()
        store.commit(records)
        store.commit([replace(records[3], id=new_id(), messages=("m2",))])
        act, coming = other.act, [episode()[1]]  # type: ignore[attr-defined]

        def acts(do: Any) -> Any:
            if getattr(getattr(do, "func", do), "__name__", "") == "delete_rows" and coming:
                store.commit(coming.pop())
            return act(do)

        monkeypatch.setattr(other, "act", acts)
        counts = delete(other, [id])
        assert coming == [] and (counts["messages"], counts["segments"]) == (1, 0)
        assert store.message("m1") and store.token_ids(segment_id([1, 2])) == (1, 2)
        with pytest.raises(RecordError):
            store.message("m2")
