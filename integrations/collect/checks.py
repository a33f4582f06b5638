"""What of a batch may be stored: ids that are what they say they are, and times that no clock of tomorrow has."""

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
_AHEAD = 3600.0
"""Seconds that the clock of an application may be ahead. A later start is stored as that of now: it would never be
old enough to be pruned."""
MOST_NAMES = 32
"""Names of rewards for one key. Each is stored for all episodes of the key."""
MOST_EPISODES = 10_000
"""Episodes of a key that can be rewarded. Each takes a row, and half a second is the longest that a batch may keep the
store from others."""
Digest = hashlib.blake2b
Path = Callable[[str], bytes | None]
"""The packed token path of a segment that is stored; None for one that is not."""


class KeyUse:
    """What is stored for the keys that a batch names. A record for a key can take a row for each episode that has the
    key, and an episode one for each reward of its key."""

    def __init__(self, records: Iterable[Record], app: str, store: Store) -> None:
        own = key_target(app, "")
        rewarded: set[str] = set()
        coming: Counter[str] = Counter()
        for record in records:
            if isinstance(record, RewardRecord | FeedbackRecord) and record.target.startswith(own):
                rewarded.add(record.target)
            elif isinstance(record, Episode) and record.key:
                coming[own + record.key] += 1
        self._episodes = coming
        """How many episodes have the key, with those of the batch, by reward target."""
        self._names: dict[str, set[str]] = {}
        """The names of the rewards of a key, by reward target."""
        if rewarded:
            rewarded_keys = [target.removeprefix(own) for target in rewarded]
            for key, count in store.figures().key_counts(app, rewarded_keys).items():
                self._episodes[own + key] += count
        if targets := rewarded | coming.keys():
            for stored in (store.rewards(targets), store.feedback(targets)):
                for target, names in stored.items():
                    self._names.setdefault(target, set()).update(names)

    def fault(self, record: RewardRecord | FeedbackRecord) -> str:
        """Why a record for a key is refused; empty if it is not, and then its name counts as stored."""
        if self._episodes[record.target] > MOST_EPISODES:
            return "too_many_episodes"
        names = self._names.setdefault(record.target, set())
        if record.name not in names and len(names) >= MOST_NAMES:
            return "too_many_names"
        names.add(record.name)
        return ""

    def slices(self, records: Sequence[Record]) -> Iterator[Sequence[Record]]:
        """Records in parts that take few rows each, to be committed one by one: others can write in between."""
        begin = rows = 0
        for at, record in enumerate(records):
            cost = 0
            if isinstance(record, RewardRecord | FeedbackRecord):
                cost = self._episodes[record.target]
            elif isinstance(record, Episode) and record.key:
                cost = len(self._names.get(key_target(record.app, record.key), ()))
            if rows and rows + cost > MOST_EPISODES:
                yield records[begin:at]
                begin, rows = at, 0
            rows += cost
        yield records[begin:]


def admitted(records: Iterable[Record], app: str, path: Path, keys: KeyUse, refused: Counter[str]) -> list[Record]:
    """Those of some records that may be stored, as the application's. What may not is counted by reason.

    A content address must be that of the content: else one application could give another's messages a content of its
    own, as the first record of an id stands.
    """
    now = time.time()
    paths: dict[str, Digest] = {}
    kept: list[Record] = []
    for record in records:
        match record:
            case Message():
                fault = "" if has_address(record.id, record.body) else "forged_id"
            case Segment():
                fault = _of_segment(record, paths, path)
            case CallRecord():
                fault = "" if ID.fullmatch(record.id) and ID.fullmatch(record.episode) else "invalid_id"
                fault = fault or ("" if len(record.role) <= _LONGEST_NAME else "invalid_name") or _of_times(record)
                record = replace(record, app=app, started=_started(record, now))
            case Episode():
                fault = "" if ID.fullmatch(record.id) and len(record.key) <= LONGEST_KEY else "invalid_id"
                fault = fault or _of_times(record)
                record = replace(record, app=app, started=_started(record, now))
            case RewardRecord():
                fault = _of_reward(record, app)
                fault = fault or (
                    "" if math.isfinite(record.value) and abs(record.value) <= LARGEST_REWARD else "value"
                )
            case FeedbackRecord():
                fault = _of_reward(record, app)
        if not fault and isinstance(record, RewardRecord | FeedbackRecord) and record.target.startswith(KEY):
            fault = keys.fault(record)
        if fault:
            refused[fault] += 1
            continue
        if isinstance(record, RewardRecord | FeedbackRecord):  # of which a clock that is ahead would win for ever
            record = replace(record, app=app, at=record.at if 0 <= record.at <= now else now)
        kept.append(record)
    return kept


def _of_segment(record: Segment, paths: dict[str, Digest], path: Path) -> str:
    """`paths` has digests of token paths by their ids: the paths themselves, each with all before it, could fill the
    memory."""
    before = ROOT if record.parent is None else paths.get(record.parent)
    if before is None:
        assert record.parent is not None
        if (stored := path(record.parent)) is None:
            return "unknown_parent"
        before = paths[record.parent] = ROOT.copy()
        before.update(stored)
    whole = before.copy()
    whole.update(record.packed)
    if len(record.packed) % 4 or whole.hexdigest() != record.id:
        return "forged_id"
    paths[record.id] = whole
    return ""


def _of_times(record: CallRecord | Episode) -> str:
    """ "invalid_time" for times that no clock shows. A latency may be negative, as of a clock that stepped back."""
    return "" if 0 <= record.started < math.inf and math.isfinite(record.latency) else "invalid_time"


def _started(record: CallRecord | Episode, now: float) -> float:
    return now if record.started > now + _AHEAD else record.started


def _of_reward(record: RewardRecord | FeedbackRecord, app: str) -> str:
    target, own = record.target, key_target(app, "")
    if target.startswith(KEY):
        if not target.startswith(own) or not 0 < len(target) - len(own) <= LONGEST_KEY:
            return "foreign"
    elif TARGET.fullmatch(target) is None:
        return "invalid_id"
    return "" if 0 < len(record.name) <= _LONGEST_NAME else "invalid_name"
