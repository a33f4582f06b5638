"""A provider that a dry run must not contact."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integrations.provider import Provider, serving


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Iterator[Provider]:
    """A provider that must not be contacted."""
    with serving() as made:
        monkeypatch.setenv("OPENAI_BASE_URL", made.url)
        monkeypatch.setenv("OPENAI_API_KEY", "none")
        yield made
        assert made.requests == []
