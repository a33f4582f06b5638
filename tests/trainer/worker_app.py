"""The tiny application under a name, as rollout workers import it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import cotune
from cotune.recording.context import current_episode
from tests.trainer.tiny_app import application, ask, client, converse, letters

_warm = client("http://127.0.0.1:9/v1").chat.completions  # imports now what the SDK imports at the first call


def judge(candidate: Any, call: Any, task: Mapping[str, str]) -> cotune.Feedback:
    """`letters` with a text, but for one letter."""
    if task["letter"] == "q":
        raise ValueError("no judgement on q")
    return cotune.Feedback(letters(candidate, call, task), f"it says {candidate.text!r}")


solve = application(first=letters, second=judge)
"""Two roles, both scored."""


def even(candidate: Any, call: Any, task: Mapping[str, str]) -> float:
    """A reward that answers in any vocabulary can have."""
    return sum(token % 2 == 0 for token in candidate.token_ids) / 4


parity = application(first=even, second=even)
"""Two roles, both scored, whatever their models write."""


async def _late(task: Mapping[str, str]) -> float:
    said = await ask("first", f"say {task['letter']}")
    if task["id"] == "late":
        said = await ask("critic", f"judge {said}")
    return said.count(task["letter"]) / 4


late = application(_late)
"""A role that only the task `late` knows."""


async def _sticky(task: Mapping[str, Any]) -> float:
    said = await ask("first", f"say {task['letter']}")
    live = current_episode.get()
    if task["kind"] == "stuck" and live is not None and live.training_step == 0:
        await asyncio.sleep(3600)
    return 0.0 if task["kind"] == "flat" else sum(map(ord, said)) % 97 / 97


sticky = application(_sticky)
"""Tasks whose rewards are equal, and those that never end in the first step."""

judged = application(converse)
"""No scorer: the outcome is all there is."""
