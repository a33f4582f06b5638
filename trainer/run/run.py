"""A run in progress: everything the loop works on."""

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
from cotune.trainer.config.resolve import join_policies
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
    """A run between steps: its parts, which stay, and its `state`, which a checkpoint holds."""

    folder: RunFolder
    config: TrainConfig
    store: Store
    learner: Learner
    schedule: Levels
    """What each step takes."""
    notes: Sequence[str]
    """What the user should know before the first step."""
    state: Checkpoint
    committed: int = -1
    """Steps that the newest checkpoint has."""
    profile_step: int | None = None
    """The step to profile, from 1."""
    stopping: bool = False
    ended: str = ""
    """Why the run ends before its last step, by its own settings."""
    way_back: str = ""
    """After the guard has ended the run: the commands that start again from its best time."""
    collapse: str = ""
    """The guard's warning, as long as the collapse lasts."""
    best: dict[str, Best] = field(default_factory=dict)
    """By policy, the checkpoint of its best evaluation."""

    @property
    def finished(self) -> bool:
        """Whether no step is left to make, or the run's own settings have ended it."""
        return self.state.steps >= self.config.steps or bool(self.ended)

    @property
    def trained(self) -> dict[str, str]:
        """The trained roles and their policies, as evaluations and the export have them, whatever a step swaps."""
        return self.state.policies.learning

    def lr_scale(self, policy: str) -> float:
        """The factor on a policy's learning rate in the next step."""
        return lr_scale(settings_of(self.config, policy).schedule, self.state.steps, self.config.steps)

    def stop(self) -> bool:
        """Stop at the next safe moment; True where the step in hand is committed first."""
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
    """A learner for these policies, in their first state; the one before is closed."""
    plan: Plan
    recipes: Recipes
    held_out: Sequence[Task]
    teachers: Mapping[str, Teacher] = field(default_factory=dict)
    published: dict[str, list[Proof]] = field(default_factory=dict)
    """By policy, the proofs of the versions that the sampler serves, oldest first."""
    learner_restarts: int = 0
    fall_back: Callable[[float | None, str], Awaitable[None]] | None = None
    """With `learner.dtype = "auto"` in bfloat16: open sampler and learner again in float32, in their first state, as
    both differ by so many nats a token."""
    _working: asyncio.Future[Any] | None = None

    def next_version(self, policy: str) -> int:
        """The version of a policy after its present one."""
        return self.state.versions.get(policy, 0) + 1

    async def interruptible(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of `work`, or None when `stop` was called meanwhile."""
        self._working = working = asyncio.ensure_future(work)
        if self.stopping:
            working.cancel()
        try:
            return await working
        except asyncio.CancelledError:
            if not self.stopping:
                raise
            return None
        finally:
            self._working = None

    def stop(self) -> bool:
        """Stop at the next safe moment: a rollout is cancelled, any other work on the step is finished and committed.
        Returns whether there is such work."""
        self.stopping = True
        return self._working is None or not self._working.cancel()

    async def reopen_learner(self) -> None:
        """A learner for the run's policies, in their first state, in place of the present one."""
        del self.learner
        gc.collect()  # its memory is needed for the new one
        self.learner = await self.open_learner(self.state.policies)

    def draw_tasks(self) -> None:
        """Draw the tasks of the next step, and in mode async of those that may roll out meanwhile.

        An adaptive pool draws by the rewards of earlier steps.
        """
        state = self.state
        for step in range(state.steps, state.steps + self.config.ahead + 1):
            if step not in state.drawn:
                state.drawn[step] = self.schedule.draw(step, state.tasks, self.learning_roles(step))

    @property
    def task_weights(self) -> dict[str, float] | None:
        """The weights of the tasks of the step in hand in mean rewards; None if it drew none."""
        drawn = self.state.drawn.get(self.state.steps)
        return None if drawn is None else drawn.task_weights

    def complete_step(self, collected: Collected, prepared: Prepared) -> None:
        """Mark the groups of the step as trained, so that later rewards for them are refused, and count the step.

        Raises RecordError.
        """
        state = self.state
        known = state.policies.roles.keys()
        state.new_roles = tuple(sorted(self.joined(state.policies, sorted(collected.roles)).roles.keys() - known))
        state.silent = self.silent(collected)
        state.advantages = prepared.state
        state.tasks = with_step(state.tasks, collected, self.recipes)
        state.drawn.pop(state.steps, None)
        members: dict[str, Sequence[str]] = {}
        for group in prepared.groups:
            # Under a tree plan a group is a call, and its id names all candidates.
            members[group.id] = () if self.plan.kind == "tree" else [sample.id for sample in group.samples]
        self.store.consume(members, state.steps)
        state.steps += 1

    def silent(self, collected: Collected) -> dict[str, int]:
        """Trained roles that have called in no episode of a step, and in how many steps in a row with it."""
        before = self.state.silent
        return {role: before.get(role, 0) + 1 for role in self.trained if role not in collected.roles}

    def joined(self, policies: Policies, roles: Sequence[str]) -> Policies:
        """`policies` with those of `roles` that have none and get one by the configuration."""
        return join_policies(self.config, policies, roles, scored=self.recipes.able(self.workflow.scorers))

    def policies_at(self, step: int) -> Policies:
        """The policies, with the roles that each plays in a step of training."""
        return swapped(self.state.policies, self.config.routing, step)

    def trained_roles(self, step: int) -> dict[str, str]:
        """The roles that are trained in a step of training, and the policies that play them."""
        return self.policies_at(step).learning

    def learning_roles(self, step: int) -> list[str]:
        """Those of them whose policies learn in that step."""
        frozen = self.frozen(step)
        return [role for role, name in self.trained_roles(step).items() if name not in frozen]

    def frozen(self, step: int) -> list[str]:
        """The policies that are not trained in a step, by their `train`."""
        return [name for name in self.state.policies.trained if not self.config.trains(name, step)]

    @property
    def recipes_of_training(self) -> list[Method]:
        """The different recipes of the trained policies."""
        return [recipe for recipe, _ in by_equal((self.recipes.of(name), name) for name in self.state.policies.trained)]

    def teacher_of(self, policy: str) -> Teacher | Literal["self"] | None:
        """Who teaches a policy; None if it learns from rewards."""
        kl_to = self.recipes.of(policy).loss.kl_to
        if kl_to == "self":
            return SELF
        return self.teachers[settings_of(self.config, policy).teacher] if kl_to == "teacher" else None

    @property
    def provider_roles(self) -> list[str]:
        """Roles that are left to the application's provider."""
        policies = self.state.policies
        return [role for role, name in policies.roles.items() if policies.specs[name].kind == "provider"]

    def served(self, step: int | None = None) -> dict[str, PolicyRef]:
        """The version that answers each role in a step of training, or in no step; provider roles have none."""
        policies = self.state.policies if step is None else self.policies_at(step)
        return players(policies, self.state.versions)
