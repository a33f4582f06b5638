"""What samples: checks of `engine` and `engine_url`, and what they mean for a run."""

from __future__ import annotations

from cotune.config.cluster import ClusterConfig
from cotune.config.train import TrainConfig
from cotune.errors import ConfigError
from cotune.integrations.models.engines import ENGINES, Engine, engine_of

AUTO = "auto"
"""The engine of a run that decides by the machine; see trainer/run/division.py."""


def check_engine(engine: str, engine_url: str, cluster: ClusterConfig) -> None:
    """Raises ConfigError for an engine that does not exist, and for a server's address that is missing or unused."""
    if engine != AUTO and engine not in ENGINES and ":" not in engine:
        known = ", ".join([AUTO, *sorted(ENGINES)])
        raise ConfigError("engine", engine, f"is not one of {known}, or module:function")
    if not engine_of(engine).by_url:
        if engine_url:
            raise ConfigError("engine_url", engine_url, 'needs engine = "vllm-url"')
        return

    urls = engine_urls(engine_url)
    if not urls or not all(url.startswith(("http://", "https://")) for url in urls):
        raise ConfigError("engine_url", engine_url, "is not the address of a vLLM server: http://HOST:PORT")
    if cluster.engines > 1:
        raise ConfigError("cluster.engines", cluster.engines, "must be 1 if a server samples")
    if cluster.gpus_per_engine:
        raise ConfigError("cluster.gpus_per_engine", cluster.gpus_per_engine, "must be 0 if a server samples")


def engine_urls(engine_url: str) -> tuple[str, ...]:
    """The addresses that `engine_url` names."""
    return tuple(url.strip() for url in engine_url.split(",") if url.strip())


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
