"""The tables that say which tasks a step takes, and how their episodes are sampled and forked."""

from __future__ import annotations

from typing import Literal

import msgspec

from cotune.errors import ConfigError, check_bounds
from cotune.records.plans import Plan, PlanKind, Select


class PlanConfig(msgspec.Struct, frozen=True, kw_only=True):
    """[plan] How candidates come about."""

    kind: PlanKind | None = None
    """tree | independent | replay (see docs/how-to/replay.md); without a value: replay for recipes c3 and
    c3_branches, tree when the workflow has scorers and the recipe takes it, else independent."""
    k: int = Plan().k
    """Candidates per call (tree), per forked call (replay), or episodes per task (independent)."""
    select: Select = Plan().select
    """Which candidate the application gets: argmax | sample | first."""


class SamplingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """[sampling] How the policies are sampled in training; overrides what the application asks for."""

    temperature: float = 1.0
    """Above 0; the distribution is never truncated in training (no top-p, no top-k)."""
    max_tokens: int = 256
    """Most new tokens per candidate where the application names no limit."""
    repeatable: bool = False
    """The same seed gives the same run, also after an interruption: episodes run one at a time, whatever `concurrency`
    is, and the in-process sampler keeps no earlier prompts. Otherwise batches and caches depend on timing, and so do
    the last digits of log-probabilities. Mode async cannot be repeated."""

    def __post_init__(self) -> None:
        check_bounds(self, "temperature", "max_tokens", table="sampling.")

    @property
    def prefix_bytes(self) -> int | None:
        """Memory for earlier prompts in the in-process sampler, in bytes; None for its own choice."""
        return 0 if self.repeatable else None


class ReplayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """[replay] Under `plan.kind = "replay"`: which calls of an episode are forked; see docs/how-to/replay.md."""

    forks: str = "all"
    """all | decisive (the calls whose answers decided most in the last steps) | first:N (the first N calls) | every:N
    (each Nth) | entropy:N (the N whose answers have the highest mean -log p per token) | role:NAME (all calls of a
    role). Only calls of trained roles count."""
    budget: int = 4
    """At most this many calls of an episode are forked. If `forks` takes more, first:N and entropy:N fork the first
    ones of their order, and decisive those with the largest effects. Other rules draw at random in each step; the
    chance of a call is proportional to 1 / (calls from it to the end), as is the information of its outcomes per
    token."""

    tools: Literal["run", "recorded", "frozen"] = "run"
    """A framework's tools in the part of a branch that repeats its trunk. run: they run again | recorded: they return
    what they returned in the trunk, as functions under `cotune.recorded` always do | frozen: as recorded, and clock,
    uuid and random have their values of the trunk too, for prompts with a date, an id or a random choice.
    docs/how-to/replay.md lists what is frozen."""

    def __post_init__(self) -> None:
        check_bounds(self, "budget", least=1, table="replay.")


class RoutingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """[routing] Roles that change their policies during training. Evaluation and the export do not change them."""

    swap: tuple[str, ...] = ()
    """Two or more roles that pass their policies around in a ring, every 5 steps (CORY)."""

    def __post_init__(self) -> None:
        if len(self.swap) == 1 or len(set(self.swap)) < len(self.swap):
            raise ConfigError("routing.swap", list(self.swap), "is not two or more different roles")


class CurriculumConfig(msgspec.Struct, frozen=True, kw_only=True):
    """[curriculum] Tasks by difficulty: as the tasks give it, or as their rewards show it."""

    pool: str = "even"
    """even: passes over all tasks | by:FIELD (a number in each task that says how hard it is: steps take the tasks of
    one level after another, the lowest number first, and then all tasks, each for an equal part of the run) | adaptive:
    tasks are drawn by the variance that the rewards of their groups are expected to have, p(1 - p) for rewards of 0 and
    1, with an equal share for each trained role."""

    def __post_init__(self) -> None:
        if self.pool not in ("even", "adaptive") and not self.by:
            fault = "is not one of even, adaptive, by:FIELD"
            raise ConfigError("curriculum.pool", self.pool, fault, "For example: by:difficulty")

    @property
    def by(self) -> str:
        """The field of each task with its difficulty. Empty if the pool does not go by one."""
        return self.pool.removeprefix("by:") if self.pool.startswith("by:") else ""


class RefillConfig(msgspec.Struct, frozen=True, kw_only=True):
    """[refill] Draws further tasks in a step whose groups have equal rewards, which teach nothing, until each trained
    role has as many groups with different rewards as it has groups in the step's own tasks. Roles that act in fewer
    than half of these tasks are not waited for, unless none acts in more."""

    budget: float = 0.0
    """Most tasks that a step draws in addition, as a share of its own: 0.5 lets a step of 32 tasks run 48. 0: none."""

    def __post_init__(self) -> None:
        check_bounds(self, "budget", least=0, table="refill.")
