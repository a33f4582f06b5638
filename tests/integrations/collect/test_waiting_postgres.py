"""A collector before a database that another writer blocks, and one before a database that is not up yet."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import httpx
import psycopg
import pytest

from cotune.errors import RunError
from cotune.integrations.collect import server as collector_server
from cotune.integrations.collect.apps import Apps
from cotune.integrations.collect.batch import pack_batch
from cotune.integrations.collect.postgres import store as postgres_store
from cotune.integrations.collect.postgres.tables import LOCK
from cotune.integrations.collect.server import running_collector
from cotune.records.ids import new_id
from cotune.records.structs import Episode, Task
from cotune.records.wire import pack
from tests.integrations.collect.test_attacks import post
from tests.postgres import Server, server


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_writer_that_blocks_the_database(postgres: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_store, "LOCK_SECONDS", 1)
    monkeypatch.setattr(postgres_store, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(collector_server, "SLOW_SECONDS", 0.3)
    address = postgres.database()
    episode = Episode(id=new_id(), task=Task(id="t", input=1), workflow="w")
    body = pack_batch("desk", new_id(), [pack([episode])[0]])
    with running_collector(address, Apps()) as found, psycopg.connect(address) as other:

        def status() -> str:
            return str(httpx.get(f"{found.url}/health").json()["status"])

        assert status() == "ok"
        other.execute(f"SELECT pg_advisory_xact_lock({LOCK})")
        answers: list[httpx.Response] = []
        sending = threading.Thread(target=lambda: answers.append(post(found.url, body)))
        sending.start()
        wait_until(lambda: status() == "store_slow")
        sending.join()
        assert (answers[0].status_code, answers[0].headers["retry-after"]) == (503, "5")
        assert status() == "store_failed"
        other.rollback()
        assert post(found.url, body).status_code == 200
        assert status() == "ok"
        assert [e.id for e in found.opened.store.episodes()] == [episode.id]


def test_a_collector_waits_for_its_database(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector_server, "OPENING_PAUSE", 0.1)
    said: list[str] = []
    with server() as database:
        address = database.database()
        database.stop()
        waiting = threading.Thread(target=collector_server._await_store, args=(address, said.append))
        waiting.start()
        wait_until(lambda: bool(said))
        waiting.join(0.5)
        assert waiting.is_alive()
        database.start()
        waiting.join(30)
        assert not waiting.is_alive()
        assert len(said) == 1 and said[0].startswith("Waiting for the store. The store postgresql://")
        with pytest.raises(RunError, match=r"cannot be used.*does not exist"):
            collector_server._await_store(address.replace("/postgres?", "/nothing?"), said.append)
    assert len(said) == 1
