"""Sends a chat request from cotune itself, for example to the model that improves prompts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from cotune.errors import ConfigError

_OWNER = "openai.com"


def key_for(base_url: str | None, variable: str | None) -> str | None:
    """The API key for an address; None to let the SDK use OPENAI_API_KEY.

    OPENAI_API_KEY is sent only to the default address and to OpenAI. For another address the user must name an
    environment `variable` that holds its key. Raises ConfigError if that variable is not set.
    """
    if variable is not None:
        if not (key := os.environ.get(variable)):
            fault = "is not set in the environment"
            raise ConfigError("reflection_key_env", variable, fault, f"For example: export {variable}=...")
        return key
    if base_url is None:
        return None
    parts = urlsplit(base_url)
    host = parts.hostname or ""
    if parts.scheme == "https" and (host == _OWNER or host.endswith(f".{_OWNER}")):
        return None
    # A self-hosted server needs no key, but the SDK does not start without one.
    return "none"


async def ask_chat(
    model: str,
    messages: Sequence[Mapping[str, Any]],
    base_url: str | None,
    params: Mapping[str, Any],
    key_variable: str | None = None,
) -> str:
    """The text of the answer, from `base_url` or the default address. Raises the SDK's errors."""
    import openai

    async with openai.AsyncOpenAI(base_url=base_url, api_key=key_for(base_url, key_variable)) as client:
        body: dict[str, Any] = {"model": model, "messages": list(messages), **params}
        reply = await client.chat.completions.create(**body)
    return reply.choices[0].message.content or ""
