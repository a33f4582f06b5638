"""One chat request of cotune's own, to a model that reads and writes texts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any


async def ask_chat(
    model: str, messages: Sequence[Mapping[str, Any]], base_url: str | None, params: Mapping[str, Any]
) -> str:
    """The text of the answer, from the address of the environment or from `base_url`. Raises the SDK's errors."""
    import openai

    # Servers of one's own need no key, and the SDK wants one.
    key = os.environ.get("OPENAI_API_KEY") or ("none" if base_url else None)
    async with openai.AsyncOpenAI(base_url=base_url, api_key=key) as client:
        body: dict[str, Any] = {"model": model, "messages": list(messages), **params}
        reply = await client.chat.completions.create(**body)
    return reply.choices[0].message.content or ""
