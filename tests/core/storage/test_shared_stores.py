"""Traces of one process share a store, which stays open for a moment after the last of them and keeps nobody out."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

import cotune
from cotune.errors import ConfigError, RunError, WorkflowError
from cotune.records.structs import CallRecord, Candidate
from cotune.storage import shared_stores
from cotune.storage.file_lock import is_held
from cotune.storage.open_store import open_store
from cotune.storage.sql.upkeep import delete
from cotune.storage.sqlite_store import SqliteStore
from tests.integrations.edits import NEW, OLD, part, prompts

WRITER = """
import sys
import cotune
from cotune.storage.open_store import open_store
with open_store(sys.argv[1]) as store:
    with cotune.trace(sys.argv[1] + ".other"):
        pass
    store.act(lambda does: does.set_counters({"dropped": 7}))
    print("open", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were opened for writing."""
    files: list[str] = []
    plain = SqliteStore.open.__func__

    def counted(cls: type[SqliteStore], path: Path | str, read_only: bool = False) -> SqliteStore:
        if not read_only:
            files.append(Path(path).name)
        return plain(cls, path, read_only)

    monkeypatch.setattr(SqliteStore, "open", classmethod(counted))
    monkeypatch.setattr(shared_stores, "open_store", SqliteStore.open)
    return files


def trace(path: Path) -> str:
    with cotune.trace(path) as traced:
        pass
    return traced.id


def stored(path: Path) -> list[str]:
    """The episodes of a file, by itself: without its log."""
    with sqlite3.connect(f"{path.absolute().as_uri()}?immutable=1", uri=True) as db:
        return [id for (id,) in db.execute("SELECT id FROM episodes ORDER BY id")]


def other_process(path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "open\n"
    return process


def unused() -> list[str]:
    return [address for address, shared in shared_stores._stores.by_address.items() if not shared.users]


def wait_until_closed() -> None:
    until = time.monotonic() + 20
    while (unused() or shared_stores._stores.closer is not None) and time.monotonic() < until:
        time.sleep(0.05)
    assert not unused() and shared_stores._stores.closer is None


def test_traces_one_after_another_open_the_file_once(tmp_path: Path, opened: list[str]) -> None:
    path = tmp_path / "records.db"
    ids = [trace(path if number % 2 else tmp_path) for number in range(20)]
    cotune.feedback(ids[0], 1.0, records=path)
    assert opened == ["records.db"]
    assert stored(path) == ids  # in the file itself at the end of each block, as a copy of it needs
    assert not is_held(tmp_path / "records.db.lock")
    wait_until_closed()
    assert not (tmp_path / "records.db-wal").exists()
    assert trace(path) not in ids and opened == ["records.db"] * 2


def test_a_reward_after_the_block_uses_the_open_store(tmp_path: Path, opened: list[str]) -> None:
    with cotune.trace(tmp_path) as traced:
        pass
    traced.reward(0.5)
    assert traced.rewards == {"team": 0.5}
    assert opened == ["records.db"]


def test_other_writers_are_not_kept_out(tmp_path: Path, opened: list[str]) -> None:
    path = tmp_path / "records.db"
    first = trace(path)
    with open_store(path) as store:
        assert [episode.id for episode in store.episodes()] == [first]
        with pytest.raises(RunError, match=f"is being written by process {os.getpid()}"):
            trace(path)
        delete(store, [first])
    assert trace(path) == stored(path)[-1] and len(stored(path)) == 1

    with other_process(path) as other:
        with pytest.raises(RunError, match=f"is being written by process {other.pid}"):
            trace(path)
        assert other.stdin is not None
        other.stdin.write("\n")
        other.stdin.close()
        assert other.wait(60) == 0
    before = len(opened)
    trace(path)  # what this process knew of the file is no longer true
    assert len(opened) == before + 1 and len(stored(path)) == 2
    with open_store(path, read_only=True) as store:
        assert store.counters()["dropped"] == 7


def test_messages_that_another_writer_deleted_are_stored_again(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    question = {"question": "2 + 2"}
    for _ in range(2):
        with cotune.trace(path, task=question) as traced:
            pass
        with open_store(path) as store:
            assert dict(store.episode(traced.id).task.input) == question
            delete(store, [traced.id])


@pytest.mark.parametrize("replaced", [False, True])
def test_a_removed_or_replaced_folder_is_opened_anew(replaced: bool, tmp_path: Path, opened: list[str]) -> None:
    folder, other = tmp_path / "run", tmp_path / "other"
    folder.mkdir()
    other.mkdir()
    first, kept = trace(folder), trace(other)
    shutil.rmtree(folder)
    if replaced:
        wait_until_closed()
        trace(other)
        first = trace(other)
        other.rename(folder)
    else:
        folder.mkdir()
    last = trace(folder)
    assert last in stored(folder / "records.db")
    assert (kept in stored(folder / "records.db")) == replaced
    assert len(stored(folder / "records.db")) == (4 if replaced else 1) and first != last


def test_a_removed_folder_does_not_come_back(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    trace(folder)
    shutil.rmtree(folder)
    wait_until_closed()
    assert not folder.exists()


def test_the_log_of_a_file_that_took_its_place_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    path = folder / "records.db"
    trace(path)
    shutil.rmtree(folder)
    folder.mkdir()
    with other_process(path) as other:
        wait_until_closed()
        log = folder / "records.db-wal"
        assert log.exists() and log.stat().st_size > 0
        with open_store(path, read_only=True) as store:
            assert store.counters()["dropped"] == 7
        other.kill()


def test_few_stores_stay_open_when_each_request_has_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_until_closed()
    monkeypatch.setattr(shared_stores, "_start_closer", lambda: None)
    for number in range(3 * shared_stores.MOST_UNUSED):
        trace(tmp_path / f"{number}.db")
    try:
        assert len(unused()) == shared_stores.MOST_UNUSED
        logs = sorted(int(path.name.partition(".")[0]) for path in tmp_path.glob("*.db-wal"))
        assert logs == list(range(2 * shared_stores.MOST_UNUSED, 3 * shared_stores.MOST_UNUSED))  # the latest ones
    finally:
        for address in unused():
            shared_stores._stores.by_address.pop(address).store.close()


def test_a_trace_that_is_refused_opens_no_store(tmp_path: Path) -> None:
    edited = prompts(part(OLD, NEW))
    with cotune.trace(prompts=edited), pytest.raises(WorkflowError, match="This trace has prompts"):
        cotune.trace(tmp_path / "records.db", prompts=edited).__enter__()
    assert not (tmp_path / "records.db").exists()


def test_feedback_that_is_refused_opens_no_store(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="printable characters"):
        cotune.feedback(key="order\n17", reward=1.0, records=tmp_path / "records.db")
    assert not (tmp_path / "records.db").exists()


def test_a_store_that_cannot_be_closed_does_not_keep_others_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    close = SqliteStore.close

    def fails(self: SqliteStore) -> None:
        close(self)
        if self.path.name == "one.db":
            raise OSError("stale handle")

    monkeypatch.setattr(SqliteStore, "close", fails)
    trace(tmp_path / "one.db")
    trace(tmp_path / "two.db")
    wait_until_closed()
    assert "one.db could not be closed" in caplog.text and "stale handle" in caplog.text
    assert not list(tmp_path.glob("*-wal"))


def test_a_forked_child_opens_the_store_itself(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    first = trace(path)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            trace(path)
            wait_until_closed()
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    last = trace(path)
    assert len(stored(path)) == 3 and stored(path)[0] == first and stored(path)[2] == last


def test_an_ended_process_leaves_one_file(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    code = "import sys, cotune\nwith cotune.trace(sys.argv[1]): pass"
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, timeout=60)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["records.db", "records.db.lock"]
    assert len(stored(path)) == 1


def test_a_store_that_has_lost_a_record_does_not_pause_but_stores_the_count(tmp_path: Path) -> None:
    path = tmp_path / "records.db"
    with open_store(path) as store:
        large = Candidate(index=0, text="", message={}, token_ids=(2**40,))  # no row can hold it
        store.write([CallRecord(id="C1", episode="E1", role="r", step=0, turn=0, candidates=(large,))])
        assert store.health.lost == 1 and not store.pause()
    with open_store(path, read_only=True) as store:
        assert store.counters()["lost"] == 1
