"""What happens on a disk that is full, in a process of its own:

    python -m tests.integrations.collect.small_disk SCENARIO DISK WORK KIND

DISK is a folder on a file system of a few megabytes (KIND `tmpfs`), or where none can be mounted, any folder, and the
processes may write no file beyond a size (`limit`). WORK is a folder with room.
"""

from __future__ import annotations

import os
import random
import resource
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import psutil

from cotune.collect.sink import CollectorRecords
from cotune.integrations.collect import sender as senders
from cotune.integrations.collect.sender import Sender
from cotune.recording.call_records import CallerContext
from cotune.recording.recorder import LiveEpisode
from cotune.records.answers import Answer
from cotune.records.structs import Candidate, Task
from cotune.storage.open_store import open_store
from cotune.storage.sql.upkeep import size
from tests.integrations.collect.processes import CollectorProcess, collecting
from tests.ports import free_port
from tests.postgres import server

RNG = random.Random(4)
RECORDS = 6
"""Of an episode: two messages, two calls, its end and a reward."""
WAIT = 120.0


class Disk:
    """A disk that can be filled, and freed again."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder = folder
        self._limited = kind == "limit"
        self._ballast = folder / "ballast"

    def fill(self, left: int) -> int | None:
        """Leave so many bytes of it. Where the disk has no bound: how large a file its user may write."""
        if self._limited:
            return left
        about = os.statvfs(self.folder)
        self._ballast.write_bytes(bytes(max(0, about.f_bavail * about.f_frsize - left)))
        return None

    def free(self) -> None:
        """Give all of it back."""
        if not self._limited:
            self._ballast.unlink()
            return
        for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def record(made: Sender) -> str:
    """Record an episode of two calls, whose texts nothing packs smaller."""
    episode = LiveEpisode(CollectorRecords(made), Task(id="t", input=None), workflow="w")
    for role in ("planner", "solver"):
        said = RNG.randbytes(10_000).hex()
        call = episode.start(CallerContext(role, "test"), {"messages": [{"role": "user", "content": said}]})
        answer = Candidate(index=0, text=said, message={"role": "assistant", "content": said})
        call.finish(Answer(candidates=(answer,), chosen=0))
    episode.end("ok", rewards={"team": 1.0})
    return episode.id


def record_until_refused(made: Sender, collector: CollectorProcess) -> list[str]:
    """Record until the collector's store has taken no batch."""
    told, end = [], time.monotonic() + WAIT
    while time.monotonic() < end:
        told += [record(made) for _ in range(2)]
        time.sleep(0.1)  # so that little more waits than the disk has taken
        with urllib.request.urlopen(f"{collector.url}/metrics", timeout=30) as answer:
            if b'outcome="failed"' in answer.read():
                return told
    raise AssertionError("the disk was never full")


def check(store: str, told: list[str]) -> int:
    """Hold that each record was either stored or counted as dropped; how many were dropped."""
    with open_store(store, read_only=True) as read:
        stored = sum(size(read, table) for table in ("messages", "calls", "episodes", "rewards"))
        counters = read.counters()
        assert RECORDS * len(told) == stored + counters["dropped"], (len(told), stored, counters)
        assert counters["lost"] == counters["foreign"] == 0
        for episode in read.episodes():
            assert all(read.message(call.messages[0]) for call in read.calls(episode.id))
    return counters["dropped"]


def of_the_application(disk: Disk, work: Path) -> None:
    """The disk of the spool is full before there is a collector: what neither it nor the memory takes is counted, and
    all else arrives."""
    os.environ["COTUNE_SPOOL"] = str(disk.folder / "spool")
    if (most := disk.fill(1 << 20)) is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
    with collecting(str(work / "records.db"), free_port()) as collector:
        made = Sender(collector.url, "desk")
        told, dropped = [], 0
        while not dropped:
            told.append(record(made))
            dropped = made._open_spool().dropped
        assert made._open_spool().memory_bytes > 3 << 20
        collector.start(most=resource.RLIM_INFINITY)
        assert made.flush(WAIT), "what was kept is not sent"
        disk.free()
        later = [record(made) for _ in range(20)]
        assert made.flush(WAIT) and not made._open_spool().failure
        made.finish()
        assert collector.stop() == 0
        assert not list(disk.folder.rglob("*.frames"))
    assert check(str(work / "records.db"), [*told, *later]) >= dropped > 0
    with open_store(work / "records.db", read_only=True) as read:
        assert all(read.figures().has_episode(id) for id in later)


def of_the_collector(disk: Disk, work: Path) -> None:
    """The disk of the collector's records file is full, and the collector killed: nothing is lost."""
    os.environ["COTUNE_SPOOL"] = str(work / "spool")
    store = str(disk.folder / "records.db")
    most = disk.fill(2 << 20)
    with collecting(store, free_port()) as collector:
        collector.start(most)
        made = Sender(collector.url, "desk")
        told = record_until_refused(made, collector)
        collector.stop(kill=True)
        told += [record(made) for _ in range(10)]
        collector.start(most)
        told += record_until_refused(made, collector)
        disk.free()
        assert made.flush(WAIT), "what waited is not stored"
        made.finish()
        assert collector.stop() == 0
    assert check(store, told) == 0


def of_postgres(disk: Disk, work: Path) -> None:
    """The disk of PostgreSQL is full. It may end over that; then it is started again."""
    os.environ["COTUNE_SPOOL"] = str(work / "spool")
    tempfile.tempdir = str(disk.folder)
    with server() as database, collecting(database.database(), free_port()) as collector:
        collector.start()
        made = Sender(collector.url, "desk")
        told = [record(made) for _ in range(10)]
        assert made.flush(WAIT)
        disk.fill(8 << 20)
        told += record_until_refused(made, collector)
        disk.free()
        if database._run("pg_isready", "-h", database.folder, check=False):
            database.stop("immediate")
            database.start()
        assert made.flush(WAIT), "what waited is not stored"
        made.finish()
        assert collector.stop() == 0
        assert check(collector.store, told) == 0


SCENARIOS = {"application": of_the_application, "collector": of_the_collector, "postgres": of_postgres}


if __name__ == "__main__":
    scenario, folder, work, kind = sys.argv[1:]
    senders.LINGER = 0.02
    SCENARIOS[scenario](Disk(Path(folder), kind), Path(work))
