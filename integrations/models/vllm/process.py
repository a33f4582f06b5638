"""vLLM in a child process of this one, where no Ray hosts it: restarted when its engine dies, gone with this process.

vLLM blocks the event loop for minutes while it starts, handles signals and configures logging: the application keeps
all of these to itself. Both vLLM's front and its engine are in the child's session, so that Ctrl-C reaches neither.
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
    """The child process with vLLM's front and the processes that it starts."""

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
    inside = msgspec.structs.replace(config, alone=True)
    source = serve.SamplerSource(f"{__name__}:open_restarted", {"config": inside})
    return await HostedSampler(VllmProcess).start(source)


async def open_restarted(config: EngineConfig) -> RoutedSampler:
    """An engine that is started again when it dies, with all that is published; runs in the child process."""
    if not config.gpus:
        os.environ.setdefault("OMP_NUM_THREADS", str(config.threads or 1))
    return await RoutedSampler.open([functools.partial(open_sampler, config)])
