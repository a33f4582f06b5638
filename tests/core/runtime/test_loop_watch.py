"""Time limits of an event loop that application code blocks."""

from __future__ import annotations

import asyncio
import threading
import time

from cotune.episodes.run_sync import run_sync
from cotune.records.structs import PolicyRef
from cotune.runtime.loop_watch import watched
from cotune.sampling.protocol import SamplingParams, in_time


def test_the_time_limit_of_an_answer_does_not_count_time_in_which_the_loop_is_blocked() -> None:
    async def answered_while_blocked() -> str:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[str] = loop.create_future()
        async with asyncio.timeout(60) as limit:
            with watched(limit, 60.0):
                async with in_time(PolicyRef("planner", 0), SamplingParams(timeout=1.0)):
                    await asyncio.sleep(0.3)
                    deliver = lambda: loop.call_soon_threadsafe(answer.set_result, "hello")  # noqa: E731
                    threading.Timer(1.4, deliver).start()
                    time.sleep(1.3)
                    return await answer

    assert run_sync(answered_while_blocked()) == "hello"
