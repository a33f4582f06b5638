"""Text of the code as Markdown of a page in `docs/reference`."""

from __future__ import annotations

import re

_CODE = re.compile(r"(`[^`]*`)")


def prose(text: str) -> str:
    """Text of a docstring or of a flag's help on one line, its names of pages as links. What is in backticks stays."""
    parts = _CODE.split(" ".join(text.split()))
    return "".join(part if part.startswith("`") else _linked(_escaped(part)) for part in parts)


def entry(term: str, summary: str, text: str) -> str:
    """One entry of a list: a name in code with what it takes, and what it is."""
    return f"- **`{term}`**{f' <small>{summary}</small>' if summary else ''}: {text}"


def small(text: str) -> str:
    """Text within an HTML tag."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _escaped(text: str) -> str:
    return re.sub(r"([*_\[\]])", r"\\\1", small(text))


def _linked(text: str) -> str:
    return re.sub(r"docs/([\w-]+)/([\w-]+)\.md", r"[\2](../\1/\2.md)", text)
