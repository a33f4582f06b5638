"""A row of the table: an application, and what is true of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from langchain_openai import ChatOpenAI
from openai import AsyncOpenAI

TRAINABLE, UNDECIDED, NOT = "trainable", "undecided", "not trainable"


@dataclass(frozen=True)
class Row:
    """`make` builds the application; `says` are pieces of findings, by level; `never` no finding holds."""

    make: Callable[[], Any]
    roles: set[str]
    verdict: str = TRAINABLE
    says: Sequence[tuple[str, str]] = ()
    never: Sequence[str] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    unlisted: tuple[str, ...] | None = None
    """The roles that no framework lists, by the report; None: not looked at."""


def model(**options: Any) -> ChatOpenAI:
    return ChatOpenAI(model="m", api_key="none", **options)  # type: ignore[arg-type]


def said(prompt: str) -> str:
    return str(model().invoke(prompt).text)


@functools.cache
def client() -> AsyncOpenAI:
    return AsyncOpenAI(api_key="none")


async def chat(content: str, system: str = "", **options: Any) -> Any:
    messages: Any = [{"role": "user", "content": content}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    reply = await client().chat.completions.create(model="m", messages=messages, **options)
    return reply.choices[0].message
