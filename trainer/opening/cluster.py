"""The parts of a run that live on Ray: its engines, its rollout workers and its learners."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence

from cotune.algorithms.recipes import LossSpec
from cotune.config.cluster import CPUS, ClusterConfig
from cotune.config.train import TrainConfig
from cotune.episodes.workflows import Workflow
from cotune.errors import ConfigError, RunError
from cotune.integrations.cluster.runtime import gpus_of_cluster, open_ray
from cotune.integrations.models.folder.folder import locate_model
from cotune.records.policies import Policies
from cotune.sampling.protocol import Sampler
from cotune.tables import plural
from cotune.trainer.config.engine import engine_kind
from cotune.trainer.config.learner import PolicyTraining
from cotune.trainer.learner.fsdp.learner import FsdpLearner
from cotune.trainer.rollout.workers import RolloutWorkers
from cotune.trainer.run.engines import (
    EngineSet,
    engine_sets,
    first_sets,
    join_samplers,
    policy_count,
    server_urls,
    start_engines,
)

SPARE_CPUS = 16
"""CPUs that a local Ray offers beyond the demands of the run's parts, for engines of policies that come later."""


class Cluster:
    """Opens the parts of a run in order. All of them, and a local Ray, end with `stack`."""

    def __init__(
        self,
        config: TrainConfig,
        workflow: Workflow,
        path: str,
        stack: contextlib.AsyncExitStack,
        say: Callable[[str], None],
    ) -> None:
        """`path` is the import path of `workflow` for rollout workers; it is only used if workers are opened."""
        self._config = config
        self._workflow = workflow
        self._path = path
        self._stack = stack
        self._say = say
        self._settings: ClusterConfig = config.cluster
        self._learner: FsdpLearner | None = None
        self._open_policies: set[str] = set()
        self._engines: list[tuple[EngineSet, Sampler]] = []
        self._urls: dict[str, str] = {}

    def open_ray(self) -> None:
        """Start or join Ray; blocks. Raises ConfigError."""
        settings = self._settings
        cpus = None  # A cluster that is joined has its own number.
        if settings.address == "local":
            demands = settings.demands(samplers=len(first_sets(self._config)))
            demanded_cpus = sum(demand.count * CPUS for demand in demands)
            # Ray may offer more CPUs than the machine has. Otherwise it would not start all parts of the run.
            cpus = max(float(os.cpu_count() or 1), demanded_cpus + SPARE_CPUS)
        self._stack.enter_context(open_ray(settings.address, num_cpus=cpus, env=settings.env))

    async def open_sampler(self) -> Sampler:
        """Start the engines that are certainly needed, before the roles are known. Raises ConfigError, EngineLost."""
        self._urls = await server_urls(self._config)
        return await self._with_engines(first_sets(self._config))

    async def complete(self, policies: Policies) -> Sampler:
        """Return the sampler for all policies, and start further engines if they need some. Raises ConfigError,
        EngineLost."""
        return await self._with_engines(engine_sets(self._config, policies))

    async def _with_engines(self, sets: Sequence[EngineSet]) -> Sampler:
        """Return a sampler over engines for each set. Running engines with the same base model and weights are used
        again; the others are started."""
        check_gpus(self._settings, sets=len(sets), present=gpus_of_cluster())

        # 1. Use running engines again. Each serves one set.
        unused = list(self._engines)
        sampler_of_set: dict[int, Sampler] = {}  # by the index of the set
        for index, engine_set in enumerate(sets):
            for running in unused:
                running_set, sampler = running
                if (running_set.model, running_set.weights) == (engine_set.model, engine_set.weights):
                    sampler_of_set[index] = sampler
                    unused.remove(running)
                    break

        # 2. Start the others at the same time. All have ended their start when the error of one is raised.
        missing = [index for index in range(len(sets)) if index not in sampler_of_set]
        results = await asyncio.gather(*(self._start(sets[index]) for index in missing), return_exceptions=True)
        for index, result in zip(missing, results, strict=True):
            if isinstance(result, BaseException):
                raise result
            sampler_of_set[index] = result
        self._engines = [(engine_set, sampler_of_set[index]) for index, engine_set in enumerate(sets)]
        return join_samplers(self._config, self._engines)

    async def _start(self, engine_set: EngineSet) -> Sampler:
        """Start the engines of a set. They end with the stack."""
        settings = self._settings
        engines = plural(settings.engines, f"{self._config.engine} engine")
        self._say(f"starting {engines} for {engine_set} on Ray ({settings.address})")
        sampler = await start_engines(self._config, engine_set, self._urls.get(engine_set.model, ""))
        self._stack.push_async_callback(sampler.aclose)
        return sampler

    async def open_workers_and_learner(
        self, policies: Policies, loss: LossSpec, sampler: Sampler, own: Mapping[str, PolicyTraining]
    ) -> tuple[RolloutWorkers, FsdpLearner]:
        """Start rollout workers and learners at the same time.

        Raises ConfigError, WorkflowError, LearnerError.
        """
        workers, learner = await asyncio.gather(
            RolloutWorkers.open(self._workflow, self._path, self._config, sampler, on_loss=self._say),
            self.open_learner(policies, loss, own),
            return_exceptions=True,
        )
        # Workers that have started end with the stack, also if the learners have failed.
        if isinstance(workers, RolloutWorkers):
            self._stack.push_async_callback(workers.aclose)
        if isinstance(workers, BaseException):
            raise workers
        if isinstance(learner, BaseException):
            raise learner
        return workers, learner

    async def reopen_learner(
        self, policies: Policies, loss: LossSpec, own: Mapping[str, PolicyTraining]
    ) -> FsdpLearner:
        """Open learners for these policies, in place of the present or lost ones. Raises RunError if some policies are
        new and the engines have no room for them."""
        # An engine of full weights serves one policy, and a vLLM engine is started with room for a number of adapters.
        has_new_policies = bool(policies.specs.keys() - self._open_policies)
        adapters = sum(spec.trained and spec.model is None for spec in policies.specs.values())
        has_full_weights = any(engine_set.weights == "full" for engine_set in engine_sets(self._config, policies))
        has_too_many = adapters > policy_count(self._config, self._config.model) and engine_kind(self._config).fixed
        if has_new_policies and (has_full_weights or has_too_many):
            raise RunError(
                f"The engines of this run have no room for the policies of roles that were first seen now; all "
                f"roles are {', '.join(policies.roles)}.",
                "Continue with engines for all: cotune train --resume RUN --set "
                f"'roles={json.dumps(list(policies.roles))}'",
            )
        if self._learner is not None:
            await self._learner.aclose()
        return await self.open_learner(policies, loss, own)

    async def open_learner(self, policies: Policies, loss: LossSpec, own: Mapping[str, PolicyTraining]) -> FsdpLearner:
        """Start the learners. `own` has the settings and losses of policies with a [[policy]] table. Raises
        ConfigError, LearnerError."""
        learner = await asyncio.to_thread(
            FsdpLearner.open,
            str(locate_model(self._config.model)),
            policies,
            self._config.learner,
            loss,
            self._settings,
            own,
            self._config.seed,
        )
        self._stack.push_async_callback(learner.aclose)
        self._learner = learner
        self._open_policies = set(policies.specs)
        return learner


def check_gpus(settings: ClusterConfig, *, sets: int, present: int) -> None:
    """Raise ConfigError if the engines and learners of a run need more GPUs than Ray has: they would wait forever.

    `sets` is the number of sets of engines, one for each base model or policy that needs engines of its own. `present`
    is the number of GPUs.
    """
    engines = settings.engines * sets * settings.gpus_per_engine
    learners = settings.learners * settings.gpus_per_learner
    if engines + learners <= present:
        return
    fault = f"takes {engines:g} GPUs, and the learners take {learners:g}: Ray has {present}"
    remedy = "Lower engines, gpus_per_engine or learners in [cluster]."
    raise ConfigError("cluster.engines", settings.engines, fault, remedy)
