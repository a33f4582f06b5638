"""The spool: records that a collector has not acknowledged yet, in files that outlive the process.

A process appends frames to segments of its own. A record is in the system's cache when `add` returns, so `kill -9` does
not lose it. What a process leaves is adopted by the next one with the same folder, under the lock of its owner.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
import threading
import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

from cotune.errors import RunError
from cotune.records.ids import new_id
from cotune.storage.file_lock import FileLock, LockHeldError

log = logging.getLogger("cotune.collect")

_HEAD = struct.Struct("<III")
"""Of a frame: its length, the records in it, and the CRC-32 of both and of what follows."""
_MOST_SUMMED = 2 << 30
"""Bytes that checksums are computed of, about two seconds, to find the next frame after a damaged one. In a text that
was written to look like many heads, all would take hours; the rest of the segment is lost then."""
_PARTS = 8
"""Segments that fill the spool: the oldest one is dropped at a time."""
MEMORY = 4 << 20
"""Bytes of frames that are kept in memory while the disk takes none."""


@dataclass(eq=False)
class _Segment:
    """A file of frames, or with `path` None those that the disk did not take."""

    path: Path | None
    size: int = 0
    """Bytes written."""
    taken: int = 0
    """Bytes that were taken to be sent."""
    done: int = 0
    """Bytes that are acknowledged."""
    damaged: int = 0
    """Bytes up to the end of the last damaged part that was counted."""
    records: int = 0
    """Records in it that are not acknowledged, about."""
    frames: deque[bytes] = field(default_factory=deque)


class Spool:
    """Frames in the order in which they came. `add` is safe from any thread; one thread takes and acknowledges."""

    def __init__(self, folder: Path, bound: int, owner: str = "") -> None:
        """A new spool in `folder`, or the one that the ended process `owner` left there. Raises RunError where that
        cannot be locked, as its owner lives.

        A new spool never raises: while no file can be made in the folder, its frames wait in memory.
        """
        self.folder = folder
        self.dropped = 0
        """Records that were dropped as the spool was full, or that the disk has damaged, and not told to the collector
        yet. Those of a batch that was on its way are among them, although they may have arrived."""
        self.failure = ""
        """Why the disk took no frame at the last attempt."""
        self._part = max(1, bound // _PARTS)
        self._bound = bound
        self._guard = threading.Lock()
        self._file: int | None = None
        self._numbers = 0
        self._segments: deque[_Segment] = deque()
        self._loose = _Segment(None)
        self.name = owner or new_id()
        self._lock: FileLock | None = None
        if owner:
            self._lock = _lock(folder, owner)
            left = sorted(folder.glob(f"{owner}-*.frames"))
            self._segments.extend(_Segment(path, path.stat().st_size) for path in left)
            self._numbers = len(left)
        else:
            with self._guard, contextlib.suppress(OSError, RunError):
                self._claim()

    def add(self, body: bytes, records: int) -> bool:
        """Append a frame; False where it is dropped, as neither the disk nor the memory takes it."""
        head = struct.pack("<II", len(body), records)
        frame = head + struct.pack("<I", zlib.crc32(body, zlib.crc32(head))) + body
        with self._guard:
            try:
                self._append(frame, records)
            except (OSError, RunError) as error:
                self.failure = error.cause if isinstance(error, RunError) else error.strerror or str(error)
                if self._loose.size + len(frame) > MEMORY:
                    self.dropped += records
                    return False
                self._loose.frames.append(frame)
                self._loose.size += len(frame)
                self._loose.records += records
            else:
                self.failure = ""
        return True

    def take(self, most: int) -> list[bytes]:
        """The next frames, of about so many bytes; none where all were taken.

        They are given again, also to another process, unless `acknowledge` follows. Raises OSError where the disk, or
        the system, does not let them be read now.
        """
        bodies: list[bytes] = []
        size = 0
        with self._guard:
            segments = [*self._segments, self._loose]
            sizes = [segment.size for segment in segments]
        for segment, end in zip(segments, sizes, strict=True):
            for body in self._read(segment, end, most - size):
                bodies.append(body)
                size += len(body)
            if size >= most:
                break
        return bodies

    def acknowledge(self) -> None:
        """Forget what was taken."""
        with self._guard:
            while self._segments and self._segments[0].taken >= self._segments[0].size:
                segment = self._segments[0]
                assert segment.path is not None
                if self._file is not None and len(self._segments) == 1:
                    if segment.size:
                        os.ftruncate(self._file, 0)
                    segment.size = segment.taken = segment.done = segment.damaged = segment.records = 0
                    break
                self._segments.popleft()
                with contextlib.suppress(OSError):
                    segment.path.unlink()
            for segment in self._segments:
                segment.done = segment.taken
            loose = self._loose
            while loose.taken and loose.frames:
                size = len(loose.frames.popleft())
                loose.taken -= size
                loose.size -= size

    def again(self) -> None:
        """Give what was taken again: it was not acknowledged."""
        with self._guard:
            for segment in (*self._segments, self._loose):
                segment.taken = segment.done

    def tell_dropped(self, count: int) -> None:
        """Take so many dropped records as told."""
        with self._guard:
            self.dropped -= count

    @property
    def waiting(self) -> int:
        """Bytes that are not acknowledged."""
        with self._guard:
            return sum(segment.size - segment.done for segment in self._segments) + self._loose.size

    @property
    def loose(self) -> int:
        """Bytes of them that are in memory alone."""
        with self._guard:
            return self._loose.size

    def close(self) -> None:
        """Give the lock back, with all files where nothing waits. What waits is adopted by another process."""
        with self._guard:
            left = any(segment.size > segment.done for segment in self._segments)
            if self._file is not None:
                os.close(self._file)
                self._file = None
            if not left:
                with contextlib.suppress(OSError):
                    for segment in self._segments:
                        assert segment.path is not None
                        segment.path.unlink(missing_ok=True)
                    (self.folder / f"{self.name}.lock").unlink(missing_ok=True)
        if self._lock is not None:
            self._lock.release()

    def after_fork(self) -> None:
        """In a forked child: let go of the parent's files."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        self._segments.clear()

    def _claim(self) -> None:
        """Lock a name in the folder, so that no other process takes this spool for an abandoned one. Raises OSError, or
        RunError where the file system has no locks."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.name, self._lock = _new(self.folder)

    def _append(self, frame: bytes, records: int) -> None:
        if self._lock is None:
            self._claim()
        last = self._segments[-1] if self._segments else None
        if self._file is None or last is None or last.size >= self._part:
            last = self._begin()
        assert self._file is not None
        written = 0
        try:
            while written < len(frame):
                written += os.write(self._file, frame[written:])
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, last.size)
            raise
        last.size += len(frame)
        last.records += records
        self._bounded()

    def _begin(self) -> _Segment:
        path = self.folder / f"{self.name}-{self._numbers:06}.frames"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        if self._file is not None:
            os.close(self._file)
        self._file = file
        self._numbers += 1
        self._segments.append(_Segment(path))
        return self._segments[-1]

    def _bounded(self) -> None:
        """Drop the oldest segments of a full spool."""
        while len(self._segments) > 1 and sum(segment.size for segment in self._segments) > self._bound:
            oldest = self._segments.popleft()
            assert oldest.path is not None
            dropped = oldest.records
            with contextlib.suppress(OSError):
                dropped = dropped or sum(frame.records for frame in _frames(oldest.path, 0, oldest.size))
                oldest.path.unlink()
            self.dropped += dropped

    def _read(self, segment: _Segment, end: int, most: int) -> Iterator[bytes]:
        """Frames of a segment from where it was taken last, up to `end`, until there are `most` bytes."""
        if segment.path is None:
            at = 0
            for loose in list(segment.frames):
                if at >= segment.taken and most > 0:
                    segment.taken += len(loose)
                    most -= len(loose)
                    yield loose[_HEAD.size :]
                at += len(loose)
            return
        for frame in _frames(segment.path, segment.taken, end):
            if most <= 0:
                return
            if frame.body is None and frame.end > segment.damaged:
                text = "The spool %s is damaged from byte %d to %d: at least %d of its records are lost."
                log.error(text, segment.path, segment.taken, frame.end, frame.records)
                self.dropped += frame.records
                segment.damaged = frame.end
            segment.taken = frame.end
            if frame.body is not None:
                most -= len(frame.body)
                yield frame.body
        if most > 0:  # where the file is gone
            segment.taken = end


def _lock(folder: Path, name: str) -> FileLock:
    # On a full disk too: sending what an ended process left there is what makes room.
    return FileLock(folder / f"{name}.lock", f"The spool {name}", on_full_disk=True)


def _new(folder: Path) -> tuple[str, FileLock]:
    """The name and the lock of a new spool. Whoever looks for abandoned ones may take a lock, or even remove its file,
    between its making and its locking: then another name is taken."""
    for _ in range(20):
        name = new_id()
        with contextlib.suppress(LockHeldError):
            lock = _lock(folder, name)
            if lock.is_in_place():
                return name, lock
            lock.release()
    return name, _lock(folder, name)


class _Frame(NamedTuple):
    """A frame that ends at byte `end` of a file; or, without a body, what lies before the next whole one, of which so
    many records at least are lost."""

    body: bytes | None
    records: int
    end: int


def _frames(path: Path, start: int, end: int) -> Iterator[_Frame]:
    """The frames of a file from one place to another, and the damaged parts between them."""
    try:
        file = path.open("rb")
    except FileNotFoundError:  # dropped meanwhile
        return
    with file:
        while start < end:
            frame = _frame(file, start, end) or _damaged(file, start, end)
            yield frame
            start = frame.end


def _frame(file: BinaryIO, start: int, end: int) -> _Frame | None:
    file.seek(start)
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    length, records, _ = _HEAD.unpack(head)
    at = start + _HEAD.size + length
    body = file.read(length) if at <= end else b""
    return _Frame(body, records, at) if _belong(head, body) else None


def _damaged(file: BinaryIO, start: int, end: int) -> _Frame:
    """From a frame that its process did not finish, or that the disk changed, to the next whole one."""
    file.seek(start)
    data = memoryview(file.read(end - start))
    at, budget = 1, _MOST_SUMMED
    while at < len(data):
        whole = _is_frame(data[at:])
        if whole or budget < 0:
            break
        if whole is False:  # it had the length of one: its sum was computed
            budget -= _HEAD.unpack_from(data[at:])[0]
        at += 1
    at = at if budget >= 0 else len(data)
    length, records, _ = _HEAD.unpack(data[: _HEAD.size]) if len(data) >= _HEAD.size else (0, 0, 0)
    known = _HEAD.size + length == at or (at == len(data) < _HEAD.size + length)
    return _Frame(None, records if known and 0 < records <= length else 1, end if at == len(data) else start + at)


def _is_frame(data: memoryview) -> bool | None:
    """Whether these bytes begin with a whole frame; None where their head alone says no. A record takes a byte at
    least, which tells most of them apart without their sum."""
    if len(data) < _HEAD.size:
        return None
    length, records, _ = _HEAD.unpack_from(data)
    if not 0 < records <= length <= len(data) - _HEAD.size:
        return None
    return _belong(data[: _HEAD.size], data[_HEAD.size : _HEAD.size + length])


def _belong(head: bytes | memoryview, body: bytes | memoryview) -> bool:
    """Whether a frame's head names this body."""
    length, _, crc = _HEAD.unpack(head)
    return bool(len(body) == length and zlib.crc32(body, zlib.crc32(head[:8])) == crc)


def abandoned(folder: Path, own: str, bound: int) -> Iterator[Spool]:
    """The spools of `folder` whose processes have ended, one after another, each under its lock."""
    for path in sorted(folder.glob("*.lock")):
        if path.stem == own:
            continue
        with contextlib.suppress(RunError, OSError):
            yield Spool(folder, bound, path.stem)
