"""The report of each step: the seconds of its phases and all of its figures, in a file and on the screen."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping

import msgspec

from cotune.reading.gradient_shares import MOST, WINDOW, dominant_roles, shares_of
from cotune.records.structs import JUDGING
from cotune.sampling.request_params import sentences_about_ignored
from cotune.storage.judge_ledger import totals_of
from cotune.storage.metrics_file import StepMetrics, read_metrics
from cotune.storage.outcomes import failure_reward
from cotune.trainer.batch import GIVE_OUTCOMES, NO_OUTCOME, Batch, misses_outcomes
from cotune.trainer.privileged import NO_FEEDBACK
from cotune.trainer.reporting.metrics import (
    Updates,
    count_lags,
    outcome_means,
    outcome_path,
    policies_that_moved,
    reasons_for_staying,
    role_metrics,
    throughput_fields,
)
from cotune.trainer.reporting.progress import Progress
from cotune.trainer.reporting.summary import NO_SIGNAL, SILENT_STEPS
from cotune.trainer.rollout.forks import replay_figures
from cotune.trainer.rollout.refill import RolledOut
from cotune.trainer.run.run import RolloutRun, Run
from cotune.trainer.schedules.schedule import lr_scale


class StepReport:
    """Measures the phases of each step, and writes the line of the step to metrics.jsonl and to the screen."""

    def __init__(self, run: Run, progress: Progress) -> None:
        self.progress = progress
        self._folder = run.folder

    @contextlib.contextmanager
    def phase(self, name: str, of: str = "") -> Iterator[None]:
        """Count the seconds within the block for a phase of the step. `of` is the object of the phase, for example the
        names of policies."""
        with self.progress.activity.phase(name, of):
            yield

    def restart(self) -> None:
        """Drop the seconds so far, because the step is repeated."""
        self.progress.activity.clear()

    def write(self, metrics: StepMetrics) -> None:
        """Add the step's line to metrics.jsonl, and show it."""
        self.progress.activity.clear()
        self._folder.append_metrics(msgspec.to_builtins(metrics))
        self.progress.step(metrics)


class RolloutReport(StepReport):
    """Computes the figures of steps with rollouts."""

    def __init__(self, run: RolloutRun, progress: Progress) -> None:
        super().__init__(run, progress)
        self._run = run
        self._counters: dict[str, float] = {}
        """The counts of sampler, rollout workers, judges, teachers and store when the last step ended."""

    async def begin(self) -> None:
        """Read the counts from before the first step, so that they are not in its figures."""
        await self._new_counts()

    async def metrics(
        self, batch: Batch, updates: Updates, held_out: Mapping[str, float], rolled: RolledOut
    ) -> StepMetrics:
        """Return the figures of a step, once its policies are published."""
        counters = await self._new_counts()
        run = self._run
        config = self._run.config
        state = self._run.state
        collected = batch.collected
        prepared = batch.prepared
        seconds = dict(self.progress.activity.seconds)

        # Figures of the rollout.
        episodes = [episode for episode in batch.episodes if episode.phase != JUDGING]
        # The branches of a replay plan are not single samples of whole episodes.
        whole_episodes = [episode for episode in episodes if run.plan.kind != "replay" or episode.rollout == 0]
        calls = collected.calls.values()
        sampled_tokens = 0
        for call in calls:
            sampled_tokens += sum(len(candidate.token_ids) for candidate in call.candidates)
        trained_roles = run.trained_roles(state.steps)
        plans = config.plans_of(run.plan, trained_roles)
        outcomes = outcome_means(
            whole_episodes,
            collected.outcomes,
            failed=failure_reward(config.on_failure),
            task_weights=run.task_weights,
        )

        # Figures by role, and the reasons for policies and roles without training.
        roles = role_metrics(prepared, collected, batch.rows, updates, trained_roles)
        if rolled.refill:
            for role in roles:
                roles[role] |= rolled.refill.figures(role)
        frozen = run.frozen(state.steps)
        stayed = reasons_for_staying(state.policies, updates, batch.rows, collected, prepared, frozen=frozen)
        silent = run.count_silent_steps(collected)
        return StepMetrics(
            step=state.steps,
            episodes=len(episodes),
            failed=sum(episode.status != "ok" and episode.blame != "divergence" for episode in episodes),
            unknown=batch.unknown,
            calls=sum(episode.calls for episode in episodes),
            candidates=sum(len(call.candidates) for call in calls),
            groups=len(prepared.groups),
            rows=len(prepared.trained),
            path=outcome_path([plans.get(role, run.plan) for role in trained_roles] or [run.plan]),
            outcome={name: outcome.mean for name, outcome in outcomes.items()},
            outcome_n={name: outcome.n for name, outcome in outcomes.items()},
            candidate_reward=prepared.reward,
            held_out=dict(held_out),
            roles=roles,
            policies={name: self._policy_figures(name, updates) for name in updates},
            left_out=dict(batch.left_out),
            staleness=count_lags(prepared.trained, batch.versions),
            counters=counters,
            lr_scale=lr_scale(config.schedule, state.steps, config.steps),
            seconds=seconds,
            **throughput_fields(updates, seconds, sampled_tokens),
            updated=bool(policies_that_moved(updates)),
            stayed=stayed,
            silent=silent,
            refill=_refill_figures(rolled),
            replay=replay_figures(run, batch.episodes, rolled.fork_effects),
            notes=(
                *prepared.warnings,
                *sentences_about_ignored(calls),
                *_rounded_away(updates),
                *self._policy_notes(batch, stayed),
                *self._gradient_notes(roles, trained_roles),
                *_outcome_notes(run, batch),
                *_refill_notes(rolled),
                *(SILENT.format(role=role) for role, steps in silent.items() if steps >= SILENT_STEPS),
            ),
        )

    def _policy_notes(self, batch: Batch, stayed: Mapping[str, str]) -> list[str]:
        """Return notes on policies without an update: no signal since the run began, or no feedback for a teacher.
        `stayed` has the reason for each policy that has not moved."""
        notes: list[str] = []
        if not self._run.state.versions and "no signal" in stayed.values():
            notes.append(NO_SIGNAL)
        without_hints = _without_hints(self._run, batch, stayed)
        if without_hints:
            notes.append(NO_FEEDBACK.format(policies=", ".join(without_hints)))
        return notes

    def _gradient_notes(self, roles: Mapping[str, Mapping[str, float]], policy_of: Mapping[str, str]) -> list[str]:
        """Return a note for each role that has had most of the gradient of its policy over the last steps. `roles` has
        the figures of this step by role, and `policy_of` the trained roles with their policies."""
        shares = shares_of(roles)
        if not shares:
            return []
        # The earlier steps come from metrics.jsonl, so that they count also if the run was interrupted in between.
        shares_of_steps = [shares]
        for line in reversed(read_metrics(self._folder.path)):
            if len(shares_of_steps) == WINDOW:
                break
            earlier_shares = shares_of(line["roles"])
            if earlier_shares:
                shares_of_steps.append(earlier_shares)
        dominant = dominant_roles(shares_of_steps)
        return [CAPTURED.format(role=role, policy=policy_of[role]) for role in dominant if role in policy_of]

    def _policy_figures(self, name: str, updates: Updates) -> dict[str, float]:
        """Return the figures of a policy's update, and of the proof of its publication if it has moved."""
        figures = {key: float(value) for key, value in updates[name].items() if "/" not in key}
        if name not in policies_that_moved(updates):
            return figures
        proof = self._run.published[name][-1]
        return figures | {
            "version": proof.policy.version,
            "norm": proof.norm,
            "norm_moved": proof.norm_moved,
            "probe_gap_mean": proof.probe_gap_mean,
            "probe_gap_max": proof.probe_gap_max,
        }

    async def _new_counts(self) -> dict[str, float]:
        """Return the counts of sampler, workers, judges, teachers and store since the last call, without zeros."""
        run = self._run
        totals: dict[str, float] = dict((await run.sampler.info()).counters)
        totals |= {f"workers.{name}": count for name, count in run.runner.counters.items()}
        totals |= {f"judge.{name}": count for name, count in totals_of(run.folder.path).items()}
        of_teachers = Counter[str]()
        for teacher in run.teachers.values():
            of_teachers += Counter(teacher.counters)
        totals |= {f"teacher.{name}": count for name, count in of_teachers.items()}
        totals["late_rewards_refused"] = run.store.health.refused

        before = self._counters
        self._counters = totals
        new_counts: dict[str, float] = {}
        for name, total in totals.items():
            increase = total - before.get(name, 0)
            if increase:
                new_counts[name] = increase
        return new_counts


def _without_hints(run: RolloutRun, batch: Batch, stayed: Mapping[str, str]) -> list[str]:
    """Return the policies that have no sample because there was no feedback for their teacher."""
    if not batch.left_out["no_hint"]:
        return []
    return [name for name, reason in stayed.items() if reason == "no sample" and run.recipes.of(name).loss.teacher_sees]


def _outcome_notes(run: RolloutRun, batch: Batch) -> list[str]:
    """Return a note if the step would learn from outcomes, but no episode has one."""
    if not misses_outcomes(run, batch):
        return []
    return [f"{NO_OUTCOME} {GIVE_OUTCOMES.format(name=run.workflow.variable)}."]


def _refill_notes(rolled: RolledOut) -> list[str]:
    """Return a note for each role that lacks groups after the refill, and one if tasks of the refill were late."""
    notes: list[str] = []
    if rolled.refill:
        notes += [FLAT.format(role=role) for role in rolled.refill.missing]
    if rolled.late_tasks:
        notes.append(LATE)
    return notes


def _refill_figures(rolled: RolledOut) -> dict[str, int]:
    """Return the figures of a step's refill for metrics.jsonl; empty without a refill."""
    if not rolled.refill:
        return {}
    return {
        "tasks": rolled.refill.tasks,
        "episodes": rolled.refilled,
        "late": rolled.late,
        "late_tasks": len(rolled.late_tasks),
    }


def _rounded_away(updates: Updates) -> list[str]:
    """Return notes on tensors whose steps are lost to rounding. The learner reports each tensor once."""
    kinds = (("lost/", "lost_share", _LOST), ("lost_bfloat16/", "lost_share_bfloat16", _UNSEEN))
    notes: list[str] = []
    for policy, figures in updates.items():
        for prefix, share, text in kinds:
            sizes = {name.removeprefix(prefix): size for name, size in figures.items() if name.startswith(prefix)}
            if not sizes:
                continue
            examples = ", ".join(f"{tensor} {size:.2g}" for tensor, size in sorted(sizes.items())[:3])
            if len(sizes) > 3:
                examples += ", ..."
            notes.append(text.format(policy=policy, count=len(sizes), some=examples, share=figures[share]))
    return notes


LATE = (
    "Training did not wait for the last tasks that a refill had drawn: tasks whose episodes take long are "
    "under-represented among its tasks. See `late_tasks` in the metrics. In mode sync they are waited for."
)
FLAT = (
    "The refill's budget was spent before role {role!r} had its groups with different rewards: nearly all of its tasks "
    "are solved by every candidate or by none (docs/how-to/not-learning.md). See `refill_missing` in the metrics."
)
SILENT = (
    f"Role {{role!r}} has called in no episode for {SILENT_STEPS} steps and more, so nothing trains it. Where a model "
    "decides who comes next, by a tool, a handoff or a route, reward the role that decides for going there, or learn "
    "first from recordings of a model that does (docs/how-to/not-learning.md); a role that is no longer used is better "
    "taken out of `roles` and [[policy]]."
)
CAPTURED = (
    f"Role {{role!r}} has held over {MOST:.0%} of the gradient of policy {{policy!r}} in the mean of the last {WINDOW} "
    "steps (`gradient_share`). The policy learns mainly for this role, and its other roles may get worse. If their "
    "rewards fall or stay flat, balance the gradient, or give the role a policy of its own "
    "(docs/how-to/teams.md#roles-that-share-a-policy)."
)
_LOST = (
    "Policy {policy}: float32 rounds the whole step away in {count} tensors, and {share:.2%} of all entries (largest "
    "step, in halves of a unit in the last place: {some}). They move once steps are larger: after the warm-up, or with "
    "a larger learner.lr."
)
_UNSEEN = (
    "Policy {policy}: bfloat16 does not see a single step of {count} tensors, and {share:.2%} of all entries. Weights "
    "are kept in float32, where steps add up until it does."
)
