"""How many values a JSON text holds, counted without reading it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotune.integrations.web.http.bodies import decoded, json_values
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


def test_too_many_are_refused_by_the_name_of_the_setting() -> None:
    assert decoded(b"[1,2,3]", list, 4) == [1, 2, 3]
    with pytest.raises(RequestError, match="The body holds 5 JSON values; at most 4 are read: --max-values") as found:
        decoded(b"[1,2,3,4]", list, 4)
    assert found.value.status == 413
