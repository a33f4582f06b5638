"""The spool: files with the records that a collector has not acknowledged yet. They remain when the process ends.

Each process appends frames to its segments. When `add` returns, the record is in the operating system's cache, so
`kill -9` does not lose it. A later process with the same folder locks the spool of an ended process and sends it.
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
"""The head of a frame: its length, its number of records, and the CRC-32 of both and of the body."""
_MOST_CHECKED_BYTES = 2 << 30
"""The most bytes whose checksums are computed to find the next frame after a damaged one, which takes two seconds. A
text that imitates many heads would take hours, and then the remaining segment is lost."""
_SEGMENTS_PER_SPOOL = 8
"""The number of segments of a full spool. Its oldest segment is dropped as a whole."""
MOST_MEMORY_BYTES = 4 << 20
"""The most bytes of frames that wait in memory while the disk cannot be written."""


@dataclass(eq=False)
class _Segment:
    """A file of frames. With `path` None, the frames are in memory, as the disk could not be written."""

    path: Path | None
    size: int = 0
    """The number of written bytes."""
    taken: int = 0
    """The number of bytes that were taken in order to send them."""
    acknowledged: int = 0
    """The number of acknowledged bytes."""
    damaged: int = 0
    """The end of the last damaged part that was counted."""
    records: int = 0
    """The approximate number of records that are not acknowledged."""
    frames: deque[bytes] = field(default_factory=deque)


class Spool:
    """Frames in the order of their arrival. Any thread may call `add`. Only one thread may take and acknowledge."""

    def __init__(self, folder: Path, bound: int, left_spool: str = "") -> None:
        """Make a new spool in `folder`, or open the spool with the name `left_spool`, which an ended process has left.

        A new spool never raises an error: its frames wait in memory while no file can be made in the folder. A left
        spool raises RunError if its process still runs. `bound` is the most bytes that the spool keeps on the disk.
        """
        self.folder = folder
        self.dropped = 0
        """The number of records that were dropped from a full spool or damaged on the disk, until it is reported to the
        collector. It includes records of a batch that was being sent, although they may have arrived."""
        self.failure = ""
        """The reason why the last frame could not be written to the disk."""
        self._segment_bytes = max(1, bound // _SEGMENTS_PER_SPOOL)
        self._bound = bound
        self._guard = threading.Lock()
        self._file: int | None = None
        self._next_number = 0
        self._segments: deque[_Segment] = deque()
        self._in_memory = _Segment(None)
        self.name = left_spool or new_id()
        self._lock: FileLock | None = None
        if left_spool:
            self._lock = _lock_spool(folder, left_spool)
            paths = sorted(folder.glob(f"{left_spool}-*.frames"))
            self._segments.extend(_Segment(path, path.stat().st_size) for path in paths)
            self._next_number = len(paths)
        else:
            with self._guard, contextlib.suppress(OSError, RunError):
                self._claim_name()

    def add(self, body: bytes, records: int) -> bool:
        """Append a frame. Returns False if it is dropped because the disk cannot be written and the memory is full."""
        head = struct.pack("<II", len(body), records)
        frame = head + struct.pack("<I", zlib.crc32(body, zlib.crc32(head))) + body
        with self._guard:
            try:
                self._append(frame, records)
            except (OSError, RunError) as error:
                self.failure = error.cause if isinstance(error, RunError) else error.strerror or str(error)
                if self._in_memory.size + len(frame) > MOST_MEMORY_BYTES:
                    self.dropped += records
                    return False
                self._in_memory.frames.append(frame)
                self._in_memory.size += len(frame)
                self._in_memory.records += records
            else:
                self.failure = ""
        return True

    def take(self, most: int) -> list[bytes]:
        """Take the next frames, up to about `most` bytes; none if all were taken.

        Unless they are acknowledged, this process or another takes them again. Raises OSError if they cannot be read.
        """
        bodies: list[bytes] = []
        size = 0
        with self._guard:
            # Another thread may append to the newest file meanwhile: only frames up to its present size are read.
            segments_and_ends = [(segment, segment.size) for segment in self._segments]
        for segment, end in segments_and_ends:
            for body in self._take_from_file(segment, end, most - size):
                bodies.append(body)
                size += len(body)
            if size >= most:
                return bodies
        bodies += self._take_from_memory(most - size)
        return bodies

    def acknowledge(self) -> None:
        """Remove all frames that were taken, because the collector has them now."""
        with self._guard:
            # 1. Files whose frames were all taken.
            while self._segments and self._segments[0].taken >= self._segments[0].size:
                segment = self._segments[0]
                assert segment.path is not None
                if self._file is not None and len(self._segments) == 1:
                    # It is the open file. It is emptied, not removed, so that the next record needs no new file.
                    if segment.size:
                        os.ftruncate(self._file, 0)
                    self._segments[0] = _Segment(segment.path)
                    break
                self._segments.popleft()
                with contextlib.suppress(OSError):
                    segment.path.unlink()
            # 2. A file that was taken in part keeps all its frames, and remembers the acknowledged part.
            for segment in self._segments:
                segment.acknowledged = segment.taken

            # 3. Frames in memory. `taken` bytes are at their beginning.
            in_memory = self._in_memory
            while in_memory.taken and in_memory.frames:
                frame_bytes = len(in_memory.frames.popleft())
                in_memory.taken -= frame_bytes
                in_memory.size -= frame_bytes

    def take_again(self) -> None:
        """Take the frames again that were taken and not acknowledged."""
        with self._guard:
            for segment in (*self._segments, self._in_memory):
                segment.taken = segment.acknowledged

    def subtract_dropped(self, count: int) -> None:
        """Subtract dropped records that were reported to the collector."""
        with self._guard:
            self.dropped -= count

    @property
    def waiting(self) -> int:
        """The number of bytes that are not acknowledged."""
        with self._guard:
            return sum(segment.size - segment.acknowledged for segment in self._segments) + self._in_memory.size

    @property
    def memory_bytes(self) -> int:
        """The number of waiting bytes that are only in memory."""
        with self._guard:
            return self._in_memory.size

    def close(self) -> None:
        """Release the lock, and remove all files if no frame waits. Another process sends waiting frames."""
        with self._guard:
            has_waiting = any(segment.size > segment.acknowledged for segment in self._segments)
            if self._file is not None:
                os.close(self._file)
                self._file = None
            if not has_waiting:
                with contextlib.suppress(OSError):
                    for segment in self._segments:
                        assert segment.path is not None
                        segment.path.unlink(missing_ok=True)
                    (self.folder / f"{self.name}.lock").unlink(missing_ok=True)
        if self._lock is not None:
            self._lock.release()

    def after_fork(self) -> None:
        """Close the parent's files in a forked child."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        self._segments.clear()

    def _claim_name(self) -> None:
        """Lock a name in the folder, so that no other process regards this spool as abandoned. Raises OSError, and
        RunError if the file system has no locks."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.name, self._lock = _new_spool(self.folder)

    def _append(self, frame: bytes, records: int) -> None:
        """Append a frame with `records` records to the last file, or to a new one if that is full."""
        if self._lock is None:
            self._claim_name()
        newest = self._segments[-1] if self._segments else None
        if self._file is None or newest is None or newest.size >= self._segment_bytes:
            segment = self._begin_segment()
        else:
            segment = newest
        assert self._file is not None
        written = 0
        try:
            while written < len(frame):
                written += os.write(self._file, frame[written:])
        except OSError:
            # Half a frame would make the frames after it unreadable.
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, segment.size)
            raise
        segment.size += len(frame)
        segment.records += records
        self._drop_oldest()

    def _begin_segment(self) -> _Segment:
        """Begin a new file of the spool. Files are readable for their owner only, because records contain prompts."""
        path = self.folder / f"{self.name}-{self._next_number:06}.frames"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        if self._file is not None:
            os.close(self._file)
        self._file = file
        self._next_number += 1
        self._segments.append(_Segment(path))
        return self._segments[-1]

    def _drop_oldest(self) -> None:
        """Drop the oldest segments of a full spool."""
        while len(self._segments) > 1 and sum(segment.size for segment in self._segments) > self._bound:
            oldest = self._segments.popleft()
            assert oldest.path is not None
            n_records = oldest.records
            with contextlib.suppress(OSError):
                if not n_records:  # they were not counted, as in the files of an ended process
                    n_records = sum(frame.records for frame in _read_frames(oldest.path, 0, oldest.size))
                oldest.path.unlink()
            self.dropped += n_records

    def _take_from_memory(self, most: int) -> Iterator[bytes]:
        """Take the next frames in memory, up to about `most` bytes. Yields their bodies."""
        segment = self._in_memory
        frame_start = 0
        size = 0
        for frame in list(segment.frames):
            # Frames before the position `segment.taken` were taken already, and wait for their acknowledgement.
            if frame_start >= segment.taken and size < most:
                segment.taken += len(frame)
                size += len(frame)
                yield frame[_HEAD.size :]
            frame_start += len(frame)

    def _take_from_file(self, segment: _Segment, end: int, most: int) -> Iterator[bytes]:
        """Take the next frames of a file before `end`, up to about `most` bytes. Yields their bodies.

        Damaged parts are logged, and their records are counted as dropped.
        """
        assert segment.path is not None
        size = 0
        for frame in _read_frames(segment.path, segment.taken, end):
            if size >= most:
                return
            if frame.body is None and frame.end > segment.damaged:
                text = "The spool %s is damaged from byte %d to %d: at least %d of its records are lost."
                log.error(text, segment.path, segment.taken, frame.end, frame.records)
                self.dropped += frame.records
                segment.damaged = frame.end
            segment.taken = frame.end
            if frame.body is not None:
                size += len(frame.body)
                yield frame.body
        if size < most:
            # All was read. If the file was removed meanwhile, no frame has set this.
            segment.taken = end


def _lock_spool(folder: Path, name: str) -> FileLock:
    # A spool must also be locked on a full disk: to send its records frees space.
    return FileLock(folder / f"{name}.lock", f"The spool {name}", on_full_disk=True)


def _new_spool(folder: Path) -> tuple[str, FileLock]:
    """Make a name and a lock for a new spool. A process that searches for abandoned spools may lock the new file, or
    remove it, before this process has locked it. Then another name is tried."""
    for _ in range(20):
        name = new_id()
        with contextlib.suppress(LockHeldError):
            lock = _lock_spool(folder, name)
            if lock.is_in_place():
                return name, lock
            lock.release()
    return name, _lock_spool(folder, name)


class _Frame(NamedTuple):
    """A frame that ends at byte `end` of a file. Without a body, it is the damaged part before the next whole frame, in
    which at least `records` are lost."""

    body: bytes | None
    records: int
    end: int


def _read_frames(path: Path, start: int, end: int) -> Iterator[_Frame]:
    """Read the frames of a part of a file, and the damaged parts between them."""
    try:
        file = path.open("rb")
    except FileNotFoundError:  # dropped meanwhile
        return
    with file:
        while start < end:
            frame = _read_frame(file, start, end) or _damaged_part(file, start, end)
            yield frame
            start = frame.end


def _read_frame(file: BinaryIO, start: int, end: int) -> _Frame | None:
    """The frame at byte `start`; None if it is incomplete or damaged, as the last one is after a crash."""
    file.seek(start)
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    length, records, _ = _HEAD.unpack(head)
    frame_end = start + _HEAD.size + length
    body = file.read(length) if frame_end <= end else b""
    return _Frame(body, records, frame_end) if _is_intact(head, body) else None


def _damaged_part(file: BinaryIO, start: int, end: int) -> _Frame:
    """The part of a file from an unfinished or damaged frame at `start` to the next whole frame, with the number of
    records that are lost in it.

    The process may have ended while it wrote, so every offset is tried until a whole frame is found. The head of the
    damaged frame tells the number of its records if it is credible; otherwise one lost record is counted.
    """
    file.seek(start)
    data = memoryview(file.read(end - start))
    part_length = _find_frame(data)
    reaches_end = part_length == len(data)
    lost_records = 1
    if len(data) >= _HEAD.size:
        length, records, _ = _HEAD.unpack(data[: _HEAD.size])
        # The head is only credible if the next frame begins at its end, or if the file ends before.
        frame_length = _HEAD.size + length
        is_cut_off = reaches_end and part_length < frame_length
        is_credible = frame_length == part_length or is_cut_off
        if is_credible and 0 < records <= length:
            lost_records = records
    return _Frame(None, lost_records, end if reaches_end else start + part_length)


def _find_frame(data: memoryview) -> int:
    """The offset, above 0, of the first whole frame in damaged data; the length of the data if there is none.

    It is also the length of the data if the search would compute checksums of more than `_MOST_CHECKED_BYTES`.
    """
    checked_bytes = 0
    for offset in range(1, len(data) - _HEAD.size + 1):
        head = data[offset : offset + _HEAD.size]
        length, records, _ = _HEAD.unpack(head)
        # Each record takes at least one byte, so most offsets are ruled out without computing a checksum.
        body_start = offset + _HEAD.size
        if not 0 < records <= length <= len(data) - body_start:
            continue
        if _is_intact(head, data[body_start : body_start + length]):
            return offset
        checked_bytes += length
        if checked_bytes > _MOST_CHECKED_BYTES:
            break
    return len(data)


def _is_intact(head: bytes | memoryview, body: bytes | memoryview) -> bool:
    """Whether the head and the body belong to one frame, by the length and the checksum in the head."""
    length, _, crc = _HEAD.unpack(head)
    return bool(len(body) == length and zlib.crc32(body, zlib.crc32(head[:8])) == crc)


def abandoned_spools(folder: Path, name_of_this: str, bound: int) -> Iterator[Spool]:
    """Open the spools of `folder` whose processes have ended, one after another. Each is locked.

    `name_of_this` is the name of this process's spool, which is left out.
    """
    for path in sorted(folder.glob("*.lock")):
        if path.stem == name_of_this:
            continue
        # The spool of a running process is locked, and another process may have sent and removed this one.
        with contextlib.suppress(RunError, OSError):
            yield Spool(folder, bound, path.stem)
