"""The sender before a collector that refuses, fails and comes back."""

from __future__ import annotations

import atexit
import json
import logging
import os
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import cotune
from cotune.errors import ConfigError
from cotune.integrations.collect import sender as senders
from cotune.integrations.collect.batch import COLLECTOR_HEADER, Batch, read_batch
from cotune.integrations.collect.sender import Sender
from cotune.records.ids import new_id
from cotune.records.structs import Record, RewardRecord


class Fake:
    """A collector that answers as the test says; keeps what it took."""

    def __init__(self) -> None:
        self.answer: Callable[[Batch], tuple[int, dict[str, str]]] = lambda batch: (200, {})
        self.mark = {COLLECTOR_HEADER: "1"}
        """What tells its answers from those of other servers."""
        self.body = json.dumps({"error": {"message": "as the test says"}})
        self.batches: list[Batch] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""

    def took(self) -> list[Record]:
        return [record for batch in self.batches for part in batch.parts for record in part]


@pytest.fixture
def collector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    made = Fake()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            batch = read_batch(zlib.decompress(self.rfile.read(int(self.headers["content-length"])), 31))
            made.headers.append({name.lower(): value for name, value in self.headers.items()})
            status, fields = made.answer(batch)
            if status == 200 and made.mark:
                made.batches.append(batch)
            body = made.body.encode()
            self.send_response(status)
            for name, value in {**made.mark, **fields, "content-length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    made.url = f"http://127.0.0.1:{server.server_port}/base"
    monkeypatch.setenv("COTUNE_SPOOL", str(tmp_path))
    monkeypatch.setattr(senders, "LINGER", 0.01)
    monkeypatch.setattr(senders, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(senders, "LONGEST_PAUSE", 0.05)
    monkeypatch.setattr(senders, "REFUSED_PAUSE", 0.05)
    yield made
    server.shutdown()
    server.server_close()


def reward(value: float = 1.0) -> RewardRecord:
    return RewardRecord(new_id(), "team", value)


def test_what_is_written_together_comes_together_with_the_token(collector: Fake) -> None:
    sender = Sender(collector.url, "desk", "a-token")
    written = [[reward(), reward()], [reward()]]
    for records in written:
        sender.write(records)
    assert sender.flush(10)
    assert [part for batch in collector.batches for part in batch.parts] == written
    assert {batch.app for batch in collector.batches} == {"desk"}
    assert collector.headers[0]["authorization"] == "Bearer a-token"
    sender.finish()


@pytest.mark.parametrize("status", [401, 404, 429, 500, 503])
def test_a_batch_is_kept_until_it_is_taken(collector: Fake, status: int, caplog: pytest.LogCaptureFixture) -> None:
    refusals = iter(range(3))
    collector.answer = lambda batch: (200, {}) if next(refusals, None) is None else (status, {"retry-after": "0"})
    sender = Sender(collector.url, "desk")
    record = reward()
    with caplog.at_level(logging.WARNING):
        sender.write([record])
        assert sender.flush(10)
    assert collector.took() == [record]
    said = [line.getMessage() for line in caplog.records]
    assert len(said) == 2  # once that it is down, once that it is back
    assert f"takes no records now (HTTP {status}: as the test says)" in said[0]
    assert said[1].endswith("takes records again.")
    sender.finish()


@pytest.mark.parametrize("status", [200, 400, 413])
def test_another_server_at_the_address_loses_no_record(
    collector: Fake, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    mark, collector.mark = collector.mark, {}
    answered = threading.Event()

    def answer(batch: Batch) -> tuple[int, dict[str, str]]:
        answered.set()
        return (200 if collector.mark else status), {}

    collector.answer = answer
    sender = Sender(collector.url, "desk")
    record = reward()
    with caplog.at_level(logging.WARNING):
        sender.write([record])
        assert answered.wait(10)
        assert not sender.flush(0.2)
        collector.mark = mark
        assert sender.flush(10)
    assert collector.took() == [record]
    assert sender.rejected == 0
    assert f"takes no records now (HTTP {status} is not from a collector" in caplog.text
    sender.finish()


@pytest.mark.parametrize(
    ("retry_after", "body"),
    [("\u00b2", "{}"), ("9" * 30, "{}"), ("-1", "{}"), ("", "[" * 9_000), ("", '{"error": null}')],
)
def test_no_answer_ends_the_thread(collector: Fake, retry_after: str, body: str) -> None:
    refusals = iter(range(2))
    collector.body = body
    collector.answer = lambda batch: (200 if next(refusals, None) is None else 503, {"retry-after": retry_after})
    sender = Sender(collector.url, "desk")
    record = reward()
    sender.write([record])
    assert sender.flush(10)
    assert collector.took() == [record]
    sender.finish()


def test_only_what_will_never_be_taken_is_dropped(collector: Fake, caplog: pytest.LogCaptureFixture) -> None:
    bad = reward(7.0)
    collector.answer = lambda batch: (400 if any(bad in part for part in batch.parts) else 200, {})
    sender = Sender(collector.url, "desk")
    good = [reward() for _ in range(9)]
    for record in (*good[:4], bad, *good[4:]):
        sender.write([record])
    assert sender.flush(10)
    assert sorted(record.target for record in collector.took()) == sorted(record.target for record in good)
    assert sender.rejected == 1
    assert "1 records of 'desk' are refused by the collector: as the test says. They are lost." in caplog.text
    sender.finish()


def test_a_collector_that_is_not_there_costs_the_application_nothing(collector: Fake, tmp_path: Path) -> None:
    sender = Sender("http://127.0.0.1:9", "desk")
    begun = time.perf_counter()
    for _ in range(100):
        sender.write([reward()])
    assert time.perf_counter() - begun < 2.0
    assert not sender.flush(0.2)
    sender.finish()
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.frames")) > 1000


def test_a_next_process_sends_what_one_left(collector: Fake) -> None:
    first = Sender(collector.url, "desk")
    first._started = True  # its thread never ran, as that of a process that was killed
    record = reward()
    first.write([record])
    assert first._spool is not None
    first._spool._lock.release()
    atexit.unregister(first.finish)
    second = Sender(collector.url, "desk")
    second.write([reward()])
    assert second.flush(10)
    second.finish()
    assert record in collector.took()


def test_a_forked_child_has_a_spool_of_its_own(collector: Fake) -> None:
    sender = Sender(collector.url, "desk")
    sender.write([reward(1.0)])
    child = os.fork()
    if not child:
        sender.write([reward(2.0)])
        sender.finish()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    sender.write([reward(3.0)])
    assert sender.flush(10)
    sender.finish()
    assert sorted(record.value for record in collector.took()) == [1.0, 2.0, 3.0]  # type: ignore[union-attr]
    assert len({batch.source for batch in collector.batches}) == 2


def test_dropped_and_left_out_records_are_told(collector: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTUNE_SPOOL_MB", "1")
    long = [RewardRecord(new_id(), "n" * 100_000, 1.0) for _ in range(20)]
    # Down until all is written: a batch on its way while its records are dropped would count them although they arrive.
    collector.answer = lambda batch: (200 if collector.batches or [long[-1]] in batch.parts else 503, {})
    sender = Sender(collector.url, "desk")
    for record in long:
        sender.write([record])
    sender.leave_out(4)
    assert sender.flush(10)
    sender.finish()
    assert sum(batch.dropped for batch in collector.batches) + len(collector.took()) == 20
    assert sum(batch.sampled for batch in collector.batches) == 4
    assert collector.took()[-1] == long[-1]


@pytest.mark.parametrize("text", ["0", "x", "-1"])
def test_a_bound_that_is_none_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTUNE_SPOOL_MB", text)
    with pytest.raises(ConfigError, match="COTUNE_SPOOL_MB"):
        Sender("http://127.0.0.1:9", "desk")


def test_what_is_written_after_the_end_waits_for_the_next_process(collector: Fake) -> None:
    first = Sender(collector.url, "desk")
    first.write([reward()])
    first.finish()
    late = reward()
    first.write([late])
    assert first._spool is not None
    first._spool.close()  # as the system does at the end of the process
    second = Sender(collector.url, "desk")
    second.write([reward()])
    assert second.flush(10)  # which takes up what others left before it sends its own
    assert late in collector.took()
    second.finish()


def test_a_process_without_free_files_loses_nothing(collector: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    sender = Sender(collector.url, "desk")
    record, fails = reward(), threading.Event()
    fails.set()
    opened = Path.open

    def failing(path: Path, *options: Any) -> Any:
        if fails.is_set() and path.suffix == ".frames":
            raise OSError(24, "Too many open files")
        return opened(path, *options)

    monkeypatch.setattr(Path, "open", failing)
    sender.write([record])
    assert not sender.flush(0.2)
    fails.clear()
    assert sender.flush(10)
    assert collector.took() == [record]
    sender.finish()


def test_a_token_that_no_header_can_have_is_refused(collector: Fake) -> None:
    with pytest.raises(ConfigError, match="cannot be sent in a header") as caught:
        Sender(collector.url, "desk", "secret\n")
    assert "secret" not in str(caught.value)


def test_a_folder_that_takes_no_spool_stops_no_application(
    collector: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Records wait in memory until the collector has them, and go to the disk again once it takes them."""
    blocked = tmp_path / "spools"
    blocked.touch()
    monkeypatch.setenv("COTUNE_SPOOL", str(blocked))
    collector.answer = lambda batch: (503, {})
    with cotune.trace(collector.url, app="desk"):
        pass
    sender = senders.sender(collector.url, "desk")
    sender.write([reward(1.0)])
    text = f"The spool {sender.folder} cannot be written (Not a directory): records wait in memory."
    assert text in caplog.text and "COTUNE_SPOOL" in caplog.text
    blocked.unlink()
    sender.write([reward(2.0)])
    assert [path.stat().st_size > 0 for path in sender.folder.glob("*.frames")] == [True]
    collector.answer = lambda batch: (200, {})
    assert sender.flush(10)
    assert [record.value for record in collector.took() if isinstance(record, RewardRecord)] == [2.0, 1.0]
    sender.finish()


FULL_DISK = """
import resource, sys
import cotune
from cotune.integrations.collect import sender as senders

senders.LINGER = 0.01
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # files can be made, and take no byte: as on a full disk
for number in range(3):
    with cotune.trace(sys.argv[1], app="desk") as trace:
        trace.reward(number)
"""


def test_a_full_disk_is_freed_by_the_next_process(collector: Fake, tmp_path: Path) -> None:
    """It records in memory, and sends what earlier processes left, which makes room."""
    first = Sender(collector.url, "desk")
    first._started = True  # its thread never ran, as that of a process that was killed
    left = [reward(number) for number in range(10, 20)]
    first.write(left)
    assert first._spool is not None and first._spool._lock is not None
    first._spool._lock.release()
    atexit.unregister(first.finish)
    done = subprocess.run([sys.executable, "-c", FULL_DISK, collector.url], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    values = [record.value for record in collector.took() if isinstance(record, RewardRecord)]
    assert sorted(values) == [0, 1, 2, *range(10, 20)]
    assert "records wait in memory" in done.stderr
    assert list(first.folder.glob("*.frames")) == []
