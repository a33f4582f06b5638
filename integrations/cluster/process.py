"""A process of the cluster that hosts one object. It is a Ray actor, which is always ended with its owner."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import psutil

from cotune.errors import ConfigError, CotuneError
from cotune.user_objects import load_object

log = logging.getLogger("cotune")

CALLS = 10_000
"""Most calls of one object that may run at once; others wait."""

DRAIN_SECONDS = 5.0
"""Seconds that the process of a closed object waits for the errors of its pending calls to be sent."""

GRACE_SECONDS = 2.0
"""Seconds that a process gets to end after Ray has asked it to; then it gets SIGKILL."""

KILL_SECONDS = 30.0
"""Seconds to wait until Ray reports the end of a killed process, and until the process has ended."""


class ProcessGone(CotuneError):
    """The process ended, crashed, was killed or cannot be reached. `cause` is Ray's explanation, in one line."""


class Host:
    """The actor. It holds an object, whose methods run on the actor's event loop.

    The operating system lists the process by the name of this class, or of a subclass.
    """

    def __init__(self) -> None:
        # Ray passes arrays read-only, in shared memory; torch warns of that, but the object does not write into them.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        self._object: Any = None
        self._running = 0

    async def open(self, factory: str, kwargs: Mapping[str, Any]) -> tuple[int, str]:
        hosted = load_object("factory", factory, "my_engine:open")(**kwargs)
        self._object = await hosted if inspect.isawaitable(hosted) else hosted
        return await self.place()

    async def place(self) -> tuple[int, str]:
        """The process id and the node of this actor."""
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
    """An object in a separate process. It can be pickled, so that any process of the cluster can call the object.

    `factory` is the import path of a class or an async function, "module:name" or "module:Class.function". It is called
    in the new process with `kwargs` and returns the object. The object's methods are coroutine functions; many may run
    at once. Ray chooses a node with `cpus` and `gpus` to spare. The process ends with the process that started it, and
    is never started again.
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
        """Describe an actor of Ray that holds one object. `start` creates it.

        Args:
            factory: import path of the function that makes the object, called with `kwargs` in the actor.
            cpus, gpus: resources that Ray reserves for it.
            runtime_env: environment of the actor's process, such as variables.
            host: class of the actor.
        """
        self._host = host
        self._factory = factory
        self._kwargs = dict(kwargs or {})
        self._options = {"num_cpus": cpus, "num_gpus": gpus, "max_concurrency": CALLS}
        self._runtime_env = dict(runtime_env or {})
        self._actor: Any = None
        self.pid: int | None = None
        self.node = ""

    async def start(self) -> None:
        """Start the process and wait for the object; then `pid` and `node` are set.

        Raises ConfigError, ProcessGone, and the errors of the factory.
        """
        import ray

        runtime_env = await asyncio.to_thread(_upload_folders, self._runtime_env)
        self._actor = ray.remote(self._host).options(**self._options, runtime_env=runtime_env).remote()
        self.pid, self.node = await _wait_for_answer(self._actor.open.remote(self._factory, self._kwargs))

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the object. Cancelling this call cancels the method.

        Raises ProcessGone, and the method's own error if that is a CotuneError.
        """
        return await _wait_for_answer(self._actor.call.remote(method, *arguments))

    async def aclose(self) -> None:
        """Call the object's `aclose`, let its pending calls fail, and end the process in any case."""
        try:
            await _wait_for_answer(self._actor.aclose.remote())
        except ProcessGone:
            pass  # it has ended already
        finally:
            await self.kill()

    async def kill(self) -> None:
        """End the process, even a stopped or busy one, and wait until it has ended."""
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
    """Wait until these processes of this machine have ended, as Ray has asked them to.

    A stopped or busy process does not react. Ray would kill it much later; this function does so after a few seconds.
    """
    processes = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    remaining = _wait_for_end(processes, GRACE_SECONDS, kill=False)
    _wait_for_end(remaining, KILL_SECONDS, kill=True)


def _wait_for_end(processes: Sequence[psutil.Process], seconds: float, *, kill: bool) -> list[psutil.Process]:
    """Wait until the processes have ended, for so many seconds. Returns those that still run.

    With `kill`, it kills them before each look.
    """
    deadline = time.monotonic() + seconds
    remaining = list(processes)
    while time.monotonic() < deadline:
        remaining = [process for process in remaining if _is_running(process)]
        if not remaining:
            break
        if kill:
            for process in remaining:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        time.sleep(0.02)
    return remaining


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


def _upload_folders(runtime_env: Mapping[str, Any]) -> dict[str, Any]:
    """Upload the folders of `working_dir` and `py_modules` to the cluster, as `ray.init` does for its own.

    This is needed for every process, because Ray removes a folder that nothing uses. Raises ConfigError.
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


async def _wait_for_answer(answer: Any) -> Any:
    """The result of a call in another process, from Ray's reference `answer`.

    Errors of cotune are raised as they were there. Raises ProcessGone if the process has ended.
    """
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
    """The reason why a process ended, from Ray's report, in one line of at most 300 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    # The report begins with other information. The reason is in the first line with one of these words.
    reason = lines[0]
    for line in lines:
        if "because" in line or "exit detail" in line or "memory" in line:
            reason = line
            break
    if "connection error code 2" in reason:
        return "its process ended by itself or was killed (a crash, an exit, too little memory)"
    _, _, detail = reason.rpartition(" Worker exit detail: ")
    return detail[:300].rstrip(".")
