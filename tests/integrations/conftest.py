"""Fixtures: a provider on a local port, or none at all, and a recorder of episodes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integrations.provider import Provider, serving
from tests.integrations.recorded import Recorded


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Iterator[Provider]:
    """What every client reaches that names no address of its own."""
    with serving() as made:
        monkeypatch.setenv("OPENAI_BASE_URL", made.url)
        monkeypatch.setenv("OPENAI_API_KEY", "none")
        monkeypatch.setenv("LANGSMITH_TRACING", "false")
        yield made


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address where nobody listens: whatever is not answered by a responder fails."""
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("LANGSMITH_TRACING", "false")


@pytest.fixture
def record() -> Recorded:
    return Recorded()
