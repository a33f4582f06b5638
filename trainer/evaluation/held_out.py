"""Held-out tasks within a run: how often single samples of the newest policies succeed on them."""

from __future__ import annotations

import itertools
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
    """Run the held-out tasks once each after this step, where that is due: one sample per call, nothing is selected.

    Returns `success`, `reward` (what the recipe trains on) and `outcome` (the plain sum, where it is another) with the
    ends of their 95% intervals and their numbers of tasks, as far as they are known; `reward/ROLE` for each trained
    role; `ROLE/NAME` for each reward of a role's scorer; `calls`, the mean without failed ones, and `turns/ROLE`;
    `episodes` and `failed`. A failed episode is no success, and counts in rewards as `on_failure` says. Where one role
    wins what another loses, each plays once more against the untrained model in the other roles:
    `against_untrained/ROLE`. Nothing where it is not due or the run is stopped.
    """
    config = run.config
    step = run.state.steps + 1
    if not run.held_out or (step % config.evaluation.every and step != config.steps):
        return {}
    with report.phase("evaluate"):
        trained = await _played(run, progress, run.served(), "trained")
        if trained is None:
            return {}
        evaluations = _share_lowest(run, step, trained, progress)
        _store(run, step, evaluations)
        if why := _no_figure(trained):
            progress.say_once(f"held-out, single samples: no figure: {why}")
        return _figures(*evaluations) | await _against_untrained(run, progress, trained.opposed)


async def evaluate_base(run: RolloutRun, report: StepReport, progress: Progress) -> None:
    """Run the held-out tasks before the first step, unless that was done: with the untrained model, or with the
    policies of `init`. Later evaluations are compared with this one."""
    if not run.held_out or _stored(run, 0):
        return
    begun = bool(run.config.init) and not run.state.steps
    served = run.served()
    policies = served if begun else {role: PolicyRef(ref.name) for role, ref in served.items()}
    with report.phase("evaluate"):
        base = await _played(run, progress, policies, "start" if begun else "base", training_step=-1)
    if base is not None:
        _store(run, 0, [base])
        figures = _figures(base)
        if why := _no_figure(base):
            progress.say_once(f"held-out, single samples: no figure: {why}")
        else:
            progress.say(f"before training, held-out, single samples: {held_out_text(figures)}")
        if progress.loggers is not None:
            progress.loggers.base(figures)
    progress.activity.begin(run.state.steps)


def start_figures(run: RolloutRun) -> dict[str, float]:
    """The figures of the evaluation before the first step; empty if there was none."""
    stored = _stored(run, 0)
    return _figures(stored[-1]) if stored else {}


def _share_lowest(run: RolloutRun, step: int, found: EvaluatedMode, progress: Progress) -> list[EvaluatedMode]:
    """The evaluation before the first step, where there is one, and `found`, that after this step, with the lowest
    reward of all evaluations of the run for failed episodes: no policy gains by a crash where another did badly.

    If that reward is new, the figures of the earlier evaluations are computed and written again, so that they compare.
    """
    lines = {line["step"] + 1: line["held_out"] for line in read_metrics(run.folder.path) if line["held_out"]}
    earlier = {done: of[-1] for done in (0, *lines) if done < step and (of := _stored(run, done))}
    *shared, found = share_floor([*earlier.values(), found])
    now = dict(zip(earlier, shared, strict=True))
    base = [now[0]] if 0 in now else []
    changed = {done: _figures(*base, one) for done, one in now.items() if done in lines}
    changed = {done: figures for done, figures in changed.items() if figures.items() - lines[done].items()}
    if changed:
        progress.say(
            f"a failed episode now counts {found.floor:.4g} in held-out figures, the lowest reward so far: those of "
            f"{plural(len(changed), 'earlier evaluation')} are computed again"
        )
        run.folder.revise_held_out(changed)
    again = {done: one for done, one in now.items() if one != earlier[done]}
    created = {one.steps: one.created for one in in_training(run.folder.path)} if again else {}
    for done, one in again.items():
        _store(run, done, [*base, one] if done else [one], created.get(done))
    return [*base, found]


def _stored(run: RolloutRun, steps: int) -> list[EvaluatedMode]:
    """The evaluations of a file of this run, if they are of the held-out tasks of now."""
    file = step_file(run.folder.path, steps)
    found = read_if_whole(file) if file.is_file() else None
    tasks = {task.id for task in run.held_out}
    return [one for one in found.evaluations.values() if one.endings.keys() == tasks] if found else []


def _store(run: RolloutRun, steps: int, evaluations: Sequence[EvaluatedMode], created: float | None = None) -> None:
    """Write an evaluation after so many steps, the last of `evaluations`, and how it compares with the one before. It
    was `created` now, or then."""
    compared = [compare(after, before) for before, after in itertools.pairwise(evaluations)]
    report = EvaluationReport(
        evaluations={one.label: one for one in evaluations},
        comparisons=tuple(compared),
        created=created or time.time(),
        steps=steps,
    )
    file = step_file(run.folder.path, steps)
    file.parent.mkdir(exist_ok=True)
    write_atomically(file, json.dumps(report.to_json()).encode())


def _figures(*evaluations: EvaluatedMode) -> dict[str, float]:
    """The figures of an evaluation for metrics.jsonl, the last of these; one before it is the base."""
    *base, last = evaluations
    figures = {"episodes": float(last.episodes), "failed": float(last.failures)}
    for name, interval in (("success", last.success), ("reward", last.reward), ("outcome", last.outcome)):
        if interval is not None:
            figures |= {name: interval.mean, f"{name}_n": float(interval.n)}
            if interval.low is not None and interval.high is not None:
                figures |= {f"{name}_low": interval.low, f"{name}_high": interval.high}
    if calls := list(last.calls_by_task.values()):
        figures["calls"] = fmean(calls)
    for role, own in last.roles.items():
        figures[f"turns/{role}"] = own.turns
        figures |= {f"{role}/{name}": value for name, value in own.rewards.items()}
        if own.reward is not None:
            figures[f"reward/{role}"] = own.reward
    for one in base:
        figures |= {f"base_{name}": x for name, x in _figures(one).items() if name in ("success", "reward", "calls")}
    return figures


def _no_figure(found: EvaluatedMode) -> str:
    """Why an evaluation has neither success nor a reward; empty where it has one."""
    if found.opposed and found.success is None:
        return (
            f"{', '.join(found.opposed)} play against each other: their held-out rewards always add up to the same, so "
            "each is judged by what it wins against the untrained model, after each evaluation"
        )
    if found.success or found.reward or found.outcome:
        return ""
    if why := found.all_failed:
        return f"all {plural(found.episodes, 'episode')} failed, the most of them with: {why}"
    return f"the workflow returned no outcome for {plural(found.episodes, 'episode')}, and evaluations ask no judge"


async def _against_untrained(run: RolloutRun, progress: Progress, roles: Sequence[str]) -> dict[str, float]:
    """The reward of each of these roles where the untrained model plays the others; empty when the run is stopped."""
    figures = {}
    for role in roles:
        policies = against_base(run.served(), role, roles)
        played = await _played(run, progress, policies, role, "eval-against-untrained")
        if played is None:
            return {}
        if role in played.roles and (reward := played.roles[role].reward) is not None:
            figures[f"{AGAINST_UNTRAINED}/{role}"] = reward
    return figures


async def _played(
    run: RolloutRun,
    progress: Progress,
    policies: Mapping[str, PolicyRef],
    label: str,
    phase: str = "eval",
    training_step: int | None = None,
) -> EvaluatedMode | None:
    """The held-out tasks with these policies; None when the run is stopped. Its episodes are those of the step in hand,
    or of `training_step`."""
    seen = EvaluationSink(run.store)
    progress.evaluation(len(run.held_out))
    batch = EpisodeBatch(
        tasks=run.held_out,
        sink=seen,
        phase=phase,
        training_step=run.state.steps if training_step is None else training_step,
        on_episode=progress.evaluated,
    )
    work = run_episodes(run, batch, plan=None, stream="eval", policies=policies)
    if await run.interruptible(work) is None:
        return None
    goal = goal_of_policies(run.recipes, run.config.on_failure, run.trained, run.workflow.bounds)
    return replace(summarise(label, seen, 0.0, {}, goal), temperature=run.config.sampling.temperature)
