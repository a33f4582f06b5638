"""Rollouts as the source of a run's batches: the episodes of each step, grouped and weighed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator

from cotune.episodes.rollout import EpisodeBatch
from cotune.errors import RunError
from cotune.recording.recorder import Responder
from cotune.records.policies import unlisted_said
from cotune.records.structs import Episode
from cotune.storage.metrics_file import StepMetrics
from cotune.trainer.batch import Batch, collect_samples, group_and_weigh
from cotune.trainer.evaluation.held_out import evaluate_base, evaluate_held_out
from cotune.trainer.guard import watch
from cotune.trainer.loop import Rows
from cotune.trainer.reporting.metrics import Updates
from cotune.trainer.reporting.profiled import profiled
from cotune.trainer.reporting.progress import Progress
from cotune.trainer.reporting.step_report import RolloutReport
from cotune.trainer.rollout.episodes import RolloutPipeline, answering, finished_episodes, run_episodes
from cotune.trainer.rollout.forks import run_forks
from cotune.trainer.rollout.judged_step import JudgedStep
from cotune.trainer.rollout.judging import Bench, judging_role
from cotune.trainer.run.best_checkpoint import note_best
from cotune.trainer.run.restore import add_new_roles, recovery
from cotune.trainer.run.run import RolloutRun
from cotune.trainer.schedules.curriculum import fewer_episodes
from cotune.trainer.updates import publish, sampler_asleep


class RolloutSource:
    """The `Source` of a run with rollouts.

    In mode async the next steps are rolled out while a step trains, at most `max_staleness` steps ahead.
    """

    def __init__(self, run: RolloutRun, progress: Progress) -> None:
        self.report = RolloutReport(run, progress)
        self._run = run
        self._progress = progress
        roll_out_step = functools.partial(roll_out, run, progress)
        self._rollouts = RolloutPipeline(roll_out_step, steps=run.config.steps, ahead=run.config.ahead)
        self._batch: Batch
        self._held_out: dict[str, float] = {}

    @contextlib.asynccontextmanager
    async def steps(self) -> AsyncIterator[None]:
        """Evaluates first what the run starts from."""
        await self.report.begin()
        await evaluate_base(self._run, self.report, self._progress)
        async with self._rollouts:
            yield

    @contextlib.asynccontextmanager
    async def step(self) -> AsyncIterator[None]:
        """Goes back to the last checkpoint where a learner is lost within."""
        async with recovery(self._run, self._rollouts, self.report):
            await add_new_roles(self._run, self.report)
            async with profiled(self._run, self.report):
                yield

    async def rows(self) -> Rows | None:
        """The rows of the step's episodes."""
        run = self._run
        run.draw_tasks()
        with self.report.phase("rollout"):
            episodes = await run.interruptible(self._rollouts.episodes_of(run.state.steps))
        if episodes is None:
            return None
        with self.report.phase("group"):
            self._batch = group_and_weigh(run, episodes, collect_samples(run, episodes))
        return self._batch.rows

    def updating(self) -> contextlib.AbstractAsyncContextManager[None]:
        """An engine that shares its GPU with the learner sleeps meanwhile."""
        return sampler_asleep(self._run, self.report)

    async def publish(self, rows: Rows, updates: Updates) -> None:
        """Send the next versions to the sampler."""
        with self.report.phase("publish"):
            await publish(self._run, rows, updates)

    async def measure(self, rows: Rows, updates: Updates) -> StepMetrics:
        """Run held-out tasks where that is due."""
        self._held_out = await evaluate_held_out(self._run, self.report, self._progress)
        return await self.report.metrics(self._batch, updates, self._held_out)

    def complete(self) -> bool:
        """A checkpoint is due where some policy is better than before."""
        self._run.complete_step(self._batch.collected, self._batch.prepared)
        better = note_best(self._run, self._held_out, self._progress)
        watch(self._run)
        return better


async def roll_out(run: RolloutRun, progress: Progress, step: int) -> list[Episode]:
    """All episodes of a step, judged; those that a run before an interruption brought to an outcome are not run again.

    When this is cancelled, finished episodes stay recorded for a resumed run. Raises SamplerError when the sampler is
    gone and RunError when records were lost: the step is not trained on, as it lacks episodes that it need not lack.
    """
    tasks = run.schedule.named(run.state.drawn[step].own)
    done, cut = finished_episodes(run, step, {task.id for task in tasks})
    if cut:
        progress.say(f"{cut} episodes of step {step + 1} lack records or rewards: they are run again")
    fewer = fewer_episodes(run.config.curriculum, tasks, run.state.tasks)
    often = {task.id: fewer.get(task.id, run.plan.episodes_per_task) for task in tasks}
    progress.rollout(sum(often.values()))
    policies = run.served(step)
    responder = answering(run, run.plan, policies).responder(run.sampler, run.chats, run.workflow)
    bench = _bench(run, step, responder)
    async with JudgedStep(run.workflow.episode_judge, run.store, bench.ask, run.workflow.redaction) as judged:

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
                f"See the log; free some space, then {run.folder.way_on}",
            )
        for text, count in (await judged.finish()).items():
            progress.say_once(f"the judge gave {count} episodes no outcome, which are not trained on: {text}")
    progress.scorer_errors(responder.scorer_errors)
    await run.sampler.info()
    return [*episodes, *bench.episodes]


def _bench(run: RolloutRun, step: int, responder: Responder) -> Bench:
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
