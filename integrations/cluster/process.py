"""A process of the cluster that hosts one object: a Ray actor, from its start to its certain end."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Collection, Mapping
from typing import Any

import psutil

from cotune.errors import ConfigError, CotuneError
from cotune.user_objects import load_object

log = logging.getLogger("cotune")

CALLS = 10_000
"""How many calls of one object may run at once; others wait."""

DRAIN_SECONDS = 5.0
"""How long a closed object's process waits for the failures of its pending calls to be sent."""

GRACE_SECONDS = 2.0
"""How long a process may take to end when Ray tells it to, before it is sent SIGKILL."""

KILL_SECONDS = 30.0
"""How long to wait until Ray says that a killed process is gone, and until it is."""


class ProcessGone(CotuneError):
    """The process ended, crashed, was killed or cannot be reached. `cause` is what Ray knows of it, in one line."""


class Host:
    """What runs in the actor: an object; its methods run on the actor's event loop.

    The operating system lists the process by the name of this class, or of one that inherits from it.
    """

    def __init__(self) -> None:
        # Ray hands arrays over read-only, in shared memory; nobody writes into what is given.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        self._object: Any = None
        self._running = 0

    async def open(self, factory: str, kwargs: Mapping[str, Any]) -> tuple[int, str]:
        hosted = load_object("factory", factory, "my_engine:open")(**kwargs)
        self._object = await hosted if inspect.isawaitable(hosted) else hosted
        return await self.place()

    async def place(self) -> tuple[int, str]:
        return os.getpid(), this_node()

    async def call(self, method: str, *arguments: Any) -> Any:
        self._running += 1
        try:
            return await getattr(self._object, method)(*arguments)
        finally:
            self._running -= 1

    async def aclose(self) -> None:
        if self._object is not None:
            await self._object.aclose()
        deadline = time.monotonic() + DRAIN_SECONDS
        while self._running and time.monotonic() < deadline:
            await asyncio.sleep(0.01)


class RayProcess:
    """An object in a process of its own. It can be pickled: every process of the cluster that has one calls the object.

    `factory` is the import path of what makes the object, a class or an async function: "module:name" or
    "module:Class.function", called there with `kwargs`. The object's methods are coroutine functions, and many may run
    at once. Ray picks a node with `cpus` and `gpus` to spare. The process ends with the one that started it, and is
    never started again.
    """

    def __init__(
        self,
        factory: str,
        kwargs: Mapping[str, Any] | None = None,
        *,
        cpus: float = 1.0,
        gpus: float = 0.0,
        runtime_env: Mapping[str, Any] | None = None,
        host: type[Host] = Host,
    ) -> None:
        self._host = host
        self._made_by = factory, dict(kwargs or {})
        self._options = {"num_cpus": cpus, "num_gpus": gpus, "max_concurrency": CALLS}
        self._runtime_env = dict(runtime_env or {})
        self._actor: Any = None
        self.pid: int | None = None
        self.node = ""

    async def start(self) -> None:
        """Return when the object is made, and `pid` and `node` are known. Raises ConfigError, ProcessGone, and what
        the factory raises."""
        import ray

        runtime_env = await asyncio.to_thread(_uploaded, self._runtime_env)
        self._actor = ray.remote(self._host).options(**self._options, runtime_env=runtime_env).remote()
        self.pid, self.node = await _answer(self._actor.open.remote(*self._made_by))

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the object; cancelled here, it is cancelled there. Raises what it raises if that is a
        CotuneError, and ProcessGone."""
        return await _answer(self._actor.call.remote(method, *arguments))

    async def aclose(self) -> None:
        """Call the object's `aclose`, let its pending calls fail, and end the process, whatever comes of that."""
        try:
            await _answer(self._actor.aclose.remote())
        except ProcessGone:
            pass
        finally:
            await self.kill()

    async def kill(self) -> None:
        """End the process, also one that is stopped or busy, and wait until it has."""
        import ray
        from ray.exceptions import RayError

        if self._actor is None:
            return
        ray.kill(self._actor)
        with contextlib.suppress(RayError, TimeoutError):
            async with asyncio.timeout(KILL_SECONDS):
                await self._actor.place.remote()
        if self.pid is not None and self.node == this_node():
            await asyncio.to_thread(end_processes, [self.pid])


def end_processes(pids: Collection[int]) -> None:
    """Wait until these processes of this machine have ended, which Ray has told to. A process that is stopped or busy
    does not hear that; it is killed, which Ray would do much later."""
    processes = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    for force, seconds in ((False, GRACE_SECONDS), (True, KILL_SECONDS)):
        deadline = time.monotonic() + seconds
        while (processes := [one for one in processes if _is_running(one)]) and time.monotonic() < deadline:
            for process in processes if force else ():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(0.02)


def this_node() -> str:
    """Ray's id of this machine."""
    import ray

    return ray.get_runtime_context().get_node_id()


def _is_running(process: psutil.Process) -> bool:
    """Whether a process or, once it has ended, any of its threads still runs and holds its sockets and memory."""
    try:
        return process.is_running() and (process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1)
    except psutil.NoSuchProcess:
        return False


def _uploaded(runtime_env: Mapping[str, Any]) -> dict[str, Any]:
    """With the folders of `working_dir` and `py_modules` sent to the cluster, as `ray.init` does for its own.

    To be done for every process: Ray forgets a folder that nothing uses. Raises ConfigError.
    """
    from ray._private.runtime_env.py_modules import upload_py_modules_if_needed
    from ray._private.runtime_env.working_dir import upload_working_dir_if_needed

    try:
        with tempfile.TemporaryDirectory() as scratch:
            uploaded = dict(runtime_env)
            for upload in (upload_py_modules_if_needed, upload_working_dir_if_needed):
                uploaded = upload(uploaded, include_gitignore=True, scratch_dir=scratch, logger=log)
    except (ValueError, TypeError, OSError, RuntimeError) as error:
        raise ConfigError("cluster.runtime_env", dict(runtime_env), f"is not accepted by Ray ({error})") from error
    return uploaded


async def _answer(answer: Any) -> Any:
    import ray
    from ray.exceptions import RayError, RayTaskError

    try:
        return await answer
    except asyncio.CancelledError:
        ray.cancel(answer, recursive=False)
        raise
    except RayTaskError as error:
        if isinstance(error.cause, CotuneError):
            raise error.cause from None
        raise
    except RayError as error:
        raise ProcessGone(ray_reason(error), "Read the log of its process in Ray's folder.") from error


def ray_reason(error: Exception) -> str:
    """Why a process ended, of Ray's report, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "because" in line or "exit detail" in line or "memory" in line]
    reason = (telling or lines or [type(error).__name__])[0]
    if "connection error code 2" in reason:
        return "its process ended by itself or was killed (a crash, an exit, too little memory)"
    return reason.split(" Worker exit detail: ")[-1][:300].rstrip(".")
