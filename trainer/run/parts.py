"""Which engine and which device each part of a run uses, in one line."""

from __future__ import annotations

from cotune.integrations.models.devices import device_name
from cotune.trainer.config.train import TrainConfig


def where_it_runs(config: TrainConfig) -> str:
    """The engine, the device and the precision of sampler and learner."""
    cluster = config.cluster
    if cluster.address:
        place = f"{cluster.learners} on Ray, {_gpus(cluster.gpus_per_learner)}"
    else:
        place = device_name(config.learner.device)
    learner = f"learner: {place}, {config.learner.precision}"
    if config.from_records:
        return learner
    return f"{_sampler(config)}; {learner}"


def _sampler(config: TrainConfig) -> str:
    cluster = config.cluster
    if cluster.engine_url:
        return f"sampler: {cluster.sampled_by} at {cluster.engine_url}"
    if cluster.address:
        return f"sampler: {cluster.engines} x {cluster.sampled_by} on Ray, {_gpus(cluster.gpus_per_engine)}"
    device = device_name("auto")
    # On a CPU the engine multiplies as the learner does, so that both agree.
    precision = config.learner.precision if device == "the CPU" else "bfloat16"
    return f"sampler: {cluster.sampled_by}, {device}, {precision}"


def _gpus(count: float) -> str:
    return "on the CPU" if not count else f"{count:g} GPU{'s' if count > 1 else ''} each"
