"""Code that waits in the loop's default threads leaves scorers and other code room there."""

from __future__ import annotations

import asyncio
import os
import threading

from cotune.episodes.episode import run_episode
from cotune.episodes.workflows import workflow, workflow_of
from cotune.records.structs import Task


class Nowhere:
    def write(self, records) -> None: ...


def test_more_waiting_threads_than_asyncio_has_lock_nothing_up() -> None:
    """The loop has a default executor of asyncio's own already when its first episode begins."""
    count = (os.cpu_count() or 1) + 5

    @workflow
    async def solve(task):
        free, done = threading.Event(), []
        waiting = [asyncio.create_task(asyncio.to_thread(free.wait)) for _ in range(count)]
        await asyncio.sleep(0)
        done.append(await asyncio.wait_for(asyncio.to_thread(lambda: "scored"), 10))
        free.set()
        await asyncio.gather(*waiting)
        return float(done == ["scored"])

    async def main():
        await asyncio.to_thread(int)
        return await run_episode(workflow_of(solve), Task(id="t", input={}), sink=Nowhere())

    assert asyncio.run(main()).rewards == {"team": 1.0}


def test_an_executor_of_the_applications_own_is_left_alone() -> None:
    from concurrent.futures import ThreadPoolExecutor

    @workflow
    async def solve(task):
        name = await asyncio.to_thread(lambda: threading.current_thread().name)
        return float(name.startswith("mine"))

    async def main():
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1, thread_name_prefix="mine"))
        return await run_episode(workflow_of(solve), Task(id="t", input={}), sink=Nowhere())

    assert asyncio.run(main()).rewards == {"team": 1.0}
