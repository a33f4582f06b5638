"""Metrics of a step: one JSON line per step, per role and per policy."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

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
"""The learner's figures of each policy that it updated."""


def moved(updates: Updates) -> list[str]:
    """The policies whose weights an update has changed: not those that had no gradient in any of its steps."""
    return [
        name for name, figures in updates.items() if figures["steps"] > figures["skipped_steps"] + figures["idle_steps"]
    ]


def step_seconds(seconds: Mapping[str, float]) -> float:
    """Seconds of a step, without those before the first one."""
    return sum(spent for phase, spent in seconds.items() if phase not in BEFORE)


def throughput(updates: Updates, seconds: Mapping[str, float], sampled: float = 0.0) -> dict[str, Any]:
    """The fields of `StepMetrics` on tokens and their rates, of `sampled` tokens in the rollout."""
    computed = sum(figures.get("computed_tokens", 0.0) for figures in updates.values())
    rollout = seconds.get("rollout", 0.0)
    return {
        "tokens_per_s": sampled / max(step_seconds(seconds), 1e-9),
        "rollout_tokens_per_s": sampled / rollout if rollout else 0.0,
        "update_tokens_per_s": computed / max(seconds.get("update", 0.0), 1e-9),
        "total_tokens": int(sum(figures.get("total_tokens", 0.0) for figures in updates.values())),
        "distinct_tokens": int(computed),
    }


def outcome_path(plan: Plan) -> str:
    """Whose outcome that of a step's episodes is: that of a path chosen among candidates is no success rate of one."""
    if plan.kind != "tree":
        return SINGLE
    how = {"argmax": "best of {} by scorer", "sample": "one of {} at random", "first": "first of {}"}
    return how[plan.select].format(plan.k)


def outcome_means(
    episodes: Sequence[Episode],
    rewards: Mapping[str, Mapping[str, float]],
    *,
    failed: float | str | None = None,
    task_weights: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Mean of each outcome component and metric over the episodes that ended, well or not; with `task_weights` the
    weighted mean over tasks of each task's mean.

    `success` is the share of `successes`. A failed episode counts its own rewards, or, if it has none, `failed`:
    a number, `lowest` (0, or the lowest of the others where that is below 0), or `exclude` (nothing, not its own
    either). One that the infrastructure has failed counts in none of them. Other metrics are of the episodes that ended
    well.
    """
    good = [(rewards.get(episode.id, {}), episode) for episode in episodes if episode.status == "ok"]
    bad = [(rewards.get(e.id, {}), e) for e in episodes if e.status != "ok" and e.is_outcome and failed != "exclude"]
    # By name, the values with their tasks.
    values: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for own, episode in good:
        for name, value in {**own, **episode.metrics}.items():
            if name in own or name != "success":
                values[name].append((episode.task.id, value))
    for name in {name for own, _ in (*bad, *good) for name in own}:
        lowest = min([0.0, *(value for _, value in values[name])])
        for own, episode in bad:
            values[name].append((episode.task.id, own.get(name, failed if isinstance(failed, float) else lowest)))
    if solved := successes(episodes, rewards):
        values["success"] = [(episode.task.id, float(one)) for episode, one in solved]

    means: dict[str, float] = {}
    for name, found in sorted(values.items()):
        if task_weights is None:
            means[name] = sum(value for _, value in found) / len(found)
            continue
        by_task: dict[str, list[float]] = defaultdict(list)
        for task, value in found:
            by_task[task].append(value)
        mean = mean_over_tasks({task: sum(own) / len(own) for task, own in by_task.items()}, task_weights)
        if mean is not None:
            means[name] = mean
    return means


def lags(samples: Iterable[Sample], versions: Mapping[str, int]) -> dict[str, int]:
    """Samples by the number of versions that their sampler was behind the policy that trains on them."""
    counts = Counter(versions.get(sample.policy.name, 0) - sample.policy.version for sample in samples)
    return {str(lag): counts[lag] for lag in sorted(counts)}


def stayed(
    policies: Policies,
    updates: Updates,
    rows: Mapping[str, Sequence[TrainRow]],
    collected: Collected,
    prepared: Prepared,
    frozen: Sequence[str] = (),
) -> dict[str, str]:
    """Why each trained policy that has not moved has not; those in `frozen` are not trained in this step."""
    reached, moves = {**dict.fromkeys(collected.unrewarded, "no reward"), **prepared.reached}, moved(updates)
    reached |= dict.fromkeys(frozen, "frozen step")
    return {
        name: "no gradient" if name in rows else reached.get(name, "no sample")
        for name, spec in policies.specs.items()
        if spec.trained and name not in moves
    }


def role_metrics(
    prepared: Prepared, collected: Collected, rows: Mapping[str, Sequence[TrainRow]], updates: Updates
) -> dict[str, dict[str, float]]:
    """Per role: reward, group spread, zero-variance share, `tokens_mean` (length of its candidates),
    `prompt_tokens_mean`, and `entropy` by the sampler's -log pi; where it was trained, the figures of its policy's
    update (clip share, entropy, gap).

    `rows` and `updates` are by policy. A figure that is not defined in this step is left out.
    """
    roles: dict[str, dict[str, float]] = {r: msgspec.structs.asdict(figures) for r, figures in prepared.roles.items()}
    by_role: dict[str, list[Sample]] = defaultdict(list)
    for sample in collected.samples:
        by_role[sample.role].append(sample)
    for role, figures in roles.items():
        samples = by_role[role]
        tokens = sum(sample.tokens for sample in samples)
        figures["tokens_mean"] = tokens / len(samples)
        figures["entropy"] = sum(sample.entropy * sample.tokens for sample in samples) / tokens
        figures["prompt_tokens_mean"] = sum(collected.calls[s.call].prompt_tokens for s in samples) / len(samples)
        # The last turn of the role in each episode; turns count from 0.
        turns: dict[str, int] = {}
        for sample in samples:
            call = collected.calls[sample.call]
            turns[call.episode] = max(turns.get(call.episode, 0), call.turn + 1)
        figures["turns"] = sum(turns.values()) / len(turns)
    known = [name for name, metric in registry()["roles"].items() if metric.of == "update"]
    for policy, update in updates.items():
        trained = sorted({row.role for row in rows[policy]})
        for role in trained:
            prefix = "" if len(trained) == 1 else f"{role}/"
            roles[role] |= {name: float(update[prefix + name]) for name in known if prefix + name in update}
    return {r: {k: v for k, v in figures.items() if math.isfinite(v)} for r, figures in roles.items()}
