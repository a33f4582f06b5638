"""The spool: frames in order, once acknowledged gone, kept by whoever comes next, and bounded."""

from __future__ import annotations

import bisect
import fcntl
import itertools
import os
import random
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cotune.errors import RunError
from cotune.integrations.collect.spool import Spool, abandoned_spools

BOUND = 80_000


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    made = Spool(tmp_path, BOUND)
    yield made
    made.close()


def test_frames_come_in_order_and_are_gone_once_acknowledged(spool: Spool, tmp_path: Path) -> None:
    for number in range(10):
        spool.add(b"%d" % number, 1)
    assert spool.take(3) == [b"0", b"1", b"2"]
    assert spool.take(2) == [b"3", b"4"]
    spool.take_again()
    assert spool.take(2) == [b"0", b"1"]
    spool.acknowledge()
    spool.take(100)
    spool.take_again()  # what is acknowledged does not come again
    assert spool.take(1) == [b"2"]
    assert len(spool.take(100)) == 7
    spool.acknowledge()
    assert (spool.take(100), spool.waiting) == ([], 0)
    assert [path.stat().st_size for path in tmp_path.glob("*.frames")] == [0]
    spool.close()
    assert list(tmp_path.iterdir()) == []


def test_random_writes_and_outages_lose_nothing_and_repeat_nothing(tmp_path: Path) -> None:
    rng = random.Random(3)
    spool, sent, got = Spool(tmp_path, 1 << 30), 0, []
    spool._segment_bytes = 2000
    for _ in range(2000):
        if rng.random() < 0.7:
            spool.add(b"%06d" % sent + b"x" * rng.randrange(200), 1)
            sent += 1
        else:
            taken = spool.take(rng.randrange(1, 3000))
            if rng.random() < 0.5:
                spool.acknowledge()
                got += taken
            else:
                spool.take_again()
    got += spool.take(1 << 30)
    spool.acknowledge()
    assert [int(body[:6]) for body in got] == list(range(sent))
    spool.close()


def test_a_full_spool_drops_the_oldest_and_counts_them(spool: Spool, tmp_path: Path) -> None:
    for number in range(200):
        spool.add(b"%03d" % number + b"x" * 1000, 2)
    kept = [int(body[:3]) for body in spool.take(1 << 30)]
    assert kept == list(range(kept[0], 200))
    assert spool.dropped == 2 * kept[0] > 0
    assert sum(path.stat().st_size for path in tmp_path.glob("*.frames")) <= BOUND


def test_what_a_process_left_is_adopted_without_its_torn_end(tmp_path: Path) -> None:
    left = Spool(tmp_path, BOUND)
    for body in (b"one", b"two", b"three"):
        left.add(body, 1)
    left._lock.release()  # its process has ended
    (path,) = tmp_path.glob("*.frames")
    os.truncate(path, path.stat().st_size - 2)
    own = Spool(tmp_path, BOUND)
    (found,) = abandoned_spools(tmp_path, own.name, BOUND)
    assert (found.take(100), found.dropped) == ([b"one", b"two"], 1)
    found.acknowledge()
    found.close()
    own.close()
    assert list(tmp_path.iterdir()) == []


WRITTEN = [b"%d" % number * 50 for number in range(6)]
"""Frames of 62 bytes, of 7 records each."""


@pytest.mark.parametrize(
    ("damage", "lost", "kept"),
    [
        (lambda text: text.replace(b"2" * 50, b"2" * 49 + b"x"), 7, {2}),
        (lambda text: text.replace(b"2" * 50, b"2" * 49 + b"x").replace(b"3" * 50, b"x" * 50), 1, {2, 3}),
        (lambda text: text[:62] + b"\xff" * 12 + text[74:], 1, {1}),  # a head
        (lambda text: text[:70] + bytes(100) + text[170:], 1, {1, 2}),  # a hole
        (lambda text: text[:70] + text[75:], 1, {1}),  # bytes that are missing
        (lambda text: text[:130] + b"noise" + text[130:], 1, {2}),
        (lambda text: bytes(20) + text[20:], 1, {0}),
        (lambda text: text[:-1], 7, {5}),
        (lambda text: text[:-60], 1, {5}),
        (lambda text: text[:-62] + bytes(62), 1, {5}),
        (lambda text: bytes(len(text)), 1, {0, 1, 2, 3, 4, 5}),
    ],
)
def test_damage_costs_its_own_frames_alone(
    tmp_path: Path, damage: Callable[[bytes], bytes], lost: int, kept: set[int], caplog: pytest.LogCaptureFixture
) -> None:
    """`kept` are the frames that are not; where a frame's head is whole and no other one is damaged, all of its records
    are counted. What is taken again is not counted again."""
    left = Spool(tmp_path, BOUND)
    for body in WRITTEN:
        left.add(body, 7)
    left._lock.release()
    (path,) = tmp_path.glob("*.frames")
    path.write_bytes(damage(path.read_bytes()))
    (found,) = abandoned_spools(tmp_path, "", BOUND)
    expected = [body for number, body in enumerate(WRITTEN) if number not in kept]
    for _ in range(3):
        assert (found.take(1 << 20), found.dropped) == (expected, lost)
        found.take_again()
    found.take(1 << 20)
    found.acknowledge()
    assert found.waiting == 0
    found.close()
    assert caplog.text.count("is damaged from byte") == 1 and f"at least {lost} of its records are lost" in caplog.text


def test_random_damage_costs_few_frames(tmp_path: Path) -> None:
    """Bytes are changed, one after another: frames that they do not lie in come all the same."""
    rng = random.Random(5)
    for number in range(60):
        left = Spool(tmp_path, 1 << 20)
        bodies = [rng.randbytes(rng.randrange(1, 300)) for _ in range(40)]
        for body in bodies:
            left.add(body, 1)
        left._lock.release()
        (path,) = tmp_path.glob("*.frames")
        text, struck = bytearray(path.read_bytes()), set()
        ends = list(itertools.accumulate(12 + len(body) for body in bodies))
        for _ in range(number % 6):
            at = rng.randrange(len(text))
            text[at] ^= rng.randrange(1, 256)
            struck.add(bisect.bisect_right(ends, at))
        path.write_bytes(text)
        (found,) = abandoned_spools(tmp_path, "", 1 << 20)
        untouched = [body for at, body in enumerate(bodies) if at not in struck]
        taken = found.take(1 << 20)
        assert [body for body in taken if body in untouched] == untouched and len(taken) <= len(bodies)
        assert (found.dropped > 0) == (len(taken) < len(bodies)) and found.dropped <= len(bodies) - len(taken)
        found.acknowledge()
        found.close()
        assert list(tmp_path.iterdir()) == []


def test_a_spool_whose_process_lives_is_left_alone(spool: Spool, tmp_path: Path) -> None:
    spool.add(b"one", 1)
    assert list(abandoned_spools(tmp_path, "", BOUND)) == []
    with pytest.raises(RunError, match="is being written by process"):
        Spool(tmp_path, BOUND, spool.name)


def test_a_disk_that_takes_nothing_leaves_frames_in_memory(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    spool.add(b"one", 1)

    def full(fd: int, body: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        assert spool.add(b"two", 1)
        assert (spool.failure, spool.memory_bytes > 0) == ("No space left on device", True)
        assert not spool.add(b"x" * (5 << 20), 3)
    spool.add(b"three", 1)
    assert (spool.failure, spool.dropped) == ("", 3)
    assert spool.take(100) == [b"one", b"three", b"two"]
    spool.take_again()
    assert spool.take(4) == [b"one", b"three"]
    spool.acknowledge()
    assert spool.take(100) == [b"two"]
    spool.acknowledge()
    assert (spool.waiting, spool.memory_bytes) == (0, 0)


def test_a_folder_that_cannot_be_made_leaves_frames_in_memory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    spool = Spool(tmp_path / "file" / "spool", BOUND)
    assert spool.add(b"one", 1)
    assert (spool.failure, spool.take(100), spool.memory_bytes) == ("Not a directory", [b"one"], spool.waiting)
    spool.acknowledge()
    assert spool.waiting == 0
    spool.close()


def test_a_file_system_without_locks_leaves_frames_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    spool = Spool(tmp_path, BOUND)
    assert spool.add(b"one", 1)
    assert "refuses locks (No locks available)" in spool.failure and spool.take(100) == [b"one"]
    assert list(tmp_path.glob("*.frames")) == []  # nobody could tell that its process lives


@pytest.mark.parametrize("removes", [True, False])
def test_a_new_spool_is_not_taken_for_an_abandoned_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removes: bool
) -> None:
    """Another process looks between the making of the lock's file and its locking."""
    lock, looked = fcntl.flock, []

    def late(fd: int, how: int) -> None:
        if not looked:
            looked.append(None)
            looked[:] = abandoned_spools(tmp_path, "", BOUND)
            assert len(looked) == 1
            if removes:
                looked[0].close()
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    spool = Spool(tmp_path, BOUND)
    assert spool.name != looked[0].name
    assert (tmp_path / f"{spool.name}.lock").exists()
    assert list(abandoned_spools(tmp_path, "", BOUND)) == []
    looked[0].close()
    spool.close()
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_text_that_looks_like_heads_costs_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summed, crc32 = [0], zlib.crc32

    def counted(data: bytes, *start: int) -> int:
        summed[0] += len(data)
        return crc32(data, *start)

    left = Spool(tmp_path, 1 << 30)
    left.add(b"one", 1)
    left.add(struct.pack("<III", 400_000, 1, 0) * 70_000, 3)
    left.add(b"two", 1)
    path = left._segments[0].path
    assert path is not None and left._lock is not None
    left._lock.release()
    content = bytearray(path.read_bytes())
    content[15 + 4] ^= 1  # the head of the second frame
    path.write_bytes(content)
    monkeypatch.setattr("cotune.integrations.collect.spool._MOST_CHECKED_BYTES", 10 << 20)
    monkeypatch.setattr("cotune.integrations.collect.spool.zlib.crc32", counted)
    (found,) = abandoned_spools(tmp_path, "", 1 << 30)
    assert found.take(1 << 20)[0] == b"one" and found.dropped > 0
    assert summed[0] < 13 << 20
