"""What samples: checks of `engine`, and what it means for a run."""

from __future__ import annotations

import re

from cotune.config.cluster import ClusterConfig
from cotune.config.train import TrainConfig
from cotune.errors import ConfigError
from cotune.integrations.models.engines import ENGINES, SERVER, Engine, engine_of

AUTO = "auto"
"""The engine of a run that decides by the machine; see trainer/run/division.py."""


def check_engine(engine: str, cluster: ClusterConfig) -> None:
    """Raises ConfigError for an engine that does not exist, and for settings that contradict a server."""
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

    if not all(url.startswith(("http://", "https://")) for url in urls):
        raise ConfigError("engine", engine, "is not a list of addresses of vLLM servers: http://HOST:PORT")
    if cluster.engines > 1:
        raise ConfigError("cluster.engines", cluster.engines, "must be 1 if a server samples")
    if cluster.gpus_per_engine:
        raise ConfigError("cluster.gpus_per_engine", cluster.gpus_per_engine, "must be 0 if a server samples")


def engine_urls(engine: str) -> tuple[str, ...]:
    """The addresses that `engine` names. Empty if it names no server."""
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
    """Whether the engine sleeps during updates. Without Ray it does so on a CPU too, where it only pauses."""
    beside_learner = config.cluster.shares_gpu or not (config.cluster.on_ray or config.cluster.gpus_per_engine)
    return engine_kind(config).sleeps and config.mode == "sync" and beside_learner
