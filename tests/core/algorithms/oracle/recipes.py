"""The parts that recipes are made of: each published method is a configuration of the same pure functions.

plan -> filters -> reward attribution -> group key -> baseline -> scale -> weighted sum of terms -> loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from cotune.algorithms.samples import KEY_FIELDS
from cotune.errors import ConfigError, check_bounds
from cotune.records.plans import PlanKind
from tests.core.algorithms.oracle.baselines import COMPARING, Baseline, Unit

Horizon = Literal["own_turn", "terminal", "reward_to_go", "mean_to_go"]
Scope = Literal["own", "sum", "mean"]
Scale = Literal["none", "std"]
Ratio = Literal["none", "token", "sequence"]
ClipStyle = Literal["ppo", "cispo", "none"]
Aggregation = Literal["token_mean", "sequence_mean", "trajectory_mean", "constant"]
KlIn = Literal["loss", "reward"]
KlTo = Literal["untrained", "teacher", "self"]
Mask = Literal["none", "token", "sequence", "geometric"]

MASK_BOUNDS: Mapping[Mask, tuple[float, float]] = {
    "token": (0.5, 5.0),
    "sequence": (0.5, 2.0),
    "geometric": (0.999, 1.001),
}
"""Where pi_old / pi_sampler is believed, by `mask`: IcePop's for tokens (arXiv 2510.18855), verl's for sequences."""

USUAL: Mapping[PlanKind, str] = {"tree": "at_grpo", "independent": "dr_mas", "replay": "c3_branches"}
"""The recipe of each plan where none is named."""

FEEDBACK = "feedback"
"""`teacher_sees` of the texts that stand beside rewards."""

PROMPT_KEY = ("task", "role", "turn", "branch")
"""Key under which all members share one prompt: the siblings of one call."""


def _require(holds: bool, field: str, value: object, fault: str, remedy: str = "") -> None:
    if not holds:
        raise ConfigError(field, value, fault, remedy)


def _shares(settings: object, *names: str) -> None:
    """Raise ConfigError for a field that is not between 0 and 1."""
    for name in names:
        value = getattr(settings, name)
        _require(0.0 <= value <= 1.0, name, value, "must be between 0 and 1")


class Attribution(msgspec.Struct, frozen=True, kw_only=True):
    """Which reward a sample answers for: weighted components x horizon x scope.

    A component weighs `weights[name]`, or `other` where it is not listed; `team` is multiplied by `team_weight` on top.
    `weights["role/name"]` is the weight for one role alone. With `seats` a component of the outcome that is named after
    a role (as where a game ends with {"white": 1, "black": -1}) counts for that role, and unlisted others for none.
    `horizon`: `own_turn` takes the candidate's own components, `terminal` the episode's outcome, `reward_to_go`
    the own components of this and all later turns of the role, discounted by `gamma` per turn, with the outcome
    at its last turn, and `mean_to_go` the same divided by the sum of the discounts. `outcome` lets `own_turn` add those
    components that only the episode has.
    `gates` are components that multiply what the others add up to: a `format` of 0 leaves nothing of a right answer.
    One that nobody of the role carries leaves the reward as it is.
    `absent` is what a component counts where a candidate, or its episode, lacks it while others of its group, or
    episodes of its task, carry it; None leaves such candidates out.
    `overlong_penalty` is taken from the reward of an answer that was cut at its length limit, and a growing share of it
    from one that ends in the last `overlong_buffer` tokens before that limit (DAPO's soft overlong punishment).
    `timeout_penalty` is taken from the outcome of an episode in which a call of a trained role timed out.
    `scope` joins the roles of an episode on the turn: own reward, or sum or mean over the roles.
    """

    team_weight: float = 1.0
    weights: Mapping[str, float] = {}
    other: float = 1.0
    seats: bool = False
    gates: tuple[str, ...] = ()
    horizon: Horizon = "own_turn"
    outcome: bool = False
    gamma: float = 1.0
    scope: Scope = "own"
    absent: float | None = None
    overlong_buffer: int = 0
    overlong_penalty: float = 0.0
    timeout_penalty: float = 0.0

    def __post_init__(self) -> None:
        _shares(self, "gamma")
        check_bounds(self, "overlong_buffer", "overlong_penalty", "timeout_penalty", least=0)
        paid, fault = self.overlong_penalty, "has no effect, as overlong_penalty is 0"
        _require(not self.overlong_buffer or paid > 0, "overlong_buffer", self.overlong_buffer, fault, "Set both.")
        _require(
            not self.timeout_penalty or self.takes_outcome,
            "timeout_penalty",
            self.timeout_penalty,
            "is taken from outcomes, and these candidates answer for their own rewards alone, as under a tree plan",
            "Use drop_timed_out, or --plan independent.",
        )

    @property
    def takes_outcome(self) -> bool:
        """Whether the episode's outcome is part of the reward."""
        return self.horizon != "own_turn" or self.outcome


class Term(msgspec.Struct, frozen=True, kw_only=True):
    """One advantage: A = (r - baseline) / (std + eps) over the samples that agree in `key`.

    `unit` is what counts once in the statistics: every sample, every rollout (its mean reward), or every response
    token. `ddof` is subtracted from the number of units under the variance. `decay` belongs to the `ema` baseline.
    `scale_key`: the samples over which r - baseline is divided by its standard deviation; None: those of `key`.
    `advantage` names a function of your own, which takes the place of baseline and scale. `weight` is the term's share
    in the sum of terms.
    """

    key: tuple[str, ...] = PROMPT_KEY
    attribution: Attribution = Attribution()
    baseline: Baseline = "mean"
    scale: Scale = "std"
    scale_key: tuple[str, ...] | None = None
    ddof: int = 1
    eps: float = 1e-6
    unit: Unit = "sample"
    decay: float = 0.95
    advantage: str = ""
    weight: float = 1.0

    def __post_init__(self) -> None:
        for name in (*self.key, *(self.scale_key or ())):
            _require(name in KEY_FIELDS, "key", name, f"is not one of {', '.join(KEY_FIELDS)}")
        _require(self.ddof in (0, 1), "ddof", self.ddof, "must be 0 (population) or 1 (sample standard deviation)")
        check_bounds(self, "eps", least=0)
        _shares(self, "decay")

    @property
    def compares(self) -> bool:
        """Whether a sample is judged by others of its group, so that one alone has no advantage."""
        return self.baseline in COMPARING or (self.scale == "std" and self.scale_key is None)


class Filters(msgspec.Struct, frozen=True, kw_only=True):
    """What is left out, and counted, beyond groups of one.

    Before the advantages: `ties`: episodes whose roles all have the same reward; groups of `zero_variance`; groups
    whose mean reward is outside `mean_range` (inclusive), of the `mean_range_roles` alone where some are named. After
    them, so that baselines take them in: samples of `zero_advantage`; `drop_truncated`: answers that were cut at their
    length limit (DAPO's overlong filtering); `drop_timed_out`: all of an episode in which a call of a trained role
    timed out; `top_entropy`: all but this share of a group's samples, those of the highest mean token entropy (DART).
    `align_to`: each role trains on the same number of calls of each episode of a task, at most so many (M-GRPO).
    """

    ties: bool = False

    zero_variance: bool = False
    mean_range: tuple[float, float] | None = None
    mean_range_roles: tuple[str, ...] = ()
    zero_advantage: bool = False
    drop_truncated: bool = False
    drop_timed_out: bool = False
    top_entropy: float | None = None
    align_to: int | None = None

    def __post_init__(self) -> None:
        kept = self.top_entropy
        _require(kept is None or 0.0 < kept <= 1.0, "top_entropy", kept, "must be a share above 0 and up to 1")
        check_bounds(self, "align_to", least=1)


class Shaping(msgspec.Struct, frozen=True, kw_only=True):
    """What the advantages of an episode's other roles add to a role's own (`shaping`): `opponent` is the weight of
    Advantage Alignment's term, 0 for none, and `opponent_gamma` discounts the role's own past advantages in it."""

    opponent: float = 0.0
    opponent_gamma: float = 0.96

    def __post_init__(self) -> None:
        _shares(self, "opponent_gamma")


class LossSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The policy loss. rho = pi_train / pi_old, bounded to [1 - clip_low, 1 + clip_high]; pi_old is the policy before
    the update.

    `ratio`: `token` (one rho per token), `sequence` (geometric mean of the response's rhos, GSPO), or `none`
    (rho = 1: REINFORCE). `style`: `ppo` takes min(rho A, clip(rho) A); `cispo` takes stop_grad(clip(rho)) A log p;
    `none` takes rho A. `dual_clip` c > 1 bounds the loss of tokens with A < 0 at c |A|.
    `tis_cap`: each token weighs min(pi_old / pi_sampler, cap), the truncated importance sampling between the
    trainer's and the sampler's log-probabilities (its geometric mean over the response where `ratio` is `sequence`);
    None leaves the weight out. `mask` rejects what lies outside [`mask_low`, `mask_high`] of that quotient: a `token`
    by its own, a whole response by the product (`sequence`) or the mean (`geometric`) of its tokens'. Rejected tokens
    carry no gradient and leave the denominators. Bounds that are not given are those of `MASK_BOUNDS`.
    `kl` is beta of the KL penalty to the untrained policy, to a `teacher` that scores the samples, or to the policy
    `self` that sees more (`kl_to`): k3 of each token in the loss, or its k1 in the `reward` (`kl_in`), taken from the
    token's advantage: A - beta (log pi_old - log pi_ref). `teacher_sees` is what a teacher reads and the policy does
    not, at the end of the last user message: a field of each task, a text; `feedback`, the texts beside the rewards of
    the candidate and its episode (`cotune.Feedback`); or `module:function`, called with (candidate, call, task), which
    returns a text, or a list of messages in place of all, or None. Candidates without one are left out as `no_hint`.
    `entropy` is the weight of the entropy bonus, times the component `entropy_by` of the episode's outcome where one is
    named and there.
    `critic`: a value head judges each token, and GAE (`gae_gamma`, `gae_lambda`) gives the tokens their advantages,
    normalised over the update; the term's own is then the reward, without baseline and scale. `critic_lr` is the value
    head's. `critic_sees` names a field of each task, a text, that the critic reads before the prompt.
    `aggregation`: mean over all response tokens; mean over responses (calls) of their token means; mean over
    trajectories (all that the policy wrote in an episode) of their token means; or the sum over tokens divided by
    (responses x `constant_length`), where None stands for the run's response limit.
    `token_loss` names a function of your own, which takes the place of ratio, clip and style.
    """

    ratio: Ratio = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    style: ClipStyle = "ppo"
    dual_clip: float | None = None
    tis_cap: float | None = 2.0
    mask: Mask = "none"
    mask_low: float | None = None
    mask_high: float | None = None
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
    token_loss: str = ""

    @property
    def needs_untrained(self) -> bool:
        """Whether the loss takes what the untrained policy says of the samples."""
        return self.kl > 0.0 and self.kl_to == "untrained"

    @property
    def moves_alone(self) -> bool:
        """Whether a candidate of advantage zero teaches something: by the KL penalty, the entropy bonus or a loss of
        your own, or as a critic makes the advantages."""
        return self.kl > 0.0 or self.entropy > 0.0 or self.critic or bool(self.token_loss)

    def __post_init__(self) -> None:
        _shares(self, "clip_low", "gae_gamma", "gae_lambda")
        check_bounds(self, "clip_high", "kl", least=0)
        check_bounds(self, "critic_lr", "tis_cap")
        check_bounds(self, "constant_length", least=1)
        sees = self.critic_sees
        _require(self.critic or not sees, "critic_sees", sees, "needs a critic", "Set critic = true too.")
        sees, taught = self.teacher_sees, self.kl_to != "untrained"
        _require(taught or not sees, "teacher_sees", sees, "needs a teacher", "Use recipe distill or self_distill.")
        alone = "needs teacher_sees: the policy would teach itself what it says anyway"
        _require(self.kl_to != "self" or bool(sees), "kl_to", self.kl_to, alone, "Set teacher_sees = feedback.")
        clip = self.dual_clip
        _require(clip is None or clip > 1.0, "dual_clip", clip, "must be a number above 1")
        for name, bound in (("mask_low", self.mask_low), ("mask_high", self.mask_high)):
            masks, remedy = self.mask != "none", "Set mask to token, sequence or geometric."
            _require(masks or bound is None, name, bound, "has no effect, as mask is none", remedy)
        low, high = self.mask_bounds
        _require(0.0 <= low < high, "mask_low", low, f"must be 0 or more, and under mask_high ({high:g})")

    @property
    def mask_bounds(self) -> tuple[float, float]:
        """Between which pi_old / pi_sampler is trained on, both included."""
        low, high = MASK_BOUNDS.get(self.mask, (0.0, float("inf")))
        return low if self.mask_low is None else self.mask_low, high if self.mask_high is None else self.mask_high


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """A named method. The first term's key makes the groups that are trained on and kept in the ledger. `about` says
    which paper it is from, and its formulas."""

    name: str
    plan: PlanKind = "independent"
    terms: tuple[Term, ...]
    filters: Filters = Filters()
    shaping: Shaping = Shaping()
    loss: LossSpec = LossSpec()
    trains_branches: bool = True
    """Under a replay plan: whether later calls of a branch are trained on, not just the candidates of its fork."""
    about: str = ""

    def __post_init__(self) -> None:
        _require(bool(self.terms), "terms", self.terms, "is empty", "Give at least one term.")
        _require(
            self.plan == "independent" or not self.takes_rewards or {"role", "turn", "branch"} <= set(self.key),
            "plan",
            self.plan,
            f"cannot be used with {self.name}, which compares whole rollouts (key {', '.join(self.key)})",
            f"Leave the plan out, or use {USUAL[self.plan]}, gspo, dapo or cispo under a {self.plan} plan.",
        )
        for term in self.terms if self.plan == "tree" and self.takes_rewards else ():
            how = term.attribution
            field, value = ("outcome", True) if how.horizon == "own_turn" else ("horizon", how.horizon)
            _require(
                not how.takes_outcome,
                field,
                value,
                "cannot be used under a tree plan: all candidates of a call share one future and so one outcome",
                "Return the team reward from a scorer as `team`, or use --plan independent.",
            )
        _require(
            self.plan != "tree" or self.loss.aggregation != "trajectory_mean",
            "aggregation",
            self.loss.aggregation,
            "cannot be used under a tree plan: candidates are no single trajectory",
            "Use token_mean, sequence_mean or constant.",
        )
        if self.loss.critic:
            for term in self.terms:
                for name in ("baseline", "scale"):
                    chosen, fault = getattr(term, name), "cannot be used with a critic"
                    _require(chosen == "none", name, chosen, fault, f"Set {name} = none.")
                fault = "cannot be used with a critic, which makes the advantages"
                _require(not term.advantage, "advantage", term.advantage, fault, "Leave one of both out.")
            for name in ("zero_variance", "zero_advantage"):
                fault = "cannot be used with a critic, which learns from every reward"
                _require(not getattr(self.filters, name), name, True, fault, f"Set {name} = false.")

    @property
    def key(self) -> tuple[str, ...]:
        return self.terms[0].key

    @property
    def attribution(self) -> Attribution:
        return self.terms[0].attribution

    @property
    def joins_calls(self) -> bool:
        """Whether rewards of other calls of its episode are part of a candidate's."""
        how = [term.attribution for term in self.terms]
        return any(one.scope != "own" or one.horizon in ("reward_to_go", "mean_to_go") for one in how)

    @property
    def by_seat(self) -> bool:
        """Whether roles play against each other: each has an outcome of its own."""
        how = [term.attribution for term in self.terms]
        return any(one.seats and one.takes_outcome and one.scope == "own" for one in how)

    @property
    def takes_rewards(self) -> bool:
        """Whether candidates need a reward: not where a teacher, or the policy itself as one, says what is learned."""
        return self.loss.kl_to == "untrained"
