"""A process that stands still in the middle of a transaction keeps others from writing for a while only."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from cotune.integrations.collect.postgres import store as postgres_store
from cotune.records.ids import new_id
from cotune.records.structs import Episode, Task
from cotune.storage.open_store import open_store
from tests.postgres import Server

STANDS_STILL = """
import os, signal, sys
from cotune.integrations.collect.postgres import store, tables

def stand_still():
    print("still", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)

store.IDLE_SECONDS = 1
writer = store.PostgresDatabase(sys.argv[1], "writer")
writer.begin()
try:
    if sys.argv[2] == "copying":
        writer.execute(tables.staging_table("messages"))
        with writer._db.cursor().copy("COPY stage_messages FROM STDIN") as copy:
            copy.write("half a row")
            stand_still()
    else:
        stand_still()
    writer.commit()
except writer.trouble as error:
    print(type(error).__name__, flush=True)
writer.rollback()
writer.begin()
writer.commit()
print("wrote again", flush=True)
"""


@pytest.mark.parametrize("where", ["idle", "copying"])
def test_a_writer_that_stands_still(where: str, postgres: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    if where == "copying":  # the server does not call that idle: whoever waits has it disconnected
        monkeypatch.setattr(postgres_store, "LOCK_SECONDS", 1)
        monkeypatch.setattr(postgres_store, "LOOK_SECONDS", 0.5)
    address = postgres.database()
    with open_store(address) as store:
        command = [sys.executable, "-c", STANDS_STILL, address, where]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout and writer.stdout.readline() == "still\n"
            begun = time.monotonic()
            store.commit([Episode(id=new_id(), task=Task(id="t", input=1), workflow="w")])
            assert time.monotonic() - begun < postgres_store.LOCK_SECONDS + 15
            assert len(list(store.episodes())) == 1
            os.kill(writer.pid, signal.SIGCONT)
            told = writer.stdout.read().split()
        assert told[0] != "wrote" and told[-2:] == ["wrote", "again"]
