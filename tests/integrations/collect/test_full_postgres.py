"""A database whose disk is full: nothing is acknowledged that is not stored, and all is stored once there is room."""

from __future__ import annotations

import contextlib
import random
import resource
from collections.abc import Iterator

import pytest

from cotune.integrations.collect.apps import Apps
from cotune.integrations.collect.batch import pack_batch
from cotune.integrations.collect.server import running_collector
from cotune.records.ids import message_id, new_id
from cotune.records.structs import CallRecord, Message, Record
from cotune.records.wire import pack
from tests.integrations.collect.test_attacks import post
from tests.postgres import server

pytestmark = pytest.mark.slow
ROOM = 24 << 20
"""Bytes of the largest file: above a segment of PostgreSQL's log, which it cannot do without."""


def batch(rng: random.Random) -> list[Record]:
    """A call whose messages take about a megabyte however they are compressed."""
    bodies = [{"role": "user", "content": rng.randbytes(300_000).hex()} for _ in range(3)]
    messages = [Message(message_id(body), body) for body in bodies]
    names = tuple(message.id for message in messages)
    return [*messages, CallRecord(id=new_id(), episode=new_id(), role="r", step=0, turn=0, messages=names)]


@contextlib.contextmanager
def small_disk() -> Iterator[None]:
    """What is started here can write no file of more than `ROOM` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_of_postgres() -> None:
    rng, sent = random.Random(1), []
    with contextlib.ExitStack() as stack:
        with small_disk():
            database = stack.enter_context(server())
        found = stack.enter_context(running_collector(database.database(), Apps()))
        while len(sent) < 60:
            records = batch(rng)
            body = pack_batch("desk", new_id(), [pack(records)[0]])
            sent.append((records[-1], body))
            if (answer := post(found.url, body)).status_code != 200:
                break
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        store = found.opened.store
        assert len([call for call, _ in sent if store.calls(call.episode)]) == len(sent) - 1 > 5
        assert store.health.lost == 0
        database.stop()
        database.start()  # now with room
        for _, body in sent[-3:]:  # what was not acknowledged, and again what was
            assert post(found.url, body).status_code == 200
        for call, _ in sent:
            (stored,) = store.calls(call.episode)
            assert all(len(store.message(name)["content"]) == 600_000 for name in stored.messages)
        assert (store.health.lost, found.opened.failing) == (0, False)
