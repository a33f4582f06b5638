"""DSPy's cache of answers, by a class that stands in for it: DSPy itself is not among the development packages."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from tests.integrations.graphs import scripted
from tests.integrations.recorded import Recorded


class Cache:
    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}

    def get(self, request: dict[str, Any], ignored_args_for_cache_key: list[str] | None = None) -> Any:
        return self.kept.get(str(request))

    def put(self, request: dict[str, Any], value: Any, ignored_args_for_cache_key: list[str] | None = None) -> None:
        self.kept[str(request)] = value


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> Cache:
    for name in ("dspy", "dspy.clients", "dspy.clients.cache"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["dspy.clients.cache"], "Cache", Cache, raising=False)
    monkeypatch.delitem(sys.modules, "cotune.integrations.apps.dspy.caches", raising=False)
    from cotune.integrations.apps.dspy.caches import install

    install()
    return Cache()


def test_made_up_answers_are_neither_kept_nor_taken_from_the_cache(cache: Cache, record: Recorded) -> None:
    cache.put({"q": 1}, "the provider's")
    found: list[Any] = []

    async def asks(task: Any) -> float:
        found.append(cache.get({"q": 1}))
        cache.put({"q": 2}, "the policy's")
        return 1.0

    outcome = record(asks, scripted())
    assert (found, list(cache.kept)) == ([None], ["{'q': 1}"])
    assert outcome.live.warnings["unused_cache"] == 2
    record(asks)
    assert (found, list(cache.kept)) == ([None, "the provider's"], ["{'q': 1}", "{'q': 2}"])
