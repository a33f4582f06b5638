"""Recipes: each published method as a configuration of the same pure functions.

plan -> filters -> reward attribution -> group key -> baseline -> scale -> weighted sum of terms -> loss.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, get_args, get_type_hints

import msgspec

from cotune.algorithms.samples import KEY_FIELDS
from cotune.errors import ConfigError, field_and_fault
from cotune.sampling.plans import PlanKind

Horizon = Literal["own_turn", "terminal", "reward_to_go"]
Scope = Literal["own", "sum", "mean"]
Baseline = Literal["none", "mean", "leave_one_out", "max", "ema"]
Scale = Literal["none", "std"]
Unit = Literal["sample", "trajectory", "token"]
Ratio = Literal["none", "token", "sequence"]
ClipStyle = Literal["ppo", "cispo", "none"]
Aggregation = Literal["token_mean", "sequence_mean", "trajectory_mean", "constant"]
KlIn = Literal["loss", "reward"]
Mask = Literal["none", "token", "sequence", "geometric"]
S = TypeVar("S", bound=msgspec.Struct)

MASK_BOUNDS: Mapping[Mask, tuple[float, float]] = {
    "token": (0.5, 5.0),
    "sequence": (0.5, 2.0),
    "geometric": (0.999, 1.001),
}
"""Where pi_old / pi_sampler is believed, by `mask`: IcePop's for tokens (arXiv 2510.18855), verl's for sequences."""

PROMPT_KEY = ("task", "role", "turn", "branch")
"""Key under which all members share one prompt: the siblings of one call."""


def _within(field: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(field, value, f"between {low:g} and {high:g}")


class Attribution(msgspec.Struct, frozen=True, kw_only=True):
    """Which reward a sample answers for: weighted components x horizon x scope.

    A component weighs `weights[name]`, or `other` where it is not listed; `team` is multiplied by `alpha` on top.
    `horizon`: `own_turn` takes the candidate's own components, `terminal` the episode's outcome, `reward_to_go`
    the own components of this and all later turns of the role, discounted by `gamma` per turn, with the outcome
    at its last turn. `outcome` lets `own_turn` add those components that only the episode has.
    `absent` is what a component counts where a candidate, or its episode, lacks it while others of its group, or
    episodes of its task, carry it; None leaves such candidates out.
    `overlong_penalty` is taken from the reward of an answer that was cut at its length limit, and a growing share of it
    from one that ends in the last `overlong_buffer` tokens before that limit (DAPO's soft overlong punishment).
    `timeout_penalty` is taken from the outcome of an episode in which a call of a trained role timed out.
    `scope` joins the roles of an episode on the turn: own reward, or sum or mean over the roles.
    """

    alpha: float = 1.0
    weights: Mapping[str, float] = {}
    other: float = 1.0
    horizon: Horizon = "own_turn"
    outcome: bool = False
    gamma: float = 1.0
    scope: Scope = "own"
    absent: float | None = None
    overlong_buffer: int = 0
    overlong_penalty: float = 0.0
    timeout_penalty: float = 0.0

    def __post_init__(self) -> None:
        _within("gamma", self.gamma, 0.0, 1.0)
        for name in ("overlong_buffer", "overlong_penalty", "timeout_penalty"):
            if not getattr(self, name) >= 0:
                raise ConfigError(name, getattr(self, name), "0 or more")
        if self.overlong_buffer and not self.overlong_penalty:
            raise ConfigError("overlong_buffer", self.overlong_buffer, "0, as overlong_penalty is 0", "Set both.")
        if self.timeout_penalty and not self.takes_outcome:
            raise ConfigError(
                "timeout_penalty",
                self.timeout_penalty,
                "0 where candidates answer for their own rewards alone, as under a tree plan",
                "Use drop_timed_out, or --plan independent.",
            )

    @property
    def takes_outcome(self) -> bool:
        """Whether the episode's outcome is part of the reward."""
        return self.horizon != "own_turn" or self.outcome

    def weight(self, component: str) -> float:
        """Weight of a reward component in the mixed reward."""
        return self.weights.get(component, self.other) * (self.alpha if component == "team" else 1.0)


class Term(msgspec.Struct, frozen=True, kw_only=True):
    """One advantage: A = (r - baseline) / (std + eps) over the samples that agree in `key`.

    `unit` is what counts once in the statistics: every sample, every rollout (its mean reward), or every response
    token. `ddof` is subtracted from the number of units under the variance. `decay` belongs to the `ema` baseline.
    `weight` is the term's share in the sum of terms.
    """

    key: tuple[str, ...] = PROMPT_KEY
    attribution: Attribution = Attribution()
    baseline: Baseline = "mean"
    scale: Scale = "std"
    ddof: int = 1
    eps: float = 1e-6
    unit: Unit = "sample"
    decay: float = 0.95
    weight: float = 1.0

    def __post_init__(self) -> None:
        for name in self.key:
            if name not in KEY_FIELDS:
                raise ConfigError("key", name, f"one of {', '.join(KEY_FIELDS)}")
        if self.ddof not in (0, 1):
            raise ConfigError("ddof", self.ddof, "0 (population) or 1 (sample standard deviation)")
        if self.eps < 0:
            raise ConfigError("eps", self.eps, "0 or more")
        _within("decay", self.decay, 0.0, 1.0)

    @property
    def compares(self) -> bool:
        """Whether a sample is judged by others of its group, so that one alone has no advantage."""
        return self.baseline in ("mean", "leave_one_out", "max") or self.scale == "std"


class Filters(msgspec.Struct, frozen=True, kw_only=True):
    """What is left out, and counted, beyond groups of one.

    Before the advantages: groups of `zero_variance`, groups whose mean reward is outside `mean_range` (inclusive).
    After them, so that baselines take them in: samples of `zero_advantage`; `drop_truncated`: answers that were cut at
    their length limit (DAPO's overlong filtering); `drop_timed_out`: all of an episode in which a call of a trained
    role timed out.
    """

    zero_variance: bool = False
    mean_range: tuple[float, float] | None = None
    zero_advantage: bool = False
    drop_truncated: bool = False
    drop_timed_out: bool = False


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
    `kl` is beta of the KL penalty to the untrained policy: k3 of each token in the loss, or its k1 in the `reward`
    (`kl_in`), taken from the token's advantage: A - beta (log pi_old - log pi_ref). `entropy` is the weight of the
    entropy bonus.
    `aggregation`: mean over all response tokens; mean over responses (calls) of their token means; mean over
    trajectories (all that the policy wrote in an episode) of their token means; or the sum over tokens divided by
    (responses x `constant_length`), where None stands for the run's response limit.
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
    entropy: float = 0.0
    aggregation: Aggregation = "token_mean"
    constant_length: int | None = None

    @property
    def moves_alone(self) -> bool:
        """Whether a policy learns where all its advantages are zero: from the KL penalty or the entropy bonus."""
        return self.kl > 0.0 or self.entropy > 0.0

    def __post_init__(self) -> None:
        _within("clip_low", self.clip_low, 0.0, 1.0)
        for name, value, least in (("clip_high", self.clip_high, 0.0), ("kl", self.kl, 0.0)):
            if not value >= least:
                raise ConfigError(name, value, f"{least:g} or more")
        if self.dual_clip is not None and not self.dual_clip > 1.0:
            raise ConfigError("dual_clip", self.dual_clip, "a number above 1, or nothing")
        if self.tis_cap is not None and not self.tis_cap > 0.0:
            raise ConfigError("tis_cap", self.tis_cap, "a number above 0, or nothing")
        for name, bound in (("mask_low", self.mask_low), ("mask_high", self.mask_high)):
            if bound is not None and self.mask == "none":
                raise ConfigError(name, bound, "nothing, as mask is none", "Set mask to token, sequence or geometric.")
        low, high = self.mask_bounds
        if not 0.0 <= low < high:
            raise ConfigError("mask_low", low, f"0 or more, and under mask_high ({high:g})")
        if self.constant_length is not None and self.constant_length < 1:
            raise ConfigError("constant_length", self.constant_length, "1 or more tokens, or nothing")

    @property
    def mask_bounds(self) -> tuple[float, float]:
        """Between which pi_old / pi_sampler is trained on, both included."""
        low, high = MASK_BOUNDS.get(self.mask, (0.0, float("inf")))
        return low if self.mask_low is None else self.mask_low, high if self.mask_high is None else self.mask_high


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """A named method. The first term's key makes the groups that are trained on and kept in the ledger."""

    name: str
    plan: PlanKind
    terms: tuple[Term, ...]
    filters: Filters = Filters()
    loss: LossSpec = LossSpec()

    def __post_init__(self) -> None:
        if not self.terms:
            raise ConfigError("terms", self.terms, "at least one term")
        if self.plan == "tree" and not {"role", "turn", "branch"} <= set(self.key):
            raise ConfigError(
                "plan",
                self.plan,
                f"independent, as {self.name} compares whole rollouts (key {', '.join(self.key)})",
                "Use at_grpo, gspo, dapo or cispo under a tree plan.",
            )
        for term in self.terms if self.plan == "tree" else ():
            if term.attribution.takes_outcome:
                how = term.attribution
                field, value = ("outcome", True) if how.horizon == "own_turn" else ("horizon", how.horizon)
                raise ConfigError(
                    field,
                    value,
                    "own_turn without outcome under a tree plan: all candidates of a call share one future and one "
                    "outcome, which can tell none of them from another",
                    "Return the team reward from a scorer as `team`, or use --plan independent.",
                )
        if self.plan == "tree" and self.loss.aggregation == "trajectory_mean":
            raise ConfigError(
                "aggregation",
                self.loss.aggregation,
                "token_mean, sequence_mean or constant under a tree plan, whose candidates are no one trajectory",
            )

    @property
    def key(self) -> tuple[str, ...]:
        return self.terms[0].key

    @property
    def attribution(self) -> Attribution:
        return self.terms[0].attribution


_TERMINAL = Attribution(horizon="terminal")
_ROLLOUT = Term(key=("task",), attribution=_TERMINAL, unit="trajectory")
_REPLACE = msgspec.structs.replace

RECIPES: Mapping[str, Recipe] = {
    r.name: r
    for r in (
        # arXiv 2510.11062: siblings of one call, r = alpha * team + local of the own turn, clip 0.2, no KL.
        Recipe(name="at_grpo", plan="tree", terms=(Term(),), filters=Filters(zero_variance=True)),
        # arXiv 2402.03300, without its KL of 0.04 (set kl). The paper leaves ddof open; this is torch.std's.
        Recipe(name="grpo", plan="independent", terms=(_ROLLOUT,), loss=LossSpec(aggregation="trajectory_mean")),
        # arXiv 2503.20783: no std, and no length under the token sum.
        Recipe(
            name="dr_grpo",
            plan="independent",
            terms=(_REPLACE(_ROLLOUT, scale="none"),),
            loss=LossSpec(aggregation="constant"),
        ),
        # arXiv 2402.14740: a response is one action, so its token log-probabilities are summed.
        Recipe(
            name="rloo",
            plan="independent",
            terms=(_REPLACE(_ROLLOUT, baseline="leave_one_out", scale="none"),),
            loss=LossSpec(aggregation="constant"),
        ),
        # arXiv 2602.08847: mean and std per role over its active steps, population formula.
        Recipe(
            name="dr_mas",
            plan="independent",
            terms=(Term(key=("task", "role"), attribution=_TERMINAL, ddof=0),),
        ),
        # arXiv 2507.18071: one ratio per response, clipped far tighter.
        Recipe(
            name="gspo",
            plan="independent",
            terms=(_ROLLOUT,),
            loss=LossSpec(ratio="sequence", clip_low=3e-4, clip_high=4e-4, aggregation="trajectory_mean"),
        ),
        # arXiv 2503.14476: clip-higher, dynamic sampling, token mean.
        Recipe(
            name="dapo",
            plan="independent",
            terms=(_ROLLOUT,),
            filters=Filters(zero_variance=True),
            loss=LossSpec(clip_high=0.28),
        ),
        # arXiv 2506.13585: the weight is clipped, not the update; no lower bound; dynamic sampling, token mean.
        Recipe(
            name="cispo",
            plan="independent",
            terms=(_ROLLOUT,),
            filters=Filters(zero_variance=True),
            loss=LossSpec(style="cispo", clip_low=1.0, clip_high=4.0),
        ),
    )
}

ANY_PLAN = ("gspo", "dapo", "cispo")
"""Recipes that are a loss for any grouping: under a tree plan they take the groups of at_grpo."""

_PARTS: dict[str, type[msgspec.Struct]] = {"loss": LossSpec, "filters": Filters, "attribution": Attribution}
_OWNER = {name: part for part, struct in _PARTS.items() for name in struct.__struct_fields__}
_TERM = ("key", "baseline", "scale", "ddof", "eps", "unit", "decay")


def recipe(name: str, **overrides: Any) -> Recipe:
    """The recipe `name` with single settings replaced; each setting is named as in its struct.

    `alpha`, `weights`, `horizon`, ... and `baseline`, `scale`, ... apply to every term. `weights` without `other`
    leaves unlisted components out. `plan` takes the groups with it: gspo, dapo and cispo compare siblings under a
    tree plan, and own-turn rewards take in the outcome under independent rollouts. Raises ConfigError for an
    unknown name, setting or value.
    """
    if name not in RECIPES:
        raise ConfigError("recipe", name, f"one of {', '.join(sorted(RECIPES))}")
    chosen = RECIPES[name]
    if "plan" in overrides:
        chosen = _under(chosen, overrides.pop("plan"))
    if "weights" in overrides:
        overrides.setdefault("other", 0.0)
    changes: dict[str, dict[str, Any]] = {"loss": {}, "filters": {}, "attribution": {}, "term": {}}
    for field, value in overrides.items():
        part = "term" if field in _TERM else _OWNER.get(field)
        if part is None:
            raise ConfigError(f"recipe.{field}", value, f"one of {', '.join(sorted([*_OWNER, *_TERM, 'plan']))}")
        changes[part][field] = value
    terms = tuple(
        _convert(term, {**changes["term"], "attribution": _convert(term.attribution, changes["attribution"])})
        for term in chosen.terms
    )
    return _REPLACE(
        chosen,
        terms=terms,
        loss=_convert(chosen.loss, changes["loss"]),
        filters=_convert(chosen.filters, changes["filters"]),
    )


def _under(chosen: Recipe, plan: Any) -> Recipe:
    if plan not in ("tree", "independent"):
        raise ConfigError("recipe.plan", plan, "tree or independent")
    terms, loss = chosen.terms, chosen.loss
    if plan == "tree" and chosen.name in ANY_PLAN:
        terms = RECIPES["at_grpo"].terms
        if loss.aggregation == "trajectory_mean":
            loss = _REPLACE(loss, aggregation="sequence_mean")
    if plan == "independent" and chosen.plan == "tree":
        terms = tuple(_REPLACE(t, attribution=_REPLACE(t.attribution, outcome=True)) for t in terms)
    return _REPLACE(chosen, plan=plan, terms=terms, loss=loss)


def _convert(struct: S, changes: Mapping[str, Any]) -> S:
    fields = {**msgspec.structs.asdict(struct), **changes}
    for field, value in changes.items():
        if isinstance(value, msgspec.Struct):
            fields[field] = msgspec.to_builtins(value)
    try:
        return msgspec.convert(fields, type(struct), strict=False)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        path, message = field_and_fault(error)
        field = re.split(r"\W", path)[0]
        options = get_args(get_type_hints(type(struct)).get(field))
        allowed = f"one of {', '.join(options)}" if options and isinstance(options[0], str) else message
        raise ConfigError(f"recipe.{field}", fields.get(field), allowed) from None
