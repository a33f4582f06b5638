"""Chat models of LangChain that do not use the OpenAI SDK."""

from __future__ import annotations


def install() -> None:
    """Hook."""
