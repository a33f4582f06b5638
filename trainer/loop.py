"""The training loop. One step of it is the algorithm: roll out, group, update each policy, publish, commit."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import msgspec

from cotune.algorithms.collect import collect, failure_reward
from cotune.algorithms.prepare import prepare, train_rows
from cotune.errors import LearnerLost, RunError
from cotune.policies import unlisted_said
from cotune.recording.records import Episode
from cotune.recording.rollout import EpisodeBatch
from cotune.trainer.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from cotune.trainer.empty_step import require_usable
from cotune.trainer.held_out import evaluate_held_out
from cotune.trainer.late_roles import take_in
from cotune.trainer.metrics import Clock
from cotune.trainer.progress import Progress
from cotune.trainer.rollout.episodes import run_episodes
from cotune.trainer.rollout.finished import finished_episodes
from cotune.trainer.rollout.pipeline import RolloutPipeline
from cotune.trainer.run import Run, consume, restore
from cotune.trainer.schedule import lr_scale
from cotune.trainer.step_report import counted, lags, step_metrics
from cotune.trainer.updates import asleep, by_policy, moved, publish, update


async def train_steps(run: Run, progress: Progress) -> None:
    """Training from the run's next step to its last.

    for each step:
        episodes = run the workflow on the step's tasks; every call is K candidates, scored, one goes on
                   (mode async: the next steps' episodes go on meanwhile, at most `max_staleness` steps ahead)
        samples  = candidates of finished episodes; what cannot be trained on is counted by reason
        groups   = samples with one prompt; advantages inside each
        for each policy: update on the rows of its roles; publish the new version; prove that it arrived
        now and then: the held-out tasks, one sample per call
        commit (as the next step begins): checkpoint with the ledger of consumed groups
    """
    config = run.config
    await counted(run)
    rollouts = RolloutPipeline(lambda step: roll_out(run, step, progress), steps=config.steps, ahead=config.ahead)
    async with rollouts:
        while run.step < config.steps and not run.stopping:
            try:
                await one_step(run, rollouts, progress)
            except LearnerLost as error:
                await rollouts.cancel()
                await go_back(run, error, progress)
        await commit(run, last=True)


async def one_step(run: Run, rollouts: RolloutPipeline, progress: Progress) -> None:
    """Save the steps before, get the episodes of the next one, train on them; nothing more when the run is stopped."""
    clock = Clock()
    with clock("checkpoint"):
        await commit(run, last=bool(run.newcomers))
    if run.newcomers:
        with clock("newcomers"):
            await take_in(run, progress)
    with clock("rollout"):
        episodes = await run.interruptible(rollouts.episodes_of(run.step))
    if episodes is None:
        return
    await train_step(run, episodes, clock, progress)
    if run.step == run.config.steps:
        await commit(run, last=True)


async def go_back(run: Run, error: LearnerLost, progress: Progress) -> None:
    """Restart lost learners from the last checkpoint. Raises `error` when they have been restarted too often."""
    run.learner_restarts += 1
    limit = run.config.cluster.learner_restarts
    if run.learner_restarts > limit:
        raise LearnerLost(
            f"{error.cause} It was the {run.learner_restarts}th time; cluster.learner_restarts is {limit}.",
            f"See the cause, then go on with: cotune train --resume {run.folder.path}",
        ) from error
    progress.say(f"{error.cause} Restarting it from the last checkpoint ({run.learner_restarts} of {limit}).")
    saved = load_checkpoint(run.folder.checkpoints)
    if saved is None:
        raise error
    if run.policies.specs.keys() == saved[0].policies.specs.keys():
        await asyncio.to_thread(run.learner.restart)
    else:  # policies that are younger than the checkpoint begin again
        await run.reopen_learner()
    await restore(run, *saved)


async def train_step(run: Run, episodes: Sequence[Episode], clock: Clock, progress: Progress) -> None:
    """Group the episodes of the run's next step, update the policies, publish them, and report."""
    config = run.config
    with clock("group"):
        collected = collect(
            run.store,
            episodes,
            plan=run.plan.kind,
            roles=run.trained_roles,
            versions=run.versions,
            max_lag=config.ahead,
            on_failure=failure_reward(config.on_failure),
        )
        prepared = prepare(
            collected.samples, run.recipe, run.state, consumed=run.consumed, decays=config.learner.weight_decay > 0
        )
        rows = by_policy(run, train_rows(prepared, collected, run.store))
    left_out = Counter(collected.left_out) + Counter(prepared.left_out)
    if not rows:
        require_usable(run, episodes, left_out)
    staleness = lags(rows, run.versions)
    scale = lr_scale(config.schedule, run.step, config.steps)
    async with asleep(run, clock):
        with clock("update"):
            updates = await update(run, rows, scale)
    with clock("publish"):
        await publish(run, {name: rows[name] for name in moved(updates)})
    held_out = await evaluate_held_out(run, clock)
    run.state = prepared.state
    counters = await counted(run)
    metrics = step_metrics(
        run, episodes, collected, prepared, rows, updates, left_out, staleness, counters, scale, clock, held_out
    )
    run.latest = metrics.roles
    known = run.policies.roles.keys()
    run.newcomers = tuple(sorted(run.joined(run.policies, sorted(collected.roles)).roles.keys() - known))
    run.ledger.update({group.id: run.step for group in prepared.groups})
    if run.plan.kind == "independent":  # under a tree plan a group is a call, by its id
        run.members.update({group.id: tuple(s.id for s in group.samples) for group in prepared.groups})
    run.consumed.update(run.ledger)
    run.folder.append_metrics(msgspec.to_builtins(metrics))
    run.step += 1
    progress.step(metrics)


async def roll_out(run: Run, step: int, progress: Progress) -> list[Episode]:
    """All episodes of a step; those that a run before an interruption brought to an outcome are not run again.

    When this is cancelled, finished episodes stay recorded for a resumed run. Raises SamplerError when the sampler is
    gone and RunError when records were lost: the step is not trained on, as it lacks episodes that it need not lack.
    """
    config = run.config
    tasks = run.schedule.of(step)
    done, cut = finished_episodes(run, step, {task.id for task in tasks})
    if cut:
        progress.say(f"{cut} episodes of step {step + 1} lack records that were lost: they are run again")
    progress.rollout(step, len(tasks) * run.plan.episodes_per_task)
    batch = EpisodeBatch(
        tasks=tasks,
        sink=run.store,
        phase="train",
        training_step=step,
        rollouts=run.plan.episodes_per_task,
        done=done,
        on_episode=progress.episode,
    )
    episodes = await run_episodes(run, batch, plan=run.plan)
    run.store.flush()
    progress.scorer_errors(run.runner.scorer_errors)
    for role in run.runner.unlisted:
        progress.say_once(unlisted_said(role, config.other_roles))
    if run.store.lost:
        raise RunError(
            f"{run.store.lost} records could not be stored, so step {step + 1} is not trained on.",
            f"See the log; free some space, then go on with: cotune train --resume {run.folder.path}",
        )
    await run.sampler.info()
    return episodes


async def commit(run: Run, *, last: bool = False) -> None:
    """Write a checkpoint when one is due, then mark its groups as consumed."""
    if run.step == run.committed or (run.step % run.config.checkpoint_every and not last):
        return
    checkpoint = Checkpoint(
        steps=run.step,
        versions=dict(run.versions),
        policies=run.policies,
        ledger=dict(run.ledger),
        members=dict(run.members),
        newcomers=run.newcomers,
        state=run.state,
        metrics=run.latest,
    )
    folder, keep = run.folder.checkpoints, run.config.keep_checkpoints
    try:
        await asyncio.to_thread(save_checkpoint, folder, checkpoint, run.learner, keep=keep)
    except OSError as error:
        raise RunError(
            f"The checkpoint after {run.step} steps cannot be written: {error}.",
            f"Free some space, then go on with: cotune train --resume {run.folder.path}",
        ) from error
    consume(run, checkpoint)
    run.ledger.clear()
    run.members.clear()
    run.committed = run.step
