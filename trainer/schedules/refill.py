"""The choice of further tasks for a step if the rewards of some groups do not differ."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence

from cotune.algorithms.method import Method
from cotune.algorithms.task_signals import GroupSignal
from cotune.config.rollouts import RefillConfig
from cotune.config.train import TrainConfig
from cotune.errors import ConfigError
from cotune.trainer.schedules.task_pool import DrawnTasks, extra_tasks


class Refill:
    """The refill of one step. It depends only on the tasks that were drawn for the step, and on their groups.

    A group with different rewards is called useful here. Each trained role that acts in at least half of the step's own
    tasks gets a target: as many useful groups as it has groups in these tasks. If no role acts that often, the roles
    that act most get one.
    """

    def __init__(
        self, config: RefillConfig, tasks: DrawnTasks, roles: Collection[str], signals: Iterable[GroupSignal]
    ) -> None:
        """Set the target of each role from the groups of the step's first tasks (`signals`). `roles` are the roles that
        learn in this step."""
        self._first_tasks = len(tasks.own)
        self._waiting = deque(tasks.reserve)
        self._budget_left = extra_tasks(config.budget, len(tasks.own))
        self._signals: dict[str, list[GroupSignal]] = {}
        """The groups of each task."""
        self._new_episodes: set[str] = set()
        """Ids of the episodes of tasks that the refill has drawn."""
        self.tasks = 0
        """Number of tasks that the refill has drawn."""
        self.targets: dict[str, int] = {}
        """Number of useful groups that the step needs, by role."""

        self._add_groups(signals)
        groups_of_role: dict[str, list[GroupSignal]] = {}
        task_count: dict[str, int] = {}  # by role, the number of first tasks that it acts in
        for role in sorted(roles):
            groups_of_role[role] = self._groups(role)
            task_count[role] = len({group.task for group in groups_of_role[role]})
        # A role gets a target if it acts in half of the first tasks, or in as many as any role does. For a role that
        # acts rarely, the refill would draw tasks in vain.
        least_tasks = min(len(tasks.own) / 2, max(task_count.values(), default=0))
        for role, groups in groups_of_role.items():
            if groups and task_count[role] >= least_tasks:
                self.targets[role] = len(groups)

    @property
    def missing(self) -> dict[str, int]:
        """Number of groups with different rewards that the step lacks, by role."""
        missing: dict[str, int] = {}
        for role, target in self.targets.items():
            useful = self._count_useful(role)
            if useful < target:
                missing[role] = target - useful
        return missing

    def more(self, running: int = 0, most: int | None = None) -> list[str]:
        """Draw the tasks to run now, while `running` tasks are running and at most `most` may run at the same time.

        So many are drawn that they are expected to bring the missing useful groups, whose rewards differ, at the rate
        of the ended tasks. One group and two tasks are added to these, so that the rate is never 0.
        """
        ended = self._first_tasks + self.tasks - running
        needed = 0.0
        for role, missing in self.missing.items():
            useful = self._count_useful(role)
            needed = max(needed, missing * (ended + 2) / (useful + 1))
        count = min(math.ceil(needed) - running, self._budget_left)
        if most is not None:
            count = min(count, most - running)
        drawn: list[str] = []
        while self._waiting and len(drawn) < count:
            drawn.append(self._waiting.popleft())
        self._budget_left -= len(drawn)
        self.tasks += len(drawn)
        return drawn

    def ended(self, tasks: Iterable[str], episodes: Iterable[str], signals: Iterable[GroupSignal]) -> None:
        """Store that drawn tasks have ended. `episodes` are the ids of their new episodes, and `signals` all groups
        that these tasks have now."""
        for name in tasks:
            self._signals.pop(name, None)
        self._new_episodes.update(episodes)
        self._add_groups(signals)

    def figures(self, role: str) -> dict[str, float]:
        """Return counts of a role's groups. `refill_drawn` counts the groups in the episodes of the refill. Those with
        different rewards are useful (`refill_kept`), the others not (`refill_wasted`). `refill_missing` is the number
        of useful groups that the step still lacks."""
        groups = [signal for signal in self._groups(role) if signal.episodes & self._new_episodes]
        useful = sum(signal.spread for signal in groups)
        return {
            "refill_drawn": len(groups),
            "refill_kept": useful,
            "refill_wasted": len(groups) - useful,
            "refill_missing": self.missing.get(role, 0),
        }

    def _add_groups(self, signals: Iterable[GroupSignal]) -> None:
        for signal in signals:
            self._signals.setdefault(signal.task, []).append(signal)

    def _groups(self, role: str) -> list[GroupSignal]:
        """Return the groups of a role in all tasks of the step so far."""
        groups: list[GroupSignal] = []
        for signals in self._signals.values():
            groups += [signal for signal in signals if role in signal.roles]
        return groups

    def _count_useful(self, role: str) -> int:
        """Count the groups of a role with different rewards."""
        return sum(signal.spread for signal in self._groups(role))


def why_no_refill(recipe: Method) -> str:
    """Return the reason why a refill has no effect for the roles of this recipe; an empty text if it has one."""
    if not recipe.takes_rewards or not recipe.compares:
        return f"has no effect with recipe {recipe.name}, which does not compare the rewards of a group"
    if not {"task", "branch", "prompt", "rollout"} & set(recipe.group_by):
        return f"has no effect with recipe {recipe.name}, which compares episodes of different tasks"
    return ""


def check_refill(config: TrainConfig, recipes: Sequence[Method]) -> None:
    """Raise ConfigError for a refill that has no effect with any of the policies' recipes."""
    budget = config.refill.budget
    faults = [why_no_refill(recipe) for recipe in recipes]
    if budget and all(faults):
        raise ConfigError("refill.budget", budget, faults[0], "Leave it out.")
