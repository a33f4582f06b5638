"""One line that names the engine and the devices of a run."""

from __future__ import annotations

from cotune.config.train import TrainConfig
from cotune.integrations.models.bfloat16 import gpu_has_bfloat16
from cotune.integrations.models.devices import device_name
from cotune.trainer.config.engine import engine_kind, engine_sleeps


def where_it_runs(config: TrainConfig) -> str:
    """Return the engine, the device and the precision of sampler and learner, after `divide` has chosen them."""
    cluster = config.cluster
    devices = device_name()
    if cluster.on_ray:
        devices = f"{cluster.learners} on Ray, {_describe_gpus(cluster.gpus_per_learner)}"
    learner = f"learner: {devices}, {config.learner.precision}"
    if config.from_records:
        return learner
    return f"{_describe_sampler(config)}; {learner}"


def _describe_sampler(config: TrainConfig) -> str:
    """Return the engine, the device and the precision of the sampler."""
    cluster = config.cluster
    if engine_kind(config).by_url:
        return f"sampler: vLLM at {config.engine}"
    asleep = ", asleep during updates" if engine_sleeps(config) else ""
    if cluster.on_ray:
        gpus = _describe_gpus(cluster.gpus_per_engine)
        return f"sampler: {cluster.engines} x {config.engine} on Ray, {gpus}{asleep}"
    device = device_name()
    if device == "the CPU":
        precision = config.learner.precision  # the engine multiplies in the learner's precision, so that both agree
    elif config.engine == "vllm" and not gpu_has_bfloat16():
        precision = "float32"
    else:
        precision = "bfloat16"
    return f"sampler: {config.engine}, {device}, {precision}{asleep}"


def _describe_gpus(count: float) -> str:
    """Describe the GPUs of one engine or one learner."""
    if not count:
        return "on the CPU"
    if count < 1:
        return "on a GPU that both share"
    return f"{count:g} GPU{'s' if count > 1 else ''} each"
