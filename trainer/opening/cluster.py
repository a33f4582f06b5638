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
    joined,
    policy_count,
    server_urls,
    start_engines,
)

SPARE_CPUS = 16
"""What a local Ray gives out beyond what the run's parts ask for, so that engines of further policies find room."""


class Cluster:
    """Opens the parts in order; all of them, and a local Ray, end with `stack`."""

    def __init__(
        self,
        config: TrainConfig,
        workflow: Workflow,
        path: str,
        stack: contextlib.AsyncExitStack,
        say: Callable[[str], None],
    ) -> None:
        """`path` is where rollout workers find `workflow`; it is not looked at where none are opened."""
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
        if self._config.learner.device != "auto" and settings.gpus_per_learner:
            raise ConfigError("learner.device", self._config.learner.device, "must be auto if learners have GPUs")
        local, sets = settings.address == "local", len(first_sets(self._config))
        wanted = sum(demand.count * CPUS for demand in settings.demands(samplers=sets)) + SPARE_CPUS
        cpus = max(float(os.cpu_count() or 1), wanted) if local else None
        self._stack.enter_context(open_ray(settings.address, num_cpus=cpus, env=settings.env))

    async def open_sampler(self) -> Sampler:
        """Start the engines that are known to be needed before the roles are. Raises ConfigError, EngineLost."""
        self._urls = await server_urls(self._config)
        return await self._with_engines(first_sets(self._config))

    async def complete(self, policies: Policies) -> Sampler:
        """The sampler for all policies: more engines are started where these need some. Raises ConfigError,
        EngineLost."""
        return await self._with_engines(engine_sets(self._config, policies))

    async def _with_engines(self, sets: Sequence[EngineSet]) -> Sampler:
        """A sampler over engines for each set: those that were started for the same base and weights, or new ones."""
        check_gpus(self._settings, sets=len(sets), present=gpus_of_cluster())
        free = list(self._engines)

        def started(one: EngineSet) -> Sampler | None:
            same = next((old for old in free if (old[0].model, old[0].weights) == (one.model, one.weights)), None)
            if same is None:
                return None
            free.remove(same)
            return same[1]

        samplers = [started(one) for one in sets]
        missing = [one for one, sampler in zip(sets, samplers, strict=True) if sampler is None]
        results = await asyncio.gather(*map(self._start, missing), return_exceptions=True)
        new: list[Sampler] = []
        for result in results:
            if isinstance(result, BaseException):
                raise result
            new.append(result)
        self._engines = [(one, sampler or new.pop(0)) for one, sampler in zip(sets, samplers, strict=True)]
        return joined(self._config, self._engines)

    async def _start(self, one: EngineSet) -> Sampler:
        settings = self._settings
        engines = plural(settings.engines, f"{self._config.engine} engine")
        self._say(f"starting {engines} for {one} on Ray ({settings.address})")
        sampler = await start_engines(self._config, one, self._urls.get(one.model, ""))
        self._stack.push_async_callback(sampler.aclose)
        return sampler

    async def open_workers_and_learner(
        self, policies: Policies, loss: LossSpec, sampler: Sampler, own: Mapping[str, PolicyTraining]
    ) -> tuple[RolloutWorkers, FsdpLearner]:
        """Start the processes that run the application and those that train, at once.

        Raises ConfigError, WorkflowError, LearnerError.
        """
        workers, learner = await asyncio.gather(
            RolloutWorkers.open(self._workflow, self._path, self._config, sampler, on_loss=self._say),
            self.open_learner(policies, loss, own),
            return_exceptions=True,
        )
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
        """Learners for these policies in place of the present or lost ones. Raises RunError where some policies are new
        and the engines have no room for them."""
        trained = sum(spec.trained and spec.model is None for spec in policies.specs.values())
        full = any(one.weights == "full" for one in engine_sets(self._config, policies))
        crowded = full or (engine_kind(self._config).fixed and trained > policy_count(self._config, self._config.model))
        if crowded and policies.specs.keys() - self._open_policies:
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
        """Start the processes that train; `own` are other methods of some. Raises ConfigError, LearnerError."""
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
        self._learner, self._open_policies = learner, set(policies.specs)
        return learner


def check_gpus(settings: ClusterConfig, *, sets: int, present: int) -> None:
    """Raises ConfigError if the engines and learners of a run need more GPUs than Ray has: Ray would let them wait."""
    engines = settings.engines * sets * settings.gpus_per_engine
    learners = settings.learners * settings.gpus_per_learner
    if engines + learners <= present:
        return
    fault = f"takes {engines:g} GPUs, and the learners take {learners:g}: Ray has {present}"
    remedy = "Lower engines, gpus_per_engine or learners in [cluster]."
    raise ConfigError("cluster.engines", settings.engines, fault, remedy)
