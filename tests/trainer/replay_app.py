"""The relay of the replay tests under a name; the environment tells it to ask otherwise, as a changed application
would, or with an id of its own."""

from __future__ import annotations

import asyncio
import os
import uuid

from tests.trainer.tiny_app import application, ask


async def _relay(task: dict[str, str]) -> dict[str, float]:
    said = ""
    if os.environ.get("RAISING") == task["letter"]:
        raise ValueError("out of order")
    if os.environ.get("ENDLESS") == task["letter"]:
        await asyncio.Event().wait()
    for role in ("first", "second", "third"):
        changed = "now " if role == "second" and os.environ.get("CHANGED") == task["letter"] else ""
        number = f"{uuid.uuid4()} " if "NUMBERED" in os.environ else ""
        said += await ask(role, f"{changed}say {number}{task['letter']} {said}")
    return {"team": sum(letter in "abcdefgh" for letter in said) / 12}


solve = application(_relay)
