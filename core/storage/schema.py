"""Records as rows of SQLite and back: the schema of the file and the encoding of its columns."""

from __future__ import annotations

import json
import struct
import time
from array import array
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Annotated, Any, TypeVar, cast

import msgspec
from msgspec.structs import replace

from cotune.errors import RecordError
from cotune.json_values import plain
from cotune.records.ids import pack_ids, packer, unpack_ids
from cotune.records.images import split_images
from cotune.records.structs import (
    CallRecord,
    Candidate,
    Episode,
    FeedbackRecord,
    Message,
    Record,
    RewardRecord,
    ShownToken,
)
from cotune.storage.outcomes import metric

Row = tuple[Any, ...]
Timed = TypeVar("Timed", CallRecord, Episode)

VERSION = 6
"""Version of the tables of a records file, its `user_version`; raised when they change."""

APPLICATION = 0x636F7475
"""`application_id` of a records file ("cotu")."""

_LATEST = 9e9
"""Upper bound of times, in seconds: the sum of two fits 64 bits of nanoseconds."""

TABLES = {
    "images": ("id TEXT PRIMARY KEY", "media_type TEXT NOT NULL", "data BLOB NOT NULL", "at REAL NOT NULL"),
    "messages": ("id TEXT PRIMARY KEY", "body TEXT NOT NULL", "at REAL NOT NULL"),
    "segments": ("id TEXT PRIMARY KEY", "parent TEXT", "token_ids BLOB NOT NULL", "at REAL NOT NULL"),
    "calls": (
        *("id TEXT PRIMARY KEY", "episode TEXT NOT NULL", "step INTEGER NOT NULL", "role TEXT NOT NULL"),
        *("turn INTEGER NOT NULL", "status TEXT NOT NULL", "prompt TEXT", "prompt_tokens INTEGER NOT NULL"),
        *("completion_tokens INTEGER NOT NULL", "app TEXT NOT NULL", "model TEXT NOT NULL", "policy TEXT"),
        *("version INTEGER", "started REAL NOT NULL", "latency REAL NOT NULL", "drawn INTEGER NOT NULL"),
        *("body TEXT NOT NULL", "candidates TEXT NOT NULL", "token_ids BLOB NOT NULL", "logprobs BLOB NOT NULL"),
    ),
    "episodes": (
        *("id TEXT PRIMARY KEY", "task TEXT NOT NULL", "phase TEXT NOT NULL", "training_step INTEGER"),
        *("status TEXT NOT NULL", "app TEXT NOT NULL", "key TEXT NOT NULL", "started REAL NOT NULL"),
        *("latency REAL NOT NULL", "calls INTEGER NOT NULL", "error TEXT", "blame TEXT", "success REAL"),
        *("body TEXT NOT NULL", "metrics TEXT NOT NULL"),
    ),
    "rewards": (
        *("target TEXT", "name TEXT", "value REAL", "at REAL", "app TEXT NOT NULL DEFAULT ''"),
        "PRIMARY KEY (target, name)",
    ),
    "feedback": (
        *("target TEXT", "name TEXT", "text TEXT", "at REAL", "cut INTEGER", "app TEXT NOT NULL DEFAULT ''"),
        "PRIMARY KEY (target, name)",
    ),
    "replaced": (
        *("target TEXT", "name TEXT", "at REAL", "value REAL", "text TEXT", "app TEXT NOT NULL DEFAULT ''"),
        "PRIMARY KEY (target, name, at)",
    ),
    "consumed": ("target TEXT PRIMARY KEY", "training_step INTEGER NOT NULL", "is_group INTEGER NOT NULL"),
    "counters": ("name TEXT PRIMARY KEY", "value INTEGER NOT NULL"),
}
"""Columns of each table, in SQLite's types; what makes queries quick stands in columns beside the whole record."""

INDEXES = """
CREATE INDEX calls_by_episode ON calls (episode, step);
CREATE INDEX calls_drawn ON calls (id) WHERE drawn > 1;
CREATE INDEX episodes_by_step ON episodes (phase, training_step);
CREATE INDEX episodes_by_task ON episodes (task);
CREATE INDEX episodes_by_key ON episodes (app, key) WHERE key != '';
"""

FIGURES = """
CREATE INDEX calls_by_role ON calls
    (role, model, status, turn, prompt_tokens, completion_tokens, latency, drawn, started);
CREATE INDEX calls_failed ON calls (role, status) WHERE status != 'ok';
CREATE INDEX calls_by_policy ON calls (policy) WHERE policy IS NOT NULL;
CREATE INDEX episodes_failed ON episodes (phase) WHERE status = 'error';
CREATE INDEX episodes_with_success ON episodes (phase) WHERE success IS NOT NULL;
"""
"""Indexes with all columns that sums over calls and episodes read, so that they need no rows."""

COLUMNS = {
    table: [column.split()[0] for column in columns if not column.startswith("PRIMARY KEY")]
    for table, columns in TABLES.items()
}
"""Names of the columns of each table, which a store has unless it is damaged."""

FEEDBACK = """feedback LEFT JOIN rewards USING (target, name)
    WHERE coalesce(rewards.at, feedback.at) <= feedback.at"""
"""Texts whose reward was not replaced since."""

WRITTEN = ("images", "messages", "segments", "calls", "episodes", "rewards", "feedback")
"""Tables that records are written to."""
WIDTHS = {table: len(COLUMNS[table]) for table in WRITTEN}
"""Numbers of their columns."""
WITHDRAWN = "cancelled"
"""How an episode may end after it has been stored with another end."""
DAY = 86400.0
"""Seconds after which a message, image or segment that is used again is marked as used (`at`)."""


Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]


class StoredCandidate(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A candidate without its arrays: `tokens` and `logprobs` are their lengths."""

    index: int
    text: str
    message: dict[str, Any]
    finish_reason: str
    tokens: Count
    logprobs: Count
    malformed: bool = False
    shown: tuple[ShownToken, ...] | None = None
    stop: str = ""


_json = msgspec.json.Encoder(enc_hook=plain)
_stored = msgspec.json.Decoder(list[StoredCandidate])
_calls = msgspec.json.Decoder(CallRecord)
_episodes = msgspec.json.Decoder(Episode)

_USED = f"ON CONFLICT (id) DO UPDATE SET at = excluded.at WHERE excluded.at > {{table}}.at + {DAY}"
CONFLICTS = {
    **{table: _USED.format(table=table) for table in ("images", "messages", "segments")},
    "calls": "ON CONFLICT (id) DO NOTHING",
    "episodes": "ON CONFLICT (id) DO UPDATE SET status = excluded.status, body = excluded.body "
    f"WHERE excluded.status = '{WITHDRAWN}'",
    "rewards": "ON CONFLICT (target, name) DO UPDATE SET value = excluded.value, at = excluded.at, "
    "app = excluded.app, rowid = {next}",
    "feedback": "ON CONFLICT (target, name) DO UPDATE SET text = excluded.text, at = excluded.at, "
    "cut = excluded.cut, app = excluded.app",
    "replaced": "ON CONFLICT (target, name, at) DO UPDATE SET value = coalesce(excluded.value, replaced.value), "
    "text = coalesce(excluded.text, replaced.text)",
    "consumed": "ON CONFLICT (target) DO UPDATE SET is_group = 1 WHERE excluded.is_group = 1",
}
"""What a row does whose key is there. The writer has chosen between rewards of a name before; `{next}` is the number
that a new row would get."""


def encode(records: Sequence[Record], known: Container[str]) -> tuple[list[tuple[str, Row]], int]:
    """Rows with their tables, and about how many bytes they take; messages, their images and segments in `known` are
    left out.

    Raises TypeError, ValueError or struct.error for a record that cannot be encoded.
    """
    rows: list[tuple[str, Row]] = []
    size, now = 0, time.time()
    for record in records:
        row: Row
        if isinstance(record, CallRecord):
            table, row = "calls", _call_row(record)
            size += 1300 + len(row[16]) + len(row[17]) + len(row[18])
        elif isinstance(record, RewardRecord):
            table, row = "rewards", (record.target, record.name, float(record.value), record.at, record.app)
            size += 300
        elif isinstance(record, FeedbackRecord):
            table, row = "feedback", (record.target, record.name, record.text, record.at, record.cut, record.app)
            size += 300 + len(record.text)
        elif isinstance(record, Episode):
            table, row = "episodes", _episode_row(record)
            size += 1100 + len(row[13])
        elif record.id in known:
            continue
        elif isinstance(record, Message):
            # Images are parts of a content in parts; most contents are texts.
            parts = isinstance(record.body, dict) and isinstance(record.body.get("content"), list)
            body, images = split_images(record.body) if parts else (record.body, [])
            for image in images:
                if (name := image.id) not in known:
                    rows.append(("images", (name, image.media_type, bytearray(image.data), now)))
                    size += 300 + len(image.data)
            table, row = "messages", (record.id, _json.encode(body).decode(), now)
            size += 200 + len(row[1])
        else:
            table, row = "segments", (record.id, record.parent, bytearray(record.packed), now)
            size += 300 + len(row[2])
        rows.append((table, row))
    return rows, size


def _call_row(call: CallRecord) -> Row:
    # bytearray, as sqlite3 searches adapters for bytes, which costs more than the rest of binding.
    stored, token_ids, logprobs = [], bytearray(), bytearray()
    for c in call.candidates:
        tokens, known = len(c.token_ids), len(c.logprobs)
        stored.append(
            StoredCandidate(c.index, c.text, c.message, c.finish_reason, tokens, known, c.malformed, c.shown, c.stop)
        )
        if tokens:
            token_ids += pack_ids(c.token_ids)
        if known:
            logprobs += packer(f"<{known}f").pack(*c.logprobs)
    completion = len(token_ids) // 4 if token_ids else call.usage.completion_tokens
    return (
        call.id,
        call.episode,
        call.step,
        call.role,
        call.turn,
        call.status,
        call.prompt,
        call.prompt_tokens or call.usage.prompt_tokens,
        completion,
        call.app,
        call.model,
        call.policy and call.policy.name,
        call.policy and call.policy.version,
        call.started,
        max(call.latency, 0.0),
        len(call.candidates),
        _json.encode(replace(call, candidates=())).decode(),
        _json.encode(stored).decode(),
        token_ids,
        logprobs,
    )


def _episode_row(episode: Episode) -> Row:
    body = _json.encode(replace(episode, metrics={})).decode()
    metrics = json.dumps(dict(episode.metrics)) if episode.metrics else "{}"
    return (
        episode.id,
        episode.task.id,
        episode.phase,
        episode.training_step,
        episode.status,
        episode.app,
        episode.key,
        episode.started,
        max(episode.latency, 0.0),
        episode.calls,
        episode.error,
        episode.blame,
        metric(episode.metrics.get("success")),
        body,
        metrics,
    )


def call_from(body: str, candidates: str, token_ids: bytes | None, logprobs: bytes) -> CallRecord:
    """Put a call back together from its columns. Raises ValueError, TypeError or struct.error for broken ones.

    Without `token_ids` the call is lean: its candidates have as many token ids, and the beginning of their texts.
    """
    lean = token_ids is None
    ids = () if token_ids is None else unpack_ids(token_ids)
    values: Any = array("f", logprobs) if lean else struct.unpack(f"<{len(logprobs) // 4}f", logprobs)
    found, at_id, at_value = [], 0, 0
    for entry in _stored.decode(candidates):
        tools = entry.message.get("tool_calls")
        candidate = Candidate(
            index=entry.index,
            text=entry.text[:1] if lean else entry.text,
            message=entry.message if not lean else {"tool_calls": tools[:1]} if tools else {},
            token_ids=cast(tuple[int, ...], range(entry.tokens)) if lean else ids[at_id : at_id + entry.tokens],
            logprobs=values[at_value : at_value + entry.logprobs],
            finish_reason=entry.finish_reason,
            malformed=entry.malformed,
            shown=None if lean else entry.shown,
            stop=entry.stop,
        )
        at_id, at_value = at_id + entry.tokens, at_value + entry.logprobs
        found.append(candidate)
    if (not lean and at_id != len(ids)) or at_value != len(values):
        raise ValueError("the arrays have other lengths than the candidates")
    call = _in_time(_calls.decode(body))
    if not (0 <= call.step < 1 << 31 and 0 <= call.turn < 1 << 31):
        raise ValueError("step or turn is out of range")
    if found and call.chosen is not None and not 0 <= call.chosen < len(found):
        raise ValueError("no candidate is the chosen one")
    return replace(call, candidates=tuple(found))


def episode_from(body: str, metrics: str) -> Episode:
    """Put an episode back together from its columns. Metrics may be NaN or infinite, which `body` cannot hold.

    Raises ValueError or TypeError for broken ones.
    """
    episode = _in_time(_episodes.decode(body))
    if metrics == "{}":
        return episode
    reported = msgspec.convert(json.loads(metrics), dict[str, Any])
    found = {name: number for name, value in reported.items() if (number := metric(value)) is not None}
    "".join(found).encode()  # which raises for names that are no text
    return replace(episode, metrics=found)


def _in_time(record: Timed) -> Timed:
    """The record. Raises ValueError for times that no clock shows.

    A negative latency is 0: other recorders measure it with a clock that may step back.
    """
    if not (0 <= record.started < _LATEST and -_LATEST < record.latency < _LATEST):
        raise ValueError("a time that no clock shows")
    return record if record.latency >= 0 else replace(record, latency=0.0)


def join_path(segment_id: str, rows: Iterable[tuple[str, str | None, bytes]]) -> tuple[int, ...]:
    """Token ids of a path from the (id, parent, token ids) of its segments, in any order.

    Raises RecordError when the path does not lead to a root.
    """
    segments = {id: (parent, blob) for id, parent, blob in rows}
    path: list[bytes] = []
    at: str | None = segment_id
    while at is not None and at in segments:
        at, blob = segments.pop(at)
        path.append(blob)
    if not path or at is not None:
        raise RecordError(
            f"The token path of segment {segment_id!r} is not complete in this store.",
            "Leave out the calls that refer to it; the store's `lost` counter is how many records it misses.",
        )
    try:
        return unpack_ids(b"".join(reversed(path)))
    except (TypeError, struct.error):
        cause = f"The token path of segment {segment_id!r} is broken in this store."
        raise RecordError(cause, "Leave out the calls that refer to it.") from None


def in_parts(names: Iterable[str]) -> Iterator[list[str]]:
    """Cut names into lists short enough for one IN clause."""
    items = list(names)
    return (items[i : i + 500] for i in range(0, len(items), 500))


AMONG = "IN (SELECT value FROM json_each(?))"
"""The condition that a column is one of a `NameList`."""


class NameList(str):
    """Names as one parameter of a query, of which `json_each` makes rows."""

    __slots__ = ()

    @classmethod
    def of(cls, names: Iterable[str]) -> NameList:
        """The list of these names in JSON."""
        return cls(json.dumps([*names]))
