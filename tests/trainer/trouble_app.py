"""An application without a model that does to its process what its task says."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import cotune
from cotune.runtime.run_context import current_run
from cotune.storage.judge_ledger import Ledger


@cotune.workflow
async def trouble(task: dict[str, Any]) -> float:
    """Leave the number of the process in the task's folder, then do what the task says."""
    Path(task["folder"], f"{task['id']}-{time.monotonic_ns()}").write_text(str(os.getpid()))
    await getattr(_Deeds, task["do"])(task)
    return 1.0


@cotune.workflow
def plain(task: dict[str, Any]) -> float:
    """A plain function: no time-out stops it."""
    time.sleep(task["seconds"])
    return 1.0


class _Deeds:
    @staticmethod
    async def nothing(task: dict[str, Any]) -> None:
        await asyncio.sleep(task.get("seconds", 0.0))

    @staticmethod
    async def spend(task: dict[str, Any]) -> None:
        """What a judge spends of its budget."""
        Ledger(current_run.get().folder).reserve("judge", 1.0, max_calls=3, max_cost=None)

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
        time.sleep(60)  # the signal may reach this thread late, when others wait for a processor

    @staticmethod
    async def leak(task: dict[str, Any]) -> None:
        """Processes that outlive the episode: a child, one in a session of its own, one without the environment, and a
        grandchild whose parent has ended."""
        for keywords in ({}, {"start_new_session": True}, {"env": {}}):
            child = subprocess.Popen(["/bin/sleep", "300"], **keywords)
            Path(task["folder"], f"child-{child.pid}").touch()
        said = subprocess.run(["sh", "-c", "sleep 300 >/dev/null 2>&1 & echo $!"], stdout=subprocess.PIPE, text=True)
        Path(task["folder"], f"child-{said.stdout.strip()}").touch()
        if task.get("then"):
            await getattr(_Deeds, task["then"])(task)
