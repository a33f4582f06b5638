"""Applications that rollout workers import: one that behaves, and one that does to its process what its task says."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cotune
from cotune.plans import seed_of
from cotune.records import PolicyRef
from cotune.sampler import Completion, SamplerInfo, SamplingParams
from tests.trainer.tiny_app import application, ask, client, letters

_warm = client("http://127.0.0.1:9/v1").chat.completions  # imports now what the SDK imports at the first call
solve = application(first=letters, second=letters)
"""Two roles, both scored."""


class Letters:
    """A sampler that crosses processes: the letters of a candidate depend on its request alone."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    async def sample(
        self, prompt_token_ids: Sequence[int], n: int, params: SamplingParams, policy: PolicyRef
    ) -> list[Completion]:
        await asyncio.sleep(self.seconds)
        return [self._candidate(seed_of(*prompt_token_ids, params.seed, policy, i)) for i in range(n)]

    @staticmethod
    def _candidate(seed: int) -> Completion:
        ids = tuple(4 + (seed >> 5 * i) % 26 for i in range(4))
        return Completion(ids, tuple(-1.0 - i for i in range(4)), "length")

    async def info(self) -> SamplerInfo:
        return SamplerInfo(name="letters", max_model_len=256)


@cotune.workflow
async def trouble(task: dict[str, Any]) -> float:
    """Make a call, then do what the task says."""
    said = await ask("first", f"say {task['id']}")
    Path(task["folder"], f"{task['id']}-{time.monotonic_ns()}").write_text(str(os.getpid()))
    await getattr(_Deeds, task["do"])(task)
    return float(len(said))


trouble.scorer("first")(letters)


@cotune.workflow
def waits(task: dict[str, Any]) -> float:
    """A plain function, which no event loop can stop."""
    if task["do"] == "hang":
        time.sleep(60)
    return 1.0


@cotune.workflow
async def exits(task: dict[str, Any]) -> float:
    """Without a model."""
    os._exit(3)


class _Deeds:
    @staticmethod
    async def nothing(task: dict[str, Any]) -> None:
        await asyncio.sleep(task.get("seconds", 0.0))

    @staticmethod
    async def leave(task: dict[str, Any]) -> None:
        sys.exit(4)

    @staticmethod
    async def crash(task: dict[str, Any]) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)
        await asyncio.sleep(60)

    @staticmethod
    async def exit(task: dict[str, Any]) -> None:
        os._exit(3)

    @staticmethod
    async def exit_once(task: dict[str, Any]) -> None:
        if len(list(Path(task["folder"]).glob(f"{task['id']}-*"))) == 1:
            os._exit(3)

    @staticmethod
    async def block(task: dict[str, Any]) -> None:
        time.sleep(60)

    @staticmethod
    async def stop(task: dict[str, Any]) -> None:
        """As code that never gives the interpreter lock back: no thread of the process runs."""
        os.kill(os.getpid(), signal.SIGSTOP)

    @staticmethod
    async def leak(task: dict[str, Any]) -> None:
        """Processes that outlive the episode: a child, one in a session of its own, one without the environment."""
        for keywords in ({}, {"start_new_session": True}, {"env": {}}):
            child = subprocess.Popen(["/bin/sleep", "300"], **keywords)
            Path(task["folder"], f"child-{child.pid}").touch()
        for _ in range(20):
            threading.Thread(target=time.sleep, args=(300,), daemon=True).start()
        if task.get("then"):
            await getattr(_Deeds, task["then"])(task)


__all__ = ["Letters", "exits", "solve", "trouble", "waits"]
