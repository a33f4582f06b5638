"""The relay of the replay tests under a name; the environment tells it to ask otherwise, as a changed application
would, or with an id of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid

from tests.trainer.tiny_app import application, ask

ended: list[str] = []
"""What has been said by the end of each episode of this process."""


async def _relay(task: dict[str, str]) -> dict[str, float]:
    said = ""
    if os.environ.get("RAISING") == task["letter"]:
        raise ValueError("out of order")
    if os.environ.get("ENDLESS") == task["letter"]:
        if "INTERRUPTED" in os.environ:
            while len(ended) < int(os.environ["INTERRUPTED"]):
                await asyncio.sleep(0.05)
            await asyncio.sleep(1.0)  # until what has ended is counted
            os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()
    for role in ("first", "second", "third"):
        changed = "now " if role == "second" and os.environ.get("CHANGED") == task["letter"] else ""
        number = f"{uuid.uuid4()} " if "NUMBERED" in os.environ else ""
        said += await ask(role, f"{changed}say {number}{task['letter']} {said}")
    ended.append(said)
    return {"team": sum(letter in "abcdefgh" for letter in said) / 12}


solve = application(_relay)
