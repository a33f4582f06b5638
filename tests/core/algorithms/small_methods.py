"""Methods and rewards that tests compare with hand-worked numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from cotune.algorithms.comparing import centred, standardized
from cotune.algorithms.method import Method
from cotune.algorithms.recipes import OUTCOME, PROMPT_KEY, Attribution, Filters
from cotune.algorithms.samples import Floats, Sample
from cotune.algorithms.step import AdvantageState, Step


class CentredSiblings(Method):
    """at_grpo without a division by the deviation."""

    name = "centred_siblings"
    plan = "tree"
    group_by = PROMPT_KEY
    filters = Filters(zero_variance=True)

    def advantages(self, step: Step, rewards: Floats) -> Floats:
        advantages = np.zeros(len(rewards))
        for group in step.groups:
            advantages[group] = centred(rewards[group])
        return advantages


class CentredRoles(CentredSiblings):
    """dr_mas without a division by the deviation."""

    name = "centred_roles"
    plan = "independent"
    group_by = ("task", "role")
    filters = Filters()
    attribution = OUTCOME


class ReturnsOfSiblings(CentredSiblings):
    """Candidates of one prompt in independent rollouts, by all that follows."""

    name = "returns_of_siblings"
    plan = "independent"
    attribution = Attribution(outcome=True)
    to_go = True
    gamma = 1.0

    def rewards(self, step: Step) -> Floats:
        return step.rewards_to_go(self.gamma)


class AverageOfRoles(Method):
    """A moving average for each role."""

    name = "average_of_roles"
    group_by = ("role",)
    attribution = OUTCOME
    compares = False
    remembers = True
    decay = 0.5

    def advantages(self, step: Step, rewards: Floats) -> Floats:
        advantages = np.zeros(len(rewards))
        for group in step.groups:
            advantages[group] = rewards[group] - step.moving_average(group, rewards[group].mean(), self.decay)
        return advantages


class StandardizedTasks(Method):
    """Samples of a task, whatever their episode."""

    name = "standardized_tasks"
    group_by = ("task",)
    ddof = 1

    def advantages(self, step: Step, rewards: Floats) -> Floats:
        advantages = np.zeros(len(rewards))
        for group in step.groups:
            advantages[group] = standardized(rewards[group], ddof=self.ddof)
        return advantages


class Asked(Method):
    """Rewards alone."""

    name = "asked"
    group_by = PROMPT_KEY


def attribute(
    samples: Sequence[Sample],
    attribution: Attribution,
    *,
    to_go: float | None = None,
    scope: Literal["own", "sum", "mean"] = "own",
) -> Floats:
    """[n] rewards by an attribution; with `to_go`, a discount, of later turns too, and by `scope` of other roles."""
    step = Asked().replaced(attribution=attribution, to_go=to_go is not None).step(samples)
    rewards = step.rewards() if to_go is None else step.rewards_to_go(to_go)
    if scope == "own":
        return rewards
    return step.sum_over_roles(rewards) if scope == "sum" else step.mean_over_roles(rewards)


def lacking(samples: Sequence[Sample], attribution: Attribution) -> set[tuple[str, str]]:
    step = Asked().replaced(attribution=attribution).step(samples)
    step.rewards()
    return set(step.lacking)


def advantages(
    samples: Sequence[Sample], method: Method, state: AdvantageState | None = None
) -> tuple[Floats, AdvantageState]:
    """[n] advantages of samples that are all compared, in the groups of the method, and the state after them."""
    step = method.step(samples, state)
    step.groups = [np.arange(len(samples))]
    step.groups = step.group_by(*method.group_by)
    return method.advantages(step, method.rewards(step)), step.state
