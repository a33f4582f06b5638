"""Leave samples out of training. Every reason has its name here and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence

import numpy as np

from cotune.algorithms.comparing import Spread
from cotune.algorithms.groups import Group
from cotune.algorithms.recipes import Filters
from cotune.algorithms.samples import Bools, Floats, Sample
from cotune.records.plans import seed_of

REASONS: Mapping[str, str] = {
    "failed_episode": "the episode was cancelled, or it failed and such episodes are excluded",
    "outage": "a model's engine or provider, or the store, failed the episode, or it raised cotune.Outage",
    "failed_call": "the request failed, so there is no answer to learn from",
    "timed_out_call": "the request timed out",
    "cancelled_call": "the request was cancelled, or its answer not read to the end",
    "malformed_call": "the provider's response is not an answer, or is incomplete",
    "opponent_failed": "another seat of the game failed the episode, so the outcome does not judge this one",
    "untrained_role": "no trained policy plays the role, or none did yet",
    "no_policy": "an outside provider answered",
    "no_token_ids": "the engine or provider gave no token ids",
    "redacted": "a redactor changed its text, so its token ids are not stored",
    "lost_image": "an image of its prompt is not among the records",
    "no_logprobs": "the engine or provider gave no log-probabilities",
    "broken_logprobs": "log-probabilities are not finite, or not one per token",
    "empty_response": "the candidate has no token",
    "interrupted": "the provider cut the answer off, neither at its end nor at the length limit",
    "truncated": "the answer was cut at its length limit, and drop_truncated is set",
    "timed_out_episode": "a call of its episode timed out, and drop_timed_out is set",
    "greedy": "sampled at temperature 0, so nothing was explored",
    "stale_version": "sampled from another version of the policy than the one being trained",
    "trunk": "an answer of the episode that was forked: only its branches are compared",
    "not_forked": "the call comes after the fork of its branch, and the recipe trains on the forks alone",
    "continuation": "it follows a candidate that is not trained on",
    "diverged": "the episode did not repeat what was recorded: see its error",
    "not_chosen": "the application continued with another candidate, and the plan compares whole episodes",
    "scorer_failed": "the scorer raised or returned something that is not a reward",
    "missing_reward": "a reward component that the recipe needs never arrived",
    "non_finite_reward": "a reward is NaN or infinite",
    "group_of_one": "nothing to compare it with",
    "consumed": "its group was trained on before",
    "tie": "all roles of its episode have the same reward, and ties is set",
    "zero_variance": "all rewards of the group are equal",
    "mean_out_of_range": "the group's mean reward is outside mean_range",
    "not_in_share": "other groups of its policy have a larger spread or mean, and keep_groups keeps a share alone",
    "zero_advantage": "its advantage is zero, so it teaches nothing",
    "low_entropy": "its mean token entropy is not in the share that top_entropy keeps",
    "beyond_alignment": "its role has more calls in the episode than align_to allows",
    "no_hint": "its teacher has no text to see, by teacher_sees, or too long a one, or its prompt has images",
    "frozen_step": "its policy is not trained in this step: `train` of its [[policy]] says so",
    "no_signal": "all advantages of its policy are zero, so the step leaves that policy as it is",
}
"""Reason -> why candidates with it are not trained on. A failed call without candidates counts as one."""


def sample_reason(sample: Sample, advantage: float, filters: Filters) -> str:
    """The first reason to leave out a sample after its `advantage` is known; empty if it stays."""
    if filters.drop_truncated and sample.truncated:
        return "truncated"
    if filters.drop_timed_out and sample.timed_out:
        return "timed_out_episode"
    if filters.zero_advantage and not advantage:
        return "zero_advantage"
    return ""


def tied(samples: Sequence[Sample], rewards: Floats) -> Bools:
    """Whether two or more roles act in the sample's episode and all have the same rewards, [n].

    An episode of which this is true does not show which role did better.
    """
    rewards_of_episode: dict[str, dict[str, set[float]]] = {}
    for sample, reward in zip(samples, rewards.tolist(), strict=True):
        rewards_of_episode.setdefault(sample.rollout, {}).setdefault(sample.role, set()).add(reward)
    tied_episodes: set[str] = set()
    for episode, rewards_by_role in rewards_of_episode.items():
        first, *others = rewards_by_role.values()
        if others and all(rewards_of_role == first for rewards_of_role in others):
            tied_episodes.add(episode)
    return np.array([sample.rollout in tied_episodes for sample in samples], np.bool_)


def low_entropy(groups: Sequence[Group], share: float) -> set[str]:
    """Ids of the samples whose entropy is not among the highest `share` of their group (rounded up)."""
    low: set[str] = set()
    for group in groups:
        entropies = sorted((sample.entropy for sample in group.samples), reverse=True)
        n_highest = math.ceil(share * len(entropies))
        # Samples that tie with the last one stay, so more than the share may remain.
        threshold = entropies[n_highest - 1]
        low.update(sample.id for sample in group.samples if sample.entropy < threshold)
    return low


def group_reasons(
    groups: Sequence[Group], stats: Spread, filters: Filters, consumed: Container[str]
) -> list[str | None]:
    """For each group, the first reason to leave it out, or None.

    `stats` are the statistics of the groups' rewards, and `consumed` the ids of groups that were trained on before.
    """
    low, high = filters.mean_range or (float("-inf"), float("inf"))
    reasons: list[str | None] = []
    for group, flat, mean in zip(groups, stats.flat.tolist(), stats.mean.tolist(), strict=True):
        mean_is_checked = not filters.mean_range_roles or group.samples[0].role in filters.mean_range_roles
        if group.id in consumed:
            reasons.append("consumed")
        elif filters.zero_variance and flat:
            reasons.append("zero_variance")
        elif mean_is_checked and not low <= mean <= high:
            reasons.append("mean_out_of_range")
        else:
            reasons.append(None)
    if filters.keep_groups is not None:
        remaining = [i for i, reason in enumerate(reasons) if reason is None]
        for i in _outside_share(groups, stats, filters, remaining):
            reasons[i] = "not_in_share"
    return reasons


def _outside_share(groups: Sequence[Group], stats: Spread, filters: Filters, candidates: Sequence[int]) -> list[int]:
    """The groups that `keep_groups` drops: of each policy, all but the best share by mean or variance of their rewards.

    `candidates` are the indices of the groups that the other filters leave. Returns the indices of the groups to drop.
    """
    assert filters.keep_groups is not None
    measure = stats.mean if filters.keep_groups_by == "mean" else stats.variance
    candidates_of_policy: dict[str, list[int]] = {}
    for i in candidates:
        candidates_of_policy.setdefault(groups[i].samples[0].policy.name, []).append(i)
    outside: list[int] = []
    for indices in candidates_of_policy.values():
        # The sort is stable: of equal groups, the earlier are kept.
        best_first = sorted(indices, key=lambda i: -measure[i])
        n_kept = math.ceil(filters.keep_groups * len(indices))
        outside += best_first[n_kept:]
    return outside


def align_call_counts(samples: Sequence[Sample], most: int) -> list[int]:
    """Choose samples so that every episode of a task trains a role on the same number of calls. Returns the indices of
    the samples, in order, some of them twice or more.

    Trajectory alignment of M-GRPO (arXiv 2511.13288): a role is called d times in an episode, and the episodes of a
    task differ in d. All get D = min(most, the largest d of the task), so that they weigh the same. An episode with
    more than D calls keeps a random D; one with fewer repeats random calls until it has D. The choice depends only on
    the task, the role, the number of the episode in the task, and the training step.
    """
    # The indices of a role's calls on a task, by episode.
    calls: dict[tuple[str, str], dict[str, list[int]]] = {}
    for i, sample in enumerate(samples):
        calls.setdefault((sample.task, sample.role), {}).setdefault(sample.rollout, []).append(i)
    aligned: list[int] = []
    for (task, role), calls_of_episodes in calls.items():
        n_aligned = min(most, max(map(len, calls_of_episodes.values())))  # D
        for episode_number, indices in enumerate(calls_of_episodes.values()):
            training_step = samples[indices[0]].training_step
            random = np.random.default_rng(seed_of(training_step, task, role, episode_number))
            # With more than D calls, `repeats` is 0 and `n_random` is D: a random choice of D calls.
            repeats, n_random = divmod(n_aligned, len(indices))
            aligned += indices * repeats
            aligned += [indices[i] for i in random.choice(len(indices), n_random, replace=False)]
    return sorted(aligned)
