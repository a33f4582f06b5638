"""What an evaluation goes by: the reward that a run trains on, of single samples, failed episodes included."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean

import msgspec

from cotune.algorithms.attribution import weight_of
from cotune.algorithms.collect import failure_of
from cotune.algorithms.method import Method, Outcome
from cotune.algorithms.own import rewards_of
from cotune.algorithms.policy_recipes import Recipes, by_equal
from cotune.algorithms.recipes import Attribution
from cotune.algorithms.samples import Sample
from cotune.algorithms.step import Step
from cotune.records.ids import candidate_id
from cotune.records.structs import CallRecord, Episode, PolicyRef
from cotune.storage.outcomes import OnFailure, failure_reward

NO_ROLE = ""
"""Stands for the role of an episode without an answered call."""
TELLING = 6
"""Least number of episodes with one constant sum of rewards, other than 0, that is not taken for chance."""


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """The reward that counts, by default the plain sum of the outcome, and for which roles (None: all).

    `on_failure` is what a failed episode counts, as in training; with `by_seat` it counts for the role alone whose call
    ended last. `others` are the goals of the roles whose policies are trained on something else. `taught` are roles
    whose policies learn from a teacher instead of rewards: each counts what the episode is worth to the other roles.
    `bounds` are those that the scorers of roles declare.
    """

    method: Method = Outcome()
    on_failure: OnFailure = "lowest"
    roles: Collection[str] | None = None
    by_seat: bool = False
    others: tuple[Goal, ...] = ()
    taught: tuple[str, ...] = ()
    bounds: Mapping[str, tuple[float, float]] = {}

    @property
    def attribution(self) -> Attribution:
        return self.method.attribution

    def of_role(self, role: str) -> Goal:
        """The goal of one role alone; of a taught role, the goal of all."""
        if role in self.taught:
            return self
        part = next((one for one in self.others if role in (one.roles or ())), self)
        return msgspec.structs.replace(part, roles=[role], others=(), taught=(), bounds=self.bounds)


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """An episode of an evaluation: the components of its outcome, and its answered calls (`single_sample`)."""

    episode: Episode
    outcome: Mapping[str, float]
    samples: Sequence[Sample] = ()
    timed_out: Collection[str] = ()
    """Roles of which a call timed out."""
    last: str = NO_ROLE
    """The role whose call ended last, answered or not."""


class Worth(msgspec.Struct, frozen=True, kw_only=True):
    """What some episodes are worth, aligned with them.

    `reward` is the mean over an episode's trained roles of what each has in `by_role`; None where it has none.
    `failed` marks the failed episodes without an outcome of their own, which count the lowest reward of those that
    ended well, or 0: `floor`. `opposed` names the
    trained roles whose rewards add up to the same in every episode: one's gain is another's loss, and their mean says
    nothing.
    """

    reward: list[float | None]
    by_role: list[dict[str, float]]
    failed: list[bool]
    floor: float
    opposed: tuple[str, ...] = ()


def goal_of(recipe: Method | None, on_failure: str, roles: Collection[str] | None = None) -> Goal:
    """What a run with this recipe goes by.

    It is the plain sum of the outcome without a recipe, and the outcome by the recipe's weights if the recipe learns
    from a teacher.
    """
    failed = failure_reward(on_failure)
    if recipe is None:
        return Goal(on_failure=failed)
    if not recipe.takes_rewards:
        return Goal(method=_weighted_outcome(recipe), on_failure=failed)
    return Goal(method=recipe, on_failure=failed, roles=roles, by_seat=recipe.by_seat)


def _weighted_outcome(recipe: Method) -> Method:
    """The outcome of whole episodes by a recipe's weights."""
    how = recipe.attribution
    outcome = Attribution(own=False, outcome=True, weights=how.weights, other=how.other, team_weight=how.team_weight)
    return Outcome().replaced(attribution=outcome)


def goal_of_policies(
    recipes: Recipes, on_failure: str, players: Mapping[str, str], bounds: Mapping[str, tuple[float, float]] = {}
) -> Goal:
    """What a run goes by whose policies may have recipes of their own; `players` are the trained roles with the
    policies that play them, and `bounds` those that the scorers of roles declare.

    Each role is judged by the rewards that its policy is trained on. A role whose policy learns from a teacher has no
    such rewards: it is judged by those of the other roles. If all policies learn from teachers, the outcome counts, by
    the run's weights.
    """
    taught = tuple(role for role, policy in players.items() if not recipes.of(policy).takes_rewards)
    parts = by_equal((recipes.of(policy), role) for role, policy in players.items() if role not in taught)
    if not parts and taught:
        return Goal(method=_weighted_outcome(recipes.run), on_failure=failure_reward(on_failure))
    if not parts:
        return goal_of(recipes.run, on_failure, [])
    goals = [goal_of(recipe, on_failure, roles) for recipe, roles in parts]
    return msgspec.structs.replace(goals[0], others=tuple(goals[1:]), taught=taught, bounds=bounds)


def single_sample(call: CallRecord, rewards: Mapping[str, float]) -> Sample:
    """The chosen answer of a call as a sample, whoever gave it. `worth` adds what its episode tells."""
    assert call.chosen is not None
    candidate = call.candidates[call.chosen]
    return Sample(
        id=candidate_id(call.id, call.chosen),
        task="",
        rollout=call.episode,
        role=call.role,
        turn=call.turn,
        step=call.step,
        branch=call.id,
        prompt=call.id,
        policy=call.policy or PolicyRef(call.model),
        tokens=len(candidate.token_ids) or call.usage.completion_tokens,
        rewards=rewards,
        limit=call.sampling.get("max_tokens"),
        truncated=candidate.finish_reason == "length",
    )


def worth(played: Sequence[Played], goal: Goal) -> Worth:
    """What each episode is worth.

    Episodes that the infrastructure failed, that were cancelled, or that failed under `on_failure = "exclude"` have no
    reward. A role's reward in an episode is the mean over its calls, or the return from its first call where the recipe
    sums rewards up to the end.
    """
    if goal.taught:
        return _with_taught(worth(played, msgspec.structs.replace(goal, taught=())), goal.taught)
    if goal.others:
        goals = [msgspec.structs.replace(goal, others=()), *goal.others]
        return _together(played, goals, [worth(played, one) for one in goals])
    samples = [sample for one in played if _counts(one.episode, goal) for sample in _samples(one, goal)]
    step = goal.method.step(samples)
    found = _by_role(step, goal)
    sound = [found[one.episode.id] for one in played if one.episode.status == "ok" and one.episode.id in found]
    floor = min([0.0, *(fmean(by_role.values()) for by_role in sound)])
    lacking = step.outcome_missing(later_turns=goal.method.to_go).tolist()
    told = {
        s.rollout for s, lacks in zip(samples, lacking, strict=True) if not lacks and s.role in found.get(s.rollout, ())
    }
    failed = {s.rollout for s in samples if s.failure == "lowest" and s.rollout in found} - told
    for id in failed:
        if NO_ROLE in found[id]:
            found[id] = {NO_ROLE: floor}
    ids = [one.episode.id for one in played]
    return Worth(
        reward=[fmean(found[id].values()) if id in found else None for id in ids],
        by_role=[found.get(id, {}) for id in ids],
        failed=[id in failed for id in ids],
        floor=floor,
        opposed=_opposed(sound, dict.fromkeys(_names(sound), goal.method), _components(played)),
    )


def _with_taught(of_others: Worth, taught: Collection[str]) -> Worth:
    """The worth of episodes with the taught roles added, each with the reward of the episode. Their mean stays."""
    by_role = []
    for rewards, reward in zip(of_others.by_role, of_others.reward, strict=True):
        shared = {} if reward is None else dict.fromkeys(taught, reward)
        by_role.append({**rewards, **shared})
    return msgspec.structs.replace(of_others, by_role=by_role)


def _together(played: Sequence[Played], goals: Sequence[Goal], parts: Sequence[Worth]) -> Worth:
    """What the episodes are worth, where roles go by different goals, each by its part."""
    by_role: list[dict[str, float]] = []
    for found in zip(*(part.by_role for part in parts), strict=True):
        own = {role: value for one in found for role, value in one.items()}
        by_role.append({role: value for role, value in own.items() if role != NO_ROLE} or own)
    sound = [own for one, own in zip(played, by_role, strict=True) if one.episode.status == "ok" and own]
    opposed = tuple(role for part in parts for role in part.opposed)
    if not opposed:  # players of one game may differ in a setting of their recipe, and so be in different parts
        methods = {role: goal.method for goal in goals for role in goal.roles or ()}
        opposed = _opposed(sound, methods, _components(played))
    return Worth(
        reward=[fmean(own.values()) if own else None for own in by_role],
        by_role=by_role,
        failed=[any(marks) for marks in zip(*(part.failed for part in parts), strict=True)],
        floor=min([0.0, *(fmean(own.values()) for own in sound)]),
        opposed=opposed,
    )


def _by_role(step: Step, goal: Goal) -> dict[str, dict[str, float]]:
    """The reward of each role that counts, by episode."""
    values: dict[str, dict[str, list[tuple[int, float]]]] = defaultdict(lambda: defaultdict(list))
    for sample, value in zip(step.samples, rewards_of(goal.method, step).tolist(), strict=True):
        if math.isfinite(value) and (goal.roles is None or sample.role in (*goal.roles, NO_ROLE)):
            values[sample.rollout][sample.role].append((sample.turn, value))
    whole = goal.method.to_go
    return {
        id: {role: min(of)[1] if whole else fmean(value for _, value in of) for role, of in by_role.items()}
        for id, by_role in values.items()
    }


def _counts(episode: Episode, goal: Goal) -> bool:
    return episode.status == "ok" or (episode.is_outcome and goal.on_failure != "exclude")


def _samples(one: Played, goal: Goal) -> list[Sample]:
    """The samples of an episode with what it tells; one for its outcome alone where it has no answered call."""
    episode, place, found = one.episode, one.episode.id, one.samples
    blamed = one.last if goal.by_seat and episode.status != "ok" else NO_ROLE
    if blamed != NO_ROLE:
        found = [sample for sample in found if sample.role == blamed]
    alone = Sample(
        id=f"{place}.0", task="", rollout=place, role=blamed, turn=0, step=0, branch=place, prompt=place,
        policy=PolicyRef(blamed), tokens=0,
    )  # fmt: skip
    return [
        msgspec.structs.replace(
            sample,
            task=episode.task.id,
            outcome=one.outcome,
            failure=failure_of(episode, goal.on_failure),
            timed_out=any(goal.roles is None or role in goal.roles for role in one.timed_out),
        )
        for sample in found or [alone]
    ]


def _names(by_role: Sequence[Mapping[str, float]]) -> list[str]:
    return sorted({role for found in by_role for role in found})


def _components(played: Sequence[Played]) -> list[str]:
    return sorted({name for one in played for name in one.outcome})


def _opposed(
    sound: Sequence[Mapping[str, float]], methods: Mapping[str, Method], components: Sequence[str]
) -> tuple[str, ...]:
    """The roles whose rewards always add up to the same, although the outcome weighs differently for each.

    `methods` are those of the roles; without one of a role (that of an episode without calls) nobody is opposed.
    """
    roles = _names(sound)
    weights = set()
    for role in roles:
        method = methods.get(role)
        if method is None or not method.attribution.outcome or method.joins_roles:
            return ()
        weights.add(tuple(weight_of(name, role, method.attribution, outcome=True) for name in components))
    if len(weights) < 2:
        return ()
    totals = [sum(by_role.values()) for by_role in sound]
    size = max(abs(value) for by_role in sound for value in by_role.values())
    unlike = any(max(by_role.values()) - min(by_role.values()) > 1e-9 * size for by_role in sound)
    nothing = max(map(abs, totals)) <= 1e-9 * size
    steady = len(sound) >= TELLING and max(totals) - min(totals) <= 1e-9 * size
    return tuple(roles) if unlike and (nothing or steady) else ()
