"""Further episodes of a step whose groups have nothing to compare."""

from __future__ import annotations

from typing import Literal

import msgspec

from cotune.errors import ConfigError, check_bounds


class RefillConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[refill] Draws further tasks in a step whose groups have equal rewards, which teach nothing."""

    budget: float = 0.0
    """Most tasks that a step draws in addition, as a share of its own: 0.5 lets a step of 32 tasks run 48. 0: none."""
    groups: int | None = None
    """Groups with different rewards that a step should have for each trained role; without a value, as many as the role
    has in the step's own tasks. Roles that act in fewer than half of these tasks are not waited for, unless none acts
    in more."""
    draw: Literal["tasks", "again"] = "tasks"
    """tasks: further tasks | again: the step's own tasks without such a group, run plan.k times more, for rewards that
    are nearly always equal."""

    def __post_init__(self) -> None:
        check_bounds(self, "budget", least=0, table="refill.")
        check_bounds(self, "groups", least=1, table="refill.")
        if not self.budget and (self.groups is not None or self.draw != "tasks"):
            name = "draw" if self.groups is None else "groups"
            fault, remedy = "has no effect with refill.budget = 0", "Set refill.budget, for example to 0.5."
            raise ConfigError(f"refill.{name}", getattr(self, name), fault, remedy)
