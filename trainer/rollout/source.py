"""Rollouts as the source of a run's batches: the episodes of each step, grouped and weighed."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence

import msgspec

from cotune.algorithms.task_signals import GroupSignal, group_signals
from cotune.episodes.rollout import EpisodeBatch
from cotune.errors import RunError
from cotune.recording.recorder import Responder
from cotune.records.policies import unlisted_said
from cotune.records.structs import Episode
from cotune.storage.episode_filters import EpisodeFilters
from cotune.storage.metrics_file import StepMetrics
from cotune.trainer.batch import Batch, collect_samples, group_and_weigh
from cotune.trainer.evaluation.held_out import evaluate_base, evaluate_held_out
from cotune.trainer.guard import watch
from cotune.trainer.loop import Rows
from cotune.trainer.reporting.metrics import Updates
from cotune.trainer.reporting.progress import Progress
from cotune.trainer.reporting.step_report import RolloutReport
from cotune.trainer.rollout.episodes import RolloutPipeline, answering, finished_episodes, run_episodes
from cotune.trainer.rollout.forks import run_forks
from cotune.trainer.rollout.judged_step import JudgedStep
from cotune.trainer.rollout.judging import Bench, judging_role
from cotune.trainer.rollout.refill import RolledOut, run_refill
from cotune.trainer.run.best_checkpoint import note_best, note_start
from cotune.trainer.run.restore import add_new_roles, recovery
from cotune.trainer.run.run import RolloutRun
from cotune.trainer.schedules.curriculum import fewer_episodes
from cotune.trainer.schedules.refill import Refill, why_no_refill
from cotune.trainer.updates import keep_figures, publish, sampler_asleep


class RolloutSource:
    """The `Source` of a run with rollouts.

    In mode async the next steps are rolled out while a step trains, at most `max_staleness` steps ahead.
    """

    def __init__(self, run: RolloutRun, progress: Progress) -> None:
        self.report = RolloutReport(run, progress)
        self._run = run
        self._progress = progress
        self._needed: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)
        """By step, set once training asks for its episodes."""

        async def roll_out_step(step: int) -> RolledOut:
            return await roll_out(run, progress, step, self._needed[step])

        self._rollouts = RolloutPipeline(roll_out_step, steps=run.config.steps, ahead=run.config.ahead)
        self._rolled: RolledOut
        self._batch: Batch
        self._held_out: dict[str, float] = {}

    @contextlib.asynccontextmanager
    async def steps(self) -> AsyncIterator[None]:
        """Evaluates first what the run starts from."""
        await self.report.begin()
        await evaluate_base(self._run, self.report, self._progress)
        note_start(self._run)
        async with self._rollouts:
            yield

    @contextlib.asynccontextmanager
    async def step(self) -> AsyncIterator[None]:
        """Goes back to the last checkpoint where a learner is lost within."""
        async with recovery(self._run, self._rollouts, self.report):
            await add_new_roles(self._run, self.report)
            yield

    async def rows(self) -> Rows | None:
        """The rows of the step's episodes."""
        run = self._run
        run.draw_tasks()
        self._needed[run.state.steps].set()
        with self.report.phase("rollout"):
            rolled = await run.interruptible(self._rollouts.episodes_of(run.state.steps))
        if rolled is None:
            return None
        self._rolled = rolled
        with self.report.phase("group"):
            self._batch = group_and_weigh(run, rolled.episodes, collect_samples(run, rolled.episodes))
        return self._batch.rows

    def updating(self, rows: Rows) -> contextlib.AbstractAsyncContextManager[None]:
        """An engine that shares its GPU with the learner sleeps meanwhile."""
        return sampler_asleep(self._run, rows, self.report)

    async def publish(self, rows: Rows, updates: Updates) -> None:
        """Send the next versions to the sampler."""
        with self.report.phase("publish"):
            await publish(self._run, rows, updates)
        await asyncio.to_thread(keep_figures, self._run, rows)

    async def measure(self, rows: Rows, updates: Updates) -> StepMetrics:
        """Run held-out tasks where that is due."""
        self._held_out = await evaluate_held_out(self._run, self.report, self._progress)
        metrics = await self.report.metrics(self._batch, updates, self._held_out, self._rolled)
        warning = watch(self._run, metrics)
        return msgspec.structs.replace(metrics, notes=(*metrics.notes, warning)) if warning else metrics

    def complete(self) -> bool:
        """A checkpoint is due where some policy is better than before."""
        self._run.complete_step(self._batch.collected, self._batch.prepared)
        return note_best(self._run, self._held_out, self._progress)


async def roll_out(run: RolloutRun, progress: Progress, step: int, needed: asyncio.Event) -> RolledOut:
    """All episodes of a step, judged; those that a run before an interruption brought to an outcome are not run again.

    `needed` is set when training waits for the step. When this is cancelled, finished episodes stay recorded for a
    resumed run. Raises SamplerError when the sampler is gone and RunError when records were lost: the step is not
    trained on, as it lacks episodes that it need not lack.
    """
    drawn, config, plan = run.state.drawn[step], run.config, run.plan
    tasks = {task.id: task for task in run.schedule.named([*drawn.own, *drawn.reserve])}
    done, cut = finished_episodes(run, step, tasks)
    if cut:
        progress.say(f"{cut} episodes of step {step + 1} lack records or rewards: they are run again")
    there = {(episode.task.id, episode.rollout): episode for episode in done}
    fewer = fewer_episodes(config.curriculum, tasks.values(), run.state.tasks)
    policies = run.served(step)
    responder = answering(run, plan, policies).responder(run.sampler, run.chats, run.workflow)
    bench = _bench(run, step, responder)
    async with JudgedStep(run.workflow.episode_judge, run.store, bench.ask, run.workflow.redaction) as judged:

        def ended(episode: Episode) -> None:
            progress.episode(episode)
            judged.ended(episode)

        async def roll(ids: Collection[str], times: Mapping[str, int]) -> list[Episode]:
            """The episodes of tasks that were drawn so often in the step, those that are there already included."""
            often = {name: times[name] * fewer.get(name, plan.episodes_per_task) for name in ids}
            known = [e for e in there.values() if e.task.id in often and e.rollout < _places(run, times[e.task.id])]
            batch = EpisodeBatch(
                tasks=[tasks[name] for name in ids],
                sink=run.store,
                phase="train",
                training_step=step,
                rollouts=max(often.values()),
                fewer=often,
                done=[episode for episode in known if episode.fork is None],
                on_episode=ended,
                record_tools=plan.kind == "replay" and config.replay.tools != "run",
                freeze=plan.kind == "replay" and config.replay.tools == "frozen",
            )
            judged.already(batch.done)
            if plan.kind != "replay":
                judged.expect(often)
            episodes = await run_episodes(run, batch, plan=plan, policies=policies)
            run.store.flush()
            if plan.kind == "replay":
                episodes += await run_forks(run, batch, episodes, known, policies, judged)
                run.store.flush()
            there.update({(episode.task.id, episode.rollout): episode for episode in episodes})
            return episodes

        async def signals(episodes: Sequence[Episode]) -> list[GroupSignal]:
            await judged.finish()
            return group_signals(collect_samples(run, episodes, step), run.recipes)

        progress.rollout(sum(fewer.get(name, plan.episodes_per_task) for name in drawn.own))
        episodes = await roll(drawn.own, dict.fromkeys(drawn.own, 1))
        rolled = RolledOut(episodes=episodes)
        if config.refill.budget:
            rolled = await _refilled(run, progress, step, episodes, roll, signals, needed)
        progress.scorer_errors(run.runner.scorer_errors)
        for role in run.runner.unlisted:
            progress.say_once(unlisted_said(role, run.config.other_roles))
        if run.store.health.lost:
            raise RunError(
                f"{run.store.health.lost} records could not be stored, so step {step + 1} is not trained on.",
                f"See the log; free some space, then {run.folder.way_on}",
            )
        for text, count in (await judged.finish()).items():
            progress.say_once(f"the judge gave {count} episodes no outcome, which are not trained on: {text}")
    progress.scorer_errors(responder.scorer_errors)
    await run.sampler.info()
    return msgspec.structs.replace(rolled, episodes=[*rolled.episodes, *bench.episodes])


def _places(run: RolloutRun, times: int) -> int:
    """The rollouts of a task that was drawn so often are below this; under a replay plan its branches are too."""
    return sys.maxsize if run.plan.kind == "replay" else times * run.plan.episodes_per_task


async def _refilled(
    run: RolloutRun,
    progress: Progress,
    step: int,
    own: Sequence[Episode],
    roll: Callable[[Collection[str], Mapping[str, int]], Awaitable[list[Episode]]],
    signals: Callable[[Sequence[Episode]], Awaitable[list[GroupSignal]]],
    needed: asyncio.Event,
) -> RolledOut:
    """The episodes of a step with those of its refill. In mode async late ones are waited for until the step is
    `needed`."""
    config, per_task = run.config, run.plan.episodes_per_task
    players = run.trained_roles(step)
    roles = [role for role in run.learning_roles(step) if not why_no_refill(run.recipes.of(players[role]))]
    refill = Refill(config.refill, run.state.drawn[step], roles, await signals(own))

    async def draw(ids: Collection[str]) -> list[Episode]:
        progress.further(len(ids) * per_task)
        return await roll(ids, refill.times)

    at_once = max(1, config.concurrency // run.plan.k) if config.mode == "async" else None
    added, late = await run_refill(refill, own, draw, signals, at_once, needed)
    run.store.flush()
    ids = {episode.id for episode in (*own, *added)}
    begun = run.store.episodes(EpisodeFilters(phase="train", training_step=step)) if late else ()
    return RolledOut(
        episodes=[*own, *added],
        refill=refill,
        refilled=len(added),
        late=sum(episode.task.id in late and episode.id not in ids for episode in begun),
        late_tasks=sorted(set(late)),
    )


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
