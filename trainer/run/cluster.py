"""The parts of a run that live on Ray: its engines, its rollout workers and its learners."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Callable, Mapping

from cotune.algorithms.recipes import LossSpec
from cotune.episodes.workflows import Workflow
from cotune.errors import ConfigError, RunError
from cotune.integrations.cluster.runtime import open_ray
from cotune.integrations.models.engines import EngineWeights
from cotune.integrations.models.folder.folder import locate_model
from cotune.integrations.models.per_policy import PolicySampler
from cotune.records.policies import Policies
from cotune.sampling.protocol import Sampler
from cotune.tables import plural
from cotune.trainer.config.cluster import CPUS, ClusterConfig
from cotune.trainer.config.learner import Method
from cotune.trainer.config.train import TrainConfig
from cotune.trainer.learner.fsdp.learner import FsdpLearner
from cotune.trainer.rollout.workers import RolloutWorkers
from cotune.trainer.run.engines import first_weights, owners, policy_count, start_engines

SPARE_CPUS = 16
"""What a local Ray gives out beyond what the run's parts ask for, so that pools of further policies find room."""


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

    def open_ray(self) -> None:
        """Start or join Ray; blocks. Raises ConfigError."""
        settings = self._settings
        if self._config.learner.device != "auto" and settings.gpus_per_learner:
            raise ConfigError("learner.device", self._config.learner.device, "must be auto if learners have GPUs")
        local = settings.address == "local"
        wanted = sum(demand.count * CPUS for demand in settings.demands()) + SPARE_CPUS
        cpus = max(float(os.cpu_count() or 1), wanted) if local else None
        self._stack.enter_context(open_ray(settings.address, num_cpus=cpus, env=settings.env))

    async def open_sampler(self) -> Sampler:
        """Start engines on the base model. Raises ConfigError, EngineLost."""
        return await self._start(first_weights(self._config))

    async def complete(self, policies: Policies, first: Sampler) -> Sampler:
        """The sampler for all policies: `first`, and more engines where several policies have full weights.

        Raises ConfigError, EngineLost.
        """
        full, rest = owners(self._config, policies)
        if len(full) + rest <= 1:
            return first
        if first_weights(self._config) == "full":
            own = {full[0]: first} | {name: await self._start("full", name) for name in full[1:]}
            return PolicySampler(own, await self._start("full", "the untrained model") if rest else None)
        return PolicySampler({name: await self._start("full", name) for name in full}, first)

    async def _start(self, weights: EngineWeights, whose: str = "") -> Sampler:
        settings = self._settings
        engines = plural(settings.engines, f"{settings.sampled_by} engine")
        self._say(f"starting {engines}{f' for {whose}' if whose else ''} on Ray ({settings.address})")
        sampler = await start_engines(self._config, str(locate_model(self._config.model)), weights)
        self._stack.push_async_callback(sampler.aclose)
        return sampler

    async def open_workers_and_learner(
        self, policies: Policies, loss: LossSpec, sampler: Sampler, own: Mapping[str, Method]
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

    async def reopen_learner(self, policies: Policies, loss: LossSpec, own: Mapping[str, Method]) -> FsdpLearner:
        """Learners for these policies in place of the present or lost ones. Raises RunError where some policies are new
        and the engines have no room for them."""
        full, _ = owners(self._config, policies)
        trained = sum(spec.trained for spec in policies.specs.values())
        crowded = full or (self._settings.kind.fixed and trained > policy_count(self._config))
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

    async def open_learner(self, policies: Policies, loss: LossSpec, own: Mapping[str, Method]) -> FsdpLearner:
        """Start the processes that train; `own` are other methods of some. Raises ConfigError, LearnerError."""
        learner = await asyncio.to_thread(
            FsdpLearner.open,
            str(locate_model(self._config.model)),
            policies,
            self._config.learner,
            loss,
            self._settings,
            own,
        )
        self._stack.push_async_callback(learner.aclose)
        self._learner, self._open_policies = learner, set(policies.specs)
        return learner
