"""Objects of an application that keep the messages they receive. Warnings name the ones that episodes share."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any
from weakref import WeakKeyDictionary

_first_episodes: WeakKeyDictionary[Any, dict[Hashable, str]] = WeakKeyDictionary()
"""By object, and by the part of it that an episode uses: the first episode that did."""


def was_used_by_another(item: Any, episode_id: str, part: Hashable = None) -> bool:
    """Whether another episode was the first to use this part of the object. The first caller becomes that episode."""
    return _first_episodes.setdefault(item, {}).setdefault(part, episode_id) != episode_id
