"""The training loop."""

from __future__ import annotations

import asyncio
import functools

from cotune.episodes.rollout import EpisodeBatch
from cotune.errors import RunError
from cotune.recording.recorder import Responder
from cotune.records.policies import unlisted_said
from cotune.records.structs import Episode
from cotune.trainer.batch import collect_samples, group_and_weigh
from cotune.trainer.evaluation.held_out import evaluate_base, evaluate_held_out
from cotune.trainer.guard import roll_back, safe_checkpoint, watch
from cotune.trainer.reporting.profiled import profiled
from cotune.trainer.reporting.progress import Progress
from cotune.trainer.reporting.step_report import StepReport
from cotune.trainer.rollout.episodes import RolloutPipeline, answering, finished_episodes, run_episodes
from cotune.trainer.rollout.forks import run_forks
from cotune.trainer.rollout.judged_step import JudgedStep
from cotune.trainer.rollout.judging import Bench, judging_role
from cotune.trainer.run.best_checkpoint import note_best
from cotune.trainer.run.checkpoint import commit_checkpoint
from cotune.trainer.run.restore import add_new_roles, recovery
from cotune.trainer.run.run import Run
from cotune.trainer.schedules.curriculum import fewer_episodes
from cotune.trainer.updates import publish, sampler_asleep, update


async def train_steps(run: Run, progress: Progress) -> None:
    """Train from the run's next step to its last, or until it is stopped.

    In mode async the rollouts of the next steps go on while a step trains, at most `max_staleness` steps ahead.
    """
    steps, report = run.config.steps, StepReport(run, progress)
    await report.begin()
    with report.phase("checkpoint"):
        await commit(run)
    await evaluate_base(run, report, progress)
    roll_out_step = functools.partial(roll_out, run, progress)
    async with RolloutPipeline(roll_out_step, steps=steps, ahead=run.config.ahead) as rollouts:
        while run.state.steps < steps and not (run.stopping or run.ended):
            async with recovery(run, rollouts, report):
                await add_new_roles(run, report)
                async with profiled(run, report):
                    with report.phase("rollout"):
                        episodes = await run.interruptible(rollouts.episodes_of(run.state.steps))
                    if episodes is None:
                        break  # stopped
                    with report.phase("group"):
                        collected = collect_samples(run, episodes)
                        batch = group_and_weigh(run, episodes, collected)
                    async with sampler_asleep(run, report):
                        with report.phase("update", ", ".join(batch.rows)):
                            updates = await update(run, batch.rows)
                    with report.phase("publish"):
                        await publish(run, batch.rows, updates)
                    held_out = await evaluate_held_out(run, report, progress)
                    metrics = await report.write(batch, updates, held_out)
                    run.complete_step(collected, batch.prepared, metrics.roles)
                    better = note_best(run, held_out, progress)
                    watch(run)
                    with report.phase("checkpoint"):
                        await commit(run, due=better)
        await commit(run, due=True)
    roll_back(run)


async def roll_out(run: Run, progress: Progress, step: int) -> list[Episode]:
    """All episodes of a step, judged; those that a run before an interruption brought to an outcome are not run again.

    When this is cancelled, finished episodes stay recorded for a resumed run. Raises SamplerError when the sampler is
    gone and RunError when records were lost: the step is not trained on, as it lacks episodes that it need not lack.
    """
    tasks = run.schedule.of(step)
    done, cut = finished_episodes(run, step, {task.id for task in tasks})
    if cut:
        progress.say(f"{cut} episodes of step {step + 1} lack records or rewards: they are run again")
    fewer = fewer_episodes(run.config.curriculum, tasks, run.state.rewards)
    often = {task.id: fewer.get(task.id, run.plan.episodes_per_task) for task in tasks}
    progress.rollout(sum(often.values()))
    policies = run.served(step)
    responder = answering(run, run.plan, policies).responder(run.sampler, run.chat, run.workflow)
    bench = _bench(run, step, responder)
    async with JudgedStep(run.workflow.episode_judge, run.store, bench.ask) as judged:

        def ended(episode: Episode) -> None:
            progress.episode(episode)
            judged.ended(episode)

        batch = EpisodeBatch(
            tasks=tasks,
            sink=run.store,
            phase="train",
            training_step=step,
            rollouts=run.plan.episodes_per_task,
            fewer=fewer,
            done=[episode for episode in done if episode.fork is None],
            on_episode=ended,
            record_tools=run.plan.kind == "replay" and run.config.replay.tools == "recorded",
            freeze=run.plan.kind == "replay" and run.config.replay.freeze,
        )
        judged.already(batch.done)
        if run.plan.kind != "replay":
            judged.expect(often)
        episodes = await run_episodes(run, batch, plan=run.plan, policies=policies)
        run.store.flush()
        if run.plan.kind == "replay":
            episodes += await run_forks(run, batch, episodes, done, policies, judged)
            run.store.flush()
        progress.scorer_errors(run.runner.scorer_errors)
        for role in run.runner.unlisted:
            progress.say_once(unlisted_said(role, run.config.other_roles))
        if run.store.lost:
            raise RunError(
                f"{run.store.lost} records could not be stored, so step {step + 1} is not trained on.",
                f"See the log; free some space, then go on with: cotune train --resume {run.folder.path}",
            )
        for text, count in (await judged.finish()).items():
            progress.say_once(f"the judge gave {count} episodes no outcome, which are not trained on: {text}")
    progress.scorer_errors(responder.scorer_errors)
    await run.sampler.info()
    return [*episodes, *bench.episodes]


def _bench(run: Run, step: int, responder: Responder) -> Bench:
    """How the workflow's judge is asked. Where a role judges, as often for a task as it has episodes, so that these
    episodes of judging can be compared, or once where there is nothing to compare."""
    flow, plan = run.workflow, run.plan
    compared = plan.kind == "independent" and judging_role(flow) in run.trained_roles(step)
    return Bench(
        workflow=flow,
        store=run.store,
        responder=responder,
        training_step=step,
        attempts=plan.k if compared else 1,
        timeout=run.config.episode_timeout,
    )


async def commit(run: Run, *, due: bool = False) -> None:
    """Write a checkpoint where one is due.

    One is every `checkpoint_every` steps, after the last one, and before new roles get their policies.
    """
    state, config = run.state, run.config
    due = due or bool(run.state.new_roles) or state.steps % config.checkpoint_every == 0 or state.steps == config.steps
    if state.steps == run.committed or not due:
        return
    spare = {name for name in [safe_checkpoint(run)] if name}
    best = run.best if config.evaluation.keep_best else None
    keep = config.keep_checkpoints
    await asyncio.to_thread(commit_checkpoint, run.folder, state, run.learner, keep=keep, spare=spare, best=best)
    run.committed = state.steps
