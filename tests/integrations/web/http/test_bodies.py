"""Bodies: how many values a JSON text holds, counted without reading it, and content codings."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from cotune.integrations.web.http.bodies import decoded, inflated, json_values
from cotune.integrations.web.http.requests import RequestError

TEXTS = st.text(alphabet='a,[]{}"\\ü: ')
VALUES = st.recursive(
    st.none() | st.integers() | TEXTS, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner), max_leaves=30
)


def count(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(count, value.values()))
    return 1 + sum(map(count, value)) if isinstance(value, list) else 1


@settings(max_examples=60, deadline=None)
@given(VALUES)
def test_the_count_is_that_of_the_values(value: Any) -> None:
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False, separators=(",", ":"))):
        assert json_values(text.encode()) == count(value)
        assert json_values(text.encode(), 10_000) >= count(value)


def test_too_many_values_are_refused() -> None:
    assert decoded(b"[1,2,3]", list, 4) == [1, 2, 3]
    with pytest.raises(RequestError, match="The body holds 5 JSON values; at most 4 are read") as found:
        decoded(b"[1,2,3,4]", list, 4)
    assert found.value.status == 413


PACK = {"gzip": gzip.compress, "zstd": zstandard.compress}


@pytest.mark.parametrize("coding", PACK)
def test_a_packed_body_is_unpacked_within_the_limit(coding: str) -> None:
    text = b'{"a": 1}' * 1000
    packed = PACK[coding](text)
    assert inflated(packed, coding, len(text), "--max-body") == text
    with pytest.raises(RequestError, match="larger than 7999 bytes once it is unpacked: --max-body") as error:
        inflated(packed, coding, len(text) - 1, "--max-body")
    assert error.value.status == 413


@pytest.mark.parametrize("coding", PACK)
def test_a_broken_body_is_refused_by_the_name_of_its_coding(coding: str) -> None:
    packed = PACK[coding](b'{"a": 1}' * 1000)
    for broken in (packed[:-1], packed[:3], b"plain text"):
        with pytest.raises(RequestError, match=f"The body is not {coding}: ") as error:
            inflated(broken, coding, 10_000, "--max-body")
        assert error.value.status == 400


def test_an_unknown_coding_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match="Content-Encoding 'br' cannot be read; gzip and zstd can") as error:
        inflated(b"{}", "br", 10, "--max-body")
    assert error.value.status == 415
