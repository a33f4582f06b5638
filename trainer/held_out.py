"""Held-out tasks within a run: how often single samples of the newest policies succeed on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cotune.algorithms.goal import goal_of
from cotune.recording.records import PolicyRef
from cotune.recording.rollout import EpisodeBatch
from cotune.trainer.evaluation.run import Evaluation, summarise
from cotune.trainer.evaluation.sink import EvaluationSink
from cotune.trainer.reporting.progress import Progress
from cotune.trainer.reporting.step_report import StepReport
from cotune.trainer.rollout.episodes import run_episodes
from cotune.trainer.run import Run

AGAINST_UNTRAINED = "against_untrained"
"""`against_untrained/ROLE` among held-out figures: what the role wins where its opponents are untrained."""


async def evaluate_held_out(run: Run, report: StepReport, progress: Progress) -> dict[str, float]:
    """Run the held-out tasks once each after this step, where that is due: one sample per call, nothing is selected.

    Returns `success`, `reward` (what the recipe trains on) and `outcome` (the plain sum, where it is another) with the
    ends of their 95% intervals and their numbers of tasks, as far as they are known; `reward/ROLE` for each trained
    role; `ROLE/NAME` for each reward of a role's scorer; `episodes` and `failed`. A failed episode is no success, and
    counts in rewards as `on_failure` says. Where one role wins what another loses, each plays once more against the
    untrained model in the other roles: `against_untrained/ROLE`. Nothing where it is not due or the run is stopped.
    """
    config = run.config
    step = run.state.steps + 1
    if not run.held_out or (step % config.evaluation.every and step != config.steps):
        return {}
    with report.phase("evaluate"):
        found = await _played(run, run.served(), "eval")
    if found is None:
        return {}
    figures = {"episodes": float(found.episodes), "failed": float(sum(found.failed.values()))}
    for name, interval in (("success", found.success), ("reward", found.reward), ("outcome", found.outcome)):
        if interval is not None:
            figures |= {name: interval.mean, f"{name}_n": float(interval.n)}
            if interval.low is not None and interval.high is not None:
                figures |= {f"{name}_low": interval.low, f"{name}_high": interval.high}
    for role, own in found.roles.items():
        figures |= {f"{role}/{name}": value for name, value in own.rewards.items()}
        if own.reward is not None:
            figures[f"reward/{role}"] = own.reward
    if found.opposed:
        progress.say_once(
            f"{', '.join(found.opposed)} play against each other: their held-out rewards always add up to the same, so "
            "each is judged by what it wins against the untrained model"
        )
        with report.phase("evaluate"):
            figures |= await _against_untrained(run, found.opposed)
    return figures


async def _against_untrained(run: Run, roles: Sequence[str]) -> dict[str, float]:
    """What each of these roles wins where the untrained model plays the others; nothing when the run is stopped."""
    present, figures = run.served(), {}
    for role in roles:
        policies = {
            name: PolicyRef(ref.name) if name in roles and name != role else ref for name, ref in present.items()
        }
        found = await _played(run, policies, "eval-against-untrained")
        if found is None:
            return {}
        reward = found.roles[role].reward if role in found.roles else None
        if reward is not None:
            figures[f"{AGAINST_UNTRAINED}/{role}"] = reward
    return figures


async def _played(run: Run, policies: Mapping[str, PolicyRef], phase: str) -> Evaluation | None:
    """The held-out tasks with these policies; None when the run is stopped."""
    seen = EvaluationSink(run.store)
    batch = EpisodeBatch(tasks=run.held_out, sink=seen, phase=phase, training_step=run.state.steps)
    work = run_episodes(run, batch, plan=None, stream="eval", policies=policies)
    if await run.interruptible(work) is None:
        return None
    goal = goal_of(run.recipe, run.config.on_failure, run.evaluated_roles())
    return summarise("held-out", seen, 0.0, {}, goal)
