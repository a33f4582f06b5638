"""The settings of methods: which rewards count (`Attribution`), which samples are left out (`Filters`), and the loss
(`LossSpec`). A method sets them as class attributes; a run changes some of them in the tables [rewards] and [loss]
(`cotune.config.methods`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from cotune.config.methods import Aggregation, KlTo, Mask, Ratio
from cotune.errors import ConfigError, check_bounds
from cotune.records.plans import PlanKind

ClipStyle = Literal["ppo", "cispo", "none"]
KlIn = Literal["loss", "reward"]
Balance = Literal["none", "equal"]

MASK_BOUNDS: Mapping[Mask, tuple[float, float]] = {
    "token": (0.5, 5.0),
    "sequence": (0.5, 2.0),
    "geometric": (0.999, 1.001),
}
"""Default `mask_range` by `mask`: IcePop's for tokens (arXiv 2510.18855), verl's for sequences."""

USUAL: Mapping[PlanKind, str] = {"tree": "at_grpo", "independent": "dr_mas", "replay": "c3_branches"}
"""The default recipe of each plan."""

FEEDBACK = "feedback"
"""Value of `teacher_sees` for the texts beside rewards (`cotune.Feedback`)."""

PROMPT_KEY = ("task", "role", "turn", "branch")
"""Key under which all members share one prompt: the siblings of one call."""


def _check_shares(settings: object, *names: str) -> None:
    """Raise ConfigError for a field that is not between 0 and 1."""
    for name in names:
        value = getattr(settings, name)
        if not 0.0 <= value <= 1.0:
            raise ConfigError(name, value, "must be between 0 and 1")


class Attribution(msgspec.Struct, frozen=True, kw_only=True):
    """Which rewards count for a candidate, and the weight of each component.

    `own` counts the candidate's own components, which its role's scorer returned, and `outcome` the components of its
    episode. A component that both have counts once, as the candidate's own.

    The weight of a component is `weights[name]`, or `other` if it is not listed. `weights["role/name"]` is the weight
    for one role only. The weight of `team` is multiplied by `team_weight`. With `seats` a component of the outcome that
    is named after a role, as in {"white": 1, "black": -1}, counts for that role, and unlisted components of the outcome
    count for none.
    `gates` are components that multiply the sum of the others: with a `format` of 0, a right answer has no reward. A
    gate that no candidate of the role has changes nothing.
    `absent` is the value of a component that a candidate or its episode lacks, if others that it is compared with have
    it. Without it (None) these candidates are left out.
    `overlong_penalty` is subtracted from the reward of an answer that was cut at its length limit, and a growing share
    of it from an answer that ends in the last `overlong_buffer` tokens before that limit (DAPO's soft overlong
    punishment). `timeout_penalty` is subtracted from the outcome of an episode in which a call of a trained role timed
    out.
    """

    own: bool = True
    outcome: bool = False
    team_weight: float = 1.0
    weights: Mapping[str, float] = {}
    other: float = 1.0
    seats: bool = False
    gates: tuple[str, ...] = ()
    absent: float | None = None
    overlong_buffer: int = 0
    overlong_penalty: float = 0.0
    timeout_penalty: float = 0.0

    def __post_init__(self) -> None:
        """Raise ConfigError for penalties that are negative or have no effect."""
        check_bounds(self, "overlong_buffer", "overlong_penalty", "timeout_penalty", least=0)
        if self.overlong_buffer and self.overlong_penalty == 0:
            fault = "has no effect, as overlong_penalty is 0"
            raise ConfigError("overlong_buffer", self.overlong_buffer, fault, "Set both.")
        if self.timeout_penalty and not self.outcome:
            raise ConfigError(
                "timeout_penalty",
                self.timeout_penalty,
                "is taken from outcomes, and these candidates answer for their own rewards alone, as under a tree plan",
                "Use drop_timed_out, or --plan independent.",
            )


OUTCOME = Attribution(own=False, outcome=True)
"""Only the outcome of the episode."""
OWN_AND_OUTCOME = Attribution(outcome=True)
"""The candidate's own rewards and the outcome of its episode."""


class Filters(msgspec.Struct, frozen=True, kw_only=True):
    """Which samples are left out of training, and counted by reason, besides groups of one.

    Before the advantages, so that these samples are not compared with others:
    `ties` leaves out episodes in which all roles have the same reward. `zero_variance` leaves out groups with equal
    rewards. `mean_range` leaves out groups whose mean reward is outside these bounds; with `mean_range_roles`, only
    groups of these roles. `keep_groups` keeps this share of the groups of each policy that the other filters leave
    (rounded up): the groups with the largest standard deviation of rewards, or with `keep_groups_by = "mean"` the
    groups with the highest mean reward (PettingLLMs' `filter_method` and `filter_ratio`).

    After the advantages, so that the samples are compared with the others of their group:
    `zero_advantage` leaves out samples whose advantage is 0. `drop_truncated` leaves out answers that were cut at their
    length limit (DAPO's overlong filtering). `drop_timed_out` leaves out episodes in which a call of a trained role
    timed out. `top_entropy` keeps the samples with the highest mean token entropy, this share of each group (DART).
    `align_to` trains each role on the same number of calls of each episode of a task, at most this number (M-GRPO).
    """

    ties: bool = False

    zero_variance: bool = False
    mean_range: tuple[float, float] | None = None
    mean_range_roles: tuple[str, ...] = ()
    keep_groups: float | None = None
    keep_groups_by: Literal["mean", "spread"] = "spread"
    zero_advantage: bool = False
    drop_truncated: bool = False
    drop_timed_out: bool = False
    top_entropy: float | None = None
    align_to: int | None = None

    def __post_init__(self) -> None:
        for name in ("top_entropy", "keep_groups"):
            share = getattr(self, name)
            if share is not None and not 0.0 < share <= 1.0:
                raise ConfigError(name, share, "must be a share above 0 and up to 1")
        check_bounds(self, "align_to", least=1)


class LossSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The policy loss. rho = pi_train / pi_old, bounded to [1 - clip_low, 1 + clip_high]; pi_old is the policy before
    the update.

    `ratio`: `token` (one rho per token), `sequence` (geometric mean of the response's rhos, GSPO), or `none`
    (rho = 1: REINFORCE). `style`: `ppo` takes min(rho A, clip(rho) A); `cispo` takes stop_grad(clip(rho)) A log p;
    `none` takes rho A. `dual_clip` c > 1 bounds the loss of tokens with A < 0 at c |A|.
    `tis_cap`: each token weighs min(pi_old / pi_sampler, cap), the truncated importance sampling between the
    trainer's and the sampler's log-probabilities (its geometric mean over the response if `ratio` is `sequence`);
    None leaves the weight out. `mask` rejects tokens or responses whose quotient is outside `mask_range`: a `token` by
    its own quotient, a whole response by the product (`sequence`) or the mean (`geometric`) of its tokens' quotients.
    Rejected tokens have no gradient and are not in the denominators. The default range is in `MASK_BOUNDS`.
    `kl` is beta of the KL penalty to the untrained policy, to a `teacher` that scores the samples, or to the policy
    `self` that sees more (`kl_to`): k3 of each token in the loss, or its k1 in the `reward` (`kl_in`), subtracted from
    the token's advantage: A - beta (log pi_old - log pi_ref). `teacher_sees` is a text that only a teacher reads, at
    the end of the last user message: a field of each task; `feedback`, the texts beside the rewards of the candidate
    and its episode (`cotune.Feedback`); or `module:function`, called with (candidate, call, task), which returns a
    text, or a list of messages that replace all, or None. Candidates without one are left out as `no_hint`.
    `entropy` is the weight of the entropy bonus, times the component `entropy_by` of the episode's outcome if this is
    set and the outcome has it.
    `critic`: a value head judges each token, and GAE (`gae_gamma`, `gae_lambda`) computes the tokens' advantages,
    normalised over the update. The advantage of a sample is then its reward. `critic_lr` is the value head's rate.
    `critic_sees` names a field of each task, a text, that the critic reads before the prompt.
    `aggregation`: mean over all response tokens; mean over responses (calls) of their token means; mean over
    trajectories (all answers of the policy in an episode) of their token means; or the sum over tokens divided by
    (responses x `constant_length`), with None for the run's response limit.
    `balance`: with `equal`, the roles of a policy that plays several have gradients of about the same length. The rows
    of a role weigh m / g: g is the estimated length of the role's gradient (`gradient_share` in
    docs/reference/metrics.md) by the advantages and the sampler's log-probabilities, and m the mean of g over the roles
    that have an advantage.
    `token_loss` names your own function, which replaces ratio, clip and style: in the file of its class
    f"{__file__}:soft_clip".
    """

    ratio: Ratio = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    style: ClipStyle = "ppo"
    dual_clip: float | None = None
    tis_cap: float | None = 2.0
    mask: Mask = "none"
    mask_range: tuple[float, float] | None = None
    kl: float = 0.0
    kl_in: KlIn = "loss"
    kl_to: KlTo = "untrained"
    teacher_sees: str = ""
    entropy: float = 0.0
    entropy_by: str = ""
    critic: bool = False
    gae_gamma: float = 1.0
    gae_lambda: float = 0.95
    critic_lr: float = 1e-2
    critic_sees: str = ""
    aggregation: Aggregation = "token_mean"
    constant_length: int | None = None
    balance: Balance = "none"
    token_loss: str = ""

    @property
    def needs_untrained(self) -> bool:
        """Whether the loss needs the untrained policy's log-probabilities of the samples."""
        return self.kl > 0.0 and self.kl_to == "untrained"

    @property
    def moves_alone(self) -> bool:
        """Whether a candidate of advantage zero teaches something: by the KL penalty, the entropy bonus or your own
        loss, or because a critic computes the advantages."""
        return self.kl > 0.0 or self.entropy > 0.0 or self.critic or bool(self.token_loss)

    def __post_init__(self) -> None:
        """Raise ConfigError for settings outside their bounds, and for settings that need another that is not set."""
        _check_shares(self, "clip_low", "gae_gamma", "gae_lambda")
        check_bounds(self, "clip_high", "kl", least=0)
        check_bounds(self, "critic_lr", "tis_cap")
        check_bounds(self, "constant_length", least=1)
        if self.critic_sees and not self.critic:
            raise ConfigError("critic_sees", self.critic_sees, "needs a critic", "Set critic=True too.")
        if self.teacher_sees and self.kl_to == "untrained":
            remedy = "Use recipe distill or self_distill."
            raise ConfigError("teacher_sees", self.teacher_sees, "needs a teacher", remedy)
        if self.kl_to == "self" and not self.teacher_sees:
            fault = "needs teacher_sees: the policy would teach itself what it says anyway"
            raise ConfigError("kl_to", self.kl_to, fault, "Set teacher_sees = feedback.")
        if self.dual_clip is not None and not self.dual_clip > 1.0:
            raise ConfigError("dual_clip", self.dual_clip, "must be a number above 1")
        if self.mask_range is not None:
            self._check_mask_range(self.mask_range)

    def _check_mask_range(self, bounds: tuple[float, float]) -> None:
        """Raise ConfigError for a `mask_range` without a mask, or that is not a range."""
        if self.mask == "none":
            remedy = "Set mask to token, sequence or geometric."
            raise ConfigError("mask_range", bounds, "has no effect, as mask is none", remedy)
        # A user's method sets it in code, where nothing has checked the type.
        is_pair = isinstance(bounds, tuple | list) and len(bounds) == 2
        if not is_pair or not 0.0 <= bounds[0] < bounds[1]:
            raise ConfigError("mask_range", bounds, "must be two numbers, 0 or more, the lower one first")

    @property
    def mask_bounds(self) -> tuple[float, float]:
        """The bounds of pi_old / pi_sampler for tokens that are trained on, both included."""
        if self.mask_range is not None:
            return self.mask_range
        return MASK_BOUNDS.get(self.mask, (0.0, float("inf")))
