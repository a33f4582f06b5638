"""The [cluster] table: Ray, and how many processes and GPUs the parts of a run get there."""

from __future__ import annotations

from typing import Any

import msgspec

from cotune.errors import ConfigError, check_bounds

CPUS = 1.0
"""CPUs that Ray counts for an engine, an FSDP worker or a rollout worker."""

NO_RAY = "none"
"""The address of a run that stays out of Ray."""
SHARED = 0.5
"""GPUs of an engine, and of a learner, that share one."""


class Demand(msgspec.Struct, frozen=True):
    """Processes of one kind that a run starts, and the GPUs of each; each also takes `CPUS`."""

    part: str
    count: int
    gpus: float = 0.0


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """[cluster] Engines, learners and rollout workers as Ray actors. A run chooses their numbers from the GPUs of the
    machine or of the Ray cluster; each number in this table replaces one. `cotune doctor` prints the result."""

    address: str = ""
    """local: start Ray on this machine, for this run only | auto or HOST:PORT: use a running Ray cluster | none: no
    Ray, one engine and one learner on this machine; see docs/how-to/cluster.md. If neither the flag nor a [cluster]
    table is there: local on a machine with several GPUs, Ray and vLLM, else none. A [cluster] table without an address
    means local."""
    engines: int = 0
    """Engines that sample: of each base model, and with vLLM of each policy that trains all weights. 0: one on the CPU,
    else as many as the GPUs that learners leave allow."""
    gpus_per_engine: float = 0
    """GPUs of one engine; above 1 it is tensor parallel. 0.5: it shares a GPU with the one learner and sleeps during
    updates. 0: none on the CPU, else the fewest that hold the model."""
    learners: int = 0
    """FSDP workers, on a GPU each if there are any; they train all policies in turn, and a batch is divided among them.
    0: one on the CPU, else a quarter of the GPUs, or as many as the model needs."""
    rollout_workers: int = 1
    """Processes that run the application; one that crashes costs its episodes only."""
    env: dict[str, str] = {}
    """[cluster.env] Environment variables of the actors, such as keys that the application needs."""
    runtime_env: dict[str, Any] = {}
    """[cluster.runtime_env] Ray's runtime environment of the rollout workers, such as working_dir or pip."""

    def __post_init__(self) -> None:
        """Raise ConfigError for numbers that Ray cannot place, and for settings that need Ray if there is none."""
        check_bounds(self, "rollout_workers", least=1, table="cluster.")
        check_bounds(self, "engines", "learners", "gpus_per_engine", least=0, table="cluster.")
        if self.gpus_per_engine not in (SHARED, int(self.gpus_per_engine)):
            fault = f"is not a whole number, nor {SHARED} for an engine and a learner on one"
            raise ConfigError("cluster.gpus_per_engine", self.gpus_per_engine, fault)
        if self.shares_gpu:
            for name in ("engines", "learners"):
                if getattr(self, name) > 1:
                    fault = "must be 1 if engine and learner share a GPU"
                    raise ConfigError(f"cluster.{name}", getattr(self, name), fault)
        if self.address == NO_RAY:
            self._check_without_ray()

    def _check_without_ray(self) -> None:
        """Raise ConfigError for settings that need Ray."""
        remedy = 'Set cluster.address = "local", or leave it out.'
        for name in ("engines", "gpus_per_engine", "learners", "rollout_workers"):
            if getattr(self, name) > 1:
                raise ConfigError(f"cluster.{name}", getattr(self, name), "needs Ray", remedy)
        for name in ("env", "runtime_env"):
            if getattr(self, name):
                raise ConfigError(f"cluster.{name}", getattr(self, name), "needs Ray", remedy)

    @property
    def on_ray(self) -> bool:
        """Whether the parts of the run are Ray actors; a run without an address decides when it opens."""
        return self.address not in ("", NO_RAY)

    @property
    def shares_gpu(self) -> bool:
        """Whether the engine and the learner share a GPU."""
        return self.gpus_per_engine == SHARED

    @property
    def gpus_per_learner(self) -> float:
        """GPUs of each learner, as far as the table tells; see `DividedCluster`."""
        return SHARED if self.shares_gpu else 0.0

    def divided(self, *, gpus_per_learner: float, **numbers: float) -> DividedCluster:
        """This table with the GPUs of a learner, and with other `numbers`."""
        fields = {name: getattr(self, name) for name in ClusterConfig.__struct_fields__}
        return DividedCluster(**{**fields, **numbers}, gpus_per_learner=gpus_per_learner)

    def demands(self, samplers: int = 1) -> tuple[Demand, ...]:
        """What the run asks of the cluster, with this many sets of engines."""
        return (
            Demand("engine", self.engines * samplers, self.gpus_per_engine),
            Demand("learner", self.learners, self.gpus_per_learner),
            Demand("rollout worker", self.rollout_workers),
        )


class DividedCluster(ClusterConfig, frozen=True, kw_only=True):
    """[cluster] once a run has divided the GPUs, with the number that no user sets: a learner has one GPU, half of the
    one that it shares with an engine, or none on the CPU."""

    gpus_per_learner: float = 0.0  # a field in place of the property
