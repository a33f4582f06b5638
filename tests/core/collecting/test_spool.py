"""The spool: frames in order, once acknowledged gone, kept by whoever comes next, and bounded."""

from __future__ import annotations

import fcntl
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from cotune.collecting.spool import Spool, abandoned
from cotune.errors import RunError

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
    spool.again()
    assert spool.take(2) == [b"0", b"1"]
    spool.acknowledge()
    spool.take(100)
    spool.again()  # what is acknowledged does not come again
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
    spool._part = 2000
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
                spool.again()
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
    (found,) = abandoned(tmp_path, own.name, BOUND)
    assert (found.take(100), found.dropped) == ([b"one", b"two"], 1)
    found.acknowledge()
    found.close()
    own.close()
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_frame_is_not_sent(tmp_path: Path) -> None:
    left = Spool(tmp_path, BOUND)
    left.add(b"one", 1)
    left.add(b"two", 1)
    left._lock.release()
    (path,) = tmp_path.glob("*.frames")
    path.write_bytes(path.read_bytes().replace(b"two", b"twx"))
    (found,) = abandoned(tmp_path, "", BOUND)
    assert (found.take(100), found.dropped) == ([b"one"], 1)
    found.close()


def test_a_spool_whose_process_lives_is_left_alone(spool: Spool, tmp_path: Path) -> None:
    spool.add(b"one", 1)
    assert list(abandoned(tmp_path, "", BOUND)) == []
    with pytest.raises(RunError, match="is being written by process"):
        Spool(tmp_path, BOUND, spool.name)


def test_a_disk_that_takes_nothing_leaves_frames_in_memory(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    spool.add(b"one", 1)

    def full(fd: int, body: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        assert spool.add(b"two", 1)
        assert (spool.failure, spool.loose > 0) == ("No space left on device", True)
        assert not spool.add(b"x" * (5 << 20), 3)
    spool.add(b"three", 1)
    assert (spool.failure, spool.dropped) == ("", 3)
    assert spool.take(100) == [b"one", b"three", b"two"]
    spool.again()
    assert spool.take(4) == [b"one", b"three"]
    spool.acknowledge()
    assert spool.take(100) == [b"two"]
    spool.acknowledge()
    assert (spool.waiting, spool.loose) == (0, 0)


def test_a_folder_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"The spool .* cannot be made: .* Set COTUNE_SPOOL"):
        Spool(tmp_path / "file" / "spool", BOUND)


@pytest.mark.parametrize("removes", [True, False])
def test_a_new_spool_is_not_taken_for_an_abandoned_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removes: bool
) -> None:
    """Another process looks between the making of the lock's file and its locking."""
    lock, looked = fcntl.flock, []

    def late(fd: int, how: int) -> None:
        if not looked:
            looked.append(None)
            looked[:] = abandoned(tmp_path, "", BOUND)
            assert len(looked) == 1
            if removes:
                looked[0].close()
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    spool = Spool(tmp_path, BOUND)
    assert spool.name != looked[0].name
    assert (tmp_path / f"{spool.name}.lock").exists()
    assert list(abandoned(tmp_path, "", BOUND)) == []
    looked[0].close()
    spool.close()
    assert list(tmp_path.iterdir()) == []
