"""Metrics of a step: one JSON line per step, per role and per policy."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from cotune.algorithms.collect import Collected, is_outcome, successes
from cotune.algorithms.prepare import Prepared
from cotune.algorithms.samples import Sample, TrainRow
from cotune.reading.metrics import registry
from cotune.records.plans import Plan
from cotune.records.policies import Policies
from cotune.records.structs import Episode
from cotune.trainer.reporting.activity import BEFORE

Updates = Mapping[str, Mapping[str, float]]
"""The learner's figures of each policy that it updated."""


class StepMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """What one step did. `left_out` counts what was not trained on, by reason."""

    step: int
    episodes: int
    failed: int
    unknown: int = 0
    """Episodes that ended well and whose outcome nobody knows."""
    calls: int
    candidates: int
    groups: int
    rows: int
    path: str = ""
    """Whose `outcome` it is: of the path that the selection took, or of single samples."""
    outcome: dict[str, float]
    """Mean of each named team reward and metric over the episodes, failed ones too (`outcome_means`)."""
    candidate_reward: float | None = None
    """Mean of the trained reward over all candidates that have one, chosen or not."""
    held_out: dict[str, float] = {}
    """After steps with an evaluation: success and reward of single samples on held-out tasks."""
    roles: dict[str, dict[str, float]]
    policies: dict[str, dict[str, float]]
    left_out: dict[str, int]
    staleness: dict[str, int]
    """Rows by how many versions their sampler was behind the policy that trained on them; all "0" in mode sync."""
    counters: dict[str, float]
    """What the sampler, the rollout workers, judges and a teacher counted in this step, such as retried requests and
    restarts; `judge.cost` is money."""
    lr_scale: float
    seconds: dict[str, float]
    """By phase. `checkpoint` is what it took to save the steps before this one; `load` and `look` (at the application)
    are in the first line of a process."""
    tokens_per_s: float
    """Sampled tokens of trained roles per second of the whole step."""
    rollout_tokens_per_s: float = 0.0
    """The same per second of its rollout."""
    update_tokens_per_s: float = 0.0
    """Tokens that the updates put through the models, per second of the updates."""
    total_tokens: int = 0
    """Tokens of the rows with their prompts, once for each optimizer step that they are in."""
    distinct_tokens: int = 0
    """Those of them that went through the model: what rows of a pass begin with alike, once."""
    updated: bool
    """Whether any policy has a new version."""
    stayed: dict[str, str] = {}
    """Trained policies without a new version, and why: `no sample` (its roles had no usable call), `no reward` (its
    samples have none that the recipe uses), `no comparison` (they stood alone in their groups), `no signal` (all its
    advantages are zero), `filtered` (filters left out those that differ), `no gradient` (its rows moved nothing)."""
    silent: dict[str, int] = {}
    """Trained roles that have called in no episode of the last steps, and of how many."""
    notes: tuple[str, ...] = ()
    replay: dict[str, int] = {}
    """Under a replay plan: calls that were forked, those that could not be as the record cannot repeat what was before
    (`unrepeatable`), branches, and how many of them diverged; calls of
    branches that the policies were expected to answer (`budget`), did answer (`sampled`), and that were answered from
    the record (`repeated`)."""


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
        return "single samples"
    how = {"argmax": "best of {} by scorer", "sample": "one of {} at random", "first": "first of {}"}
    return how[plan.select].format(plan.k)


def outcome_means(
    episodes: Sequence[Episode], rewards: Mapping[str, Mapping[str, float]], *, failed: float | str | None = None
) -> dict[str, float]:
    """Mean of each outcome component and metric over the episodes that ended, well or not.

    `success` is the share of `successes`. A failed episode counts rewards of its own; where it has none, what `failed`
    says: a number, `lowest` (0, or the lowest of the others where that is below 0), or `exclude` (nothing, not its own
    either). One that the infrastructure has failed counts in none of them. Other metrics are of the episodes that ended
    well.
    """
    good = [(rewards.get(episode.id, {}), episode) for episode in episodes if episode.status == "ok"]
    bad = [rewards.get(e.id, {}) for e in episodes if e.status != "ok" and is_outcome(e) and failed != "exclude"]
    values: dict[str, list[float]] = defaultdict(list)
    for own, episode in good:
        for name, value in {**own, **episode.metrics}.items():
            if name in own or name != "success":
                values[name].append(value)
    for name in {name for own in (*bad, *(own for own, _ in good)) for name in own}:
        lowest = min(0.0, *values[name])
        values[name] += [own.get(name, failed if isinstance(failed, float) else lowest) for own in bad]
    if solved := successes(episodes, rewards):
        values["success"] = [float(one) for one in solved]
    return {name: sum(found) / len(found) for name, found in sorted(values.items())}


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
) -> dict[str, str]:
    """Why each trained policy that has not moved has not."""
    reached, moves = {**dict.fromkeys(collected.unrewarded, "no reward"), **prepared.reached}, moved(updates)
    return {
        name: "no gradient" if name in rows else reached.get(name, "no sample")
        for name, spec in policies.specs.items()
        if spec.trained and name not in moves
    }


def role_metrics(
    prepared: Prepared, collected: Collected, rows: Mapping[str, Sequence[TrainRow]], updates: Updates
) -> dict[str, dict[str, float]]:
    """Per role: reward, group spread, zero-variance share, `tokens_mean` (length of its candidates),
    `prompt_tokens_mean`, and `entropy` by the sampler's -log pi; where it was trained, what its policy's update says of
    it (clip share, entropy, gap).

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
    known = [name for name, metric in registry()["roles"].items() if metric.of == "update"]
    for policy, update in updates.items():
        trained = sorted({row.role for row in rows[policy]})
        for role in trained:
            prefix = "" if len(trained) == 1 else f"{role}/"
            roles[role] |= {name: float(update[prefix + name]) for name in known if prefix + name in update}
    return {r: {k: v for k, v in figures.items() if math.isfinite(v)} for r, figures in roles.items()}
