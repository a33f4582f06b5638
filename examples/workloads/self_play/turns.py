"""What is said in a game, turn by turn, and what a game is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Task = Mapping[str, Any]
"""A game to play: its name under `game`, and what that one takes."""
Said = Sequence[tuple[str, str]]
"""Roles and their messages, in order."""
Messages = list[dict[str, str]]


class Game(Protocol):
    """A module of this folder."""

    MAX_TOKENS: int
    """Of a message."""

    def turn(self, task: Task, said: Said) -> str | None:
        """Whose turn it is; None where the game is over."""

    def messages(self, task: Task, said: Said, role: str) -> Messages:
        """What a role sees at its turn."""


def with_rules(task: Task, content: str) -> Messages:
    """A user's message, after the rules where the task tells them."""
    told = [{"role": "system", "content": task["rules"]}] if "rules" in task else []
    return [*told, {"role": "user", "content": content}]
