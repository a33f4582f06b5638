"""vLLM in a child process, for runs without Ray. It is restarted if its engine dies, and ends with this process.

While vLLM starts, it blocks the event loop for minutes. It also handles signals and configures logging, which must not
happen in the application's process. Both vLLM's front end and its engine are in the session of the child process, so
that Ctrl-C reaches neither.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from cotune.integrations.apps.activation import NO_ACTIVATION
from cotune.integrations.cluster.router.router import RoutedSampler
from cotune.integrations.cluster.temp_dir import remove_abandoned
from cotune.integrations.models.child import serve
from cotune.integrations.models.child.process import ProcessHost
from cotune.integrations.models.child.sampler import HostedSampler
from cotune.integrations.models.engines import EngineConfig, open_sampler
from cotune.integrations.models.vllm.adapters import FOLDERS, SHARED_MEMORY
from cotune.integrations.models.vllm.engine import CLOSE_SECONDS


class VllmProcess(ProcessHost):
    """The child process with vLLM's front end, and the processes that it starts."""

    body = serve.__name__
    environment: Mapping[str, str] = {**NO_ACTIVATION, "VLLM_LOGGING_LEVEL": "ERROR"}
    start_seconds = 3600.0  # a large model is read from a network disk, and its graphs are compiled
    close_seconds = CLOSE_SECONDS + 10.0
    has_children = True

    def remove_leftovers(self) -> None:
        for parent in (SHARED_MEMORY, Path(tempfile.gettempdir())):
            remove_abandoned(parent, FOLDERS)


async def start_vllm_process(config: EngineConfig) -> HostedSampler:
    """Start vLLM in a child process, and wait until it serves. Raises ConfigError, EngineLost, SamplerError."""
    child_config = msgspec.structs.replace(config, alone=True)
    source = serve.SamplerSource(f"{__name__}:open_restarted", {"config": child_config})
    return await HostedSampler(VllmProcess).start(source)


async def open_restarted(config: EngineConfig) -> RoutedSampler:
    """Open an engine in the child process. If it dies, it is started again with all published versions."""
    if not config.gpus:
        os.environ.setdefault("OMP_NUM_THREADS", str(config.threads or 1))
    return await RoutedSampler.open([functools.partial(open_sampler, config)])
