"""Whose key a request of cotune's own carries."""

from __future__ import annotations

import asyncio

import pytest

from cotune.errors import ConfigError
from cotune.integrations.apps.openai.asking import ask_chat, key_for
from tests.integrations.provider import serving


@pytest.mark.parametrize(
    ("address", "key"),
    [
        (None, None),
        ("https://api.openai.com/v1", None),
        ("https://eu.api.openai.com/v1", None),
        ("http://api.openai.com/v1", "none"),
        ("https://api.openai.com.evil.example/v1", "none"),
        ("https://notopenai.com/v1", "none"),
        ("https://openai.com@evil.example/v1", "none"),
        ("http://localhost:8000/v1", "none"),
    ],
)
def test_the_key_of_the_environment_goes_to_openai_alone(address: str | None, key: str | None) -> None:
    assert key_for(address, None) == key


def test_another_address_gets_the_key_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    monkeypatch.setenv("OTHER_KEY", "other")
    with serving() as provider:
        for variable in (None, "OTHER_KEY"):
            asyncio.run(ask_chat("m", [{"role": "user", "content": "hello"}], provider.url, {}, variable))
    assert [sent["authorization"] for sent in provider.headers] == ["Bearer none", "Bearer other"]
    with pytest.raises(ConfigError, match=r"reflection_key_env.*NO_SUCH.*not set"):
        key_for(None, "NO_SUCH")
