"""An application that invents names for products, with the plain OpenAI SDK. It has no measure of a good name."""

from __future__ import annotations

import functools
import os

import openai


@functools.cache
def client(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "none"), max_retries=0)


async def name_for(product: str) -> str:
    """One name."""
    reply = await client(os.environ["OPENAI_BASE_URL"]).chat.completions.create(
        model="namer", messages=[{"role": "user", "content": f"name for {product}"}], max_tokens=8
    )
    return reply.choices[0].message.content or ""
