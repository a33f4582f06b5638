"""A method: the small class of a recipe, with its rewards, its advantages and its loss."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import msgspec
import numpy as np

from cotune.algorithms.comparing import Unit
from cotune.algorithms.recipes import PROMPT_KEY, USUAL, Attribution, Filters, LossSpec
from cotune.algorithms.samples import KEY_FIELDS, Floats, Sample
from cotune.algorithms.step import AdvantageState, Step
from cotune.errors import ConfigError
from cotune.records.plans import PlanKind

_SETTINGS = ("name", "plan", "group_by", "attribution", "filters", "loss")
"""Attributes in which methods of one class can differ."""


class Method:
    """Defines the training of a policy: which samples are compared, the reward and the advantage of each, and the loss.

    Derive your own method from this class or from a published method, and override the attributes that differ.
    """

    name: str = ""
    """Name of the recipe."""
    plan: PlanKind = "independent"
    """How candidates are sampled: `tree`, `independent` or `replay`."""
    group_by: tuple[str, ...] = ("task", "role")
    """Samples that agree in these fields are one group."""
    unit: Unit = "sample"
    """The unit of the mean and the deviation of a group in figures: sample | trajectory | token."""
    compares: bool = True
    """Whether samples of a group are compared. Then a sample alone in its group is left out."""
    attribution: Attribution = Attribution()
    """Which rewards count. `cotune check` shows them, and evaluations use them."""
    filters: Filters = Filters()
    """Which samples are left out."""
    loss: LossSpec = LossSpec()
    """The policy loss."""
    to_go: bool = False
    """Whether the reward of a call also covers the later turns of its role."""
    joins_roles: bool = False
    """Whether the reward of a call also covers the calls of other roles."""
    needs_all_roles: bool = False
    """Whether a role's advantages depend on the advantages of the other roles."""
    remembers: bool = False
    """Whether advantages depend on moving averages of earlier steps."""
    trains_branches: bool = True
    """Under a replay plan: whether also later calls of a branch are trained on, or only the candidates of its fork."""
    unread: ClassVar[bool] = False
    """Whether this is a placeholder for a user's class that was not loaded."""

    def rewards(self, step: Step) -> Floats:
        """One reward for each of the step's samples, [n]; NaN if it is not known."""
        return step.rewards()

    def advantages(self, step: Step, rewards: Floats) -> Floats:
        """One advantage for each of the step's samples, [n]. Samples in no group have 0."""
        raise NotImplementedError(f"{type(self).__name__} has no advantages(step, rewards)")

    def step(self, samples: Sequence[Sample], state: AdvantageState | None = None, part: str = "") -> Step:
        """The samples of a step, for `rewards` and `advantages`. `part` separates the moving averages of policies that
        have a recipe of their own."""
        return Step(samples, self.attribution, self.group_by, state, part, to_go=self.to_go)

    def under(self, plan: PlanKind) -> Self:
        """This method under a plan. Raises ConfigError if it cannot be used there."""
        if self.plan == "replay" and plan != "replay":
            raise ConfigError(
                "plan.kind",
                plan,
                f"cannot be used with recipe {self.name}, which needs replay",
                f"Use --plan replay, or recipe {USUAL[plan]}.",
            )
        changed = self.replaced(plan=plan)
        if plan != "independent" and not self.takes_rewards:
            # A teacher scores the samples, so the method's groups and rewards, for another plan, do not matter.
            changed.group_by = PROMPT_KEY
            changed.attribution = Attribution()
        elif plan != "tree" and self.plan == "tree":
            # Outside a tree each candidate has a separate episode, so the outcomes of candidates can differ.
            changed.attribution = msgspec.structs.replace(self.attribution, outcome=True)
        return changed

    def replaced(self, **attributes: Any) -> Self:
        """A copy with other attributes."""
        changed = copy.copy(self)
        for name, value in attributes.items():
            setattr(changed, name, value)
        return changed

    def check(self) -> None:
        """Raise ConfigError for attributes that contradict each other."""
        for field in self.group_by:
            if field not in KEY_FIELDS:
                raise ConfigError("recipe", self.name, f"groups by {field!r}, not one of {', '.join(KEY_FIELDS)}")
        if self.plan != "independent" and self.takes_rewards and not {"role", "turn", "branch"} <= set(self.group_by):
            raise ConfigError(
                "plan",
                self.plan,
                f"cannot be used with {self.name}, which compares whole rollouts (key {', '.join(self.group_by)})",
                f"Leave the plan out, or use {USUAL[self.plan]}, gspo, dapo or cispo under a {self.plan} plan.",
            )
        if self.plan == "tree" and self.takes_rewards and (self.attribution.outcome or self.to_go):
            raise ConfigError(
                "plan",
                self.plan,
                f"cannot be used with {self.name}, which takes the outcome of the episode: all candidates of a call "
                "share one future and so one outcome",
                "Return the team reward from a scorer as `team`, or use --plan independent.",
            )
        if self.plan == "tree" and self.loss.aggregation == "trajectory_mean":
            raise ConfigError(
                "aggregation",
                self.loss.aggregation,
                "cannot be used under a tree plan: candidates are no single trajectory",
                "Use token_mean, sequence_mean or constant.",
            )
        if self.loss.critic and (self.compares or self.filters.zero_variance or self.filters.zero_advantage):
            raise ConfigError(
                "recipe",
                self.name,
                "has a critic, which makes the advantages and learns from every reward, and compares rewards too",
                "Set compares = False, and leave zero_variance and zero_advantage out.",
            )

    @property
    def joins_calls(self) -> bool:
        """Whether the reward of a candidate includes rewards of other calls of its episode."""
        return self.joins_roles or self.to_go

    @property
    def by_seat(self) -> bool:
        """Whether roles play against each other, so that each has a separate outcome."""
        return self.attribution.seats and self.attribution.outcome and not self.joins_roles

    @property
    def takes_rewards(self) -> bool:
        """Whether candidates need a reward. They do not if a teacher, or the policy itself, scores them."""
        return self.loss.kl_to == "untrained"

    @property
    def is_own(self) -> bool:
        """Whether the class is the user's."""
        return not type(self).__module__.startswith("cotune.")

    def __eq__(self, other: object) -> bool:
        """Whether both are the same class with the same settings."""
        if not isinstance(other, Method) or type(other) is not type(self):
            return False
        return all(getattr(other, name) == getattr(self, name) for name in _SETTINGS)

    def __hash__(self) -> int:
        return hash((type(self), self.name, self.plan))


class Outcome(Method):
    """The reward is the outcome of the episode. For evaluations of anything that is not a run."""

    name = "outcome"
    group_by = PROMPT_KEY
    compares = False
    attribution = Attribution(own=False, outcome=True)


class Unread(Method):
    """A placeholder for a user's class when a run is only shown: the groups of its plan, without advantages."""

    compares = False
    unread = True

    def __init__(self, name: str, plan: PlanKind) -> None:
        self.name = name
        self.plan = plan
        self.group_by = ("task", "role") if plan == "independent" else PROMPT_KEY
        self.attribution = Attribution(outcome=plan != "tree", absent=0.0)
        # A token_loss, so that no sample is left out because its advantage is zero.
        self.loss = LossSpec(token_loss=name)

    def advantages(self, step: Step, rewards: Floats) -> Floats:
        return np.zeros(len(rewards))
