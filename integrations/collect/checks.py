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
        """Count what is stored for the keys that these records reward, to refuse rewards beyond the limits of a key."""
        app_prefix = key_target(app, "")
        rewarded: set[str] = set()
        new_episodes: Counter[str] = Counter()
        for record in records:
            if isinstance(record, RewardRecord | FeedbackRecord) and record.target.startswith(app_prefix):
                rewarded.add(record.target)
            elif isinstance(record, Episode) and record.key:
                new_episodes[app_prefix + record.key] += 1
        self._episodes = new_episodes
        """The number of stored and new episodes of each key, by reward target."""
        self._names: dict[str, set[str]] = {}
        """The names of the rewards of each key, by reward target."""
        if rewarded:
            rewarded_keys = [target.removeprefix(app_prefix) for target in rewarded]
            for key, count in store.figures().key_counts(app, rewarded_keys).items():
                self._episodes[app_prefix + key] += count
        if targets := rewarded | new_episodes.keys():
            for stored in (store.rewards(targets), store.feedback(targets)):
                for target, names in stored.items():
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
        """Divide records into parts with few rows. Other writers can use the store between the commits of two parts."""
        begin = rows = 0
        for at, record in enumerate(records):
            cost = 0
            if isinstance(record, RewardRecord | FeedbackRecord):
                cost = self._episodes[record.target]
            elif isinstance(record, Episode) and record.key:
                cost = len(self._names.get(key_target(record.app, record.key), ()))
            if rows and rows + cost > MOST_EPISODES:
                yield records[begin:at]
                begin = at
                rows = 0
            rows += cost
        yield records[begin:]


def select_valid(
    records: Iterable[Record], app: str, stored_path: StoredPath, keys: KeyUse, refused: Counter[str]
) -> list[Record]:
    """Select the records that may be stored, and assign them to the application. Refused ones are counted by reason.

    A content address must match the content. As the first record with an id is valid for all, an application could
    otherwise change the contents of messages of another.
    """
    now = time.time()
    paths: dict[str, Digest] = {}
    accepted: list[Record] = []
    for record in records:
        match record:
            case Message():
                fault = "" if has_address(record.id, record.body) else "forged_id"
            case Segment():
                fault = _segment_fault(record, paths, stored_path)
            case CallRecord():
                if not (ID.fullmatch(record.id) and ID.fullmatch(record.episode)):
                    fault = "invalid_id"
                elif len(record.role) > _LONGEST_NAME:
                    fault = "invalid_name"
                else:
                    fault = _time_fault(record)
                record = replace(record, app=app, started=_plausible_start(record, now))
            case Episode():
                fault = "" if ID.fullmatch(record.id) and len(record.key) <= LONGEST_KEY else "invalid_id"
                fault = fault or _time_fault(record)
                record = replace(record, app=app, started=_plausible_start(record, now))
            case RewardRecord():
                fault = _target_fault(record, app)
                if not fault and not (math.isfinite(record.value) and abs(record.value) <= LARGEST_REWARD):
                    fault = "value"
            case FeedbackRecord():
                fault = _target_fault(record, app)
        if not fault and isinstance(record, RewardRecord | FeedbackRecord) and record.target.startswith(KEY):
            fault = keys.fault(record)
        if fault:
            refused[fault] += 1
            continue
        if isinstance(record, RewardRecord | FeedbackRecord):
            # The latest reward is valid, so a time in the future would prevent all corrections.
            record = replace(record, app=app, at=record.at if 0 <= record.at <= now else now)
        accepted.append(record)
    return accepted


def _segment_fault(record: Segment, paths: dict[str, Digest], stored_path: StoredPath) -> str:
    """The reason to refuse a segment. `paths` has the digests of token paths by their ids, as the paths themselves,
    each with all tokens before it, could fill the memory."""
    before = ROOT if record.parent is None else paths.get(record.parent)
    if before is None:
        assert record.parent is not None
        if (stored := stored_path(record.parent)) is None:
            return "unknown_parent"
        before = paths[record.parent] = ROOT.copy()
        before.update(stored)
    path_digest = before.copy()
    path_digest.update(record.packed)
    if len(record.packed) % 4 or path_digest.hexdigest() != record.id:
        return "forged_id"
    paths[record.id] = path_digest
    return ""


def _time_fault(record: CallRecord | Episode) -> str:
    """The reason to refuse the times of a record; empty if they are possible. A latency may be negative, if a clock was
    set back."""
    return "" if 0 <= record.started < math.inf and math.isfinite(record.latency) else "invalid_time"


def _plausible_start(record: CallRecord | Episode, now: float) -> float:
    return now if record.started > now + _CLOCK_TOLERANCE else record.started


def _target_fault(record: RewardRecord | FeedbackRecord, app: str) -> str:
    """The reason to refuse a reward or feedback: a foreign or malformed target, or a bad name. Empty if it is
    accepted.
    """
    target = record.target
    app_prefix = key_target(app, "")
    if target.startswith(KEY):
        if not target.startswith(app_prefix) or not 0 < len(target) - len(app_prefix) <= LONGEST_KEY:
            return "foreign"
    elif TARGET.fullmatch(target) is None:
        return "invalid_id"
    return "" if 0 < len(record.name) <= _LONGEST_NAME else "invalid_name"
