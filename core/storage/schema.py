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
from cotune.records.images import Image, split_images
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
"""Columns of each table, in SQLite's types. Next to the whole record (`body`), columns repeat the fields that queries
use."""

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
"""Indexes with all columns that sums over calls and episodes read, so that SQLite need not read the rows."""

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
"""Number of columns of each of these tables."""
WITHDRAWN = "cancelled"
"""The only status that may replace another one after an episode has been stored."""
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
"""The ON CONFLICT clause of each table, for a row whose key exists already. The writer has chosen the latest reward of
each name before; `{next}` is the number that a new row would get."""


_ROW_BYTES = {
    "calls": 1300,
    "episodes": 1100,
    "rewards": 300,
    "feedback": 300,
    "images": 300,
    "segments": 300,
    "messages": 200,
}
"""Memory of a row's Python objects apart from its long values, about, by table."""


def encode(records: Sequence[Record], stored_ids: Container[str]) -> tuple[list[tuple[str, Row]], int]:
    """Encode records as rows. Returns each row with the name of its table, and the estimated size of all rows in bytes.

    Messages, images and segments whose ids are in `stored_ids` are left out. Raises TypeError, ValueError or
    struct.error for a record that cannot be encoded.
    """
    rows: list[tuple[str, Row]] = []
    size = 0
    now = time.time()
    for record in records:
        row: Row
        if isinstance(record, CallRecord):
            table = "calls"
            row = _call_row(record)
            *_, body, candidates, token_ids, _logprobs = row  # the last columns are the long ones
            size += len(body) + len(candidates) + len(token_ids)
        elif isinstance(record, RewardRecord):
            table = "rewards"
            row = (record.target, record.name, float(record.value), record.at, record.app)
        elif isinstance(record, FeedbackRecord):
            table = "feedback"
            row = (record.target, record.name, record.text, record.at, record.cut, record.app)
            size += len(record.text)
        elif isinstance(record, Episode):
            table = "episodes"
            row = _episode_row(record)
            *_, body, _metrics = row
            size += len(body)
        elif record.id in stored_ids:  # a message or a segment
            continue
        elif isinstance(record, Message):
            # Only a content in parts can hold images. Most contents are texts and need no search.
            message = record.body
            images: list[Image] = []
            if isinstance(message, dict) and isinstance(message.get("content"), list):
                message, images = split_images(message)
            for image in images:
                image_id = image.id  # a hash of the bytes, which takes time
                if image_id not in stored_ids:
                    rows.append(("images", (image_id, image.media_type, bytearray(image.data), now)))
                    size += _ROW_BYTES["images"] + len(image.data)
            table = "messages"
            encoded = _json.encode(message).decode()
            row = (record.id, encoded, now)
            size += len(encoded)
        else:
            table = "segments"
            row = (record.id, record.parent, bytearray(record.packed), now)
            size += len(record.packed)
        size += _ROW_BYTES[table]
        rows.append((table, row))
    return rows, size


def _call_row(call: CallRecord) -> Row:
    """The columns of a call, in the order of `COLUMNS["calls"]`.

    One column has the token ids of all candidates, one after another, and another their log-probabilities. Each stored
    candidate has the number of its ids and log-probabilities, with which `call_from` splits these columns again.
    """
    # bytearray instead of bytes: for bytes, sqlite3 searches its adapters, which costs more than the rest of binding.
    stored: list[StoredCandidate] = []
    token_ids = bytearray()
    logprobs = bytearray()
    for candidate in call.candidates:
        n_tokens = len(candidate.token_ids)
        n_logprobs = len(candidate.logprobs)
        stored.append(
            StoredCandidate(
                candidate.index,
                candidate.text,
                candidate.message,
                candidate.finish_reason,
                n_tokens,
                n_logprobs,
                candidate.malformed,
                candidate.shown,
                candidate.stop,
            )
        )
        if n_tokens:
            token_ids += pack_ids(candidate.token_ids)
        if n_logprobs:
            logprobs += packer(f"<{n_logprobs}f").pack(*candidate.logprobs)
    # A packed id has 4 bytes. Answers of a provider have no ids, only the number of tokens that it reports.
    completion = len(token_ids) // 4 if token_ids else call.usage.completion_tokens
    policy_name = None
    policy_version = None
    if call.policy is not None:
        policy_name = call.policy.name
        policy_version = call.policy.version
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
        policy_name,
        policy_version,
        call.started,
        # An imported trace may have a clock that stepped back.
        max(call.latency, 0.0),
        len(call.candidates),
        _json.encode(replace(call, candidates=())).decode(),
        _json.encode(stored).decode(),
        token_ids,
        logprobs,
    )


def _episode_row(episode: Episode) -> Row:
    """The columns of an episode, in the order of `COLUMNS["episodes"]`. Its metrics have a column of their own."""
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
    """Decode a call from its columns. Raises ValueError, TypeError or struct.error for broken columns.

    If `token_ids` is None, the call is lean: its candidates have the right numbers of token ids, but not the ids, and
    only the beginning of texts and tool calls.
    """
    # These columns have the values of all candidates, one after another.
    is_lean = token_ids is None
    all_ids: tuple[int, ...] = ()
    all_logprobs: Any
    if token_ids is None:
        all_logprobs = array("f", logprobs)  # takes less memory than a tuple
    else:
        all_ids = unpack_ids(token_ids)
        all_logprobs = struct.unpack(f"<{len(logprobs) // 4}f", logprobs)

    decoded: list[Candidate] = []
    ids_start = 0
    logprobs_start = 0
    for stored in _stored.decode(candidates):
        ids_end = ids_start + stored.tokens
        logprobs_end = logprobs_start + stored.logprobs
        candidate_logprobs = all_logprobs[logprobs_start:logprobs_end]
        if is_lean:
            candidate = _lean_candidate(stored, candidate_logprobs)
        else:
            candidate = Candidate(
                index=stored.index,
                text=stored.text,
                message=stored.message,
                token_ids=all_ids[ids_start:ids_end],
                logprobs=candidate_logprobs,
                finish_reason=stored.finish_reason,
                malformed=stored.malformed,
                shown=stored.shown,
                stop=stored.stop,
            )
        ids_start = ids_end
        logprobs_start = logprobs_end
        decoded.append(candidate)
    has_other_ids = not is_lean and ids_start != len(all_ids)
    if has_other_ids or logprobs_start != len(all_logprobs):
        raise ValueError("the arrays have other lengths than the candidates")
    call = _with_valid_times(_calls.decode(body))
    if not (0 <= call.step < 1 << 31 and 0 <= call.turn < 1 << 31):
        raise ValueError("step or turn is out of range")
    if decoded and call.chosen is not None and not 0 <= call.chosen < len(decoded):
        raise ValueError("no candidate is the chosen one")
    return replace(call, candidates=tuple(decoded))


def _lean_candidate(stored: StoredCandidate, logprobs: Any) -> Candidate:
    """A candidate without the content that takes memory. It shows only whether there is a text or a tool call, and how
    many tokens there are."""
    tool_calls = stored.message.get("tool_calls")
    return Candidate(
        index=stored.index,
        text=stored.text[:1],
        message={"tool_calls": tool_calls[:1]} if tool_calls else {},
        token_ids=cast(tuple[int, ...], range(stored.tokens)),
        logprobs=logprobs,
        finish_reason=stored.finish_reason,
        malformed=stored.malformed,
        stop=stored.stop,
    )


def episode_from(body: str, metrics: str) -> Episode:
    """Decode an episode from its columns. Metrics may be NaN or infinite, which `body` cannot hold.

    Raises ValueError or TypeError for broken columns.
    """
    episode = _with_valid_times(_episodes.decode(body))
    if metrics == "{}":
        return episode
    reported = msgspec.convert(json.loads(metrics), dict[str, Any])
    numbers: dict[str, float] = {}
    for name, value in reported.items():
        number = metric(value)
        if number is not None:
            name.encode()  # raises ValueError for half of a surrogate pair, which later JSON could not hold
            numbers[name] = number
    return replace(episode, metrics=numbers)


def _with_valid_times(record: Timed) -> Timed:
    """Return the record. Raises ValueError if its start or its latency is an impossible time.

    A negative latency becomes 0, because other recorders measure it with a clock that may step back.
    """
    if not (0 <= record.started < _LATEST and -_LATEST < record.latency < _LATEST):
        raise ValueError("a time that no clock shows")
    if record.latency < 0:
        return replace(record, latency=0.0)
    return record


def join_path(segment_id: str, rows: Iterable[tuple[str, str | None, bytes]]) -> tuple[int, ...]:
    """All token ids of a path of segments. `rows` are the (id, parent, token ids) of its segments, in any order.

    Raises RecordError when the path does not lead to a root.
    """
    parents: dict[str, str | None] = {}
    blobs: dict[str, bytes] = {}
    for id, parent, blob in rows:
        parents[id] = parent
        blobs[id] = blob

    path: list[bytes] = []
    segment: str | None = segment_id
    while segment is not None and segment in parents:
        path.append(blobs[segment])
        segment = parents.pop(segment)  # popped, so that a broken path with a circle ends
    if not path or segment is not None:
        raise RecordError(
            f"The token path of segment {segment_id!r} is not complete in this store.",
            "Leave out the calls that refer to it. The store's `lost` counter is the number of missing records.",
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
"""The condition that a column is in a `NameList`."""


class NameList(str):
    """Names as one parameter of a query, as JSON. `json_each` turns them into rows."""

    __slots__ = ()

    @classmethod
    def of(cls, names: Iterable[str]) -> NameList:
        """The list of these names in JSON."""
        return cls(json.dumps([*names]))
