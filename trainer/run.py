"""A run in progress: everything the loop works on, opened from a run folder."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from cotune.algorithms.advantages import AdvantageState
from cotune.algorithms.recipes import LossSpec, Recipe
from cotune.integrations.samplers.transformers.sampler import TransformersSampler
from cotune.policies import Policies
from cotune.recording.records import PolicyRef, Task
from cotune.sampling.plans import Plan
from cotune.sampling.protocol import ChatFormat, Sampler
from cotune.storage.protocol import Store
from cotune.storage.sqlite_store import SqliteStore
from cotune.trainer.checkpoint import Checkpoint, load_checkpoint
from cotune.trainer.config.train import TrainConfig
from cotune.trainer.learner.protocol import Learner
from cotune.trainer.publish import Proof, prove_publish
from cotune.trainer.resume import counts
from cotune.trainer.rollout.local import LocalRunner
from cotune.trainer.rollout.preflight import preflight
from cotune.trainer.rollout.protocol import EpisodeRunner
from cotune.trainer.run_folder import RunFolder
from cotune.trainer.schedule import TaskSchedule
from cotune.workflows import Workflow

if TYPE_CHECKING:
    from cotune.trainer.cluster import Cluster

T = TypeVar("T")


@dataclass
class Run:
    """State of a run between steps. `step` is the next one to do; `versions` is by policy."""

    folder: RunFolder
    config: TrainConfig
    workflow: Workflow
    tasks: Sequence[Task]
    store: Store
    sampler: Sampler
    runner: EpisodeRunner
    learner: Learner
    plan: Plan
    recipe: Recipe
    policies: Policies
    notes: list[str]
    schedule: TaskSchedule
    reopen: Callable[[Learner, Policies], Coroutine[Any, Any, Learner]]
    held_out: Sequence[Task] = ()
    step: int = 0
    committed: int = -1
    versions: dict[str, int] = field(default_factory=dict)
    proofs: dict[str, Proof] = field(default_factory=dict)
    live: dict[str, list[PolicyRef]] = field(default_factory=dict)
    """Versions that the sampler serves, oldest first."""
    state: AdvantageState = field(default_factory=AdvantageState)
    newcomers: tuple[str, ...] = ()
    """Roles seen since the last step that get a policy before the next one."""
    ledger: dict[str, int] = field(default_factory=dict)
    members: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The candidates of those groups of the ledger that hold several calls."""
    consumed: set[str] = field(default_factory=set)
    counted: dict[str, int] = field(default_factory=dict)
    """What sampler and workers had counted when the last step ended."""
    latest: dict[str, dict[str, float]] = field(default_factory=dict)
    stopping: bool = False
    learner_restarts: int = 0
    _working: asyncio.Future[Any] | None = None

    async def interruptible(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of `work`, or None when `stop` was called meanwhile."""
        self._working = asyncio.ensure_future(work)
        if self.stopping:
            self._working.cancel()
        try:
            return await self._working
        except asyncio.CancelledError:
            if not self.stopping:
                raise
            return None
        finally:
            self._working = None

    def stop(self) -> None:
        """Stop at the next safe moment: at once during a rollout, else when the step in hand is committed."""
        self.stopping = True
        if self._working is not None:
            self._working.cancel()

    async def reopen_learner(self) -> None:
        """A learner for the run's policies, in their first state, in place of the present one."""
        old, self.learner = self.learner, None  # type: ignore[assignment]
        self.learner = await self.reopen(old, self.policies)

    def joined(self, policies: Policies, roles: Sequence[str]) -> Policies:
        """`policies` with those of `roles` that have none and get one by the configuration."""
        return self.config.join(policies, roles, scored=self.workflow.scorers if self.plan.kind == "tree" else None)

    @property
    def trained_roles(self) -> dict[str, str]:
        """The trained roles, and the policies that play them."""
        return {role: name for role, name in self.policies.roles.items() if self.policies.specs[name].trained}

    @property
    def provider_roles(self) -> list[str]:
        return [role for role, name in self.policies.roles.items() if self.policies.specs[name].kind == "provider"]

    def served(self) -> dict[str, PolicyRef]:
        """The version that answers each role; provider roles have none."""
        return {
            role: PolicyRef(name, self.versions.get(name, 0))
            for role, name in self.policies.roles.items()
            if self.policies.specs[name].kind != "provider"
        }


@contextlib.asynccontextmanager
async def opened(
    folder: RunFolder,
    config: TrainConfig,
    workflow: Workflow,
    tasks: Sequence[Task],
    say: Callable[[str], None],
) -> AsyncIterator[Run]:
    """Open sampler, store and learner; look around with a few episodes, or restore the newest checkpoint."""
    plan, recipe, why = config.resolve_plan(list(workflow.scorers))
    saved = load_checkpoint(folder.checkpoints)
    async with contextlib.AsyncExitStack() as stack:
        store = SqliteStore.open(folder.records)
        stack.callback(store.close)
        cluster = _cluster(config, folder, workflow, stack, say) if config.cluster.address else None
        sampler, chat = await _model(config, stack, cluster, say)
        notes: list[str] = []
        if saved is None:
            seen = await preflight(config, workflow, tasks, plan, recipe, store, sampler, chat, say)
            policies = config.resolve_policies(
                seen.roles, scored=list(workflow.scorers) if plan.kind == "tree" else None
            )
            notes = [*seen.notes, *filter(None, seen.lessons(policies, recipe))]
        else:
            scored = list(workflow.scorers) if plan.kind == "tree" else None
            policies = config.join(saved[0].policies, [*saved[0].newcomers, *config.roles], scored=scored)
            new = policies.roles.keys() - saved[0].policies.roles.keys()
            notes = [f"role {role!r} gets the policy {policies.roles[role]}" for role in sorted(new)]
        if cluster is not None:
            sampler = await cluster.complete(policies, sampler)
        limit = recipe.loss.constant_length or config.sampling.max_tokens
        loss = msgspec.structs.replace(recipe.loss, constant_length=limit)
        trained = [name for name, spec in policies.specs.items() if spec.trained]
        say(f"loading the weights to train: {', '.join(trained)} ...")
        if cluster is not None:
            runner, learner = await cluster.open_workers_and_learner(policies, loss, sampler)
        else:
            runner, learner = LocalRunner(workflow, sampler, chat), _local_learner(config, policies, loss)

        async def reopen(old: Learner, policies: Policies) -> Learner:
            if cluster is not None:
                return await cluster.reopen_learner(policies, loss)
            del old
            gc.collect()  # the old one's memory is needed for the new one
            return await asyncio.to_thread(_local_learner, config, policies, loss)

        run = Run(
            folder=folder,
            config=config,
            workflow=workflow,
            tasks=tasks,
            store=store,
            sampler=sampler,
            runner=runner,
            learner=learner,
            schedule=TaskSchedule(tasks, config.seed, counts(config, folder.described.get("changes", ()))),
            reopen=reopen,
            plan=plan,
            recipe=recipe,
            policies=policies,
            notes=[why, *notes, *_untrained(policies)],
        )
        if saved is not None:
            say(f"loading the checkpoint after {saved[0].steps} steps ...")
            await restore(run, *saved)
        yield run


def _cluster(
    config: TrainConfig,
    folder: RunFolder,
    workflow: Workflow,
    stack: contextlib.AsyncExitStack,
    say: Callable[[str], None],
) -> Cluster:
    from cotune.integrations.ray.crash_notice import crash_notice
    from cotune.trainer.cluster import Cluster

    killed = "The run was ended from outside: killed, out of memory, or Ray has lost a node that it cannot do without."
    stack.enter_context(crash_notice(f"{killed} Go on with: cotune train --resume {folder.path}"))
    return Cluster(config, workflow, folder.workflow, stack, say)


def _local_learner(config: TrainConfig, policies: Policies, loss: LossSpec) -> Learner:
    from cotune.trainer.learner.local import LocalLearner

    return LocalLearner.open(config.model, policies, config.learner, loss)


async def _model(
    config: TrainConfig, stack: contextlib.AsyncExitStack, cluster: Cluster | None, say: Callable[[str], None]
) -> tuple[Sampler, ChatFormat]:
    """The sampler and the chat format: the sampler's process, or Ray, starts while this one imports torch."""
    say(f"loading the model {config.model} ..." if cluster is None else f"starting Ray ({config.cluster.address}) ...")
    loading = asyncio.get_running_loop().run_in_executor(None, _chat, config.model, config.tool_format)
    if cluster is not None:
        try:
            cluster.open_ray()
        finally:
            chat = await loading
        return await cluster.open_sampler(), chat
    opening = TransformersSampler.open(config.model, threads=config.sampling.threads)
    sampler, chat = await asyncio.gather(opening, loading, return_exceptions=True)
    if not isinstance(sampler, BaseException):
        stack.push_async_callback(sampler.aclose)
    for opened_or_not in (chat, sampler):
        if isinstance(opened_or_not, BaseException):
            raise opened_or_not
    return sampler, chat


def _chat(model: str, tool_format: str) -> ChatFormat:
    """The chat format of `model`; what the learner imports is loaded along with it."""
    from cotune.integrations.chat.template import ChatTemplate
    from cotune.trainer.learner import local as local_learner  # noqa: F401

    return ChatTemplate.load(model, tool_format)


def _untrained(policies: Policies) -> list[str]:
    kinds: dict[str, list[str]] = {}
    for role, name in policies.roles.items():
        kinds.setdefault(policies.specs[name].kind, []).append(role)
    said = {"frozen": "played by the untrained model", "provider": "left to the application's provider"}
    return [f"not trained: {', '.join(kinds[kind])} ({text})" for kind, text in said.items() if kind in kinds]


async def restore(run: Run, checkpoint: Checkpoint, path: Path) -> None:
    """Go back to a checkpoint: weights and optimizers, versions at the sampler, and what counts as consumed."""
    new = [name for name, spec in run.policies.specs.items() if spec.trained and name not in checkpoint.policies.specs]
    await asyncio.to_thread(run.learner.load, path, new)
    for served in (await run.sampler.info()).served:  # a publish that broke off may or may not have arrived
        name, _, version = served.rpartition("@")
        await run.sampler.retire(PolicyRef(name, int(version)))
    run.live.clear()
    run.ledger.clear()
    run.members.clear()
    run.newcomers = ()
    run.proofs.clear()
    run.step = run.committed = checkpoint.steps
    run.versions = dict(checkpoint.versions)
    run.state = checkpoint.state
    run.latest = dict(checkpoint.metrics)
    consume(run, checkpoint)
    run.consumed = {group for group, at in run.store.consumed().items() if at < run.step} | set(checkpoint.ledger)
    run.folder.truncate_metrics(run.step)
    for name, version in run.versions.items():
        spec = run.policies.specs[name]
        weights = await asyncio.to_thread(run.learner.weights, name)
        lora = spec.lora if spec.kind == "lora" else None
        run.live[name] = [PolicyRef(name, version)]
        run.proofs[name] = await prove_publish(run.sampler, run.live[name][0], weights, lora)


def consume(run: Run, checkpoint: Checkpoint) -> None:
    """Mark the groups of a checkpoint's ledger as trained: later rewards for them are refused, and counted."""
    for step in sorted(set(checkpoint.ledger.values())):
        groups = [group for group, at in checkpoint.ledger.items() if at == step]
        run.store.consume({group: checkpoint.members.get(group, ()) for group in groups}, step)
