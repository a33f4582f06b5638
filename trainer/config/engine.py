"""The engine that samples: checks of the setting `engine`, and its consequences for a run."""

from __future__ import annotations

import re

from cotune.config.cluster import ClusterConfig
from cotune.config.train import TrainConfig
from cotune.errors import ConfigError
from cotune.integrations.models.engines import ENGINES, SERVER, Engine, engine_of

AUTO = "auto"
"""The engine is chosen for the machine when a run starts; see trainer/run/division.py."""


def check_engine(engine: str, cluster: ClusterConfig) -> None:
    """Raise ConfigError for an engine that does not exist, and for settings of engines that a server has no use for."""
    names = {AUTO, *ENGINES} - {SERVER}
    if engine == SERVER:
        raise ConfigError("engine", engine, "has no address", 'Write it here: engine = "http://HOST:PORT".')
    if re.fullmatch(r"[^/,]+:\d+(/.*)?", engine):
        raise ConfigError("engine", engine, "is an address without http:// or https://", f"Write http://{engine}.")
    if engine not in names and ":" not in engine:
        raise ConfigError("engine", engine, f"is not one of {', '.join(sorted(names))}, an address, or module:function")
    urls = engine_urls(engine)
    if not urls:
        return

    for url in urls:
        if not url.startswith(("http://", "https://")):
            fault = f"has {url!r}, which is not the address of a vLLM server"
            remedy = 'Write addresses separated by commas: engine = "http://HOST:PORT,http://HOST:PORT".'
            raise ConfigError("engine", engine, fault, remedy)
    if cluster.engines > 1:
        fault = f"must be 1 with engine = {engine!r}: the server starts its own engines"
        raise ConfigError("cluster.engines", cluster.engines, fault, "Leave out cluster.engines, or change engine.")
    if cluster.gpus_per_engine:
        fault = f"must be 0 with engine = {engine!r}: the server has its own GPUs"
        remedy = "Leave out cluster.gpus_per_engine, or change engine."
        raise ConfigError("cluster.gpus_per_engine", cluster.gpus_per_engine, fault, remedy)


def engine_urls(engine: str) -> tuple[str, ...]:
    """The addresses of servers in `engine`; empty if it is another kind of engine."""
    if not engine_of(engine).by_url:
        return ()
    return tuple(url.strip() for url in engine.split(",") if url.strip())


def engine_kind(config: TrainConfig) -> Engine:
    """The row of the engine in the table of engines."""
    return engine_of(config.engine)


def engine_shares_gpu(config: TrainConfig) -> bool:
    """Whether the engine shares its GPU with the learner, and can free it during updates."""
    return config.cluster.shares_gpu and engine_kind(config).sleeps


def engine_sleeps(config: TrainConfig) -> bool:
    """Whether the engine sleeps during updates, to free the memory that it shares with the learner. Without Ray it does
    so on a CPU too, where it only pauses."""
    if not engine_kind(config).sleeps or config.mode != "sync":
        return False
    without_own_gpu = not config.cluster.on_ray and not config.cluster.gpus_per_engine
    return config.cluster.shares_gpu or without_own_gpu
