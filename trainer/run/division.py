"""The choice of the engine, and of the GPUs for engines and learners, unless the configuration sets them.

| machine | sampler | learner |
|---|---|---|
| no GPU | in process, on the CPU | the CPU |
| one GPU, and vLLM | vLLM in a child process, asleep during updates | the same GPU |
| one GPU, and no vLLM or a model that vLLM does not know | in process, on the GPU | the same GPU |
| several GPUs, and vLLM and Ray | vLLM engines on a local Ray | FSDP workers on a local Ray |
| several GPUs, and no Ray or no vLLM | as with one GPU | as with one GPU |

`find_resources` examines the machine, and `divide` chooses.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import msgspec

from cotune.algorithms.catalogue import is_own, recipe_class
from cotune.config.cluster import NO_RAY, SHARED, ClusterConfig
from cotune.config.train import TrainConfig
from cotune.errors import ConfigError, install_extra
from cotune.integrations.cluster.runtime import gpus_of_cluster, open_ray
from cotune.integrations.models.engines import SERVER, engine_name
from cotune.integrations.models.folder.folder import count_parameters, locate_model
from cotune.integrations.models.vllm.installed import Build, unknown_architectures, vllm_build
from cotune.tables import plural
from cotune.trainer.config.check import check
from cotune.trainer.config.engine import AUTO, engine_kind, engine_sleeps
from cotune.trainer.config.teachers import is_address, teachers_of
from cotune.trainer.run.engines import POLICIES, first_sets

WEIGHTS_PART = 0.5
"""Part of a GPU that weights may fill. The rest is for an engine's cache or a learner's activations (estimated)."""
FULL_BYTES = 16.0
"""Bytes for each parameter of a policy with full weights: float32 weights, gradients and two moments."""

FASTER = "vLLM samples several times as fast (estimated)"


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    """The GPUs and the installed software that a run can use."""

    gpus: int = 0
    """GPUs of this machine, or of the Ray cluster that the configuration names."""
    gpu_bytes: float = 0.0
    """Memory of the smallest GPU; 0 if it is not known."""
    ray: bool = False
    """Whether Ray is installed."""
    vllm: Build = ""
    unknown_to_vllm: tuple[str, ...] = ()
    """Architectures of the run's models that vLLM does not know."""
    parameters: int = 0
    """Parameters of the largest base model; 0 if the number is not known."""
    importable: bool = True
    """Whether other processes can import the application."""


class Division(NamedTuple):
    """A configuration with its engine and its division of GPUs, and notes on them for the user."""

    config: TrainConfig
    notes: tuple[str, ...]


def divide_run(
    config: TrainConfig,
    stack: contextlib.ExitStack | contextlib.AsyncExitStack,
    *,
    is_importable: Callable[[], bool] = lambda: True,
) -> Division:
    """Divide a run on this machine, or on the Ray cluster that its configuration names. The cluster is joined until
    `stack` ends. `is_importable` says whether other processes can import the application. Raises ConfigError."""
    if config.cluster.on_ray and config.cluster.address != "local":
        stack.enter_context(open_ray(config.cluster.address, env=config.cluster.env))
    return divide(config, find_resources(config, is_importable=is_importable))


def find_resources(config: TrainConfig, *, is_importable: Callable[[], bool] = lambda: True) -> Resources:
    """Examine this machine, or the Ray cluster that the configuration names. The cluster must have been joined."""
    import torch

    if config.cluster.on_ray and config.cluster.address != "local":
        return resources_of_cluster(gpus_of_cluster())
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    sizes = [torch.cuda.get_device_properties(index).total_memory for index in range(gpus)]
    # The search through all modules takes half a second, and only several GPUs are divided among processes.
    importable = gpus <= 1 or is_importable()
    return resources_of(
        config, gpus=gpus, gpu_bytes=float(min(sizes, default=0)), vllm=vllm_build(), importable=importable
    )


def resources_of_cluster(gpus: int) -> Resources:
    """Return the resources of a Ray cluster with this number of GPUs.

    Its machines are not inspected. Machines with GPUs are assumed to have vLLM, others the same software as this one.
    """
    return Resources(gpus=gpus, ray=True, vllm="gpu" if gpus else vllm_build())


def resources_of(
    config: TrainConfig, *, gpus: int, gpu_bytes: float, vllm: Build, importable: bool = True
) -> Resources:
    """Return the resources of a machine with these GPUs and this vLLM, and the sizes of the base models.

    A model that is not on this machine is downloaded to inspect it, so models are inspected only if the division of the
    machine depends on them.
    """
    folders: list[Path] = []
    if gpus or config.cluster.on_ray:
        folders = [locate_model(model) for model in config.bases]
    parameters = 0
    if gpus > 1:  # only then are the GPUs divided by the sizes of models
        parameters = max((count_parameters(folder) for folder in folders), default=0)
    return Resources(
        gpus=gpus,
        gpu_bytes=gpu_bytes,
        ray=find_spec("ray") is not None,
        vllm=vllm,
        unknown_to_vllm=unknown_architectures(folders) if vllm else (),
        parameters=parameters,
        importable=importable,
    )


def divide(config: TrainConfig, resources: Resources) -> Division:
    """Choose the settings that the configuration leaves open: `engine`, `cluster.address`, the numbers of [cluster].

    Raises ConfigError for settings that contradict each other on this machine.
    """
    if config.cluster.on_ray:
        return _divide_on_ray(config, resources)
    if resources.gpus <= 1:
        return _divide_without_ray(config, resources)

    obstacle = _obstacle_to_ray(config, resources)
    if not obstacle:
        local = msgspec.structs.replace(config.cluster, address="local")
        return _divide_on_ray(msgspec.structs.replace(config, cluster=local), resources)
    divided, notes = _divide_without_ray(config, resources)
    gpus_used = 1  # engine and learner share it
    if not divided.cluster.shares_gpu:
        gpus_used = int(divided.cluster.gpus_per_engine + divided.cluster.gpus_per_learner)
    unused = f"{gpus_used} of {resources.gpus} GPUs used: {obstacle}"
    return Division(divided, (unused, *notes))


def _divide_without_ray(config: TrainConfig, resources: Resources) -> Division:
    """Choose one engine and one learner on this machine. If there is a GPU and the engine is not vLLM, a note says
    why."""
    engine = config.engine
    notes: list[str] = []
    if engine == AUTO:
        engine = "transformers"
        if resources.gpus and not config.from_records:
            obstacle = _obstacle_to_vllm(config, resources, shares_gpu=True)
            if obstacle:
                notes.append(f"the transformers engine samples on the GPU: {obstacle}. {FASTER}.")
            else:
                engine = "vllm"

    # Engine and learner share the GPU. Without an engine of its own, the run gives the whole GPU to the learner.
    starts_engine = _starts_engines(config)
    per_engine = 0.0
    per_learner = 0.0
    if resources.gpus and starts_engine:
        per_engine = SHARED
        per_learner = SHARED
    elif resources.gpus:
        per_learner = 1.0
    # ClusterConfig itself raises ConfigError if it is built with this address and with settings that need Ray.
    cluster = msgspec.structs.replace(config.cluster, address=NO_RAY)
    if starts_engine:
        _check_gpus_per_engine(cluster, per_engine)
    cluster = cluster.divided(engines=1, gpus_per_engine=per_engine, learners=1, gpus_per_learner=per_learner)
    divided = msgspec.structs.replace(config, engine=engine, cluster=cluster)
    check(divided)  # the chosen engine may not work with all settings: one that sleeps needs mode sync
    return Division(divided, tuple(notes))


def _check_gpus_per_engine(cluster: ClusterConfig, per_engine: float) -> None:
    """Raise ConfigError if the configuration sets another number of GPUs per engine than a run without Ray has on this
    machine, `per_engine`."""
    configured = cluster.gpus_per_engine
    if configured and configured != per_engine:
        fault = f"needs Ray: without it, it is {per_engine:g} on this machine"
        remedy = 'Leave it out, or set cluster.address = "local".'
        raise ConfigError("cluster.gpus_per_engine", configured, fault, remedy)


def _starts_engines(config: TrainConfig) -> bool:
    """Return whether the run starts engines."""
    return not config.from_records and not engine_kind(config).by_url


def _divide_on_ray(config: TrainConfig, resources: Resources) -> Division:
    """Divide the GPUs among engines and learners on Ray. A note says why the engines are not vLLM, if they are not."""
    # 1. The engine: vLLM if nothing speaks against it.
    notes: list[str] = []
    shares_gpu = _shares_gpu_on_ray(config, resources)
    engine = config.engine
    if engine == AUTO:
        engine = "transformers"
        if not config.from_records:
            obstacle = _obstacle_to_vllm(config, resources, shares_gpu=shares_gpu)
            if obstacle:
                notes.append(f"transformers engines sample: {obstacle}. {FASTER}.")
            else:
                engine = "vllm"
    with_engine = msgspec.structs.replace(config, engine=engine)

    # 2. The GPUs. How many engines there are depends on the kind of engine.
    cluster: ClusterConfig
    if shares_gpu:
        cluster = config.cluster.divided(engines=1, gpus_per_engine=SHARED, learners=1, gpus_per_learner=SHARED)
    else:
        cluster = _divide_gpus(with_engine, resources)
    divided = msgspec.structs.replace(with_engine, cluster=cluster)
    check(divided)

    teacher = _local_teacher(config)
    if teacher and cluster.address == "local" and resources.gpus:
        notes.append(
            f"the teacher {teacher} is loaded in this process, on the first GPU, which Ray gives to an engine or a "
            "learner too. Serve it by vLLM on another machine if memory is short."
        )
    return Division(divided, tuple(notes))


def _shares_gpu_on_ray(config: TrainConfig, resources: Resources) -> bool:
    """Return whether engine and learner share a GPU: [cluster] says so, or there is only one."""
    cluster = config.cluster
    if cluster.shares_gpu:
        return True
    if resources.gpus != 1 or not _starts_engines(config):
        return False
    # With one GPU, both share it, unless the configuration asks for several processes or sets the GPUs of an engine (0
    # leaves them open).
    asks_for_another_division = cluster.engines > 1 or cluster.learners > 1 or cluster.gpus_per_engine != 0
    return not asks_for_another_division


def _divide_gpus(config: TrainConfig, resources: Resources) -> ClusterConfig:
    """Return [cluster] with the numbers of engines and learners, and their GPUs. Configured numbers stay."""
    cluster = config.cluster
    gpus = resources.gpus
    if not gpus:
        return cluster.divided(engines=cluster.engines or 1, learners=cluster.learners or 1, gpus_per_learner=0)
    if not _starts_engines(config):
        return cluster.divided(engines=1, learners=cluster.learners or gpus, gpus_per_learner=1)

    # There is a set of engines for each model, and `cluster.engines` is the number of engines of each set.
    sets = _count_engine_sets(config)
    per_engine = cluster.gpus_per_engine or _gpus_for_weights(config, resources, most=max(1, gpus // 2))
    gpus_for_one_engine_each = sets * per_engine
    if cluster.learners:
        learners = cluster.learners
    elif cluster.engines:
        learners = max(1, gpus - int(cluster.engines * gpus_for_one_engine_each))
    else:
        # A quarter of the GPUs trains, or more if the weights need them, but one engine of each set must have room.
        # Rollouts get the larger part, as they take most of a step: they decode token by token.
        wanted = max(gpus // 4, _learners_for_weights(config, resources, sets))
        learners = max(1, min(wanted, gpus - int(gpus_for_one_engine_each)))
    engines = cluster.engines or max(1, int((gpus - learners) // gpus_for_one_engine_each))
    return cluster.divided(engines=engines, gpus_per_engine=per_engine, learners=learners, gpus_per_learner=1)


def _obstacle_to_ray(config: TrainConfig, resources: Resources) -> str:
    """Return the reason why a run does not use Ray on a machine with several GPUs, in a configuration that leaves the
    choice open; an empty text if it uses Ray. The user reads it behind "1 of 4 GPUs used: "."""
    if config.cluster.address == NO_RAY:
        return "cluster.address is none"
    if engine_name(config.engine) not in (AUTO, "vllm", SERVER) and not config.from_records:
        return f"engine is {config.engine}. Engines and learners on all of them: cluster.address = local"
    if not resources.ray:
        return f"Ray, which divides the others among engines and learners, is not installed. {install_extra('ray')}"
    chooses_vllm = config.engine == AUTO and not config.from_records
    if chooses_vllm and (obstacle := _obstacle_to_vllm(config, resources, shares_gpu=False)):
        return obstacle
    if config.learner.quantize != "none":
        return "learner.quantize needs a learner in one process"
    if config.learner.optimizer != "adamw":
        return "learner.optimizer needs a learner in one process"
    for name in (config.recipe, *(policy.recipe for policy in config.policy)):
        if name is not None and is_own(name) and recipe_class(name).loss.token_loss:
            return f"the token_loss of {name} needs a learner in one process"
    if teacher := _local_teacher(config):
        return f"the teacher {teacher} is loaded in this process, on the first GPU. Serve it by vLLM for the others"
    if not resources.importable:
        return "other processes cannot import the application. Put it into a module"
    if not _starts_engines(config):
        return ""
    cluster = msgspec.structs.replace(config.cluster, address="local")
    config_on_ray = msgspec.structs.replace(config, engine="vllm", cluster=cluster)
    needed = _count_engine_sets(config_on_ray) + 1  # one GPU for an engine of each set, and one for the learner
    if needed > resources.gpus:
        return f"engines and learners need {needed}, as each base model and each policy of full weights has an engine"
    return ""


def _local_teacher(config: TrainConfig) -> str:
    """Return the name of a teacher whose model is loaded in the run's process; an empty text without one."""
    for name in teachers_of(config, config.model):
        if not is_address(name):
            return name
    return ""


def _obstacle_to_vllm(config: TrainConfig, resources: Resources, *, shares_gpu: bool) -> str:
    """Return the reason why vLLM cannot sample for this run; an empty text if it can. `shares_gpu` says whether it
    would share its GPU with the learner."""
    if not resources.vllm:
        return f"vLLM is not installed. {install_extra('vllm')}".removesuffix(".")
    if resources.gpus and resources.vllm == "cpu":
        return "the installed vLLM was built for the CPU, and its build for GPUs is needed"
    if not resources.gpus and resources.vllm == "gpu":
        return "the installed vLLM was built for GPUs"
    if resources.unknown_to_vllm:
        return f"vLLM does not know {', '.join(resources.unknown_to_vllm)}"
    # The kind of each policy. If the roles are not known yet, assume two, each with a policy of full weights.
    if config.policy:
        kinds = [policy.kind for policy in config.policy if policy.kind != "provider"]
    elif config.policies == "full":
        kinds = ["full"] * (len(config.roles) or 2)
    else:
        kinds = ["lora"]
    if config.ahead and "full" in kinds:
        return "vLLM holds one version of full weights, and mode async needs several"
    if not shares_gpu:
        return ""
    if config.mode != "sync":
        return "vLLM on the learner's GPU sleeps during updates, in which mode async samples"
    if len(config.bases) > 1 or ("full" in kinds and len(kinds) > 1):
        return "one GPU has room for one engine of vLLM, and each base model and policy of full weights needs its own"
    return ""


def _count_engine_sets(config: TrainConfig) -> int:
    """Count the sets of engines on Ray: one for each base model, and with vLLM one for each policy of full weights."""
    if config.policy or config.policies != "full" or not engine_kind(config).fixed:
        return len(first_sets(config))
    return len(config.roles) or POLICIES


def _gpus_for_weights(config: TrainConfig, resources: Resources, *, most: int) -> int:
    """Return the fewest GPUs, a power of two, that hold an engine's weights in bfloat16. The result is at most `most`,
    rounded down to a power of two."""
    if not resources.gpu_bytes:
        return 1
    weight_bytes = 2.0 * resources.parameters
    count = 1
    while weight_bytes > WEIGHTS_PART * resources.gpu_bytes * count:
        count *= 2
    most_power_of_two: int = 2 ** int(math.log2(most))
    return min(count, most_power_of_two)


def _learners_for_weights(config: TrainConfig, resources: Resources, sets: int) -> int:
    """Return the fewest learners whose GPUs together hold the weights that the learners divide among them."""
    if not resources.gpu_bytes:
        return 1
    full_policies = 0
    if config.policy:
        full_policies = sum(policy.kind == "full" for policy in config.policy)
    elif config.policies == "full":
        full_policies = sets  # each policy of full weights has a set of engines
    if full_policies:
        bytes_per_parameter = FULL_BYTES * full_policies
    else:  # adapters: frozen weights fill the memory
        bytes_per_parameter = 4.0 if config.learner.dtype == "float32" else 2.0
    weight_bytes = resources.parameters * bytes_per_parameter
    bytes_of_learner = WEIGHTS_PART * resources.gpu_bytes  # the part of its GPU that weights may take
    return max(1, math.ceil(weight_bytes / bytes_of_learner))


def describe_division(config: TrainConfig) -> str:
    """Describe which devices sample and learn, in a sentence that `cotune doctor` prints."""
    cluster = config.cluster
    if cluster.on_ray:
        learner = f"{plural(cluster.learners, 'learner')} {_each(cluster.gpus_per_learner)}"
    elif cluster.shares_gpu:
        learner = "the learner on the same GPU"
    else:
        learner = f"the learner on {'one GPU' if cluster.gpus_per_learner else 'the CPU'}"
    if engine_sleeps(config):
        learner += f", and {config.engine} sleeps during updates"

    if config.from_records:
        sampler = ""
    elif engine_kind(config).by_url:
        sampler = f"vLLM at {config.engine}; "
    elif cluster.on_ray:
        sampler = f"{plural(cluster.engines, f'{config.engine} engine')} {_each(cluster.gpus_per_engine)}; "
    else:
        sampler = f"{config.engine} on {'one GPU' if cluster.gpus_per_engine else 'the CPU'}; "
    ray = f" (Ray: {cluster.address})" if cluster.on_ray else ""
    return f"{sampler}{learner}{ray}"


def _each(gpus: float) -> str:
    """Describe the GPUs of each engine or learner."""
    if not gpus:
        return "on the CPU"
    if gpus == SHARED:
        return "on the GPU that both share"
    return f"with {gpus:g} GPU{'s' if gpus > 1 else ''} each"
