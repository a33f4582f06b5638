"""Checks which records of a batch may be stored: their ids must match their contents, and their times be possible."""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from msgspec.structs import replace

from cotune.records.ids import ID, KEY, LONGEST_KEY, ROOT, TARGET, has_address, key_target
from cotune.records.structs import (
    LARGEST_REWARD,
    CallRecord,
    Episode,
    FeedbackRecord,
    Message,
    Record,
    RewardRecord,
    Segment,
)
from cotune.storage.protocol import Store

_LONGEST_NAME = 200
_CLOCK_TOLERANCE = 3600.0
"""The most seconds by which an application's clock may be ahead. A later start is replaced by the present time, as the
record would never be old enough to be pruned."""
MOST_NAMES = 32
"""The most names of rewards for one key. Each is stored for all episodes of the key."""
MOST_EPISODES = 10_000
"""The most episodes of a key that can be rewarded. Each takes a row, and a batch may block the store for half a second
at most."""
Digest = hashlib.blake2b
StoredPath = Callable[[str], bytes | None]
"""The packed token path of a stored segment; None for other segments."""


class KeyUse:
    """The stored episodes and rewards of the keys in a batch. A record for a key can take a row for each episode of the
    key, and an episode can take a row for each reward of its key."""

    def __init__(self, records: Iterable[Record], app: str, store: Store) -> None:
        """Read how many episodes and rewards the store has for the keys in `records`, to refuse rewards beyond the
        limits of a key. Keys are written as reward targets here, with the application before the key.
        """
        self._episodes: Counter[str] = Counter()
        """The number of stored and new episodes of each key."""
        self._names: dict[str, set[str]] = {}
        """The names of the rewards of each key."""
        app_prefix = key_target(app, "")
        rewarded_targets: set[str] = set()
        for record in records:
            if isinstance(record, RewardRecord | FeedbackRecord) and record.target.startswith(app_prefix):
                rewarded_targets.add(record.target)
            elif isinstance(record, Episode) and record.key:
                self._episodes[app_prefix + record.key] += 1
        # A new episode takes a row for each reward of its key that is stored already.
        targets = rewarded_targets | self._episodes.keys()
        if rewarded_targets:
            rewarded_keys = [target.removeprefix(app_prefix) for target in rewarded_targets]
            for key, count in store.figures().key_counts(app, rewarded_keys).items():
                self._episodes[app_prefix + key] += count
        if targets:
            for names_of_target in (store.rewards(targets), store.feedback(targets)):
                for target, names in names_of_target.items():
                    self._names.setdefault(target, set()).update(names)

    def fault(self, record: RewardRecord | FeedbackRecord) -> str:
        """The reason to refuse a record for a key. It is empty for an accepted record, whose name is then counted."""
        if self._episodes[record.target] > MOST_EPISODES:
            return "too_many_episodes"
        names = self._names.setdefault(record.target, set())
        if record.name not in names and len(names) >= MOST_NAMES:
            return "too_many_names"
        names.add(record.name)
        return ""

    def slices(self, records: Sequence[Record]) -> Iterator[Sequence[Record]]:
        """Divide the records of a batch into parts that add few rows to the store. Each part is committed alone, so
        that other writers can use the store in between.
        """
        first = 0
        rows = 0
        for index, record in enumerate(records):
            # A reward for a key takes a row for each episode of the key. An episode takes a row for each reward that
            # its key has already. Other records take only their own row, which is not counted.
            added_rows = 0
            if isinstance(record, RewardRecord | FeedbackRecord):
                added_rows = self._episodes[record.target]
            elif isinstance(record, Episode) and record.key:
                added_rows = len(self._names.get(key_target(record.app, record.key), ()))
            if rows and rows + added_rows > MOST_EPISODES:
                yield records[first:index]
                first = index
                rows = 0
            rows += added_rows
        yield records[first:]


def select_valid(
    records: Iterable[Record], app: str, stored_path: StoredPath, keys: KeyUse, refused: Counter[str]
) -> list[Record]:
    """Select the records that may be stored, and assign them to the application. Refused ones are counted by reason.

    An id that is an address of the content must match the content. All applications share the first record with an id,
    so one application could otherwise change the messages of another.
    """
    now = time.time()
    path_digests: dict[str, Digest] = {}
    accepted: list[Record] = []
    for record in records:
        fault = _record_fault(record, app, path_digests, stored_path)
        if not fault and isinstance(record, RewardRecord | FeedbackRecord) and record.target.startswith(KEY):
            fault = keys.fault(record)
        if fault:
            refused[fault] += 1
        else:
            accepted.append(_assign(record, app, now))
    return accepted


def _record_fault(record: Record, app: str, path_digests: dict[str, Digest], stored_path: StoredPath) -> str:
    """The reason to refuse a record, whatever else is in its batch; empty if it is accepted.

    `path_digests` and `stored_path` have the token paths that segments of tokens may refer to, see `_segment_fault`.
    """
    match record:
        case Message():
            return "" if has_address(record.id, record.body) else "forged_id"
        case Segment():
            return _segment_fault(record, path_digests, stored_path)
        case CallRecord():
            if not (ID.fullmatch(record.id) and ID.fullmatch(record.episode)):
                return "invalid_id"
            if len(record.role) > _LONGEST_NAME:
                return "invalid_name"
            return _time_fault(record)
        case Episode():
            if not ID.fullmatch(record.id) or len(record.key) > LONGEST_KEY:
                return "invalid_id"
            return _time_fault(record)
        case RewardRecord():
            if fault := _target_fault(record, app):
                return fault
            return "" if math.isfinite(record.value) and abs(record.value) <= LARGEST_REWARD else "value"
        case FeedbackRecord():
            return _target_fault(record, app)


def _assign(record: Record, app: str, now: float) -> Record:
    """The record as a record of the application `app`. A time in the future is replaced by `now`."""
    match record:
        case CallRecord() | Episode():
            started = now if record.started > now + _CLOCK_TOLERANCE else record.started
            return replace(record, app=app, started=started)
        case RewardRecord() | FeedbackRecord():
            # The latest reward is valid, so a time in the future would prevent all corrections.
            return replace(record, app=app, at=record.at if 0 <= record.at <= now else now)
        case Message() | Segment():
            return record  # named by its content, and shared by all applications


def _segment_fault(record: Segment, path_digests: dict[str, Digest], stored_path: StoredPath) -> str:
    """The reason to refuse a segment of a prompt's tokens; empty if it is accepted.

    The id of a segment must be the digest of its token path, which is all tokens before the segment and its own.
    `path_digests` has the digest of each path by its id. It does not have the paths themselves, which could fill the
    memory. The digests of this segment and of its parent are added to it.
    """
    if record.parent is None:
        parent_digest = ROOT
    elif record.parent in path_digests:
        parent_digest = path_digests[record.parent]
    else:
        # The parent came in an earlier batch.
        tokens_before = stored_path(record.parent)
        if tokens_before is None:
            return "unknown_parent"
        parent_digest = ROOT.copy()
        parent_digest.update(tokens_before)
        path_digests[record.parent] = parent_digest
    path_digest = parent_digest.copy()
    path_digest.update(record.packed)
    has_whole_tokens = len(record.packed) % 4 == 0  # a token id takes 4 bytes
    if not has_whole_tokens or path_digest.hexdigest() != record.id:
        return "forged_id"
    path_digests[record.id] = path_digest
    return ""


def _time_fault(record: CallRecord | Episode) -> str:
    """The reason to refuse the times of a record; empty if they are possible. A latency may be negative, if a clock was
    set back."""
    return "" if 0 <= record.started < math.inf and math.isfinite(record.latency) else "invalid_time"


def _target_fault(record: RewardRecord | FeedbackRecord, app: str) -> str:
    """The reason to refuse the target or the name of a reward or feedback; empty if both are accepted.

    A target is an id, or a key that the application has given to an episode. Its name comes before the key in the
    target, so that it cannot reward the episodes of other applications.
    """
    target = record.target
    if target.startswith(KEY):
        app_prefix = key_target(app, "")
        key_length = len(target) - len(app_prefix)
        if not target.startswith(app_prefix) or not 0 < key_length <= LONGEST_KEY:
            return "foreign"
    elif TARGET.fullmatch(target) is None:
        return "invalid_id"
    if not 0 < len(record.name) <= _LONGEST_NAME:
        return "invalid_name"
    return ""
