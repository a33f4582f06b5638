"""Metrics of a step: one JSON line per step, per role and per policy."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from cotune.algorithms.collect import Collected, successes
from cotune.algorithms.prepare import Prepared, mean_over_tasks
from cotune.algorithms.samples import Sample, TrainRow
from cotune.reading.headline import SINGLE
from cotune.reading.metrics import registry
from cotune.records.plans import Plan
from cotune.records.policies import Policies
from cotune.records.structs import Episode
from cotune.trainer.reporting.activity import BEFORE

Updates = Mapping[str, Mapping[str, float]]
"""The learner's figures for each policy that it has updated."""


def policies_that_moved(updates: Updates) -> list[str]:
    """Return the policies whose weights an update has changed: at least one of its optimizer steps had a gradient."""
    policies: list[str] = []
    for name, figures in updates.items():
        if figures["steps"] > figures["skipped_steps"] + figures["idle_steps"]:
            policies.append(name)
    return policies


def step_seconds(seconds: Mapping[str, float]) -> float:
    """Return the seconds of a step, without the phases before the first step."""
    return sum(spent for phase, spent in seconds.items() if phase not in BEFORE)


def throughput_fields(updates: Updates, seconds: Mapping[str, float], sampled: float = 0.0) -> dict[str, Any]:
    """Return the fields of `StepMetrics` about tokens and their rates. `seconds` are by phase, and `sampled` is the
    number of tokens that the rollouts have sampled.

    The learner computes tokens that rows share only once, so it counts computed (distinct) tokens apart from all
    tokens.
    """
    computed = sum(figures.get("computed_tokens", 0.0) for figures in updates.values())
    rollout = seconds.get("rollout", 0.0)
    return {
        "tokens_per_s": sampled / max(step_seconds(seconds), 1e-9),
        "rollout_tokens_per_s": sampled / rollout if rollout else 0.0,
        "update_tokens_per_s": computed / max(seconds.get("update", 0.0), 1e-9),
        "total_tokens": int(sum(figures.get("total_tokens", 0.0) for figures in updates.values())),
        "distinct_tokens": int(computed),
    }


def outcome_path(plans: Iterable[Plan]) -> str:
    """Return how the candidates of the episodes were chosen whose outcomes a step reports. If they were selected, the
    outcome is not the success rate of single samples. `plans` has the plan of each trained role, whose policies may
    have a K of their own."""
    selections = {"argmax": "best of {} by scorer", "sample": "one of {} at random", "first": "first of {}"}
    texts: list[str] = []
    for plan in plans:
        texts.append(SINGLE if plan.kind != "tree" else selections[plan.select].format(plan.k))
    return " or ".join(dict.fromkeys(texts))


class OutcomeMean(NamedTuple):
    """The mean of one outcome component or metric, and the number of episodes that it is over."""

    mean: float
    n: int


def outcome_means(
    episodes: Sequence[Episode],
    rewards: Mapping[str, Mapping[str, float]],
    *,
    failed: float | str | None = None,
    task_weights: Mapping[str, float] | None = None,
) -> dict[str, OutcomeMean]:
    """Return the mean of each outcome component and metric over the episodes that ended, with or without an error.

    With `task_weights` it is the weighted mean over tasks of each task's mean. `success` is the share of `successes`.

    A failed episode counts with its own rewards. If it has none, it counts with `failed`: a number, or by default the
    lowest reward of the other episodes, at most 0. With "exclude", failed episodes do not count at all. Episodes that
    failed because of the infrastructure never count. Means of metrics that are no rewards are over episodes without an
    error.
    """
    # 1. The episodes that count, and the components that any of them has.
    finished = [episode for episode in episodes if episode.status == "ok"]
    failures: list[Episode] = []
    if failed != "exclude":
        failures = [episode for episode in episodes if episode.status != "ok" and episode.is_outcome]
    components: set[str] = set()
    for episode in (*finished, *failures):
        components.update(rewards.get(episode.id, {}))

    # 2. The values of each component or metric, with their tasks.
    values: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for episode in finished:
        episode_rewards = rewards.get(episode.id, {})
        for name, value in {**episode_rewards, **episode.metrics}.items():
            # A metric `success` is in `successes` below.
            if name in episode_rewards or name != "success":
                values[name].append((episode.task.id, value))
    for name in components:
        # A failed episode without a reward of its own gets the lowest one, so that failing never pays.
        value_if_failed = min([0.0, *(value for _, value in values[name])])
        if isinstance(failed, float):
            value_if_failed = failed
        for episode in failures:
            value = rewards.get(episode.id, {}).get(name, value_if_failed)
            values[name].append((episode.task.id, value))
    successes_of_episodes = successes(episodes, rewards)
    if successes_of_episodes:
        values["success"] = [(episode.task.id, float(success)) for episode, success in successes_of_episodes]

    # 3. Their means.
    means: dict[str, OutcomeMean] = {}
    for name, values_with_tasks in sorted(values.items()):
        mean = _mean(values_with_tasks, task_weights)
        if mean is not None:
            means[name] = OutcomeMean(mean, len(values_with_tasks))
    return means


def _mean(values_with_tasks: Sequence[tuple[str, float]], task_weights: Mapping[str, float] | None) -> float | None:
    """Return the mean of values that come with their task. With `task_weights` it is the weighted mean of the
    tasks' means; None if no task has a weight."""
    if task_weights is None:
        values = [value for _task, value in values_with_tasks]
        return sum(values) / len(values)
    values_of_task: dict[str, list[float]] = defaultdict(list)
    for task, value in values_with_tasks:
        values_of_task[task].append(value)
    task_means = {task: sum(values) / len(values) for task, values in values_of_task.items()}
    return mean_over_tasks(task_means, task_weights)


def count_lags(samples: Iterable[Sample], versions: Mapping[str, int]) -> dict[str, int]:
    """Count samples by the number of versions that their sampler was behind the policy that trains on them."""
    counts = Counter(versions.get(sample.policy.name, 0) - sample.policy.version for sample in samples)
    return {str(lag): counts[lag] for lag in sorted(counts)}


def reasons_for_staying(
    policies: Policies,
    updates: Updates,
    rows: Mapping[str, Sequence[TrainRow]],
    collected: Collected,
    prepared: Prepared,
    frozen: Sequence[str] = (),
) -> dict[str, str]:
    """Return, for each trained policy that has not moved, the reason. Policies in `frozen` do not train in this
    step."""
    moved_policies = policies_that_moved(updates)
    reasons: dict[str, str] = {}
    for name, spec in policies.specs.items():
        if not spec.trained or name in moved_policies:
            continue
        if name in rows:
            reasons[name] = "no gradient"
        elif name in frozen:
            reasons[name] = "frozen step"
        elif name in prepared.reached:
            reasons[name] = prepared.reached[name]
        elif name in collected.unrewarded:
            reasons[name] = "no reward"
        else:
            reasons[name] = "no sample"
    return reasons


def role_metrics(
    prepared: Prepared,
    collected: Collected,
    rows: Mapping[str, Sequence[TrainRow]],
    updates: Updates,
    policy_of_role: Mapping[str, str],
) -> dict[str, dict[str, float]]:
    """Return the figures of each role.

    These are the figures of `prepared` (rewards and groups) and of the role's samples. A role that was trained also has
    the figures of its policy's update. `rows` and `updates` are by policy. `policy_of_role` has the trained roles of
    the step. Figures that are not defined in this step are left out.
    """
    samples_of_role: dict[str, list[Sample]] = defaultdict(list)
    for sample in collected.samples:
        samples_of_role[sample.role].append(sample)
    roles: dict[str, dict[str, float]] = {}
    for role, role_figures in prepared.roles.items():
        roles[role] = {**msgspec.structs.asdict(role_figures), **_sample_figures(collected, samples_of_role[role])}

    update_figures = [name for name, metric in registry()["roles"].items() if metric.of == "update"]
    for policy, update in updates.items():
        trained_roles = sorted({row.role for row in rows[policy]})
        for role in trained_roles:
            # The figures of an update have the role in their name only if it trained several roles.
            prefix = "" if len(trained_roles) == 1 else f"{role}/"
            for name in update_figures:
                if prefix + name in update:
                    roles[role][name] = float(update[prefix + name])

        # If only one of several roles of a policy had something to learn from, it has the whole gradient: a share of 1,
        # and 0 for the others.
        roles_of_policy = [role for role, name in policy_of_role.items() if name == policy and role in roles]
        if len(trained_roles) == 1 and len(roles_of_policy) > 1 and update.get("grad_norm"):
            for role in roles_of_policy:
                roles[role]["gradient_share"] = float(role == trained_roles[0])

    finite: dict[str, dict[str, float]] = {}
    for role, figures in roles.items():
        finite[role] = {name: value for name, value in figures.items() if math.isfinite(value)}
    return finite


def _sample_figures(collected: Collected, samples: Sequence[Sample]) -> dict[str, float]:
    """Return the mean lengths, the entropy and the turns of a role's samples. The entropy is the sampler's mean
    -log pi, over tokens."""
    tokens = sum(sample.tokens for sample in samples)
    prompt_tokens = sum(collected.calls[sample.call].prompt_tokens for sample in samples)
    turns_of_episode: dict[str, int] = {}
    for sample in samples:
        call = collected.calls[sample.call]
        turns_of_episode[call.episode] = max(turns_of_episode.get(call.episode, 0), call.turn + 1)  # turns count from 0
    return {
        "tokens_mean": tokens / len(samples),
        "entropy": sum(sample.entropy * sample.tokens for sample in samples) / tokens,
        "prompt_tokens_mean": prompt_tokens / len(samples),
        "turns": sum(turns_of_episode.values()) / len(turns_of_episode),
    }
