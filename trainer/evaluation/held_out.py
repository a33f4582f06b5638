"""Evaluation on held-out tasks within a run: one sample per call, by the newest policies."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from statistics import fmean

from msgspec.structs import replace

from cotune.algorithms.goal import goal_of_policies
from cotune.episodes.rollout import EpisodeBatch
from cotune.reading.evaluations import EvaluatedMode, EvaluationReport, in_training, read_if_whole, step_file
from cotune.records.structs import PolicyRef
from cotune.storage.metrics_file import read_metrics
from cotune.tables import plural
from cotune.trainer.evaluation.modes import against_base
from cotune.trainer.evaluation.report import compare
from cotune.trainer.evaluation.run import share_floor, summarise
from cotune.trainer.evaluation.sink import EvaluationSink
from cotune.trainer.reporting.progress import Progress, held_out_text
from cotune.trainer.rollout.episodes import run_episodes
from cotune.trainer.run.run import RolloutRun
from cotune.trainer.run.run_folder import write_atomically
from cotune.trainer.step_report import StepReport

AGAINST_UNTRAINED = "against_untrained"
"""`against_untrained/ROLE` among held-out figures: the reward of the role against untrained opponents."""


async def evaluate_held_out(run: RolloutRun, report: StepReport, progress: Progress) -> dict[str, float]:
    """Run each held-out task once after this step, if an evaluation is due: one sample per call, nothing is selected.

    Returns the figures; none if no evaluation is due or the run is stopped:

    - `success`, `reward` (the recipe trains on it) and `outcome` (the plain sum, if it differs), as far as they are
      known, each with the ends of its 95% interval and its number of tasks
    - `reward/ROLE` for each trained role, and `ROLE/NAME` for each reward of a role's scorer
    - `calls`, the mean without failed episodes, and `turns/ROLE`
    - `episodes` and `failed`
    - `against_untrained/ROLE` if one role's gain is another's loss: each role then plays once more, against the
      untrained model in the other roles

    A failed episode is no success. Its reward follows `on_failure`.
    """
    config = run.config
    step = run.state.steps + 1
    if not run.held_out or (step % config.evaluation.every and step != config.steps):
        return {}
    with report.phase("evaluate"):
        trained = await _play(run, progress, run.served(), "trained")
        if trained is None:
            return {}
        base, trained = _share_lowest(run, step, trained, progress)
        _store(run, step, trained, base)
        if reason := _no_figure_reason(trained):
            progress.say_once(f"held-out, single samples: no figure: {reason}")
        return _figures(trained, base) | await _against_untrained(run, progress, trained.opposed)


async def evaluate_base(run: RolloutRun, report: StepReport, progress: Progress) -> None:
    """Run the held-out tasks before the first step, unless this evaluation exists. Later ones are compared with it.

    The untrained model plays, or the policies that `init` names.
    """
    if not run.held_out or _stored(run, steps=0):
        return
    policies = run.served()
    label = "start"
    if not run.config.init or run.state.steps:
        policies = {role: PolicyRef(ref.name) for role, ref in policies.items()}
        label = "base"
    with report.phase("evaluate"):
        base = await _play(run, progress, policies, label, training_step=-1)
    if base is not None:
        _store(run, steps=0, evaluation=base)
        figures = _figures(base)
        if reason := _no_figure_reason(base):
            progress.say_once(f"held-out, single samples: no figure: {reason}")
        else:
            progress.say(f"before training, held-out, single samples: {held_out_text(figures)}")
        if progress.loggers is not None:
            progress.loggers.base(figures)
    progress.activity.begin(run.state.steps)


def start_figures(run: RolloutRun) -> dict[str, float]:
    """Return the figures of the evaluation before the first step; none if there was no such evaluation."""
    base = _stored(run, steps=0)
    return {} if base is None else _figures(base)


def _share_lowest(
    run: RolloutRun, step: int, trained: EvaluatedMode, progress: Progress
) -> tuple[EvaluatedMode | None, EvaluatedMode]:
    """Give failed episodes the lowest reward of all evaluations of the run, so that no policy gains by failing on tasks
    that another one solves badly.

    Returns the evaluation before the first step, if there is one, and `trained`, the evaluation after this step. If the
    lowest reward is new, the figures of earlier evaluations are computed and written again, to stay comparable.
    """
    # 1. The earlier evaluations by their number of steps, and the lowest reward of all.
    stored_figures: dict[int, Mapping[str, float]] = {}
    for line in read_metrics(run.folder.path):
        if line["held_out"]:
            stored_figures[line["step"] + 1] = line["held_out"]
    earlier: dict[int, EvaluatedMode] = {}
    for steps in (0, *stored_figures):
        evaluation = _stored(run, steps) if steps < step else None
        if evaluation is not None:
            earlier[steps] = evaluation
    *earlier_with_shared_floor, trained = share_floor([*earlier.values(), trained])
    earlier_with_floor = dict(zip(earlier, earlier_with_shared_floor, strict=True))
    base = earlier_with_floor.get(0)  # the evaluation before the first step

    # 2. Revise the lines of metrics.jsonl whose figures have changed.
    revised: dict[int, dict[str, float]] = {}
    for steps, evaluation in earlier_with_floor.items():
        if steps not in stored_figures:
            continue  # The evaluation before the first step has no line.
        figures = _figures(evaluation, base if steps else None)
        has_changed = bool(figures.items() - stored_figures[steps].items())
        if has_changed:
            revised[steps] = figures
    if revised:
        progress.say(
            f"a failed episode now counts {trained.floor:.4g} in held-out figures, the lowest reward so far: the "
            f"figures of {plural(len(revised), 'earlier evaluation')} are computed again"
        )
        run.folder.revise_held_out(revised)

    # 3. Write the changed evaluations again. They keep the time at which they were first written.
    changed = {steps: evaluation for steps, evaluation in earlier_with_floor.items() if evaluation != earlier[steps]}
    if changed:
        created = {stored.steps: stored.created for stored in in_training(run.folder.path)}
        for steps, evaluation in changed.items():
            _store(run, steps, evaluation, base if steps else None, created.get(steps))
    return base, trained


def _stored(run: RolloutRun, steps: int) -> EvaluatedMode | None:
    """Read the evaluation after `steps` steps; None if there is none, or if it is of other held-out tasks."""
    file = step_file(run.folder.path, steps)
    report = read_if_whole(file) if file.is_file() else None
    if report is None:
        return None
    held_out = {task.id for task in run.held_out}
    evaluations = [evaluation for evaluation in report.evaluations.values() if evaluation.endings.keys() == held_out]
    # The evaluation before training, with which this one is compared, is stored in front of it.
    return evaluations[-1] if evaluations else None


def _store(
    run: RolloutRun,
    steps: int,
    evaluation: EvaluatedMode,
    base: EvaluatedMode | None = None,
    created: float | None = None,
) -> None:
    """Write the evaluation after `steps` steps and its comparison with the `base`. `created` is the time at which it
    was made; the default is now."""
    evaluations = [evaluation] if base is None else [base, evaluation]
    report = EvaluationReport(
        evaluations={mode.label: mode for mode in evaluations},
        comparisons=() if base is None else (compare(evaluation, base),),
        created=created or time.time(),
        steps=steps,
    )
    file = step_file(run.folder.path, steps)
    file.parent.mkdir(exist_ok=True)
    write_atomically(file, json.dumps(report.to_json()).encode())


def _figures(evaluation: EvaluatedMode, base: EvaluatedMode | None = None) -> dict[str, float]:
    """The figures of an evaluation for metrics.jsonl. The main figures of the evaluation before training are added as
    `base_NAME`.
    """
    figures = {"episodes": float(evaluation.episodes), "failed": float(evaluation.failures)}
    intervals = {"success": evaluation.success, "reward": evaluation.reward, "outcome": evaluation.outcome}
    for name, interval in intervals.items():
        if interval is None:
            continue
        figures[name] = interval.mean
        figures[f"{name}_n"] = float(interval.n)
        if interval.low is not None and interval.high is not None:
            figures[f"{name}_low"] = interval.low
            figures[f"{name}_high"] = interval.high
    if evaluation.calls_by_task:
        figures["calls"] = fmean(evaluation.calls_by_task.values())
    for role, statistics in evaluation.roles.items():
        figures[f"turns/{role}"] = statistics.turns
        for name, value in statistics.rewards.items():
            figures[f"{role}/{name}"] = value
        if statistics.reward is not None:
            figures[f"reward/{role}"] = statistics.reward
    if base is not None:
        for name, value in _figures(base).items():
            if name in ("success", "reward", "calls"):
                figures[f"base_{name}"] = value
    return figures


def _no_figure_reason(evaluation: EvaluatedMode) -> str:
    """The reason why an evaluation has neither success nor a reward; an empty text if it has one."""
    if evaluation.opposed and evaluation.success is None:
        return (
            f"{', '.join(evaluation.opposed)} play against each other: their held-out rewards always add up to the "
            "same, so each is judged by its reward against the untrained model, after each evaluation"
        )
    if evaluation.success or evaluation.reward or evaluation.outcome:
        return ""
    episodes = plural(evaluation.episodes, "episode")
    if why := evaluation.all_failed:
        return f"all {episodes} failed, the most of them with: {why}"
    return f"the workflow returned no outcome for {episodes}, and evaluations ask no judge"


async def _against_untrained(run: RolloutRun, progress: Progress, roles: Sequence[str]) -> dict[str, float]:
    """Play each of these roles against the untrained model in the other ones, and return its reward. Nothing is
    returned if the run is stopped."""
    figures = {}
    for role in roles:
        policies = against_base(run.served(), role, roles)
        evaluation = await _play(run, progress, policies, role, "eval-against-untrained")
        if evaluation is None:
            return {}
        if role in evaluation.roles and (reward := evaluation.roles[role].reward) is not None:
            figures[f"{AGAINST_UNTRAINED}/{role}"] = reward
    return figures


async def _play(
    run: RolloutRun,
    progress: Progress,
    policies: Mapping[str, PolicyRef],
    label: str,
    phase: str = "eval",
    training_step: int | None = None,
) -> EvaluatedMode | None:
    """Run the held-out tasks with these policies; None if the run is stopped. The episodes are recorded under the
    current step, or under `training_step`."""
    sink = EvaluationSink(run.store)
    progress.evaluation(len(run.held_out))
    batch = EpisodeBatch(
        tasks=run.held_out,
        sink=sink,
        phase=phase,
        training_step=run.state.steps if training_step is None else training_step,
        on_episode=progress.evaluated,
    )
    work = run_episodes(run, batch, plan=None, stream="eval", policies=policies)
    if await run.interruptible(work) is None:
        return None
    goal = goal_of_policies(run.recipes, run.config.on_failure, run.trained, run.workflow.bounds)
    # Seconds and prices are left out: metrics.jsonl has the seconds of each phase.
    evaluation = summarise(label, sink, seconds=0.0, prices={}, goal=goal)
    return replace(evaluation, temperature=run.config.sampling.temperature)
