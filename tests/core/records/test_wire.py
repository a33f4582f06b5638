"""Records that cross from a worker to the driver say what the store would have been told."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from cotune.records.ids import pack_ids
from cotune.records.structs import (
    CallRecord,
    Candidate,
    Episode,
    FeedbackRecord,
    Message,
    Record,
    RewardRecord,
    Segment,
    Task,
)
from cotune.records.wire import pack, unpack
from cotune.storage.sqlite_store import SqliteStore


@dataclasses.dataclass
class Own:
    value: int


def records(value: Any) -> list[Record]:
    candidate = Candidate(index=0, text="x", message={"content": value}, token_ids=(5,), logprobs=(-0.1,))
    return [
        Message("m", {"content": value}),
        Segment("s", None, pack_ids((1, 2))),
        CallRecord(
            id="c", episode="e", role="r", step=0, turn=0, prompt="s", params={"a": value}, candidates=(candidate,)
        ),
        RewardRecord("c.0", "local", 0.5, 1.0),
        FeedbackRecord("c.0", "local", "half of it is right", 1.0, 12),
        Episode(id="e", task=Task(id="t", input={"v": value}), workflow="w"),
    ]


def test_plain_records_are_the_same() -> None:
    given = records({"a": [1, None, 2.5, "ü"]})
    packed, lost = pack(given)
    assert lost == 0
    assert unpack(packed) == given


def test_what_is_no_json_is_stored_alike(tmp_path: Path) -> None:
    values = [Own(3), {1, 2}, (1, 2), object, 1 << 70, [{"deep": [1 << 65, Own(1)]}], b"bytes", float("inf")]
    for number, value in enumerate(values):
        given = records(value)
        packed, lost = pack(given)
        assert lost == 0, value
        told = []
        for name, written in (("here", given), ("there", unpack(packed))):
            store = SqliteStore.open(tmp_path / f"{number}-{name}.db")
            store.write(written)
            store.flush()
            assert store.health.lost == 0
            told.append([store.message("m"), store.calls("e"), store.episode("e"), store.token_ids("s")])
            store.close()
        if not _has_long(value):
            assert told[0] == told[1], value


def _has_long(value: Any) -> bool:
    """Whether there is an integer in it that comes back as text."""
    return str(1 << 70) in repr(value) or str(1 << 65) in repr(value)


def test_what_cannot_be_sent_is_counted() -> None:
    given = records("fine")
    huge = Candidate(index=0, text="", message={}, token_ids=(1 << 70,))
    packed, lost = pack([given[0], CallRecord(id="d", episode="e", role="r", step=1, turn=1, candidates=(huge,))])
    assert lost == 1
    assert unpack(packed) == given[:1]


def test_what_json_cannot_hold_is_replaced() -> None:
    endless: list[Any] = []
    endless.append(endless)
    given = [Message("m", {"content": endless, "half": "\ud83d"}), *records("fine")]
    packed, lost = pack(given)
    assert lost == 0
    first, *others = unpack(packed)
    assert first == Message("m", "[dict that is no JSON]")
    assert others == given[1:]
