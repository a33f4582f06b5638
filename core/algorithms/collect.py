"""Collecting: recorded episodes in, one sample per trainable candidate out.

    records                                  samples
    episode ── outcome rewards               rollout, outcome, failure
      └ call ── prompt path, parameters      role, turn, branch, prompt, limit
          └ candidate ── own rewards         id, rewards, tokens, entropy, chosen

Every candidate either becomes a `Sample` or is counted in `left_out` under one of `REASONS`. Samples hold no token ids:
`train_rows` reads the token ids of trained samples by `Collected.calls`.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from cotune.algorithms.method import Method
from cotune.algorithms.samples import Failure, Sample
from cotune.errors import RecordError
from cotune.records.ids import candidate_id
from cotune.records.images import prompt_id
from cotune.records.plans import PlanKind
from cotune.records.structs import CallRecord, Candidate, Episode, PolicyRef
from cotune.storage.outcomes import OnFailure
from cotune.storage.protocol import Store

COMPLETE = ("stop", "length", "tool_calls", "function_call")
"""Finish reasons of an answer that ended by itself or at the length limit."""


class Collected(msgspec.Struct, frozen=True, kw_only=True):
    """Samples of a step, the calls that they answer (by id), and the number of candidates left out by reason."""

    samples: list[Sample]
    others: list[Sample] = []
    """The chosen answers of all other calls of their episodes: for their rewards, not to train on."""
    calls: Mapping[str, CallRecord]
    left_out: Mapping[str, int]
    roles: frozenset[str] = frozenset()
    """All roles that made a call, trained or not."""
    unrewarded: frozenset[str] = frozenset()
    """Policies that had candidates left out because no reward arrived."""
    images: Mapping[str, bytes] = {}
    """The encoded bytes of the images that the calls show, by their hash."""
    outcomes: Mapping[str, Mapping[str, float]] = {}
    """Rewards of the episodes that have any, by id, trained on or not."""


def collect(
    store: Store,
    episodes: Iterable[Episode],
    *,
    plan: PlanKind = "tree",
    roles: Collection[str] | Mapping[str, str] | None = None,
    versions: Mapping[str, int] | None = None,
    max_lag: int = 0,
    on_failure: OnFailure = "lowest",
    method_of: Callable[[str], Method | None] = lambda role: None,
) -> Collected:
    """Turn every trainable candidate of finished episodes into a sample; count the others by reason (`REASONS`).

    The plan decides which candidates can be samples:

    - independent: the chosen candidate of each call. The outcome of the episode is reward enough.
    - tree: all candidates of each call. Each needs a reward of its own.
    - replay: the chosen candidates of branches, the episodes that repeat a recorded episode (the trunk) up to a call
      and continue from there (`Episode.fork`). The call at the fork is trained on, later calls only if the method of
      their role `trains_branches`. Answers of the trunk are left out: whether a call was forked depends on later calls
      (`choose_forks`), so they are no fair samples of the prompt.

    Args:
        roles: the trained roles (None: all). If they are mapped to the policies that play them, answers of other
            policies are not trained on.
        versions: the version of each policy that is trained now. A candidate is stale if its version is later, or more
            than `max_lag` earlier.
        on_failure: the reward of an episode that the policy failed, after weights and gates (`Sample.failure`);
            `exclude` leaves these episodes out. Episodes that the infrastructure failed have no outcome: only a tree
            plan still compares the candidates of their calls. Calls that failed are left out.
        method_of: returns the method of a role, None for a role that is not trained. If it is `by_seat`, only the role
            that failed an episode is trained on it (`failed_seat`). If any method `joins_calls`, `Collected.others` has
            the answers of calls that are not trained on, for their rewards.
    """
    rules = _Rules(plan, roles, versions or {}, max_lag, on_failure, method_of)
    episodes = list(episodes)
    # The forked call of the trunk, by the first call of a branch, which replaces it: siblings have the same one.
    forks = [episode.fork for episode in episodes if episode.fork is not None]
    trunk_calls = {fork.at: fork.call for fork in forks}
    calls = _choose_calls(store, episodes, trunk_calls, rules)

    # The rewards of the episodes and of the candidates, in one query.
    targets = [episode.id for episode in episodes]
    for _, call in calls.usable:
        targets += [candidate_id(call.id, candidate.index) for candidate in call.candidates]
    for _, call in calls.joined:
        # A call that a replay answered from the record has the rewards of the recorded call.
        targets.append(candidate_id(call.replayed or call.id, call.chosen or 0))
    rewards = store.rewards(targets)
    samples, unrewarded = _make_samples(calls, rewards, trunk_calls, rules)
    return Collected(
        samples=samples,
        others=_other_answers(samples, rewards, calls, rules),
        calls={call.id: call for _, call in calls.usable},
        left_out=dict(calls.left_out),
        roles=frozenset(calls.roles),
        unrewarded=frozenset(unrewarded),
        images=calls.images,
        outcomes={episode.id: rewards[episode.id] for episode in episodes if rewards.get(episode.id)},
    )


def _make_samples(
    calls: _Calls, rewards: Mapping[str, Mapping[str, float]], trunk_calls: Mapping[str, str], rules: _Rules
) -> tuple[list[Sample], set[str]]:
    """Make a sample of each candidate of the usable calls that is complete and has its reward. The other candidates are
    counted in `calls.left_out`.

    Returns the samples, and the names of the policies with a candidate that lacks its reward.
    """
    samples: list[Sample] = []
    unrewarded_policies: set[str] = set()
    for episode, call in calls.usable:
        method = rules.method_of(call.role)
        needs_reward = method is None or method.takes_rewards
        for candidate in call.candidates:
            candidate_reason = _candidate_reason(candidate, call, rules.plan)
            if candidate_reason is not None:
                calls.left_out[candidate_reason] += 1
                continue
            sample = _make_sample(episode, call, candidate, rewards, calls, rules)
            reward_reason = _reward_reason(sample, call, rules.plan) if needs_reward else None
            if reward_reason is not None:
                calls.left_out[reward_reason] += 1
                if reward_reason == "missing_reward" and call.policy is not None:
                    unrewarded_policies.add(call.policy.name)
                continue
            if rules.plan == "replay":
                sample = _place_in_branch(sample, trunk_calls.get(call.id), calls.turns)
            samples.append(sample)
    return samples, unrewarded_policies


def _other_answers(
    samples: Sequence[Sample], rewards: Mapping[str, Mapping[str, float]], calls: _Calls, rules: _Rules
) -> list[Sample]:
    """The chosen answers of calls without a sample, in the episodes of `samples`.

    They are not trained on: a method that `joins_calls` adds their rewards to the rewards of the samples.
    """
    sample_ids = {sample.id for sample in samples}
    episode_ids = {sample.rollout for sample in samples}
    others: list[Sample] = []
    for episode, call in calls.joined:
        if episode.id not in episode_ids:
            continue
        answer = next((candidate for candidate in call.candidates if candidate.index == call.chosen), None)
        if answer is not None and candidate_id(call.id, answer.index) not in sample_ids:
            others.append(_make_sample(episode, call, answer, rewards, calls, rules))
    return others


class _Rules(NamedTuple):
    """The arguments of `collect` that decide which candidates become samples."""

    plan: PlanKind
    roles: Collection[str] | Mapping[str, str] | None
    versions: Mapping[str, int]
    max_lag: int
    on_failure: OnFailure
    method_of: Callable[[str], Method | None]


@dataclass
class _Calls:
    """The calls of the episodes: the ones to train on, and facts about all of them."""

    usable: list[tuple[Episode, CallRecord]] = field(default_factory=list)
    joined: list[tuple[Episode, CallRecord]] = field(default_factory=list)
    """Answered calls, trained on or not, if their rewards count for other calls (`Method.joins_calls`)."""
    timed_out: set[str] = field(default_factory=set)
    """Ids of the episodes in which a call of a trained role timed out."""
    roles: set[str] = field(default_factory=set)
    """All roles that made a call."""
    turns: dict[str, int] = field(default_factory=dict)
    """The turn of each call, by its id."""
    images: dict[str, bytes] = field(default_factory=dict)
    """The encoded bytes of the images of the usable calls, by their hash."""
    left_out: Counter[str] = field(default_factory=Counter)


def _choose_calls(store: Store, episodes: Sequence[Episode], trunk_calls: Mapping[str, str], rules: _Rules) -> _Calls:
    """Read the calls of the episodes, and choose the ones to train on.

    The first reason against a call counts for all of its candidates. `trunk_calls` has the forked call of the trunk for
    the first call of each branch.
    """
    calls = _Calls()
    for episode in episodes:
        if episode.blame == "divergence":
            calls.left_out["diverged"] += 1
            continue
        calls_made = store.calls(episode.id)
        failed = failure_of(episode, rules.on_failure) is not None
        culprit = failed_seat(calls_made) if failed else None  # an episode that failed without a call has none
        for call in calls_made:
            if call.status == "ok" and call.chosen is not None:
                calls.joined.append((episode, call))
            if call.replayed is not None:  # repeated from the record
                continue
            calls.turns[call.id] = call.turn
            calls.roles.add(call.role)
            if call.status == "timeout" and (rules.roles is None or call.role in rules.roles):
                calls.timed_out.add(episode.id)
            reason = _first_reason(episode, call, culprit, trunk_calls, rules)
            if reason is None:
                reason = _load_images(store, call, calls.images)
            if reason is None:
                calls.usable.append((episode, call))
            else:
                calls.left_out[reason] += max(1, len(call.candidates))

    # Only some methods add the rewards of other calls to the reward of a candidate.
    methods = [rules.method_of(role) for role in sorted({call.role for _, call in calls.usable})]
    if not any(method is not None and method.joins_calls for method in methods):
        calls.joined = []
    return calls


def _first_reason(
    episode: Episode, call: CallRecord, culprit: str | None, trunk_calls: Mapping[str, str], rules: _Rules
) -> str | None:
    """The first reason to leave out all candidates of a call, or None.

    `culprit` is the role that failed a game between roles (`failed_seat`), None if the episode did not fail.
    """
    if reason := _episode_reason(episode, rules.plan, rules.on_failure):
        return reason
    if reason := _call_reason(call, rules.roles, rules.versions, rules.max_lag):
        return reason
    method = rules.method_of(call.role)
    if rules.plan == "replay":
        trains_branches = method is not None and method.trains_branches
        if reason := _replay_reason(episode, call, trunk_calls, trains_branches):
            return reason
    if method is not None and method.by_seat and culprit not in (None, call.role):
        return "opponent_failed"
    return None


def _make_sample(
    episode: Episode,
    call: CallRecord,
    candidate: Candidate,
    rewards: Mapping[str, Mapping[str, float]],
    calls: _Calls,
    rules: _Rules,
) -> Sample:
    """A candidate, with the fields that its call and its episode give it."""
    prompt = prompt_id(call.prompt, call.sampling.get("images") or ()) if call.prompt else ""
    return Sample(
        id=candidate_id(call.id, candidate.index),
        task=episode.task.id,
        rollout=episode.id,
        role=call.role,
        turn=call.turn,
        step=call.step,
        branch=episode.id if rules.plan == "tree" else prompt,
        prompt=prompt,
        policy=call.policy or PolicyRef(""),
        tokens=len(candidate.token_ids),
        observation=call.messages[-1] if call.messages else "",
        # An estimate of the entropy from the sampled tokens alone: their mean negative log-probability.
        entropy=-sum(candidate.logprobs) / max(1, len(candidate.logprobs)),
        # A call that a replay answered from the record has the rewards of the recorded call.
        rewards=rewards.get(candidate_id(call.replayed or call.id, candidate.index)) or {},
        outcome=rewards.get(episode.id) or {},
        failure=failure_of(episode, rules.on_failure),
        chosen=candidate.index == call.chosen,
        training_step=episode.training_step,
        limit=call.sampling.get("max_tokens"),
        truncated=candidate.finish_reason == "length",
        timed_out=episode.id in calls.timed_out,
    )


def _place_in_branch(sample: Sample, trunk_call: str | None, turns: Mapping[str, int]) -> Sample:
    """Complete a sample of a branch, for a call at the fork or for a later call.

    At the fork, `trunk_call` is the forked call of the trunk: the sample gets its id as `branch` and its turn, as all
    siblings do. A later call has no `trunk_call`: the sample is marked as after the fork.
    """
    if trunk_call is None:
        return msgspec.structs.replace(sample, continues=True)
    return msgspec.structs.replace(sample, branch=trunk_call, turn=turns.get(trunk_call, sample.turn))


def temperature(call: CallRecord) -> float:
    """The temperature of a call: the sampler's, otherwise the application's, otherwise 1."""
    for params in (call.sampling, call.params):
        value = params.get("temperature")
        # An application may send anything, also an integer that no float can hold.
        if isinstance(value, int | float) and 0 <= value < math.inf:
            return float(min(value, sys.float_info.max))
    return 1.0


def successes(episodes: Sequence[Episode], rewards: Mapping[str, Mapping[str, float]]) -> list[tuple[Episode, bool]]:
    """The episodes with a known result, each with whether it solved its task; empty if no episode reports `success`.

    An episode that the policy failed did not solve its task, nor did one that returned only rewards while other
    episodes report `success`. An episode that finished with neither has no known result and is left out.
    """
    if all(episode.solved is None for episode in episodes):
        return []
    results: list[tuple[Episode, bool]] = []
    for episode in episodes:
        if not episode.is_outcome:  # it was cancelled, or the infrastructure failed it
            continue
        reports_success = episode.solved is not None
        has_rewards = bool(rewards.get(episode.id))
        if episode.status == "ok" and not reports_success and not has_rewards:
            continue
        results.append((episode, episode.solved is True))
    return results


def failed_seat(calls: Iterable[CallRecord]) -> str | None:
    """The role that failed a game between roles: the role whose call ended last, answered or not."""
    last = max(calls, key=lambda call: (call.started + call.latency, call.step), default=None)
    return None if last is None else last.role


def failure_of(episode: Episode, on_failure: OnFailure) -> Failure | None:
    """The failure that stands for an episode's outcome; None if it ended well, or if the policy did not fail it."""
    failed = episode.status != "ok" and episode.blame != "infrastructure"
    return on_failure if failed and on_failure != "exclude" else None


def _episode_reason(episode: Episode, plan: PlanKind, on_failure: OnFailure) -> str | None:
    """The reason to leave out all calls of an episode, or None."""
    if episode.status == "ok":
        return None
    if episode.status == "cancelled" or on_failure == "exclude":
        return "failed_episode"
    # Under a tree plan, candidates of a call are compared by their own rewards, so they need no outcome.
    if plan != "tree" and not episode.is_outcome:
        return "outage"
    return None


_REASON_OF_STATUS = {"timeout": "timed_out_call", "cancelled": "cancelled_call", "malformed": "malformed_call"}


def _call_reason(
    call: CallRecord, roles: Collection[str] | None, versions: Mapping[str, int], max_lag: int
) -> str | None:
    """The reason to leave out all candidates of a call, or None.

    `roles` are the trained roles, and `versions` the present version of each policy, as in `collect`.
    """
    if call.status != "ok" or not call.candidates:
        return _REASON_OF_STATUS.get(call.status, "failed_call")
    if roles is not None and call.role not in roles:
        return "untrained_role"
    if call.policy is None:
        return "no_policy"
    if isinstance(roles, Mapping) and roles[call.role] != call.policy.name:
        return "untrained_role"
    if call.prompt is None:
        return "redacted" if call.redacted else "no_token_ids"
    # A policy that is not in `versions` has no present version to compare with: its answers are never stale.
    current = versions.get(call.policy.name)
    if current is not None and not current - max_lag <= call.policy.version <= current:
        return "stale_version"
    return "greedy" if temperature(call) <= 0.0 else None


def _replay_reason(
    episode: Episode, call: CallRecord, trunk_calls: Mapping[str, str], trains_branches: bool
) -> str | None:
    """The reason to leave out a call under a replay plan, or None.

    A replay plan forks a recorded episode (the trunk) at some calls, and runs each fork (a branch) to its end. Samples
    come from branches only: from the call at the fork, and if `trains_branches` also from later calls. `trunk_calls`
    has the forked call of the trunk for each call at a fork.
    """
    if episode.fork is None:
        return "trunk"
    is_at_fork = call.id in trunk_calls
    if is_at_fork or trains_branches:
        return None
    return "not_forked"


def _load_images(store: Store, call: CallRecord, images: dict[str, bytes]) -> str | None:
    """Load the images of a call into `images`. Returns a reason to leave the call out if one is lost."""
    try:
        for image in call.sampling.get("images") or ():
            if image not in images:
                images[image] = store.image(image)
    except RecordError:
        return "redacted" if call.redacted else "lost_image"
    return None


def _candidate_reason(candidate: Candidate, call: CallRecord, plan: PlanKind) -> str | None:
    """The reason to leave one candidate out of training, or None. The call itself is already known to be usable.

    Under plans other than tree, only the candidate that the application got has an outcome.
    """
    if plan != "tree" and candidate.index != call.chosen:
        return "not_chosen"
    # Redaction removes token ids, so for a changed call it is the cause of missing ids, not the engine.
    if not candidate.token_ids and call.redacted and (candidate.text or candidate.tool_calls):
        return "redacted"
    if not candidate.token_ids:
        return "no_token_ids" if candidate.text or candidate.tool_calls else "empty_response"
    if not candidate.logprobs:
        return "no_logprobs"
    if len(candidate.logprobs) != len(candidate.token_ids) or not math.isfinite(sum(candidate.logprobs)):
        return "broken_logprobs"
    return None if candidate.finish_reason in COMPLETE else "interrupted"


def _reward_reason(sample: Sample, call: CallRecord, plan: PlanKind) -> str | None:
    """The reason to leave out a sample because of its rewards, or None.

    Under a tree plan it needs a reward of its own; under other plans the episode's outcome or failure is enough.
    """
    has_outcome = bool(sample.outcome) or sample.failure is not None
    if not sample.rewards and (plan == "tree" or not has_outcome):
        return "scorer_failed" if call.error else "missing_reward"
    values = (*sample.rewards.values(), *sample.outcome.values())
    finite = all(math.isfinite(value) for value in values)
    return None if finite else "non_finite_reward"
