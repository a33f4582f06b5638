"""A batch whose values would take far more memory than its bytes is refused before it is decoded."""

from __future__ import annotations

import tracemalloc
import zlib
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotune.integrations.collect import batch
from cotune.integrations.collect.batch import MOST_LISTS, pack_batch, read_batch
from cotune.records.structs import Message
from cotune.records.wire import pack

NUMBERS = st.integers(-(1 << 63), (1 << 64) - 1) | st.floats(allow_nan=False)
EXTENSIONS = st.builds(msgspec.msgpack.Ext, st.integers(0, 127), st.sampled_from([1, 2, 3, 4, 8, 16, 300]).map(bytes))
TEXTS = st.text(max_size=3) | st.sampled_from([31, 32, 256, 70_000]).map("x".__mul__)
PLAIN = st.none() | st.booleans() | NUMBERS | TEXTS | st.sampled_from([0, 256, 70_000]).map(bytes) | EXTENSIONS
VALUES = st.recursive(PLAIN, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner), max_leaves=40)


def count(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(count, value.values()))
    if isinstance(value, list):
        return 1 + sum(map(count, value))
    return int(isinstance(value, msgspec.msgpack.Ext) or (isinstance(value, int) and value < 0))


@settings(max_examples=100, deadline=None)
@given(VALUES)
def test_lists_maps_and_negative_numbers_are_counted(value: Any) -> None:
    packed = msgspec.msgpack.encode(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "MOST_LISTS", count(value))
        assert not batch._has_too_many(packed)
        patch.setattr(batch, "MOST_LISTS", count(value) - 1)
        assert batch._has_too_many(packed)


def long(kind: bytes, size: int) -> bytes:
    """A batch with a message whose body is a list of so many values of one byte."""
    body = msgspec.Raw(b"\xdd" + size.to_bytes(4) + kind * size)
    return msgspec.msgpack.encode(
        {"v": 1, "app": "a", "source": "s", "parts": [[{"type": "message", "id": "m", "body": body}]]}
    )


@pytest.mark.parametrize("kind", [b"\x90", b"\x80", b"\xe0"], ids=["list", "map", "negative"])
def test_too_many_are_refused_before_they_take_memory(kind: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "MOST_LISTS", 10_000)
    body = long(kind, 400_000)
    tracemalloc.start()
    try:
        with pytest.raises(msgspec.ValidationError, match="at most 10000 lists, maps and negative numbers"):
            read_batch(body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * len(body)


def test_long_texts_and_answers_are_read() -> None:
    given = [Message("m1", {"content": "问" * 1_500_000}), Message("m2", {"content": [65_000, 0.5] * 200_000})]
    raw = zlib.decompress(pack_batch("a", "s", [pack(given)[0]]), 31)
    assert len(raw.translate(None, batch._LIGHT)) > MOST_LISTS
    assert read_batch(raw).parts == [given]
