"""One chat request of cotune's own, to a model that reads and writes texts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from cotune.errors import ConfigError

_OWNER = "openai.com"


def key_for(base_url: str | None, variable: str | None) -> str | None:
    """The key for an address, None for the SDK's own.

    That of the environment's OPENAI_API_KEY goes to the address of the environment and to OpenAI; another address gets
    one only from a `variable` that the user names. Raises ConfigError where that is not set.
    """
    if variable is not None:
        if not (found := os.environ.get(variable)):
            fault = "is not set in the environment"
            raise ConfigError("reflection_key_env", variable, fault, f"For example: export {variable}=...")
        return found
    if base_url is None:
        return None
    parts = urlsplit(base_url)
    host = parts.hostname or ""
    if parts.scheme == "https" and (host == _OWNER or host.endswith(f".{_OWNER}")):
        return None
    return "none"  # servers of one's own need no key, and the SDK wants one


async def ask_chat(
    model: str,
    messages: Sequence[Mapping[str, Any]],
    base_url: str | None,
    params: Mapping[str, Any],
    key_variable: str | None = None,
) -> str:
    """The text of the answer, from the address of the environment or from `base_url`, with the key of `key_for`. Raises
    the SDK's errors."""
    import openai

    async with openai.AsyncOpenAI(base_url=base_url, api_key=key_for(base_url, key_variable)) as client:
        body: dict[str, Any] = {"model": model, "messages": list(messages), **params}
        reply = await client.chat.completions.create(**body)
    return reply.choices[0].message.content or ""
