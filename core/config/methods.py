"""The tables [rewards] and [loss]: what a run changes of its recipe. A setting without a value is the recipe's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

Ratio = Literal["none", "token", "sequence"]
Aggregation = Literal["token_mean", "sequence_mean", "trajectory_mean", "constant"]
KlTo = Literal["untrained", "teacher", "self"]
Mask = Literal["none", "token", "sequence", "geometric"]


class RewardSettings(msgspec.Struct, frozen=True, kw_only=True):
    """[rewards] Which rewards a candidate answers for, and how much each weighs. Settings without a value are the
    recipe's; see docs/reference/recipes.md."""

    weights: dict[str, float] | None = None
    """Weight of each component of the rewards, by name; "role/name" is the weight for one role alone. Components that
    are not listed count for nothing. Without a value all components weigh 1, unless the recipe lists its own."""
    team_weight: float | None = None
    """Weight of the component `team` against all others: r = team_weight * team + local. 1 without a value. Under a
    tree plan, roles learn from their scorers (and from a `team` that a scorer returns), and not from the workflow's
    result."""
    absent: float | None = None
    """Value of a component that a candidate or its episode lacks while others that it is compared with have it. Without
    a value these candidates are left out."""
    zero_variance: bool | None = None
    """Leave out groups in which all rewards are equal. Without a value as the recipe does; where they stay, only the
    KL penalty and the entropy bonus learn from them."""
    drop_truncated: bool | None = None
    """Do not train on answers that were cut at their length limit; others are still compared with them. false without a
    value."""
    overlong_penalty: float | None = None
    """Subtracted from the reward of an answer that was cut at its length limit. 0 without a value."""
    overlong_buffer: int | None = None
    """Tokens before the length limit in which an answer loses a growing share of `overlong_penalty`. 0 without a
    value."""


class LossSettings(msgspec.Struct, frozen=True, kw_only=True):
    """[loss] Terms of the policy loss. Settings without a value are the recipe's; see docs/reference/recipes.md.
    rho is pi_train / pi_old, bounded to [1 - clip_low, 1 + clip_high]; pi_old is the policy before the update."""

    ratio: Ratio | None = None
    """token (one rho per token) | sequence (the geometric mean of the response's, GSPO) | none (rho is 1,
    REINFORCE)."""
    clip_low: float | None = None
    """How far rho may fall below 1 before its gradient ends. 0.2 in most recipes."""
    clip_high: float | None = None
    """How far rho may rise above 1 before its gradient ends. 0.2 in most recipes."""
    tis_cap: float | None = None
    """Each token weighs min(pi_old / pi_sampler, tis_cap): truncated importance sampling between the log-probabilities
    of learner and sampler. 2 without a value."""
    mask: Mask | None = None
    """Reject what lies outside `mask_range` of pi_old / pi_sampler: a token by its own quotient, or a whole response by
    the product (sequence) or the mean (geometric) of its tokens'. Rejected tokens carry no gradient. none without a
    value."""
    mask_range: tuple[float, float] | None = None
    """Lower and upper bound of `mask`. Without a value 0.5 and 5 for token, 0.5 and 2 for sequence, 0.999 and 1.001 for
    geometric."""
    kl: float | None = None
    """Weight of the KL penalty to the model that `kl_to` names. 0 in most recipes."""
    kl_to: KlTo | None = None
    """untrained | teacher (a model that scores the samples, see `distill.teacher`) | self (the policy with
    `teacher_sees` in its context)."""
    teacher_sees: str | None = None
    """What a teacher reads and the policy does not, at the end of the last user message: the name of a field of each
    task, a text | feedback (the texts beside the rewards) | module:function, called with (candidate, call, task).
    Candidates without such a text are left out as `no_hint`."""
    entropy: float | None = None
    """Weight of the entropy bonus. 0 in most recipes."""
    aggregation: Aggregation | None = None
    """Mean over all response tokens (token_mean), over responses of their token means (sequence_mean), over episodes of
    their token means (trajectory_mean), or the sum over tokens divided by responses and the run's response limit
    (constant)."""


def changed_settings(rewards: RewardSettings, loss: LossSettings) -> Mapping[str, Any]:
    """The settings that have a value, by name."""
    settings = {**msgspec.structs.asdict(rewards), **msgspec.structs.asdict(loss)}
    return {name: value for name, value in settings.items() if value is not None}


def dotted_name(setting: str) -> str:
    """The name of a recipe's setting in a configuration: loss.clip_high."""
    return f"{'loss' if setting in LossSettings.__struct_fields__ else 'rewards'}.{setting}"
