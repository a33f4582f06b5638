"""A run in progress: the object that the training loop works on."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from cotune.algorithms.collect import Collected
from cotune.algorithms.method import Method
from cotune.algorithms.policy_recipes import Recipes, by_equal
from cotune.algorithms.prepare import Prepared
from cotune.algorithms.task_signals import with_step
from cotune.config.train import TrainConfig
from cotune.episodes.workflows import Workflow
from cotune.records.plans import Plan
from cotune.records.policies import Policies
from cotune.records.structs import PolicyRef, Task
from cotune.sampling.protocol import ChatFormats, Sampler
from cotune.storage.checkpoints import Best
from cotune.storage.protocol import Store
from cotune.trainer.config.policy import settings_of
from cotune.trainer.config.resolve import add_policies
from cotune.trainer.learner.protocol import SELF, Learner, Teacher
from cotune.trainer.publish import Proof
from cotune.trainer.run.checkpoint import Checkpoint
from cotune.trainer.run.episode_runner import EpisodeRunner
from cotune.trainer.run.run_folder import RunFolder
from cotune.trainer.schedules.routing import players, swapped
from cotune.trainer.schedules.schedule import Levels, lr_scale
from cotune.trainer.schedules.task_pool import TaskPool

T = TypeVar("T")


@dataclass(kw_only=True)
class Run:
    """A run between steps: its parts, which do not change, and its `state`, which checkpoints store."""

    folder: RunFolder
    config: TrainConfig
    store: Store
    learner: Learner
    schedule: Levels
    """The tasks or records that each step uses."""
    notes: Sequence[str]
    """Messages for the user before the first step."""
    state: Checkpoint
    committed: int = -1
    """Number of steps in the newest checkpoint."""
    profile_step: int | None = None
    """The step to profile, from 1."""
    stopping: bool = False
    ended: str = ""
    """The reason why settings of the run (patience, guard) end it before its last step."""
    way_back: str = ""
    """After the guard has ended the run: the commands that start again from its best checkpoint."""
    collapse: str = ""
    """The guard's warning, while the collapse lasts."""
    best: dict[str, Best] = field(default_factory=dict)
    """By policy, the checkpoint of its best evaluation."""

    @property
    def finished(self) -> bool:
        """Whether all steps are done, or settings of the run have ended it."""
        return self.state.steps >= self.config.steps or bool(self.ended)

    @property
    def trained(self) -> dict[str, str]:
        """The trained roles and their policies, as in evaluations and the export. Swaps within a step do not count."""
        return self.state.policies.learning

    def lr_scale(self, policy: str) -> float:
        """Return the factor on a policy's learning rate in the next step."""
        return lr_scale(settings_of(self.config, policy).schedule, self.state.steps, self.config.steps)

    def stop(self) -> bool:
        """Stop at the next safe moment. Returns whether the current step is finished and committed first."""
        self.stopping = True
        return True


@dataclass(kw_only=True)
class RolloutRun(Run):
    """A run that learns from rollouts of its workflow."""

    schedule: TaskPool
    workflow: Workflow
    max_calls: int
    """Calls that an episode may make."""
    sampler: Sampler
    chats: ChatFormats
    runner: EpisodeRunner
    open_learner: Callable[[Policies], Awaitable[Learner]]
    """Opens a learner for these policies, in their initial state; the previous learner is closed."""
    plan: Plan
    recipes: Recipes
    held_out: Sequence[Task]
    teachers: Mapping[str, Teacher] = field(default_factory=dict)
    published: dict[str, list[Proof]] = field(default_factory=dict)
    """By policy, the proofs of the versions that the sampler serves, oldest first."""
    learner_restarts: int = 0
    fall_back: Callable[[float | None, str], Awaitable[None]] | None = None
    """With `learner.dtype = "auto"` in bfloat16: opens sampler and learner again in float32, in their initial state,
    because they differ by this many nats a token, or for the reason in the text."""
    _interruptible: asyncio.Future[Any] | None = None
    """Work that `stop` cancels, if there is any."""

    def next_version(self, policy: str) -> int:
        """Return the version of a policy after its present one."""
        return self.state.versions.get(policy, 0) + 1

    async def interruptible(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of `work`, or None if `stop` has cancelled it."""
        self._interruptible = future = asyncio.ensure_future(work)
        if self.stopping:
            future.cancel()
        try:
            return await future
        except asyncio.CancelledError:
            if not self.stopping:
                raise
            return None
        finally:
            self._interruptible = None

    def stop(self) -> bool:
        """Stop at the next safe moment. A rollout is cancelled; any other work on a step is finished and committed.
        Returns whether the current step is finished and committed first."""
        self.stopping = True
        if self._interruptible is None:
            return True
        is_cancelled = self._interruptible.cancel()
        return not is_cancelled

    async def reopen_learner(self) -> None:
        """Replace the learner by a new one for the run's policies, in their initial state."""
        # The memory of the old learner is needed for the new one.
        del self.learner
        gc.collect()
        self.learner = await self.open_learner(self.state.policies)

    def draw_tasks(self) -> None:
        """Draw the tasks of the next step, and in mode async also the tasks of the steps that are rolled out ahead.

        An adaptive pool draws by the rewards of earlier steps.
        """
        state = self.state
        for step in range(state.steps, state.steps + self.config.ahead + 1):
            if step not in state.drawn:
                state.drawn[step] = self.schedule.draw(step, state.tasks, self.learning_roles(step))

    @property
    def task_weights(self) -> dict[str, float] | None:
        """The weights of the current step's tasks in mean rewards; None if no tasks were drawn for it."""
        drawn = self.state.drawn.get(self.state.steps)
        return None if drawn is None else drawn.task_weights

    def complete_step(self, collected: Collected, prepared: Prepared) -> None:
        """Mark the groups of the step as trained, so that later rewards for them are refused, and count the step.

        Raises RecordError.
        """
        # Store in the state, for the next steps and for a resumed run: the roles that get a policy before the next
        # step, the roles that made no call, the baselines of advantages, and the results of tasks.
        state = self.state
        with_new_roles = self.with_policies_for(state.policies, sorted(collected.roles))
        state.new_roles = tuple(sorted(with_new_roles.roles.keys() - state.policies.roles.keys()))
        state.silent = self.count_silent_steps(collected)
        state.advantages = prepared.state
        state.tasks = with_step(state.tasks, collected, self.recipes)
        state.drawn.pop(state.steps, None)

        # Mark the groups, each with the ids of its candidates.
        members: dict[str, Sequence[str]] = {}
        for group in prepared.groups:
            # Under a tree plan a group is a call, and its id names all candidates.
            members[group.id] = () if self.plan.kind == "tree" else [sample.id for sample in group.samples]
        self.store.consume(members, state.steps)
        state.steps += 1

    def count_silent_steps(self, collected: Collected) -> dict[str, int]:
        """Return the trained roles that made no call in this step, each with the number of steps in a row without a
        call."""
        silent_steps = self.state.silent
        return {role: silent_steps.get(role, 0) + 1 for role in self.trained if role not in collected.roles}

    def with_policies_for(self, policies: Policies, roles: Sequence[str]) -> Policies:
        """Return `policies`, and a policy for each of `roles` that has none in it, as the configuration says."""
        return add_policies(self.config, policies, roles, scored=self.recipes.trainable_roles(self.workflow.scorers))

    def policies_at(self, step: int) -> Policies:
        """Return the policies with the roles that they play in a step of training (`routing.swap`)."""
        return swapped(self.state.policies, self.config.routing, step)

    def trained_roles(self, step: int) -> dict[str, str]:
        """Return the roles that trained policies play in a step of training, with these policies."""
        return self.policies_at(step).learning

    def learning_roles(self, step: int) -> list[str]:
        """Return the trained roles whose policies are not frozen in a step."""
        frozen = self.frozen(step)
        return [role for role, name in self.trained_roles(step).items() if name not in frozen]

    def frozen(self, step: int) -> list[str]:
        """Return the policies that are not trained in a step because of their `train` setting."""
        return [name for name in self.state.policies.trained if not self.config.trains(name, step)]

    @property
    def recipes_of_training(self) -> list[Method]:
        """The recipes of the trained policies. Policies with equal recipes count once."""
        recipes = ((self.recipes.of(name), name) for name in self.state.policies.trained)
        return [recipe for recipe, _ in by_equal(recipes)]

    def teacher_of(self, policy: str) -> Teacher | Literal["self"] | None:
        """Return the teacher of a policy; None if it learns from rewards."""
        kl_to = self.recipes.of(policy).loss.kl_to
        if kl_to == "self":
            return SELF
        if kl_to == "teacher":
            return self.teachers[settings_of(self.config, policy).teacher]
        return None

    @property
    def provider_roles(self) -> list[str]:
        """Roles that are left to the application's provider."""
        policies = self.state.policies
        return [role for role, name in policies.roles.items() if policies.specs[name].kind == "provider"]

    def served(self, step: int | None = None) -> dict[str, PolicyRef]:
        """Return the policy version that answers each role: in a step of training, or outside of training if `step` is
        None. Provider roles are left out."""
        policies = self.state.policies if step is None else self.policies_at(step)
        return players(policies, self.state.versions)
