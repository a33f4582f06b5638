"""What a step reports: figures of its rollout, its updates and its publications, for metrics.jsonl and the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from cotune.algorithms.collect import Collected, failure_reward
from cotune.algorithms.prepare import Prepared
from cotune.algorithms.samples import Sample, TrainRow
from cotune.recording.records import Episode
from cotune.sampling.request_params import replaced
from cotune.trainer.metrics import Clock, StepMetrics, candidate_mean, outcome_means, path_said, role_metrics
from cotune.trainer.run import Run
from cotune.trainer.updates import Updates, moved


def step_metrics(
    run: Run,
    episodes: Sequence[Episode],
    collected: Collected,
    prepared: Prepared,
    rows: Mapping[str, Sequence[TrainRow]],
    updates: Updates,
    left_out: Mapping[str, int],
    staleness: Mapping[str, int],
    counters: Mapping[str, int],
    scale: float,
    clock: Clock,
    held_out: Mapping[str, float],
) -> StepMetrics:
    """Everything a step reports, once its policies are published."""
    tokens = sum(len(c.token_ids) for call in collected.calls.values() for c in call.candidates)
    moves = moved(updates)
    policies = {name: {k: float(v) for k, v in figures.items() if "/" not in k} for name, figures in updates.items()}
    for name, proof in run.proofs.items():
        if name in moves:
            policies[name] |= {"version": run.versions[name], "norm": proof.norm, "norm_moved": proof.norm_moved}
            policies[name] |= {"probe_gap_mean": proof.probe_gap_mean, "probe_gap_max": proof.probe_gap_max}
    return StepMetrics(
        step=run.step,
        episodes=len(episodes),
        failed=sum(episode.status != "ok" for episode in episodes),
        calls=sum(episode.calls for episode in episodes),
        candidates=sum(len(call.candidates) for call in collected.calls.values()),
        groups=len(prepared.groups),
        rows=sum(map(len, rows.values())),
        path=path_said(run.plan),
        outcome=outcome_means(
            episodes,
            run.store.rewards(episode.id for episode in episodes),
            failed=failure_reward(run.config.on_failure),
        ),
        candidate_reward=candidate_mean(prepared),
        held_out=dict(held_out),
        roles=role_metrics(prepared, collected, rows, updates),
        policies=policies,
        left_out=dict(left_out),
        staleness=dict(staleness),
        counters=dict(counters),
        lr_scale=scale,
        seconds=dict(clock.seconds),
        tokens_per_s=tokens / max(sum(clock.seconds.values()), 1e-9),
        updated=bool(moves),
        stayed={name: why for name, why in _stayed(run, collected.samples, rows).items() if name not in moves},
        notes=(*prepared.warnings, *replaced(collected.calls.values()), *_rounded_away(updates)),
    )


def _stayed(run: Run, samples: Sequence[Sample], rows: Mapping[str, Sequence[TrainRow]]) -> dict[str, str]:
    """Why each trained policy has not moved, if it has not."""
    sampled = {sample.policy.name for sample in samples}
    return {
        name: "no gradient" if name in rows else "no signal" if name in sampled else "no sample"
        for name, spec in run.policies.specs.items()
        if spec.trained
    }


def _rounded_away(updates: Updates) -> list[str]:
    """What rounding does to the first steps of tensors; the learner tells of each tensor once."""
    notes = []
    for policy, figures in updates.items():
        for kind, text in (("lost", _LOST), ("lost_bfloat16", _UNSEEN)):
            sizes = {n.partition("/")[2]: size for n, size in figures.items() if n.startswith(f"{kind}/")}
            if sizes:
                some = ", ".join(f"{name} {size:.2g}" for name, size in sorted(sizes.items())[:3])
                share = figures[kind.replace("lost", "lost_share")]
                more = ", ..." if len(sizes) > 3 else ""
                notes.append(text.format(policy=policy, count=len(sizes), some=some + more, share=share))
    return notes


_LOST = (
    "Policy {policy}: float32 rounds the whole step away in {count} tensors, and {share:.2%} of all entries (largest "
    "step, in halves of a unit in the last place: {some}). They move once steps are larger: after the warm-up, or with "
    "a larger learner.lr."
)
_UNSEEN = (
    "Policy {policy}: bfloat16 does not see a single step of {count} tensors, and {share:.2%} of all entries (largest "
    "step, in halves of a unit in the last place: {some}). Weights are kept in float32, where steps add up until it "
    "does."
)


def lags(rows: Mapping[str, Sequence[TrainRow]], versions: Mapping[str, int]) -> dict[str, int]:
    """Rows by the number of versions that their sampler was behind the policy that trains on them."""
    counts = Counter(versions.get(name, 0) - row.version for name, its_rows in rows.items() for row in its_rows)
    return {str(lag): counts[lag] for lag in sorted(counts)}


async def counted(run: Run) -> dict[str, int]:
    """What the sampler and the rollout workers have counted since the last step."""
    now = dict((await run.sampler.info()).counters)
    now |= {f"workers.{name}": count for name, count in run.runner.counters.items()}
    now["late_rewards_refused"] = run.store.refused
    news = {name: count - run.counted.get(name, 0) for name, count in now.items()}
    run.counted = now
    return {name: count for name, count in news.items() if count}
