"""A process of the cluster that hosts one object: a Ray actor, from its start to its certain end."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import signal
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from cotune.errors import ConfigError, CotuneError

log = logging.getLogger("cotune")

GRACE_SECONDS = 2.0
"""How long a process may take to end when Ray tells it to, before it is sent SIGKILL."""

KILL_SECONDS = 30.0
"""How long to wait until Ray says that a killed process is gone."""


class ProcessGone(CotuneError):
    """The process ended, crashed, was killed or cannot be reached. `cause` is what Ray knows of it, in one line."""


class _Host:
    """What runs in the actor: an object of the named class; its methods run on the actor's event loop."""

    def __init__(self, target: str) -> None:
        module, _, name = target.partition(":")
        self._object = getattr(importlib.import_module(module), name)()

    async def place(self) -> tuple[int, str]:
        import ray

        return os.getpid(), ray.get_runtime_context().get_node_id()

    async def call(self, method: str, *arguments: Any) -> Any:
        return await getattr(self._object, method)(*arguments)


class RayProcess:
    """An object of the class `target` ("module:Class") in a process of its own.

    The class is made there without arguments; its methods are coroutine functions, and many may run at once. Ray picks
    a node with `cpus` to spare. The process ends with this one, and is never started again.
    """

    def __init__(
        self, target: str, *, cpus: float = 1.0, runtime_env: Mapping[str, Any] | None = None, most: int = 10_000
    ) -> None:
        self._target = target
        self._options = {"num_cpus": cpus, "max_concurrency": most}
        self._runtime_env = dict(runtime_env or {})
        self._actor: Any = None
        self.pid: int | None = None
        self.node = ""

    async def start(self) -> None:
        """Return when the process is up, and `pid` and `node` are known. Raises ConfigError, ProcessGone."""
        import ray

        runtime_env = await asyncio.to_thread(_uploaded, self._runtime_env)
        self._actor = ray.remote(_Host).options(**self._options, runtime_env=runtime_env).remote(self._target)
        self.pid, self.node = await _answer(self._actor.place.remote())

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the object. Raises what it raises if that is a CotuneError, and ProcessGone."""
        return await _answer(self._actor.call.remote(method, *arguments))

    async def kill(self) -> None:
        """End the process, also one that is stopped or busy, and wait until it has."""
        import ray

        if self._actor is None:
            return
        ray.kill(self._actor)
        await self._gone()
        if self.pid is None or self.node != _this_node():
            return
        # Ray calls an actor gone while its process is still stopped or busy; it would kill that one much later.
        with contextlib.suppress(OSError):
            for number in (0, signal.SIGKILL):
                deadline = time.monotonic() + GRACE_SECONDS
                while time.monotonic() < deadline:
                    os.kill(self.pid, number)
                    await asyncio.sleep(0.02)

    async def _gone(self) -> None:
        """Wait until Ray says that the process has ended."""
        from ray.exceptions import RayError

        with contextlib.suppress(RayError, TimeoutError):
            async with asyncio.timeout(KILL_SECONDS):
                await self._actor.place.remote()


def _uploaded(runtime_env: Mapping[str, Any]) -> dict[str, Any]:
    """With the folders of `working_dir` and `py_modules` sent to the cluster, as `ray.init` does for its own.

    To be done for every process: Ray forgets a folder that nothing uses. Raises ConfigError.
    """
    from ray._private.runtime_env.py_modules import upload_py_modules_if_needed
    from ray._private.runtime_env.working_dir import upload_working_dir_if_needed

    try:
        with tempfile.TemporaryDirectory() as scratch:
            found = dict(runtime_env)
            for upload in (upload_py_modules_if_needed, upload_working_dir_if_needed):
                found = upload(found, include_gitignore=True, scratch_dir=scratch, logger=log)
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        raise ConfigError("cluster.runtime_env", dict(runtime_env), f"what Ray takes ({error})") from error
    return found


async def _answer(answer: Any) -> Any:
    from ray.exceptions import RayError, RayTaskError

    try:
        return await answer
    except RayTaskError as error:
        if isinstance(error.cause, CotuneError):
            raise error.cause from None
        raise
    except RayError as error:
        raise ProcessGone(_reason(error), "Read the log of its process in Ray's folder.") from error


def _reason(error: Exception) -> str:
    """What Ray's report says of why, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if "because" in line or "exit detail" in line or "memory" in line]
    reason = (told or lines or [type(error).__name__])[0]
    if "connection error code 2" in reason:
        return "its process ended by itself or was killed (a crash, an exit, too little memory)"
    return reason.split(" Worker exit detail: ")[-1][:300].rstrip(".")


def _this_node() -> str:
    import ray

    return ray.get_runtime_context().get_node_id()
