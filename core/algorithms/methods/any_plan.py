"""The base class of methods that are a loss for any plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import msgspec

from cotune.algorithms.method import Method
from cotune.algorithms.methods.at_grpo import AtGrpo
from cotune.algorithms.methods.c3_branches import C3Branches
from cotune.algorithms.methods.grpo import Grpo
from cotune.algorithms.recipes import OUTCOME
from cotune.algorithms.samples import Floats
from cotune.algorithms.step import Step
from cotune.records.plans import PlanKind

COMPARED_AS: Mapping[PlanKind, Method] = {"independent": Grpo(), "tree": AtGrpo(), "replay": C3Branches()}
"""The method that compares candidates under each plan."""


class AnyPlan(Method):
    """A loss for any plan: compares the candidates of a call as `at_grpo` under a tree plan and as `c3_branches` under
    a replay plan, and the episodes of a task as `grpo` under independent rollouts."""

    group_by = ("task",)
    unit = "trajectory"
    attribution = OUTCOME

    def advantages(self, step: Step, rewards: Floats) -> Floats:
        return COMPARED_AS[self.plan].advantages(step, rewards)

    def under(self, plan: PlanKind) -> Self:
        """This method under a plan: its loss stays, and the plan decides which samples are compared, and by which
        rewards."""
        if plan == "independent":
            return self.replaced(plan=plan)
        compared_as = COMPARED_AS[plan]
        loss = self.loss
        if loss.aggregation == "trajectory_mean":  # the candidates of a call are no trajectory
            loss = msgspec.structs.replace(loss, aggregation="sequence_mean")
        return self.replaced(
            plan=plan,
            group_by=compared_as.group_by,
            unit=compared_as.unit,
            attribution=compared_as.attribution,
            loss=loss,
        )
