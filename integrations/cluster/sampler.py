"""Runs any sampler in a Ray actor. Every process of the cluster can use it by the `Sampler` protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from cotune.errors import SamplerError
from cotune.integrations.apps.activation import NO_ACTIVATION
from cotune.integrations.cluster.process import Host, ProcessGone, RayProcess
from cotune.integrations.models.engine_sampler import CalledSampler


class SamplerActor(Host):
    """The host of one sampler. The operating system lists its process by this name."""


class RaySampler(CalledSampler):
    """The `Sampler` protocol over a sampler in a process of the cluster; made by `start_sampler`.

    It can be pickled, so that any process of the cluster can sample from the same engine. Raises SamplerError if the
    process is gone. Errors of the sampler are raised here with their own class.
    """

    takes_remote_weights = True

    def __init__(self, process: RayProcess) -> None:
        self._process = process
        self._closed = False

    async def aclose(self) -> None:
        """Close the sampler and end its process; pending requests fail with SamplerError."""
        if not self._closed:
            self._closed = True
            await self._process.aclose()

    async def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the sampler in its process. Raises SamplerError if the method or the process fails."""
        from ray.exceptions import RayTaskError

        self._check_open()
        try:
            return await self._process.call(method, *arguments)
        except RayTaskError as error:
            raise SamplerError(f"The sampler failed in its actor: {error}", "Read the error above.") from error
        except ProcessGone as gone:
            self._check_open()
            raise _engine_lost(gone) from gone

    def _check_open(self) -> None:
        if self._closed:
            raise SamplerError("The sampler was closed.", "Open a new one.")


async def start_sampler(
    factory: str,
    kwargs: Mapping[str, Any],
    *,
    num_cpus: float = 1,
    num_gpus: float = 0,
    env: Mapping[str, str] | None = None,
) -> RaySampler:
    """Start a process that hosts the sampler of `factory`, and wait until it serves. See `RayProcess`.

    `factory` is an async function. `env` is set in the process before anything is imported. Raises the errors of the
    factory, ConfigError if `factory` cannot be imported, SamplerError if the process dies.
    """
    runtime_env = {"env_vars": {**NO_ACTIVATION, **(env or {})}}
    process = RayProcess(factory, kwargs, cpus=num_cpus, gpus=num_gpus, runtime_env=runtime_env, host=SamplerActor)
    try:
        await process.start()
    except ProcessGone as gone:
        raise _engine_lost(gone) from gone
    except BaseException:
        await asyncio.shield(process.kill())
        raise
    return RaySampler(process)


def _engine_lost(gone: ProcessGone) -> SamplerError:
    return SamplerError(f"The sampler's engine is gone: {gone.cause}.", "Read the actor's log, then open a new one.")
