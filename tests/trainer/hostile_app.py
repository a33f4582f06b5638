"""An application that does to its run what its task says: it hangs, leaves, forks, changes the folder."""

from __future__ import annotations

import asyncio
import functools
import multiprocessing
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import cotune
from tests.trainer.tiny_app import ask, client

client(os.environ["OPENAI_BASE_URL"])  # it takes time that no episode has


@cotune.workflow
async def asynchronous(task: dict[str, Any]) -> float:
    return await _do(task)


@cotune.workflow
def synchronous(task: dict[str, Any]) -> float:
    if task.get("do") == "sleep":
        time.sleep(600)
    return asyncio.run(_do(task))


@cotune.workflow
async def lavish(task: dict[str, Any]) -> dict[str, float]:
    await ask("first", "say")
    return {f"name {n}": 1.0 for n in range(100_000)}


@cotune.workflow
async def scored(task: dict[str, Any]) -> float:
    await ask("first", f"say {task['id']}")
    return 1.0


@scored.scorer("first")
def slow(candidate: Any, call: Any, task: dict[str, Any]) -> float:
    if task.get("do") == "sleep":
        time.sleep(600)
    if task.get("do") == "exit":
        sys.exit("no more scores")
    return float(len(candidate.text))


async def _do(task: dict[str, Any]) -> float:
    await ask("first", f"say {task['id']}")
    if deed := task["do"]:
        found = getattr(_Deeds, deed)(task)
        if asyncio.iscoroutine(found):
            await found
    return 1.0


class _Deeds:
    @staticmethod
    def sleep(task: dict[str, Any]) -> None:
        time.sleep(600)

    @staticmethod
    def spin(task: dict[str, Any]) -> None:
        while True:
            pass

    @staticmethod
    def swallow(task: dict[str, Any]) -> None:
        while True:
            try:
                time.sleep(600)
            except BaseException:  # noqa: BLE001
                continue

    @staticmethod
    def exit(task: dict[str, Any]) -> None:
        sys.exit("bye")

    @staticmethod
    async def exit_in_a_task(task: dict[str, Any]) -> None:
        async def leave() -> None:
            sys.exit("bye")

        await asyncio.create_task(leave())

    @staticmethod
    def exit_at_once(task: dict[str, Any]) -> None:
        os._exit(7)

    @staticmethod
    def close(task: dict[str, Any]) -> None:
        raise GeneratorExit

    @staticmethod
    async def stop(task: dict[str, Any]) -> None:
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0.01)

    @staticmethod
    def linger(task: dict[str, Any]) -> None:
        threading.Thread(target=time.sleep, args=(600,), name="left\x1b[2J").start()

    @staticmethod
    def move(task: dict[str, Any]) -> None:
        os.chdir(task["to"])

    @staticmethod
    def remove(task: dict[str, Any]) -> None:
        Path(task["file"]).unlink(missing_ok=True)

    @staticmethod
    async def wait(task: dict[str, Any]) -> None:
        await asyncio.sleep(600)

    @staticmethod
    def fork(task: dict[str, Any]) -> None:
        """Children make calls while threads of the parent do, by multiprocessing's default on Linux.

        All is imported and each client made before: OpenSSL, imports and (in Python 3.11) cached properties hold locks
        that a child would wait for.
        """
        clients = [_client() for _ in range(8)]
        _call("before", clients.pop())
        threads = [threading.Thread(target=_call, args=(f"thread {n}", clients.pop())) for n in range(4)]
        for thread in threads:
            thread.start()
        context = multiprocessing.get_context("fork")
        children = [context.Process(target=_call, args=(f"child {n}", clients.pop())) for n in range(3)]
        for child in children:
            child.start()
        for one in (*threads, *children):
            one.join()

    @staticmethod
    def fork_and_exit(task: dict[str, Any]) -> None:
        if (child := os.fork()) == 0:
            sys.exit(5)
        Path(task["file"]).write_text(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))


@functools.cache
def _url() -> str:
    return os.environ["OPENAI_BASE_URL"]


def _client() -> Any:
    import openai

    made = openai.OpenAI(base_url=_url(), api_key="none", max_retries=0)
    assert made.chat.completions
    return made


def _call(text: str, client: Any) -> None:
    import openai

    with cotune.role("first"):
        try:
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}], max_tokens=4)
        except openai.APIError as error:
            sys.stdout.write(f"{text}: {error}\n")
