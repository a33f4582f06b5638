"""The SQLite file: crashes, full disks, and several processes."""

import logging
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

import cotune
from cotune.errors import RecordError, RunError
from cotune.records.structs import CallRecord, Candidate, Episode, Message, RewardRecord, Task
from cotune.storage.sql import writer
from cotune.storage.sql.writer import LATE, YIELD
from cotune.storage.sqlite_store import SqliteStore
from tests.core.storage.whole_file import copied


@pytest.fixture
def store(tmp_path):
    opened = SqliteStore.open(tmp_path)
    yield opened
    opened.close()


def python(code, *arguments):
    """Start a Python process that runs `code` with `arguments` in sys.argv[1:]."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def said(process, code=0):
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    return out


def episode(id, task="t", **fields):
    return Episode(id=id, task=Task(id=task, input=None), workflow="w", **fields)


def call(id, episode="E1", step=0):
    return CallRecord(id=id, episode=episode, role="r", step=step, turn=0)


WRITE_FOREVER = """
    import sys
    from cotune.recording.call_records import CallerContext
    from cotune.records.structs import Candidate, PolicyRef, Task
    from cotune.records.answers import Answer
    from cotune.recording.recorder import LiveEpisode
    from cotune.storage.sqlite_store import SqliteStore

    store = SqliteStore.open(sys.argv[1])
    for number in range(1_000_000):
        live = LiveEpisode(store, Task(id=f"t{number}", input=number), workflow="w")
        for step in range(3):
            said = {"role": "user", "content": f"{live.id} {step}"}
            call = live.start(CallerContext("r", "test"), {"messages": [said]})
            answer = Candidate(index=0, text="x", message={"role": "assistant", "content": "x"}, token_ids=(step,) * 9)
            call.finish(Answer(candidates=(answer,), prompt_ids=(number, *range(step * 50)), rewards=({"r": 1.0},)))
        live.end("ok", rewards={"team": float(number)})
        if number % 7 == 0:
            store.flush()
            print(live.id, flush=True)
"""


def test_sigkill_loses_nothing_flushed_and_leaves_no_part_of_an_episode(tmp_path):
    rng = random.Random(11)
    flushed = []
    for _ in range(6):
        process = python(WRITE_FOREVER, tmp_path)
        flushed.extend(process.stdout.readline() for _ in range(rng.randrange(1, 25)))
        process.send_signal(signal.SIGKILL)
        out, _ = process.communicate()
        flushed.extend(line for line in out.splitlines(keepends=True) if line.endswith("\n"))
    store = SqliteStore.open(tmp_path)
    assert store.rows("PRAGMA integrity_check") == [("ok",)]
    stored = {e.id: e for e in store.episodes()}
    assert len(flushed) >= 6
    assert {id.strip() for id in flushed} <= stored.keys()
    for id, end in stored.items():
        calls = store.calls(id)
        assert [c.step for c in calls] == [0, 1, 2]
        assert [len(store.token_ids(c.prompt)) for c in calls] == [1, 51, 101]
        assert [store.message(c.messages[0])["content"] for c in calls] == [f"{id} {step}" for step in range(3)]
        assert store.rewards([id, f"{calls[0].id}.0"]) == {
            id: {"team": float(end.task.input)},
            f"{calls[0].id}.0": {"r": 1.0},
        }
    assert set(store.figures().unfinished()).isdisjoint(stored)
    store.close()


def test_a_killed_writers_file_can_be_read_before_anyone_writes_it(tmp_path):
    process = python(WRITE_FOREVER, tmp_path)
    id = process.stdout.readline().strip()
    process.kill()
    process.communicate()
    assert (tmp_path / "records.db-wal").exists()
    reader = SqliteStore.open(tmp_path, read_only=True)
    assert reader.episode(id).calls == 3
    reader.close()


@pytest.mark.parametrize("ending", ["", "raise KeyboardInterrupt", "sys.exit(3)"])
def test_what_is_queued_is_stored_at_exit(tmp_path, ending):
    code = f"""
        import sys
        from cotune.records.structs import Message
        from cotune.storage.sqlite_store import SqliteStore

        store = SqliteStore.open(sys.argv[1])
        store.write([Message(f"m{{i}}", i) for i in range(1000)])
        {ending}
    """
    process = python(code, tmp_path)
    process.communicate(timeout=60)
    reader = SqliteStore.open(tmp_path, read_only=True)
    assert reader.rows("SELECT count(*) FROM messages") == [(1000,)]
    reader.close()


FULL_DISK = """
    import logging, resource, signal, sys
    from cotune.records.structs import Message, Segment
    from cotune.storage.sqlite_store import SqliteStore

    logging.basicConfig(level=logging.ERROR, format="%(message)s", stream=sys.stdout)
    store = SqliteStore.open(sys.argv[1])
    store.write([Message("before", 1)])
    store.flush()
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
    for i in range(3):
        store.write([Segment(f"s{i}", None, bytes(400_000))])
        store.flush()
    print("lost", store.health.lost)
    store.write([Segment("waited", None, bytes(400_000))])
    while not store._writer._failing:
        pass
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    store.flush()
    store.write([Message("after", 2)])
    store.flush()
    print("lost", store.health.lost, store.counters()["lost"], store.message("before"), store.message("after"))
    print(len(store.token_ids("waited")))
"""


def test_a_full_disk_is_counted_said_once_and_recovered_from(tmp_path):
    lines = said(python(FULL_DISK, tmp_path)).splitlines()
    assert [line for line in lines if line.startswith("lost")] == ["lost 3", "lost 3 3 1 2"]
    assert lines[-1] == "100000"
    logged = [line for line in lines if "records.db: " in line]
    assert len(logged) == 2
    assert "the store cannot be written" in logged[0]
    assert "records cannot be stored" in logged[1]


def test_a_full_queue_drops_and_counts(store, monkeypatch, caplog):
    monkeypatch.setattr("cotune.storage.sql.writer.QUEUE_BYTES", 5000)
    monkeypatch.setattr("cotune.storage.sql.writer.PUT_TIMEOUT", 0.01)
    other = sqlite3.connect(store.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    for i in range(10):
        store.write([Message(f"m{i}", "x" * 1000)])
    lost = store.health.lost
    other.execute("ROLLBACK")
    other.close()
    store.flush()
    assert 0 < lost < 10
    assert store.rows("SELECT count(*) FROM messages") == [(10 - lost,)]
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_an_application_pauses_briefly_while_a_commit_is_late(store, monkeypatch):
    pauses, changed = [], store._writer._changed
    wait = changed.wait
    monkeypatch.setattr(changed, "wait", lambda timeout=None: pauses.append(timeout) or wait(timeout))
    other = sqlite3.connect(store.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    store.write([Message("first", 1)])
    at_once = pauses.count(YIELD)
    time.sleep(2 * LATE)
    for i in range(20):
        store.write([Message(f"m{i}", 1)])
    late = pauses.count(YIELD)
    other.execute("ROLLBACK")
    other.close()
    store.flush()
    assert (at_once, late) == (0, 20)
    assert store.health.lost == 0


def test_a_lost_message_is_written_again_when_it_comes_again(store):
    large = Candidate(index=0, text="", message={}, token_ids=(2**40,))
    broken = CallRecord(id="C1", episode="E1", role="r", step=0, turn=0, candidates=(large,))
    store.write([Message("m", 1), broken])
    store.write([Message("m", 1)])
    store.flush()
    assert store.message("m") == 1


def test_a_broken_record_does_not_take_others_with_it(store, caplog):
    store.write([call("C1")])
    store.write([call("C2", episode=None)])
    store.write([call("C3", step=1)])
    store.flush()
    assert [c.id for c in store.calls("E1")] == ["C1", "C3"]
    assert store.health.lost == 1
    assert "NOT NULL constraint failed: calls.episode" in caplog.text


def test_the_ledger_says_when_it_cannot_be_written(store):
    store._writer._db.execute("PRAGMA query_only = ON")
    with pytest.raises(RecordError, match="trained twice"):
        store.consume(["g"], 1)
    store._writer._db.execute("PRAGMA query_only = OFF")
    store.consume(["g"], 1)
    assert store.consumed() == {"g": 1}


def test_refused_rewards_outlive_the_writer(tmp_path):
    store = SqliteStore.open(tmp_path)
    store.write([call("C1")])
    store.consume(["C1"], 0)
    store.close()
    again = SqliteStore.open(tmp_path)
    again.write([RewardRecord("C1.0", "late", 1.0)])
    again.flush()
    assert again.health.refused == 1
    assert again.counters() == {"lost": 0, "refused": 1, "foreign": 0, "dropped": 0, "sampled": 0}
    assert again.rewards(["C1.0"]) == {"C1.0": {}}
    again.close()


def test_a_second_writer_is_told_who_holds_the_file(tmp_path):
    code = """
        import sys
        from cotune.storage.sqlite_store import SqliteStore
        store = SqliteStore.open(sys.argv[1])
        print("open", flush=True)
        sys.stdin.read()
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"open\n"
    with pytest.raises(RunError, match=f"process {process.pid}") as caught:
        SqliteStore.open(tmp_path)
    assert "you can read the records meanwhile" in caught.value.remedy
    SqliteStore.open(tmp_path, read_only=True).close()
    process.communicate()
    SqliteStore.open(tmp_path).close()


def test_a_second_writer_in_one_process_is_refused_too(store):
    with pytest.raises(RunError, match=f"process {os.getpid()}"):
        SqliteStore.open(store.path)


def test_the_file_alone_is_whole_after_close_beside_other_readers(tmp_path):
    with SqliteStore.open(tmp_path / "run" / "records.db") as store:
        store.write([episode(f"E{number}") for number in range(5)])
        store.flush()
        other = SqliteStore.open(tmp_path / "run", read_only=True)
        assert [len(list(reader.episodes())) for reader in (store, other)] == [5, 5]
    other.close()
    with copied(tmp_path / "run") as alone:
        assert len(list(alone.episodes())) == 5


def test_a_reader_in_the_midst_of_a_query_at_close_is_named(tmp_path, caplog):
    store = SqliteStore.open(tmp_path)
    store.write([episode("E1")])
    store.flush()
    reader = sqlite3.connect(tmp_path / "records.db", isolation_level=None)
    reader.execute("BEGIN")
    reader.execute("SELECT id FROM episodes").fetchall()
    store.write([episode("E2")])
    store.close()
    assert "records are left in its -wal file: copy both" in caplog.text
    assert reader.execute("SELECT id FROM episodes").fetchall() == [("E1",)]
    reader.close()


def test_a_reader_never_holds_up_the_writer(store):
    store.write([episode(f"E{i:03d}") for i in range(300)])
    store.flush()
    slow = store.episodes()
    next(slow)
    store.write([episode("E999")])
    store.flush()
    assert [e.id for e in slow][-1] == "E999"


def test_reading_only_refuses_to_write(tmp_path):
    SqliteStore.open(tmp_path).close()
    reader = SqliteStore.open(tmp_path, read_only=True)
    with pytest.raises(RunError, match="reading only"):
        reader.write([Message("m", 1)])
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        reader.rows("DELETE FROM calls RETURNING 1")
    reader.close()


def test_missing_file(tmp_path):
    with pytest.raises(RunError, match="no records file"):
        SqliteStore.open(tmp_path, read_only=True)


@pytest.mark.parametrize("read_only", [False, True])
def test_other_files_and_versions_are_refused(tmp_path, read_only):
    foreign, text = tmp_path / "foreign.db", tmp_path / "text.db"
    db = sqlite3.connect(foreign)
    db.execute("CREATE TABLE t (a)")
    db.close()
    text.write_text("not a database at all, " * 50)
    newer = tmp_path / "newer.db"
    SqliteStore.open(newer).close()
    db = sqlite3.connect(newer)
    db.execute("PRAGMA user_version = 99")
    db.close()
    for path, said in ((foreign, "not a cotune records file"), (text, "cannot be used"), (newer, "version 99")):
        with pytest.raises(RunError, match=said):
            SqliteStore.open(path, read_only=read_only)
    SqliteStore.open(tmp_path).close()


def test_writing_after_close_is_counted(tmp_path):
    store = SqliteStore.open(tmp_path)
    store.close()
    store.close()
    store.write([Message("m", 1), Message("n", 2)])
    store.flush()
    assert store.health.lost == 2
    with pytest.raises(RunError, match="closed"):
        store.message("m")


def test_a_forked_child_reads_but_does_not_write(store):
    store.write([Message("m", 1)])
    store.flush()
    child = os.fork()
    if child == 0:
        store.write([Message("n", 2)])
        store.flush()
        os._exit(0 if store.health.lost == 1 and store.message("m") == 1 else 1)
    assert os.waitpid(child, 0)[1] == 0
    store.write([Message("k", 3)])
    store.flush()
    assert store.rows("SELECT id FROM messages ORDER BY id") == [("k",), ("m",)]


def test_what_is_known_to_be_stored_is_bounded_and_may_be_written_again(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "RECENT_IDS", 10)
    with SqliteStore.open(tmp_path / "r.db") as store:
        for number in [*range(40), *range(40)]:
            store.write([Message(f"m{number}", number)])
            store.flush()
            assert len(store._writer._stored_ids) <= 11
        assert store.rows("SELECT count(*) FROM messages") == [(40,)]
        assert (store.message("m0"), store.message("m39"), store.health.lost) == (0, 39, 0)


@pytest.fixture
def nobody():
    """No right to write other people's folders, as root has it: the effective user is nobody."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_folder_that_cannot_be_written_is_read_and_refused_for_writing(request):
    folder = Path(tempfile.mkdtemp())
    try:
        with SqliteStore.open(folder) as store:
            store.write([episode("E1")])
        with cotune.trace():  # whose imports nobody may read
            pass
        folder.chmod(0o555)
        request.getfixturevalue("nobody")
        with SqliteStore.open(folder, read_only=True) as store:
            assert [found.id for found in store.episodes()] == ["E1"]
        with pytest.raises(RunError, match=r"records.db cannot be written: Permission denied"):
            SqliteStore.open(folder)
        with pytest.raises(RunError, match=r"The folder .*new cannot be created: Permission denied"):
            SqliteStore.open(folder / "new" / "records.db")
        with pytest.raises(RunError, match="cannot be written"), cotune.trace(folder):
            pass
    finally:
        if os.geteuid() != os.getuid():
            os.seteuid(0)
        folder.chmod(0o755)
        shutil.rmtree(folder)
