"""Which further tasks a step draws in place of those whose groups have nothing to compare."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence

from cotune.algorithms.method import Method
from cotune.algorithms.task_signals import GroupSignal
from cotune.config.rollouts import RefillConfig
from cotune.config.train import TrainConfig
from cotune.errors import ConfigError
from cotune.trainer.schedules.task_pool import DrawnTasks, extra_tasks


class Refill:
    """The refill of one step: a function of the tasks drawn for it and of the groups that they show.

    Each trained role that acts in half of the step's own tasks is to have as many groups with different rewards as it
    has groups in these tasks. If no role acts that often, this holds for the roles that act most.
    """

    def __init__(
        self, config: RefillConfig, tasks: DrawnTasks, roles: Collection[str], signals: Iterable[GroupSignal]
    ) -> None:
        self._own = len(tasks.own)
        self._waiting = deque(tasks.reserve)
        self._left = extra_tasks(config.budget, len(tasks.own))
        self._signals: dict[str, list[GroupSignal]] = {}
        self._extra: set[str] = set()
        self.tasks = 0
        """How many tasks were drawn beyond the step's own."""
        self._take(signals)
        acting = {role: Counter(s.task for s in self._groups(role)) for role in sorted(roles)}
        most = max((len(by_task) for by_task in acting.values()), default=0)
        least = min(len(tasks.own) / 2, most)
        self.targets = {role: by_task.total() for role, by_task in acting.items() if 0 < len(by_task) >= least}
        """Groups with different rewards that the step is to have, by role."""

    @property
    def missing(self) -> dict[str, int]:
        """How many such groups the step lacks, by role."""
        short = {role: need - self._kept(role) for role, need in self.targets.items()}
        return {role: count for role, count in short.items() if count > 0}

    def more(self, running: int = 0, most: int | None = None) -> list[str]:
        """The tasks to draw now, while so many are running, and `most` at once may: as many as are needed where each
        shows as many such groups as those before, with one more and two tasks more for the chance of the first."""
        seen = self._own + self.tasks - running
        expected = (short * (seen + 2) / (self._kept(role) + 1) for role, short in self.missing.items())
        count = min(math.ceil(max(expected, default=0.0)) - running, self._left)
        if most is not None:
            count = min(count, most - running)
        drawn: list[str] = []
        while self._waiting and len(drawn) < count:
            drawn.append(self._waiting.popleft())
        self._left -= len(drawn)
        self.tasks += len(drawn)
        return drawn

    def ended(self, tasks: Iterable[str], episodes: Iterable[str], signals: Iterable[GroupSignal]) -> None:
        """Tasks that were drawn have run to their end: their new episodes, and all groups that they have now."""
        for name in tasks:
            self._signals.pop(name, None)
        self._extra.update(episodes)
        self._take(signals)

    def figures(self, role: str) -> dict[str, float]:
        """Groups that the refill has brought a role: all, those with different rewards and without; and how many of
        them the step lacks all the same."""
        groups = [signal for signal in self._groups(role) if signal.episodes & self._extra]
        kept = sum(signal.spread for signal in groups)
        wasted, missing = len(groups) - kept, self.missing.get(role, 0)
        return {"refill_drawn": len(groups), "refill_kept": kept, "refill_wasted": wasted, "refill_missing": missing}

    def _take(self, signals: Iterable[GroupSignal]) -> None:
        for signal in signals:
            self._signals.setdefault(signal.task, []).append(signal)

    def _groups(self, role: str) -> list[GroupSignal]:
        return [signal for own in self._signals.values() for signal in own if role in signal.roles]

    def _kept(self, role: str) -> int:
        return sum(signal.spread for signal in self._groups(role))


def why_no_refill(recipe: Method) -> str:
    """Why a refill does nothing for the roles of this recipe; empty if it does something."""
    if not recipe.takes_rewards or not recipe.compares:
        return f"has no effect with recipe {recipe.name}, which does not compare the rewards of a group"
    if not {"task", "branch", "prompt", "rollout"} & set(recipe.group_by):
        return f"has no effect with recipe {recipe.name}, which compares episodes of different tasks"
    return ""


def check_refill(config: TrainConfig, recipes: Sequence[Method]) -> None:
    """Raises ConfigError for a refill that none of the policies' recipes has a use for."""
    budget = config.refill.budget
    if budget and all(faults := [why_no_refill(recipe) for recipe in recipes]):
        raise ConfigError("refill.budget", budget, faults[0], "Leave it out.")
