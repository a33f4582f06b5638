"""One training step, in the order of the paper: draw tasks, roll out, judge, collect, group, weigh, update, publish,
evaluate, commit.

`train_on_rollouts` is the loop of a run, `make_step` makes one step, and `roll_out` runs the episodes of a step. In
mode async the next step rolls out while this one trains. Runs that learn from records have a loop of their own,
`records/loop.py`.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Collection, Sequence

import msgspec

from cotune.algorithms.task_signals import GroupSignal, group_signals
from cotune.errors import GapError, LearnerLost
from cotune.records.structs import Episode
from cotune.trainer.batch import collect_samples, group_and_weigh, make_batch, with_teacher_hints
from cotune.trainer.commit import commit
from cotune.trainer.evaluation.best_checkpoint import note_best, note_start
from cotune.trainer.evaluation.held_out import evaluate_base, evaluate_held_out
from cotune.trainer.guard import watch
from cotune.trainer.judging.step import JudgedStep, judge_bench
from cotune.trainer.opening.restore import add_new_roles, recover
from cotune.trainer.reporting.profile import profiling
from cotune.trainer.reporting.progress import Progress
from cotune.trainer.rollout.episodes import answering, run_episodes
from cotune.trainer.rollout.forks import effects_before, run_forks
from cotune.trainer.rollout.pipeline import RolloutPipeline
from cotune.trainer.rollout.refill import RolledOut, refill_step
from cotune.trainer.rollout.step_episodes import StepEpisodes, report_faults
from cotune.trainer.run.run import RolloutRun
from cotune.trainer.step_report import RolloutReport
from cotune.trainer.updates import keep_figures, publish, sampler_asleep, update_policies


async def train_on_rollouts(run: RolloutRun, progress: Progress) -> None:
    """Train from the run's next step to its last one, or until the run has ended or is stopped."""
    report = RolloutReport(run, progress)
    with report.phase("checkpoint"):
        await commit(run)
    await report.begin()
    await evaluate_base(run, report, progress)
    note_start(run)

    rollouts = RolloutPipeline(
        functools.partial(roll_out, run, progress), steps=run.config.steps, ahead=run.config.ahead
    )
    async with rollouts:
        while not (run.finished or run.stopping):
            try:
                await add_new_roles(run, report)
                async with profiling(run, progress):
                    await make_step(run, rollouts, report)
            except (LearnerLost, GapError) as error:
                await recover(run, rollouts, report, error)  # the loop continues from the last checkpoint
    await commit(run, due=True)


async def make_step(run: RolloutRun, rollouts: RolloutPipeline[RolledOut], report: RolloutReport) -> None:
    """Make the next step of a run. If the run is stopped during its rollout, nothing is trained."""
    progress = report.progress

    # Draw tasks for this step, and in mode async for the steps that are rolled out ahead.
    run.draw_tasks()

    # Roll out: run the workflow on the tasks and have its episodes judged, see `roll_out`.
    with report.phase("rollout"):
        rolled_out = await run.interruptible(rollouts.episodes_of(run.state.steps))
    if rolled_out is None:
        return

    # Collect a sample for each candidate, group the samples that are compared, and weigh each by its advantage.
    with report.phase("group"):
        collected = collect_samples(run, rolled_out.episodes)
        collected, hints = with_teacher_hints(run, rolled_out.episodes, collected)
        weighed = group_and_weigh(run, collected)
        batch = make_batch(run, rolled_out.episodes, collected, weighed, hints)

    # Update each policy on the rows of its roles, once its teacher has scored them, if it has one. An engine that
    # shares its GPU with the learner sleeps meanwhile.
    async with sampler_asleep(run, batch.rows, report):
        with report.phase("update", ", ".join(batch.rows)):
            scales = {policy: run.lr_scale(policy) for policy in batch.rows}
            updates = await update_policies(run.learner, batch.rows, scales, run.teacher_of)

    # Publish the next version of each policy that has moved, with proof that the sampler serves it.
    with report.phase("publish"):
        await publish(run, batch.rows, updates)
    await asyncio.to_thread(keep_figures, run, batch.rows)

    # Evaluate on held-out tasks if that is due, and write the step's line.
    held_out = await evaluate_held_out(run, report, progress)
    metrics = await report.metrics(batch, updates, held_out, rolled_out)
    if warning := watch(run, metrics):
        metrics = msgspec.structs.replace(metrics, notes=(*metrics.notes, warning))
    report.write(metrics)
    run.state.metrics = metrics.roles

    # Commit: the groups count as trained, and the next checkpoint has the new weights. A policy that is better than at
    # any earlier evaluation gets its checkpoint at once.
    run.complete_step(collected, weighed)
    improved = note_best(run, held_out, progress)
    with report.phase("checkpoint"):
        await commit(run, due=improved)


async def roll_out(run: RolloutRun, progress: Progress, step: int, needed: asyncio.Event) -> RolledOut:
    """Run the workflow on the tasks of a step, and have its episodes judged.

    Episodes that an interrupted run has finished are not run again. `needed` is set once training waits for the step.
    If this is cancelled, finished episodes stay recorded for a resumed run. Raises SamplerError if the sampler is gone,
    and RunError if records were lost: the step lacks episodes then, so it is not trained on.
    """
    plan = run.plan
    drawn = run.state.drawn[step]
    policies = run.served(step)
    effects = effects_before(run, step)  # read once, for all forks of the step
    step_episodes = StepEpisodes(run, step, progress)
    responder = answering(run, plan, policies).responder(run.sampler, run.chats, run.workflow)
    bench = judge_bench(run, step, responder)  # the judge may be a role, which these policies play
    async with JudgedStep(bench) as judged:

        def on_episode(episode: Episode) -> None:
            progress.episode(episode)
            judged.ended(episode)  # after the last episode of a task, it is judged while other tasks still run

        async def run_tasks(task_ids: Collection[str]) -> list[Episode]:
            """Run these tasks in this step, and return all their episodes. Recorded episodes are not run again."""
            # Tree: one episode a task, with K candidates at each call. Independent: K episodes a task. Replay: one
            # episode a task, which is then run again from some of its calls, K times from each.
            batch = step_episodes.batch(task_ids, on_episode)
            judged.add_ended(batch.done)
            if plan.kind != "replay":
                judged.expect(dict.fromkeys(task_ids, plan.episodes_per_task))
            episodes = await run_episodes(run, batch, plan=plan, policies=policies)
            run.store.flush()
            if plan.kind == "replay":
                done = step_episodes.branches(task_ids)
                episodes += await run_forks(run, batch, episodes, done, policies, effects, judged, progress.say_once)
                run.store.flush()
            step_episodes.add(episodes)
            return episodes

        async def compare(episodes: Sequence[Episode]) -> list[GroupSignal]:
            """Return the groups of these episodes, each with whether its rewards differ."""
            await judged.finish()
            return group_signals(collect_samples(run, episodes, step), run.recipes)

        progress.rollout(len(drawn.own) * plan.episodes_per_task)
        first_episodes = await run_tasks(drawn.own)
        rolled_out = RolledOut(episodes=first_episodes)

        # Refill: groups with equal rewards teach nothing, so further tasks are drawn in their place.
        if run.config.refill.budget:
            rolled_out = await refill_step(run, progress, step, first_episodes, run_tasks, compare, needed)

        report_faults(run, step, progress)
        for text, count in (await judged.finish()).items():
            progress.say_once(f"the judge gave {count} episodes no outcome, which are not trained on: {text}")
    progress.scorer_errors(responder.scorer_errors)
    await run.sampler.info()  # raises SamplerError if it is gone

    # A judge that is a role of the run is trained on the episodes in which it judged.
    return msgspec.structs.replace(rolled_out, episodes=[*rolled_out.episodes, *bench.episodes], fork_effects=effects)
